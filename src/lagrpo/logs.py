"""Where records of the logger "lagrpo" go. The command line prints them; a run shows them in its display. A program
that uses lagrpo as a library decides by its own handlers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lagrpo.redaction import redact

logger = logging.getLogger("lagrpo")


class _Lines(logging.Handler):
    """Hands each record on as a line of text; None: to standard error."""

    show: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = redact(self.format(record))
        if self.show is None:
            print(f"lagrpo: {text}", file=sys.stderr, flush=True)
        else:
            self.show(text)


_lines = _Lines()


def print_records() -> None:
    """From now on, print every record from INFO upwards to standard error, as a line."""
    logger.addHandler(_lines)
    logger.setLevel(logging.INFO)


@contextmanager
def shown_by(show: Callable[[str], None] | None, least: int = logging.INFO) -> Iterator[None]:
    """Inside, `show` gets every record from the level `least` upwards as a line instead of standard error; without
    `show`, standard error gets it if the command line prints records."""
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
