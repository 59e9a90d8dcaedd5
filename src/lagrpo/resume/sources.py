"""Digests of the files with a user's code, so that a resumed run can say what has changed.

environment.json keeps them under `sources`: file -> digest, and the digest of the chat template.
Runs of older versions have digests of functions there, by other names, which are not compared.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from lagrpo.data.fingerprint import digest
from lagrpo.rewards.reward import Rewards
from lagrpo.settings.user_loss import own_functions
from lagrpo.tasks import environment_of
from lagrpo.tasks.environments import Tools
from lagrpo.tasks.gym import Gym

if TYPE_CHECKING:
    from lagrpo.core.objective import Recipe
    from lagrpo.model.chat import Chat
    from lagrpo.training.sampling import TaskSetup

CHAT_TEMPLATE = "chat template"


def collect_sources(
    chat: Chat,
    tasks: Mapping[str, TaskSetup],
    recipe: Recipe,
    engine: str | None = None,
) -> dict[str, str | None]:
    """The digests of the chat template and of every file with code of a run's user.

    `engine` names the function that makes a rollout engine of the user's own.
    """
    template = chat.tokenizer.chat_template
    sources = {CHAT_TEMPLATE: digest(repr(template)) if template is not None else None}
    code: list[object] = [engine, *own_functions(recipe)]
    for setup in tasks.values():
        task = setup.task
        environment = environment_of(task)
        code += [type(task), getattr(task, "ask", None), environment]
        if isinstance(environment, Tools):
            code += environment.functions.values()
        code += [reward.function for reward in Rewards.from_reward(task.reward).parts]
    for part in code:
        for name, file in find_files(part).items():
            sources[name] = digest_file(file)
    return sources


def find_changed_sources(
    before: Mapping[str, str | None], now: Mapping[str, str | None]
) -> list[str]:
    """The names of what both have, with another digest."""
    return [name for name in now if name in before and before[name] != now[name]]


def has_digests_of_functions(sources: Mapping[str, str | None]) -> bool:
    """True for the sources of an older version, which has no file to compare with."""
    names = sources.keys() - {CHAT_TEMPLATE}
    return bool(names) and not any(name.endswith(".py") for name in names)


def digest_file(file: Path) -> str:
    """The digest of a file's text."""
    return digest(file.read_text(encoding="utf-8", errors="replace"))


def find_files(code: object) -> dict[str, Path]:
    """The files of a user's code by their names, such as "rewards.py".

    These are the file of `code` and the files of loaded modules in the same directory, package or
    subdirectories, except installed packages, lagrpo itself, and a script that only starts the run.
    Empty for code of lagrpo or of Python, and for code that was typed into a prompt. `code` is a
    function, a class, an object, or a name such as "package.module:function".
    """
    module = find_module(code)
    file = find_file(module)
    if module is None or file is None:
        return {}
    package, *modules_below = module.__name__.split(".")
    is_package = file.name == "__init__.py"
    # The directory from which Python imported the package, or the module without a package.
    root = file.parents[len(modules_below) + is_package]
    files = {_relative(file, root): file}
    for name, other in sorted(sys.modules.items()):
        # First by texts: nearly all of some thousand modules lie elsewhere.
        if not _path_of(other).startswith(f"{root}{os.sep}"):
            continue
        other_file = find_file(other)
        is_same_package = name.partition(".")[0] == package
        is_started = name in ("__main__", "__mp_main__") and not is_same_package
        if other_file is None or is_started:
            continue
        if is_same_package or not is_installed(other_file):
            files[_relative(other_file, root)] = other_file
    return files


def _relative(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def find_module(code: object) -> ModuleType | None:
    """The loaded module that a function, class or object comes from, or that a name begins with."""
    while isinstance(code, partial):
        bound = cast("partial[object]", code)
        code = bound.args[0] if bound.func is Gym else bound.func
    if isinstance(code, str):
        return sys.modules.get(code.partition(":")[0])
    if callable(code):
        code = inspect.unwrap(cast("Callable[..., Any]", code))
    return sys.modules.get(getattr(code, "__module__", None) or "")


def find_file(module: object) -> Path | None:
    """The file of a module; None for modules of Python and lagrpo, and without a file.

    `sys.modules` may hold objects that are not modules.
    """
    if not isinstance(module, ModuleType):
        return None
    package = module.__name__.partition(".")[0]
    if package in sys.stdlib_module_names or package == "lagrpo":
        return None
    file = Path(_path_of(module))
    return file if file.suffix == ".py" and file.is_file() else None


def _path_of(module: object) -> str:
    """The absolute path of a module's file; empty for an object without a file."""
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    if not path or path.startswith(os.sep):
        return path or ""
    return os.path.abspath(path)


def is_installed(file: Path) -> bool:
    """True for a file of an installed package."""
    return "site-packages" in file.parts or "dist-packages" in file.parts
