"""Tasks: prompts, and how an answer is scored. Each has one file, which also declares its options.

`load_task(settings, seed)` returns the task that the settings name; `check_options(settings)` rejects contradictory
settings without loading anything.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cache
from typing import Any

from lagrpo.errors import suggest
from lagrpo.rewards.load import OWN, REWARDS, check_rewards, load_function, load_rewards, require_installed
from lagrpo.rewards.reward import Rewards, UnscorableError, as_rewards, reward_names
from lagrpo.tasks.base import RowTask, Task, build_messages, environment_of, order_prompts

__all__ = ["Rewards", "RowTask", "Task", "UnscorableError", "build_messages", "order_prompts", "reward_names"]

NOT_A_TASK = "is not a Task: a Task has name, reward, size(split) and prompt(split, index)"


@cache
def task_options() -> Mapping[str, type]:
    """For each task the dataclass of its options, whose fields `option` makes. Every task also takes `system_prompt`,
    `reward` and `rewards`."""
    from lagrpo.tasks import arithmetic, calculator, countdown, custom, data, guess_number, reasoning_gym

    return {
        "arithmetic": arithmetic.Options,
        "countdown": countdown.Options,
        "gsm8k": data.Options,
        "math": data.Options,
        "custom": custom.Options,
        "reasoning_gym": reasoning_gym.Options,
        "calculator": calculator.Options,
        "guess_number": guess_number.Options,
    }


@cache
def option_takers() -> Mapping[str, Sequence[str]]:
    """For each option the names of the tasks that take it."""
    takers: dict[str, list[str]] = defaultdict(list)
    for task, options in task_options().items():
        for option in fields(options):
            takers[option.name].append(task)
    return takers


def is_reference(name: str) -> bool:
    """Whether the name of a task is a "package.module:function" (or gym:NAME), not something built in."""
    return ":" in name and not name.startswith("reasoning_gym:")


def is_multi_turn(name: str) -> bool:
    """Whether the completions of the task of this name talk to an environment of the task."""
    return name in ("calculator", "guess_number") or name.startswith("gym:")


def check_options(settings: Any) -> None:
    """Raise ValueError for an unknown task or reward, and an option that the task does not take. Loads nothing."""
    name, known = settings.name, task_options()
    check_rewards(settings.reward, settings.rewards)
    if is_reference(name):
        return
    if (kind := name.partition(":")[0]) not in known:
        raise ValueError(
            f"task.name: there is no task {name!r}; there are {', '.join(known)}, gym:NAME and a task of your own "
            f"as 'package.module:function'.{suggest(name, known)}"
        )
    if name == "custom":
        _check_custom(settings)
    for option, tasks in option_takers().items():
        if kind not in tasks and getattr(settings, option) is not None:
            raise ValueError(f"task.{option} is set, but the task {name!r} does not take it: {', '.join(tasks)} do")


def _check_custom(settings: Any) -> None:
    """Raise ValueError for the task custom without a reward, or without the answers that its rewards need."""
    if settings.reward is None and not settings.rewards:
        raise ValueError(f"the task 'custom' needs task.reward: {', '.join(REWARDS)}, or a 'package.module:function'")
    for reward in (settings.reward, *(each.reward for each in settings.rewards)):
        if reward == OWN:
            raise ValueError(f"task.rewards: the task 'custom' has no reward that {OWN!r} would name")
        if reward in REWARDS and reward not in ("length", "format") and settings.answer_column is None:
            raise ValueError(f"the reward {reward!r} needs task.answer_column, the column with reference answers")


def load_task(settings: Any, seed: int) -> Task:
    """The task that the settings name; what it generates is a function of the seed. For "package.module:function" it is
    what function(settings, seed) returns.

    Raises:
        ValueError: wrong settings (before anything heavy is loaded), unfit data, or reward functions that need what
            neither lagrpo nor the data passes.
        TypeError: the user's function returned something that is not a Task.
        ImportError: the task needs a package that is not installed.
    """
    check_options(settings)
    if is_reference(settings.name) and not settings.name.startswith("gym:"):
        return check_task(_load_own(settings, seed))
    return check_task(_load_builtin(settings, seed))


def check_task(task: Task) -> Task:
    """The task. Raises ValueError if its reward functions need what neither lagrpo nor the data passes."""
    rewards = as_rewards(task.reward)
    if task.size("train"):
        rewards.check(task.prompt("train", 0).row)
    return task


def _load_own(settings: Any, seed: int) -> Task:
    """The task that the user's function returns."""
    task = load_function(settings.name)(settings, seed)
    if not isinstance(task, Task):
        raise TypeError(f"task.name: {settings.name!r} returned a {type(task).__name__}, which {NOT_A_TASK}")
    if settings.rewards:
        if environment_of(task) is not None:
            raise ValueError(f"task.rewards: the environment of {settings.name!r} gives the rewards: leave them out")
        reward, task = load_rewards(None, settings.rewards, task.reward), copy(task)
        object.__setattr__(task, "reward", reward)  # it may be a frozen dataclass
    return task


def _load_builtin(settings: Any, seed: int) -> Task:
    kind, _, variant = settings.name.partition(":")
    require_installed(kind)
    file = importlib.import_module(f"lagrpo.tasks.{kind}")
    if kind == "gym":
        return file.load(variant, settings.system_prompt)
    names = [option.name for option in fields(task_options()[kind])]
    given = {name: value for name in names if (value := getattr(settings, name)) is not None}
    task = file.load(task_options()[kind](**given), seed, *[variant] if variant else [])
    rewards = load_rewards(settings.reward, settings.rewards, task.reward)
    return replace(task, name=settings.name, reward=rewards, system_prompt=settings.system_prompt)
