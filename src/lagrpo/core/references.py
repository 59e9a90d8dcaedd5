"""Objects that settings name by "package.module:name", also in modules of the current directory."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")


def is_reference(text: str) -> bool:
    """True for text of the form "package.module:name"."""
    module_name, colon, name = text.partition(":")
    parts = (*module_name.split("."), name)
    return bool(colon) and all(part.isidentifier() for part in parts)


def load_reference(reference: str) -> Any:
    """The object that "package.module:name" names.

    Raises ValueError for another form, a module that is missing or raises an error, and a name that
    the module does not have, and ImportError if the module imports something that is missing.
    """
    if not is_reference(reference):
        raise ValueError(f"{reference!r} is not of the form 'package.module:name'")
    module_name, _, name = reference.partition(":")
    current_directory = os.getcwd()
    if current_directory not in sys.path:
        # Last, so that no file there can shadow the standard library.
        sys.path.append(current_directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The missing module is this one or a package that holds it; else this one imports it.
        is_itself = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        if not is_itself:
            problem = f"{error}, which {module_name} imports: install it"
            raise ImportError(f"{reference!r}: {problem}", name=error.name) from error
        places = f"in the current directory ({current_directory}) or among installed packages"
        raise ValueError(f"{reference!r}: no module {error.name!r} {places}") from error
    except ImportError:
        # Its message says what to install.
        raise
    except (Exception, SystemExit) as error:
        problem = f"importing {module_name} raised {describe_raised(error)}"
        raise ValueError(f"{reference!r}: {problem}") from error
    return _get(module, name, reference)


def load_from_file(reference: str, file: Path) -> Any:
    """The object that "module:name" names, in this file instead of where Python would look.

    The module is not kept, so the object that Python finds under the same reference stays another
    one. Raises ValueError for a name that the file does not have.
    """
    module_name, _, name = reference.partition(":")
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _get(module, name, reference)


def _get(module: ModuleType, name: str, reference: str) -> Any:
    """The object of that name in a module. Raises ValueError if there is none."""
    if not hasattr(module, name):
        file = getattr(module, "__file__", None) or module.__name__
        public = [other for other in vars(module) if not other.startswith("_")]
        raise ValueError(f"{reference!r}: {file} has no {name!r}{did_you_mean(name, public)}")
    return getattr(module, name)


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """The end of an error message: "; did you mean 'x'?", with at most `most` known names.

    It is "" if no known name is like `name`.
    """
    nearest = map(repr, get_close_matches(name, list(known), n=most))
    names = " or ".join(nearest)
    return f"; did you mean {names}?" if names else ""


def call_users_function(function: Callable[..., Result], what: str, *arguments: object) -> Result:
    """What a function of the user returns for these arguments. Messages begin with `what`.

    Raises ValueError for an exception of the function, with the line that raised it. ValueError and
    ImportError pass through, because their messages are for the user.
    """
    try:
        return function(*arguments)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{what} raised {describe_raised(error)}") from error


def describe_raised(error: BaseException) -> str:
    """An exception of a user's module or function on one line: type, message, file and line."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno})"
    last = last_frame_of_user(error) or traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    message = f"{kind}: {text}" if text else kind
    return f"{message} ({last.filename}, line {last.lineno})"


def last_frame_of_user(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost call in the traceback that is neither of lagrpo nor of a library, if any."""
    library_folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    library_folders.append(str(Path(__file__).parents[1]))  # lagrpo itself
    # Frozen modules and generated code have names such as <frozen importlib._bootstrap>.
    not_of_user = (*library_folders, "<")
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_user = [frame for frame in frames if not frame.filename.startswith(not_of_user)]
    return frames_of_user[-1] if frames_of_user else None
