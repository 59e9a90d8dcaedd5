"""Tasks: what is asked, and how an answer is judged. Each has its own file, which also declares its options.

`load_task(settings, seed)` returns the task that the settings name; `check_options(settings)` refuses contradictory
settings without loading anything.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    Unjudgeable,
    build_messages,
    order_prompts,
    read_options,
)

__all__ = [
    "NO_TASK",
    "Judge",
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
    "task_options",
]

JUDGES = {
    "arithmetic": "lagrpo.tasks.arithmetic:judge",
    "countdown": "lagrpo.tasks.countdown:judge",
    "guess_number": "lagrpo.tasks.guess_number:judge",
    "number": "lagrpo.tasks.gsm8k:judge",
    "math": "lagrpo.tasks.math:judge",
    "exact": "lagrpo.tasks.custom:judge",
}
"""The built-in judges that the setting `reward` can name."""
ENVIRONMENTS = {
    "calculator": "lagrpo.tasks.calculator:ENVIRONMENT",
    "guess_number": "lagrpo.tasks.guess_number:GuessNumber",
}
"""Tasks of several turns, and what makes their environments."""
GYM = "gym:"
"""How the names of tasks begin whose environments are in the style of Gymnasium."""
TOOLS = {"calculator": "lagrpo.tasks.calculator:calculate"}
"""The built-in functions that environment.tools can name."""
NO_TASK = "is no Task: a Task has name, judge, size(split) and prompt(split, index)"


@cache
def task_options() -> Mapping[str, type]:
    """For each task the dataclass of its options, whose fields `option` makes. Every task also takes `system_prompt`
    and `reward`."""
    from lagrpo.tasks import arithmetic, calculator, countdown, custom, guess_number
    from lagrpo.tasks.files import DataOptions  # for math too, whose own file imports math-verify

    return {
        "arithmetic": arithmetic.Options,
        "countdown": countdown.Options,
        "gsm8k": DataOptions,
        "math": DataOptions,
        "custom": custom.Options,
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
    own: Any = settings
    if name == "custom" and reward is None:
        known = ", ".join(JUDGES)
        raise ValueError(f"the task 'custom' needs task.reward: one of {known}, or a 'package.module:function'")
    if name == "custom" and reward in JUDGES and own.answer_column is None:
        raise ValueError(f"the reward {reward!r} needs task.answer_column, the column to judge against")
    for option, tasks in option_takers().items():
        if name not in tasks and getattr(own, option) is not None:
            do = f"{tasks[0]} does" if len(tasks) == 1 else f"{', '.join(tasks[:-1])} and {tasks[-1]} do"
            raise ValueError(f"task.{option} is set, but the task {name!r} does not take it: {do}")


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
        file = importlib.import_module(f"lagrpo.tasks.{name}")
        judge = load_judge(settings.reward, file.judge)
        rows, ask = file.load(read_options(task_options()[name], settings), seed)
        if name in ENVIRONMENTS:
            environment = load_function(ENVIRONMENTS[name])
            talking: Any = EpisodeTask(name, rows, ask, judge, settings.system_prompt, environment=environment)
            return talking
        return RowTask(name, rows, ask, judge, settings.system_prompt)
    if name.startswith(GYM):
        from lagrpo.tasks import gym

        return gym.load(name, settings.system_prompt)
    task = load_function(name)(settings, seed)
    if not isinstance(task, Task):
        raise TypeError(f"task.name: {name!r} returned a {type(task).__name__}, which {NO_TASK}")
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


def is_reference(name: str) -> bool:
    """Whether a name in the settings is a "package.module:function", not something built in."""
    return ":" in name


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names.

    This finds modules in the current directory, too, though Python puts a console script's own directory on the path.
    They come last, so that no file there can shadow the standard library. Worker processes inherit the path.

    Raises ValueError for a name of another form, a missing module or attribute (with the nearest one), and an attribute
    that cannot be called. An import that fails inside the module raises its own error."""
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"{reference!r} is not of the form 'package.module:function'")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    module = _import(module_name, reference)
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{reference!r}: {where} has no attribute {attribute!r}.{suggest(attribute, vars(module))}")
    if not callable(function := getattr(module, attribute)):
        raise ValueError(f"{reference!r} is a {type(function).__name__}, not a function")
    return function


def _import(module_name: str, reference: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, but something that it imports was not
        raise ValueError(
            f"{reference!r}: there is no module {error.name!r}. Looked in the current directory ({os.getcwd()}) and "
            "where installed packages are; is the name right, and is there a file of that name?"
        ) from error
