"""Where the package's log records go: what happens outside of a run's display is logged to "lagrpo" and below it.

As with any library, a program decides by its handlers what becomes of the records. The command line prints them
(`print_records`); a run shows them in its display (`shown_by`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper

from lagrpo.redaction import redact

logger = logging.getLogger("lagrpo")


class _Lines(logging.Handler):
    """Hands each record on as a line of text."""

    show: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        (self.show or _print)(redact(self.format(record)))


def _print(text: str) -> None:
    print(f"lagrpo: {text}", file=sys.stderr, flush=True)


_lines = _Lines()


def print_records() -> None:
    """From now on, print every record from INFO upwards to standard error, as a line."""
    logger.addHandler(_lines)
    logger.setLevel(logging.INFO)


def print_any_sign() -> None:
    """From now on, what the encoding of standard output or error lacks (✓ in ASCII) is printed as its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def shown_by(show: Callable[[str], None] | None, least: int = logging.INFO) -> Iterator[None]:
    """Inside, `show` gets every record from the level `least` upwards as a line, in place of standard error; without
    `show`, standard error gets it where the command line prints records. The program's own handlers are left alone."""
    before = _lines.show, _lines.level, logger.level, _lines in logger.handlers
    if show is not None:
        print_records()
    _lines.show = show
    _lines.setLevel(least)
    try:
        yield
    finally:
        _lines.show, handler_level, logger_level, printed = before
        _lines.setLevel(handler_level)
        logger.setLevel(logger_level)
        if not printed:
            logger.removeHandler(_lines)
