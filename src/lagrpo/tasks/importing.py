"""Loads a user's own function, which the settings name as "package.module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lagrpo.errors import suggest


def is_reference(name: str) -> bool:
    """Whether a name in the settings is a "package.module:function", not something built in."""
    return ":" in name


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names.

    This finds modules in the current directory, too, though Python puts a console script's own directory on the path.
    They come last, so that no file there can shadow the standard library. Worker processes inherit the path.

    Raises:
        ValueError: a name of another form, a missing module or attribute (with the nearest one), or an attribute that
            cannot be called. An import that fails inside the module raises its own error.
    """
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"{reference!r} is not of the form 'package.module:function'")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    module = _import(module_name, reference)
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(
            f"{reference!r}: {where} has no attribute {attribute!r}.{suggest(attribute, vars(module))}"
        ) from error
    if not callable(function):
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
