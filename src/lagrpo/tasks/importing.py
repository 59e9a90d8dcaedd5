"""A user's own function, named in the settings as "package.module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lagrpo.errors import suggest


def is_reference(name: str) -> bool:
    """Whether a name in the settings is a "package.module:function" rather than something built in."""
    return ":" in name


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names.

    Modules in the current directory are found too: a console script's own directory is what Python puts on the path,
    not the user's. They come last, so that a file there cannot shadow the standard library. Worker processes inherit
    the path.

    Raises ValueError for a name of another form, a module that is not there, a module without that attribute (with the
    nearest one) and an attribute that cannot be called. An import that fails inside the module raises what it raises.
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
            raise  # the module was found; something that it imports was not
        raise ValueError(
            f"{reference!r}: there is no module {error.name!r}. Looked in the current directory ({os.getcwd()}) and "
            "where installed packages are; is the name right, and is there a file of that name?"
        ) from error
