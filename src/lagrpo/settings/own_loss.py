"""Losses of a user's own: their names in the settings, and their source files, which a run keeps in `loss/`.

`lagrpo verify` reads the kept files, so a run can be verified after its loss has changed.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lagrpo.core.objective import Recipe
from lagrpo.core.pieces import function_name
from lagrpo.core.recipes import resolve
from lagrpo.core.references import is_reference, load_from_file
from lagrpo.settings.schema import Settings

FOLDER = "loss"


def name_loss(loss: str | Recipe | Callable) -> str:
    """The name under which settings refer to a loss that was given in Python: "module:name", where a script is a module
    by the name of its file. A function that no module has, such as a lambda, keeps a name that cannot be loaded."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Recipe):
        return _name_recipe(loss)
    return _importable(function_name(loss))


def _name_recipe(recipe: Recipe) -> str:
    """The recipe's own name if it is one of the table, else the module of one of its functions and the variable there
    that holds it."""
    for function in own_functions(recipe):
        module = sys.modules.get(function.__module__)
        for name, value in vars(module).items() if module else ():
            if value is recipe:
                return _importable(f"{function.__module__}:{name}")
    return recipe.name or "recipe"


def _importable(reference: str) -> str:
    """`__main__:dppo` by the name of the script's file, with which other programs can import it."""
    module_name, _, name = reference.partition(":")
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if module_name == "__main__" and file:
        return f"{Path(file).stem}:{name}"
    return reference


def own_functions(recipe: Recipe) -> list[Callable]:
    """The functions of a recipe from outside lagrpo."""
    return [function for function in recipe.functions if ":" in function_name(function)]


def keep_sources(recipe: Recipe, run: Path) -> None:
    """Copy the files of a recipe's own functions into the run. A function typed into a prompt has no file."""
    for function in own_functions(recipe):
        try:
            source = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        except TypeError:  # an object that can be called
            continue
        if source.is_file():
            kept = _kept_file(run, _importable(function_name(function)))
            _keep(source, kept)


def _keep(source: Path, kept: Path) -> None:
    """Copy a file. A later version of it, with which a run was resumed, gets a number, so none is lost."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    versions = [kept, *(kept.with_suffix(f".{number}.py") for number in range(2, 1000))]
    for version in versions:
        if not version.exists():
            shutil.copyfile(source, version)
            return
        if version.read_bytes() == source.read_bytes():
            return


def load_recipe_of_run(settings: Settings, run: Path) -> Recipe:
    """The recipe of a run's settings, with functions of the user from the files that the run kept. Raises as
    `resolve`."""
    overrides = {path: _load_kept(value, run) for path, value in settings.loss.knobs.items()}
    return resolve(_load_kept(settings.loss.recipe, run), overrides)


def _load_kept(value: Any, run: Path) -> Any:
    """The object that a setting names, if the run kept its file; else the setting itself."""
    if isinstance(value, list | tuple):
        return [_load_kept(entry, run) for entry in value]
    if not isinstance(value, str) or not is_reference(value):
        return value
    kept = _kept_file(run, value)
    return load_from_file(value, kept) if kept.is_file() else value


def _kept_file(run: Path, reference: str) -> Path:
    """The place of a module's file in the run."""
    module_name = reference.partition(":")[0]
    return Path(run, FOLDER, *module_name.split(".")).with_suffix(".py")
