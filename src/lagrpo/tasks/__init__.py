"""Tasks: prompts, and how an answer is scored. Each has one file, which also declares its options.

`load_task(settings, seed)` returns the task that the settings name; `check_options(settings)` rejects contradictory
settings without loading anything.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from lagrpo.errors import suggest
from lagrpo.rewards.load import OWN, REWARDS, check_rewards, load_function, load_rewards, require_installed
from lagrpo.rewards.reward import Rewards, UnscorableError, as_rewards, reward_names
from lagrpo.tasks.base import (
    EpisodeTask,
    RowTask,
    Task,
    TaskWithEnvironment,
    build_messages,
    order_prompts,
    read_options,
)
from lagrpo.types import Prompt

__all__ = ["Rewards", "RowTask", "Task", "UnscorableError", "build_messages", "order_prompts", "reward_names"]

NOT_A_TASK = "is not a Task: a Task has name, reward, size(split) and prompt(split, index)"
ENVIRONMENTS = {
    "calculator": "lagrpo.tasks.calculator:ENVIRONMENT",
    "guess_number": "lagrpo.tasks.guess_number:GuessNumber",
}
"""Tasks of several turns, and what makes their environments."""


@cache
def task_options() -> Mapping[str, type]:
    """For each task the dataclass of its options, whose fields `option` makes. Every task also takes `system_prompt`,
    `reward` and `rewards`."""
    from lagrpo.tasks import arithmetic, calculator, countdown, custom, guess_number, reasoning_gym
    from lagrpo.tasks.data import DataOptions  # for math too, whose file imports math-verify

    return {
        "arithmetic": arithmetic.Options,
        "countdown": countdown.Options,
        "gsm8k": DataOptions,
        "math": DataOptions,
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
    return name in ENVIRONMENTS or name.startswith("gym:")


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
    task = load_function(settings.name)(settings, seed) if is_own(settings.name) else _load_builtin(settings, seed)
    if not isinstance(task, Task):
        raise TypeError(f"task.name: {settings.name!r} returned a {type(task).__name__}, which {NOT_A_TASK}")
    if is_own(settings.name) and settings.rewards:
        if isinstance(task, TaskWithEnvironment):
            raise ValueError(f"task.rewards: the environment of {settings.name!r} gives the rewards: leave them out")
        task = TaskWithRewards(task, load_rewards(None, settings.rewards, task.reward))
    return check_task(task)


def check_task(task: Task) -> Task:
    """The task. Raises ValueError if its reward functions need what neither lagrpo nor the data passes."""
    rewards = as_rewards(task.reward)
    if task.size("train"):
        rewards.check(task.prompt("train", 0).row)
    return task


def is_own(name: str) -> bool:
    """Whether a task is the user's own function."""
    return is_reference(name) and not name.startswith("gym:")


def _load_builtin(settings: Any, seed: int) -> Task:
    name, kind = settings.name, settings.name.partition(":")[0]
    if kind == "gym":
        from lagrpo.tasks import gym

        return gym.load(name, settings.system_prompt)
    require_installed(kind)
    file = importlib.import_module(f"lagrpo.tasks.{kind}")
    options = read_options(task_options()[kind], settings)
    if kind == "reasoning_gym":
        rows, ask, own = file.load(options, seed, name.partition(":")[2])
    else:
        (rows, ask), own = file.load(options, seed), file.score
    given = name, rows, ask, load_rewards(settings.reward, settings.rewards, own), settings.system_prompt
    if name not in ENVIRONMENTS:
        return RowTask(*given)
    return EpisodeTask(*given, environment=load_function(ENVIRONMENTS[name]))


@dataclass(frozen=True, slots=True)
class TaskWithRewards:
    """A task of the user's own with other rewards than its own."""

    task: Task
    reward: Rewards

    @property
    def name(self) -> str:
        return self.task.name

    def size(self, split: str) -> int:
        return self.task.size(split)

    def prompt(self, split: str, index: int) -> Prompt:
        return self.task.prompt(split, index)
