"""What messages are made of: SettingsError, how other errors become one, and text that is safe to print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """Settings that cannot be run, with every complaint on a line of its own."""


@contextmanager
def refusing(what: str = "", *further: type[Exception]) -> Iterator[None]:
    """Inside, a ValueError, OSError or ImportError (or one of `further`) says what is wrong with the settings: it
    becomes a SettingsError, whose message begins with `what`."""
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError, ImportError, *further) as error:
        raise SettingsError(f"{what}: {error}" if what else str(error)) from error


def visible(text: str) -> str:
    """Text of a model that is safe to print: control characters other than newline and tab, with which it could move
    the cursor or recolor the terminal, become their pictures (ESC is ␛).

    >>> visible("a\\x1b[31mb")
    'a␛[31mb'
    """
    return "".join(_picture(character) for character in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or not (code < 0x20 or 0x7F <= code < 0xA0):
        return character
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"
