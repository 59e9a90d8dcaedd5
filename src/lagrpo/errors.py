"""What error messages need: SettingsError, the nearest valid name, and text that is safe to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lagrpo.logs import redact


class SettingsError(ValueError):
    """The settings cannot be run. Each problem is on its own line, without secrets from the values of settings."""

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


@contextmanager
def as_settings_error(what: str = "", *further: type[Exception]) -> Iterator[None]:
    """Turn ValueError, OSError, ImportError and `further` ones inside into a SettingsError that begins with `what`."""
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError, ImportError, *further) as error:
        why = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else error
        )
        raise SettingsError(f"{what}: {why}" if what else str(why)) from error


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turn any exception inside into a ValueError of one line: some libraries raise errors of any type."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An error of a library on one line, with its type if the message says little without it.

    >>> describe_error(KeyError("x")), describe_error(ValueError("no x"))
    ("KeyError: 'x'", 'no x')
    """
    name, message = type(error).__name__, one_line(str(error))
    if not message:
        return name
    says_little = isinstance(error, LookupError | AttributeError | AssertionError)
    return f"{name}: {message}" if says_little else message


LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_is_pulled(path: Path) -> None:
    """Raise ValueError for the pointer that a clone without Git LFS has in place of a large file."""
    with path.open("rb") as file:
        beginning = file.read(len(LFS_POINTER))
    if beginning == LFS_POINTER:
        raise ValueError(f"{path} is a Git LFS pointer: run `git lfs pull` in {path.parent}")


def find_nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    """The known name most like `name`; None if none reaches the likeness (0: any name does, 1: only the same)."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: " Did you mean 'x'?" for the known name most like `name`, "" without one."""
    close = find_nearest(name, known, likeness=0.6)
    return f" Did you mean {close!r}?" if close else ""


def one_line(text: str, most: int = 300) -> str:
    """Untrusted text as part of a message: on one line, safe to print, and of at most `most` characters.

    >>> one_line("a\\n\\x1b[31mb")
    'a ␛[31mb'
    """
    line = visible(" ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]} …"


_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """A model's text, safe to print: control characters other than newline and tab, which could move the cursor or
    recolor the terminal, become their pictures (ESC is ␛).

    >>> visible("a\\x1b[31mb")
    'a␛[31mb'
    """
    return text.translate(_PICTURES)
