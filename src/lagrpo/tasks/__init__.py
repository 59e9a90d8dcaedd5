"""Tasks: what is asked, and how an answer is judged. Each has its own file, which also declares its options.

`load_task(settings, seed)` returns the task that the settings name; `check_options(settings)` refuses contradictory
settings without loading anything.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from lagrpo.errors import suggest
from lagrpo.tasks.base import (
    Judge,
    RowTask,
    Task,
    TaskSettings,
    Unjudgeable,
    build_messages,
    order_prompts,
    read_options,
)
from lagrpo.tasks.importing import is_reference, load_function

__all__ = [
    "Judge",
    "RowTask",
    "Task",
    "TaskSettings",
    "Unjudgeable",
    "build_messages",
    "check_options",
    "load_task",
    "option_takers",
    "order_prompts",
    "task_options",
]

JUDGES = {
    "arithmetic": "lagrpo.tasks.arithmetic:judge",
    "countdown": "lagrpo.tasks.countdown:judge",
    "number": "lagrpo.tasks.gsm8k:judge",
    "math": "lagrpo.tasks.math:judge",
    "exact": "lagrpo.tasks.custom:judge",
}
"""The built-in judges that the setting `reward` can name."""


@cache
def task_options() -> Mapping[str, type]:
    """For each task the dataclass of its options, whose fields `option` makes. Every task also takes `system_prompt`
    and `reward`."""
    from lagrpo.tasks import arithmetic, countdown, custom
    from lagrpo.tasks.files import DataOptions  # for math too, whose own file imports math-verify

    return {
        "arithmetic": arithmetic.Options,
        "countdown": countdown.Options,
        "gsm8k": DataOptions,
        "math": DataOptions,
        "custom": custom.Options,
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
        raise ValueError(
            f"task.reward: there is no built-in reward {reward!r}; there are {', '.join(JUDGES)}, and a function of "
            f"your own as 'package.module:function'.{suggest(reward, JUDGES)}"
        )
    if is_reference(name):
        return
    if name not in known:
        raise ValueError(
            f"task.name: there is no task {name!r}; there are {', '.join(known)}, and a task of your own as "
            f"'package.module:function'.{suggest(name, known)}"
        )
    if name == "custom":
        _check_custom(settings)
    for option, tasks in option_takers().items():
        if name not in tasks and getattr(settings, option) is not None:
            do = f"{tasks[0]} does" if len(tasks) == 1 else f"{', '.join(tasks[:-1])} and {tasks[-1]} do"
            raise ValueError(f"task.{option} is set, but the task {name!r} does not take it: {do}")


def _check_custom(settings: Any) -> None:
    """Raise ValueError for a reward that is missing, or that lacks the column to judge against."""
    if settings.reward is None:
        known = ", ".join(JUDGES)
        raise ValueError(f"the task 'custom' needs task.reward: one of {known}, or a 'package.module:function'")
    if settings.answer_column is None and not is_reference(settings.reward):
        raise ValueError(f"the reward {settings.reward!r} needs task.answer_column, the column to judge against")


def load_task(settings: TaskSettings, seed: int) -> Task:
    """The task that the settings name; what it generates is a function of the seed. For "package.module:function" it is
    what function(settings, seed) returns.

    Raises:
        ValueError: wrong settings (before anything heavy is loaded), or unfit data.
        TypeError: the user's function returned something that is not a Task.
        ImportError: the task needs a package that is not installed.
    """
    check_options(settings)
    name = settings.name
    if not is_reference(name):
        require_installed(name)
        file = import_module(f"lagrpo.tasks.{name}")
        judge = load_judge(settings.reward, file.judge)
        rows, ask = file.load(read_options(task_options()[name], settings), seed)
        return RowTask(name, rows, ask, judge, settings.system_prompt)
    task = load_function(name)(settings, seed)
    if not isinstance(task, Task):
        raise TypeError(
            f"task.name: {name!r} returned a {type(task).__name__}, which is no Task: a Task has name, judge, "
            "size(split) and prompt(split, index)"
        )
    return task


def load_judge(reward: str | None, default: Judge) -> Judge:
    """The judge that the setting `reward` names (built in, or "package.module:function"), else the task's own."""
    if reward is None:
        return default
    require_installed(reward)
    return load_function(JUDGES.get(reward, reward))


def require_installed(name: str) -> None:
    """Raise ImportError, saying what to install, where a task or reward needs a missing package."""
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'lagrpo[math]'")
