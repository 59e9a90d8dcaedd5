"""The arguments of `lagrpo.train` and `lagrpo.evaluate`: which are settings, and which need Python.

Data in memory, tasks, and functions of a script cannot be written into settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.resume.changes import find_run
from lagrpo.rewards.reward import Rewards
from lagrpo.runs.environment import read_environment
from lagrpo.settings.load import nest
from lagrpo.settings.run_code import ARGUMENTS, TRUST_ARGUMENT, find_code
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import RewardSettings
from lagrpo.startup.given_rewards import as_reward, function_of, is_setting
from lagrpo.tasks import Task, environment_of, load_task
from lagrpo.types import JsonObject, JsonView

if TYPE_CHECKING:
    from lagrpo.core.objective import Recipe

    Loss = str | Recipe | Callable[..., Any]


def in_memory_arguments(
    task: object,
    data: object,
    rewards: Sequence[object] | None,
    loss: Loss | None,
) -> list[str]:
    """The arguments of `lagrpo.train` that settings cannot hold.

    A run needs them again when it is resumed.
    """
    in_memory = data is not None and not isinstance(data, str | os.PathLike)
    functions = [function_of(reward) for reward in rewards or () if not is_setting(reward)]
    needed = {
        "task": task is not None,
        "data": in_memory,
        "rewards": not all(
            is_loadable(function, name_function(function)) for function in functions
        ),
        "loss": loss is not None and not is_loadable_loss(loss),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def name_function(function: object) -> str:
    """The name of a function, or of an object's class, as "module:function"."""
    name = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    if name is not None and module is not None:
        return f"{module}:{name}"
    return f"{type(function).__module__}:{type(function).__qualname__}"


def is_loadable_loss(loss: Loss) -> bool:
    """True if `lagrpo train` finds the loss by the name that the settings have.

    A script is a module there.
    """
    if isinstance(loss, str):
        return True
    from lagrpo.core.rows import RECIPES  # loads torch
    from lagrpo.settings.user_loss import name_loss

    if loss in RECIPES.values():
        return True
    reference = name_loss(loss)
    module_name, _, name = reference.partition(":")
    script = sys.modules.get("__main__")
    file = Path(getattr(script, "__file__", None) or "")
    if module_name == file.stem:
        is_there = getattr(script, name, None) is loss
        return is_there and file.absolute().parent == Path.cwd()
    return is_loadable(loss, reference)


def is_loadable(value: object, reference: str) -> bool:
    """True if `lagrpo train` finds the value by the name of its module.

    The module is in the current directory, or installed.
    """
    module_name, _, name = reference.partition(":")
    module = sys.modules.get(module_name)
    if module_name == "__main__" or module is None or getattr(module, name, None) is not value:
        return False
    file = Path(getattr(sys.modules[module_name.partition(".")[0]], "__file__", None) or "")
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    return str(folder) in (os.getcwd(), *sys.path[1:])  # the first is the directory of a script


def resume_call(run: Path, settings: Settings, arguments: Sequence[str]) -> str:
    """The call in Python that resumes a run with these settings."""
    words = [f"resume={str(run)!r}", *(f"{name}=…" for name in arguments)]
    replaced = [setting for name in arguments for setting in ARGUMENTS.get(name, ())]
    if any(not setting.startswith(tuple(replaced)) for setting, _ in find_code(settings)):
        words.append(TRUST_ARGUMENT)
    return f"lagrpo.train({', '.join(words)})"


def check_arguments(settings: Settings, resume: str | None, given: Sequence[str]) -> None:
    """Raise SettingsError if a resumed run lacks arguments that it was started with in Python."""
    with as_settings_error("--resume"):
        run = find_run(settings, resume)
        needed: list[str] = []
        if run is not None:
            needed = read_environment(run).get("arguments", [])
    missing = [name for name in needed if name not in given]
    if run is not None and missing:
        raise SettingsError(
            f"{run} was started from Python with {' and '.join(missing)} that its settings cannot "
            f"hold: resume it by {resume_call(run, settings, needed)}"
        )


def check_one_loss(loss: object, settings: JsonView | None) -> None:
    """Raise SettingsError if a loss is given both as an argument and among the settings."""
    if loss is not None and "recipe" in nest(settings or {}).get("loss", {}):
        raise SettingsError("loss and settings['loss.recipe'] both name a loss: give one of them")


def as_settings(
    model: str | os.PathLike[str] | None,
    data: object,
    rewards: Sequence[object] | None,
    loss: Loss | None = None,
) -> JsonObject:
    """The settings that these arguments stand for; others have none."""
    changes: JsonObject = {} if model is None else {"model.path": os.fspath(model)}
    if loss is not None:
        from lagrpo.settings.user_loss import name_loss  # loads torch

        changes["loss.recipe"] = name_loss(loss)
    if data is not None:
        changes["task.name"] = "custom"
    if isinstance(data, str | os.PathLike):
        changes["task.data"] = os.fspath(data)
    if rewards is not None and all(map(is_setting, rewards)):
        changes["task.rewards"] = list(rewards)
    return changes


def build_task(settings: Settings, data: object, rewards: Sequence[object] | None) -> Task | None:
    """Returns the task of data in memory and of reward functions; None if the settings say all.

    A tenth of the data is held out for testing (`lagrpo.tasks.data`). Raises ValueError for unfit
    rows and rewards.
    """
    has_functions = not all(map(is_setting, rewards or ()))
    in_memory = data is not None and not isinstance(data, str | os.PathLike)
    if not in_memory and not has_functions:
        return None
    replaced: JsonObject = {"data": data} if in_memory else {}
    replaced |= {"rewards": (RewardSettings(name="none", reward="exact"),)} if has_functions else {}
    task_settings = settings.task.model_copy(update=replaced | {"tools": ()})
    task: Any = load_task(task_settings, settings.run.seed)
    if not has_functions:
        return task
    parts = list(map(as_reward, rewards or ()))
    if not any(part.weight for part in parts):
        raise ValueError("rewards: all weights are 0, so every reward would be 0")
    names = [part.name for part in parts]
    for index, part in enumerate(parts):
        # Functions with the same name are told apart by their place in the list.
        if names.count(part.name) > 1:
            parts[index] = replace(part, name=f"{part.name}_{index + 1}")
    return replace(task, reward=Rewards(tuple(parts)))


def name_rewards(settings: Settings, task: Task | None) -> Settings:
    """The settings with the names, weights and ranges of a task object's rewards.

    Records and metrics need them.
    """
    if (
        task is None
        or environment_of(task) is not None
        or not Rewards.from_reward(task.reward).names
    ):
        return settings
    entries: list[RewardSettings] = []
    for part in Rewards.from_reward(task.reward).parts:
        reference = name_function(part.function)
        entries.append(
            RewardSettings(name=part.name, reward=reference, weight=part.weight, range=part.range)
        )
    return settings.model_copy(
        update={"task": settings.task.model_copy(update={"rewards": tuple(entries)})}
    )
