"""Parts of error messages: SettingsError, the nearest valid name, foreign text on one line."""

from __future__ import annotations

import difflib
import errno
import json
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lagrpo.logs import is_debugging, redact, visible

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class SettingsError(ValueError):
    """The settings cannot be run.

    Each problem is on its own line, safe to print and without secrets from the values of settings.
    """

    def __init__(self, message: str) -> None:
        super().__init__(visible(redact(message)))

    def _render_traceback_(self) -> list[str]:
        return render_for_notebook(self)


def render_for_notebook(error: BaseException) -> list[str]:
    """Returns the lines that IPython and Jupyter show instead of a traceback.

    They call `_render_traceback_` of an exception that has it.
    """
    if is_debugging():
        return traceback.format_exception(error)
    name = type(error).__name__
    return [f"{name}: {error}" if str(error) else name, *getattr(error, "__notes__", ())]


def without_own_frames(
    *failures: type[BaseException],
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Lets a function raise SettingsError without the calls inside lagrpo in its traceback.

    The user sees the line of the script and the message; with LAGRPO_DEBUG=1 everything. A notebook
    shows `failures` as their messages, too.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            try:
                return function(*args, **kwargs)
            except SettingsError as error:
                if is_debugging():
                    raise
                raise error.with_traceback(None) from None
            except failures as error:
                vars(error)["_render_traceback_"] = partial(render_for_notebook, error)
                raise

        return call

    return decorate


@contextmanager
def as_settings_error(what: str = "", *more: type[Exception]) -> Iterator[None]:
    """Turns ValueError, OSError, ImportError and `more` ones inside into a SettingsError.

    Also RecursionError: values of the user were nested too deeply.

    Its message begins with `what`.
    """
    try:
        yield
    # A SettingsError is a ValueError, too, but has its message already. A closed pipe does not
    # make the input wrong.
    except (SettingsError, BrokenPipeError):
        raise
    except RecursionError as error:
        raise SettingsError(f"{what}: {TOO_DEEP}" if what else f"a value: {TOO_DEEP}") from error
    except (ValueError, OSError, ImportError, *more) as error:
        reason = explain_os_error(error) if isinstance(error, OSError) else str(error)
        raise SettingsError(f"{what}: {reason}" if what else reason) from error


ADVICE = {
    errno.ENOSPC: "free space on the disk that is written to",
    errno.EDQUOT: "free space: your quota is used up",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of this path is a file, so choose another place",
    errno.EEXIST: "choose another place",
    errno.EISDIR: "name a file",
}
"""What to do about an error of the system, by its number."""


def explain_os_error(error: OSError) -> str:
    """Returns the file of an error of the system, the reason, and what to do about it.

    >>> explain_os_error(OSError(errno.ENOSPC, "No space left on device", "runs/a"))
    'runs/a: No space left on device; free space on the disk that is written to'
    """
    reason = error.strerror or str(error)
    if error.filename is not None:
        reason = f"{error.filename}: {reason}"
    advice = ADVICE.get(error.errno or 0)
    return f"{reason}; {advice}" if advice else reason


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turns any exception inside into a ValueError of one line.

    Some libraries raise errors of any type.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Returns an error of a library on one line.

    It has its type if the message says little without it.

    >>> describe_error(KeyError("x")), describe_error(ValueError("no x"))
    ("KeyError: 'x'", 'no x')
    """
    if isinstance(error, RecursionError):
        return TOO_DEEP
    name = type(error).__name__
    message = one_line(explain_os_error(error) if isinstance(error, OSError) else str(error))
    if not message:
        return name
    # The message of a KeyError is the bare key, for example.
    says_little = isinstance(error, LookupError | AttributeError | AssertionError)
    return f"{name}: {message}" if says_little else message


TOO_DEEP = "it is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError, also for one that is nested more deeply than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Returns the object of a JSON text. Raises ValueError for any other text."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not a JSON object")
    return value


def list_folders(directory: Path, *patterns: str) -> str:
    """Returns the end of an error message with folders below a directory that hold such files.

    It is "" if none does. A clone of the hub often has its files in folders.
    """
    folders: dict[str, None] = {}
    for pattern in patterns:
        for file in sorted([*directory.glob(f"*/{pattern}"), *directory.glob(f"*/*/{pattern}")]):
            folders[str(file.parent)] = None
    names = list(folders)
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f". Name a folder in it: {', '.join(names[:3])}{more}"


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_is_pulled(path: Path) -> None:
    """Raises ValueError if a clone without Git LFS has only the pointer to this large file."""
    with path.open("rb") as file:
        beginning = file.read(len(LFS_POINTER))
    if beginning == LFS_POINTER:
        raise ValueError(f"{path} is a Git LFS pointer: run `git lfs pull` in {path.parent}")


def find_nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    """Returns the known name most like `name`; None if none reaches the likeness.

    Any name reaches a likeness of 0, only the same name a likeness of 1.
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: " Did you mean 'x'?".

    It is "" if no known name is like `name`.
    """
    nearest = find_nearest(name, known, likeness=0.6)
    return f" Did you mean {nearest!r}?" if nearest else ""


def one_line(text: str, most: int = 300) -> str:
    """Returns untrusted text for a message: one line of at most `most` characters.

    >>> one_line("a\\n\\x1b[31mb")
    'a ␛[31mb'
    """
    line = visible(" ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]} …"
