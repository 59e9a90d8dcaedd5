"""Tasks: what is asked, and how an answer is judged. Each has its own file, which also declares its options.

`load_task(settings, seed)` returns the task that the settings name; `check_options(settings)` refuses contradictory
settings without loading anything.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from lagrpo.errors import suggest
from lagrpo.tasks.base import (
    EpisodeTask,
    Judge,
    RowTask,
    Task,
    TaskSettings,
    TaskWithEnvironment,
    Unjudgeable,
    build_messages,
    order_prompts,
    read_options,
)
from lagrpo.tasks.names import (
    ENVIRONMENTS,
    GYM,
    GYMNASIUM,
    JUDGES,
    OWN,
    SHAPED,
    is_reference,
    kind_of,
    load_function,
    load_judge,
    require_installed,
)
from lagrpo.tasks.rewards import Reward, Rewards, reward_names
from lagrpo.tasks.several import Rejudged, check_rewards, load_rewards

__all__ = [
    "NO_TASK",
    "Judge",
    "Reward",
    "Rewards",
    "RowTask",
    "Task",
    "TaskSettings",
    "Unjudgeable",
    "build_messages",
    "check_options",
    "load_function",
    "load_task",
    "option_takers",
    "order_prompts",
    "reward_names",
    "task_options",
]

NO_TASK = "is no Task: a Task has name, judge, size(split) and prompt(split, index)"


@cache
def task_options() -> Mapping[str, type]:
    """For each task the dataclass of its options, whose fields `option` makes. Every task also takes `system_prompt`
    and `reward`."""
    from lagrpo.tasks import arithmetic, calculator, countdown, custom, guess_number, reasoning_gym
    from lagrpo.tasks.files import DataOptions  # for math too, whose own file imports math-verify

    return {
        "arithmetic": arithmetic.Options,
        "countdown": countdown.Options,
        "gsm8k": DataOptions,
        "math": DataOptions,
        "custom": custom.Options,
        GYM: reasoning_gym.Options,
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


def check_options(settings: TaskSettings) -> None:
    """Raise ValueError for an unknown task, an unknown reward, and an option that the named task does not take. Nothing
    is loaded."""
    name, reward, known = settings.name, settings.reward, task_options()
    if reward is not None and not is_reference(reward) and reward not in JUDGES:
        further = f" {reward!r} can be an entry of task.rewards." if reward in SHAPED else suggest(reward, JUDGES)
        raise ValueError(
            f"task.reward: there is no built-in reward {reward!r}; there are {', '.join(JUDGES)}, and a function of "
            f"your own as 'package.module:function'.{further}"
        )
    check_rewards(settings)
    if is_reference(name):
        return
    if (kind := kind_of(name)) not in known:
        names = [f"{each}:NAME" if each == GYM else each for each in known]
        raise ValueError(
            f"task.name: there is no task {name!r}; there are {', '.join(names)}, and a task of your own as "
            f"'package.module:function'.{suggest(name, names)}"
        )
    check_custom(settings)
    own: Any = settings
    for option, tasks in option_takers().items():
        if kind not in tasks and getattr(own, option) is not None:
            do = f"{tasks[0]} does" if len(tasks) == 1 else f"{', '.join(tasks[:-1])} and {tasks[-1]} do"
            raise ValueError(f"task.{option} is set, but the task {name!r} does not take it: {do}")


def check_custom(settings: TaskSettings) -> None:
    """Raise ValueError for the task custom without a reward, or without what its rewards are to judge against."""
    if settings.name != "custom":
        return
    own: Any = settings
    if settings.reward is None and not settings.rewards:
        known = ", ".join(JUDGES)
        raise ValueError(f"the task 'custom' needs task.reward: one of {known}, or a 'package.module:function'")
    for reward in (settings.reward, *(each.reward for each in settings.rewards)):
        if reward == OWN:
            raise ValueError(f"task.rewards: the task 'custom' has no judge of its own, which {OWN!r} would name")
        if reward in JUDGES and own.answer_column is None:
            raise ValueError(f"the reward {reward!r} needs task.answer_column, the column to judge against")


def load_task(settings: TaskSettings, seed: int) -> Task:
    """The task that the settings name; what it generates is a function of the seed. For "package.module:function" it is
    what function(settings, seed) returns.

    Raises:
        ValueError: wrong settings (before anything heavy is loaded), or unfit data.
        TypeError: the user's function returned something that is not a Task.
        ImportError: the task needs a package that is not installed.
    """
    check_options(settings)
    name, kind = settings.name, kind_of(settings.name)
    if not is_reference(name):
        require_installed(kind)
        file = importlib.import_module(f"lagrpo.tasks.{kind}")
        options = read_options(task_options()[kind], settings)
        if kind == GYM:
            rows, ask, own = file.load(options, seed, name.partition(":")[2])
        else:
            (rows, ask), own = file.load(options, seed), file.judge
        judge = load_rewards(settings, own) if settings.rewards else load_judge(settings.reward, own)
        if name in ENVIRONMENTS:
            environment = load_function(ENVIRONMENTS[name])
            talking: Any = EpisodeTask(name, rows, ask, judge, settings.system_prompt, environment=environment)
            return talking
        return RowTask(name, rows, ask, judge, settings.system_prompt)
    if name.startswith(GYMNASIUM):
        from lagrpo.tasks import gym

        return gym.load(name, settings.system_prompt)
    task = load_function(name)(settings, seed)
    if not isinstance(task, Task):
        raise TypeError(f"task.name: {name!r} returned a {type(task).__name__}, which {NO_TASK}")
    if not settings.rewards:
        return task
    if isinstance(task, TaskWithEnvironment):
        raise ValueError(f"task.rewards: the environment of the task {name!r} gives the rewards: leave them out")
    return Rejudged(task, load_rewards(settings, task.judge))
