"""Entries of task.rewards: the names of rewards, and what they load."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from lagrpo.core.references import describe_raised, load_reference
from lagrpo.errors import as_settings_error, suggest
from lagrpo.rewards.reward import Reward, RewardFunction, Rewards, check_class
from lagrpo.types import Range

REWARDS = {
    "exact": "lagrpo.rewards.builtin:exact",
    "length": "lagrpo.rewards.builtin:length",
    "format": "lagrpo.rewards.builtin:format",
    "llm_judge": "lagrpo.rewards.llm_judge:LlmJudge",
    "number": "lagrpo.tasks.gsm8k:score",
    "math": "lagrpo.tasks.math:score",
    "arithmetic": "lagrpo.tasks.arithmetic:score",
    "countdown": "lagrpo.tasks.countdown:score",
    "guess_number": "lagrpo.tasks.guess_number:score",
}
WITH_OPTIONS = {"length": ("", 0), "format": ("",), "llm_judge": None}
"""Built-in rewards that take options, with the arguments of a call that checks the options.

None: the class checks its options when it is created.
"""

OWN = "task"
"""The task's own reward, as an entry of task.rewards."""


class RewardEntry(Protocol):
    """An entry of task.rewards, as `lagrpo.settings.sections.RewardSettings` has it."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def range(self) -> Range: ...

    @property
    def options(self) -> Mapping[str, object]: ...


def check_rewards(entries: Sequence[RewardEntry]) -> None:
    """Raises ValueError for contradictory entries of task.rewards.

    Functions of users are not loaded.
    """
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task.rewards: two entries have the name {name!r}")
    for entry in entries:
        _check_entry(entry)


def _check_entry(entry: RewardEntry) -> None:
    label = f"task.rewards, {entry.name!r}"
    is_builtin = ":" not in entry.reward
    builtin_names = (OWN, *REWARDS)
    if is_builtin and entry.reward not in builtin_names:
        raise ValueError(
            f"{label}: no built-in reward {entry.reward!r}; there are {', '.join(builtin_names)} "
            f"and 'package.module:function'.{suggest(entry.reward, builtin_names)}"
        )
    if is_builtin and (entry.options or entry.reward in WITH_OPTIONS):
        load_reward(entry, None)


def load_rewards(entries: Sequence[RewardEntry], own: RewardFunction | Rewards) -> Rewards:
    """Loads the rewards that the entries of task.rewards name; `own` is the task's own reward.

    Raises ValueError.
    """
    if isinstance(own, Rewards) and any(entry.reward == OWN for entry in entries):
        raise ValueError(
            f"task.rewards: {OWN!r} stands for one reward, but this task has several; leave it out"
        )
    return Rewards(tuple(load_reward(entry, own) for entry in entries))


def load_rewards_of_environment(
    entries: Sequence[RewardEntry], own: RewardFunction | Rewards
) -> Rewards:
    """Loads the rewards of a task with an environment, which gives the value of the entry `task`.

    Raises ValueError.
    """
    rewards = load_rewards(entries, own)
    parts: list[Reward] = []
    for entry, reward in zip(entries, rewards.parts, strict=True):
        parts.append(replace(reward, is_of_environment=entry.reward == OWN))
    rewards = Rewards(tuple(parts))
    if not rewards.have_environment:
        raise ValueError(
            f"task.rewards: add {OWN!r}, the reward of the environment; weight = 0 only records it"
        )
    return rewards


def load_reward(entry: RewardEntry, own: RewardFunction | Rewards | None) -> Reward:
    """Loads the reward of one entry; `own` is the task's own reward function.

    Raises ValueError, also for options that the function does not take.
    """
    function: Any = own
    if entry.reward != OWN:
        function = load_function(REWARDS.get(entry.reward, entry.reward))
    if inspect.isclass(function):
        with as_settings_error(f"task.rewards, {entry.name!r}: {entry.reward}"):
            check_class(function)
    try:
        function = bind_options(function, entry.options)
        check_arguments = WITH_OPTIONS.get(entry.reward)
        if check_arguments is not None:
            function(*check_arguments)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"task.rewards, {entry.name!r}, options: {entry.reward}: {error}"
        ) from error
    except Exception as error:
        raise ValueError(
            f"task.rewards, {entry.name!r}: {entry.reward} raised {describe_raised(error)}"
        ) from error
    return Reward(function, weight=entry.weight, range=entry.range, name=entry.name)


def bind_options(function: Callable[..., Any], options: Mapping[str, object]) -> Callable[..., Any]:
    """Returns the function with these keyword arguments, or an object of a class made with them.

    Raises TypeError for options that it does not take, and what the class raises.
    """
    if isinstance(function, type):
        return function(**options)
    if not options:
        return function
    inspect.signature(function).bind_partial(**options)
    return partial(function, **options)


def load_function(reference: str) -> Callable[..., Any]:
    """Loads the function that "package.module:function" names.

    The module may be in the current directory. Raises ValueError for another form, a missing
    module or attribute, and an object that cannot be called.
    """
    function = load_reference(reference)
    if not callable(function):
        raise ValueError(f"{reference!r} is not a function")
    return function
