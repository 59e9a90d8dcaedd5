"""From entries of the setting task.rewards to what judges."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from lagrpo.errors import suggest
from lagrpo.redaction import is_secret
from lagrpo.tasks.base import Judge, RewardSettings, Task, TaskSettings
from lagrpo.tasks.names import JUDGES, OWN, SHAPED, is_reference, load_function, load_judge
from lagrpo.tasks.rewards import Reward, Rewards

if TYPE_CHECKING:
    from lagrpo.types import Prompt


def check_rewards(settings: TaskSettings) -> None:
    """Raise ValueError for entries of `rewards` that contradict each other, or do not exist, and for their options."""
    if not settings.rewards:
        return
    if settings.reward is not None:
        raise ValueError("task.reward and task.rewards are both set: make task.reward an entry of task.rewards")
    names = [each.name for each in settings.rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"task.rewards: the name {twice[0]!r} is there twice")
    known = (OWN, *JUDGES, *SHAPED)
    for each in settings.rewards:
        where, is_function = f"task.rewards, {each.name!r}", is_reference(each.reward)
        if not is_function and each.reward not in known:
            raise ValueError(
                f"{where}: there is no built-in reward {each.reward!r}; there are {', '.join(known)}, and a function "
                f"of your own as 'package.module:function'.{suggest(each.reward, known)}"
            )
        if each.batch and not is_function:
            raise ValueError(f"{where}: batch is about functions of your own; {each.reward!r} is built in")
        if secret := next(filter(is_secret, each.options), None):
            raise ValueError(
                f"{where}: options.{secret} would be on the disk; keep the secret in an environment variable, and have "
                "the function read that (llm_judge: api_key_env)"
            )
        if each.reward in SHAPED:
            make_shaped(each)
        elif each.options and not is_function:
            raise ValueError(f"{where}: the reward {each.reward!r} takes no options")


def make_shaped(settings: RewardSettings) -> Any:
    """The built-in reward that an entry names, with its options. Raises ValueError for those that it does not take."""
    from pydantic import TypeAdapter, ValidationError

    kind: Any = load_function(SHAPED[settings.reward])
    try:
        return TypeAdapter(kind).validate_python(settings.options)
    except ValidationError as error:
        taken, unknown = [field.name for field in fields(kind)], "unexpected_keyword_argument"
        first = min(error.errors(), key=lambda each: each["type"] != unknown)
        name = ".".join(map(str, first["loc"]))
        why = str(first.get("ctx", {}).get("error", first["msg"]))
        if first["type"] == unknown:
            why = f"the reward {settings.reward!r} takes {', '.join(taken)}.{suggest(name, taken)}"
        where = f"task.rewards, {settings.name!r}, options{f'.{name}' if name else ''}"
        raise ValueError(f"{where}: {why}") from error


def load_rewards(settings: TaskSettings, own: Judge | Rewards) -> Rewards:
    """The entries of `rewards` as what judges; `own` is the task's own judge."""
    if isinstance(own, Rewards) and any(each.reward == OWN for each in settings.rewards):
        raise ValueError(f"task.rewards: the task has several rewards of its own, and {OWN!r} names a single one")
    return Rewards(tuple(load_reward(each, own) for each in settings.rewards))


def load_reward(settings: RewardSettings, own: Any) -> Reward:
    """One entry. Raises ValueError for a function that does not take what it would be called with."""
    takes: Any = "batch" if settings.batch else "text"
    if settings.reward in SHAPED:
        function = make_shaped(settings)
        takes = function.takes
    else:
        function = load_judge(None if settings.reward == OWN else settings.reward, own)
        check_call(function, settings)
        if settings.options:
            function = partial(function, **settings.options)
    given = {"weight": settings.weight, "range": settings.range, "deadline": settings.deadline}
    return Reward(settings.name, function, takes=takes, decides=settings.right, **given)


def check_call(function: Callable[..., Any], settings: RewardSettings) -> None:
    """Raise ValueError where a function cannot be called with a text, a gold answer and the options of its entry."""
    try:
        inspect.signature(function).bind("", "", **settings.options)
    except TypeError as error:
        given = ", ".join(["texts", "golds"] if settings.batch else ["text", "gold"])
        given += "".join(f", {name}=…" for name in settings.options)
        raise ValueError(f"task.rewards, {settings.name!r}: {settings.reward}({given}): {error}") from error
    except ValueError:  # a function without a signature, such as some that are written in C
        return


@dataclass(frozen=True, slots=True)
class Rejudged:
    """A task of the user's own with other rewards than its own."""

    task: Task
    judge: Rewards

    @property
    def name(self) -> str:
        return self.task.name

    def size(self, split: str) -> int:
        return self.task.size(split)

    def prompt(self, split: str, index: int) -> Prompt:
        return self.task.prompt(split, index)
