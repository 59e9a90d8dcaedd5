"""Losses of a user's own: their names in the settings, and their source files.

A run keeps copies of the files in `loss/`. `lagrpo verify` reads the copies, so a run can be
verified after its loss has changed.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path
from typing import cast

from lagrpo.core.objective import Recipe
from lagrpo.core.pieces import PieceFunction, function_name
from lagrpo.core.recipes import resolve
from lagrpo.core.references import is_reference, load_from_file
from lagrpo.settings.schema import Settings

FOLDER = "loss"


def name_loss(loss: str | Recipe | PieceFunction) -> str:
    """Returns the name of a loss in the settings: "module:name" for a loss that is given in Python.

    A script is a module by the name of its file. A function that no module has, such as a lambda,
    gets a name that cannot be loaded.
    """
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Recipe):
        return _name_recipe(loss)
    return _importable(function_name(loss))


def _name_recipe(recipe: Recipe) -> str:
    """Returns the recipe's own name if it is one of the table.

    Else it is the module of one of its functions, and the variable there that holds the recipe.
    """
    for function in own_functions(recipe):
        module = sys.modules.get(function.__module__)
        if not module:
            continue
        for name, value in vars(module).items():
            if value is recipe:
                return _importable(f"{function.__module__}:{name}")
    return recipe.name or "recipe"


def _importable(reference: str) -> str:
    """Returns a reference that other programs can import: `script:dppo` for `__main__:dppo`."""
    module_name, _, name = reference.partition(":")
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if module_name == "__main__" and file:
        return f"{Path(file).stem}:{name}"
    return reference


def own_functions(recipe: Recipe) -> list[PieceFunction]:
    """Returns the functions of a recipe from outside lagrpo."""
    return [function for function in recipe.functions if ":" in function_name(function)]


def keep_sources(recipe: Recipe, run: Path) -> None:
    """Copies the files of a recipe's own functions into the run.

    A function that was typed into a prompt has no file.
    """
    for function in own_functions(recipe):
        try:
            source_file = inspect.getsourcefile(inspect.unwrap(function))
        except TypeError:
            # An object that can be called: Python does not know its file.
            continue
        source = Path(source_file or "")
        if source.is_file():
            copy = _copy_of_module(run, _importable(function_name(function)))
            _copy_version(source, copy)


def _copy_version(source: Path, copy: Path) -> None:
    """Copies a file, unless the run has this version of it.

    A later version, with which a run was resumed, gets a number, so none is lost.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    numbered_copies = [copy.with_suffix(f".{number}.py") for number in range(2, 1000)]
    for version in [copy, *numbered_copies]:
        if not version.exists():
            shutil.copyfile(source, version)
            return
        if version.read_bytes() == source.read_bytes():
            return


def load_recipe_of_run(settings: Settings, run: Path) -> Recipe:
    """Returns the recipe of a run's settings, with the user's functions as the run has copied them.

    Raises as `resolve`.
    """
    overrides = {path: _load_copy(value, run) for path, value in settings.loss.knobs.items()}
    recipe = _load_copy(settings.loss.recipe, run)
    # `resolve` raises for any other object.
    return resolve(cast(str | Recipe | PieceFunction, recipe), overrides)


def _load_copy(value: object, run: Path) -> object:
    """Returns the object that a setting names, if the run copied its file; else the setting."""
    if isinstance(value, list | tuple):
        return [_load_copy(entry, run) for entry in value]
    if not isinstance(value, str) or not is_reference(value):
        return value
    copy = _copy_of_module(run, value)
    return load_from_file(value, copy) if copy.is_file() else value


def _copy_of_module(run: Path, reference: str) -> Path:
    """Returns the path of the copy of a module's file in the run."""
    module_name = reference.partition(":")[0]
    return Path(run, FOLDER, *module_name.split(".")).with_suffix(".py")
