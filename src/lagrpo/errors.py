"""What error messages need: SettingsError, the nearest valid name, and text that is safe to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """The settings cannot be run. Every complaint is on a line of its own."""


@contextmanager
def refusing(what: str = "", *further: type[Exception]) -> Iterator[None]:
    """Inside, turn a ValueError, OSError or ImportError (or one of `further`) into a SettingsError that begins with
    `what`."""
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError, ImportError, *further) as error:
        raise SettingsError(f"{what}: {error}" if what else str(error)) from error


def find_nearest(name: str, known: Iterable[str], likeness: float = 0.0) -> str | None:
    """The known name most like `name`; None where none reaches the likeness (0: any name does, 1: only the same).

    >>> find_nearest("trian", ["train", "eval"]), find_nearest("trian", ["eval"], likeness=0.6)
    ('train', None)
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: " Did you mean 'x'?" for the known name most like `name`, "" without one."""
    close = find_nearest(name, known, likeness=0.6)
    return f" Did you mean {close!r}?" if close else ""


def visible(text: str) -> str:
    """A model's text, safe to print: control characters other than newline and tab, which could move the cursor or
    recolor the terminal, become their pictures (ESC is ␛).

    >>> visible("a\\x1b[31mb")
    'a␛[31mb'
    """
    return "".join(_picture(character) for character in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or not (code < 0x20 or 0x7F <= code < 0xA0):
        return character
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"
