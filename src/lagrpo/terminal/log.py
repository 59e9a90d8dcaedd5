"""What the logger "lagrpo" says, on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Terminal(logging.Handler):
    """Prints, so that a display that has taken over stdout gets the line."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"lagrpo: {self.format(record)}", flush=True)


@contextmanager
def show_log(show: bool = True) -> Iterator[None]:
    """Inside, messages of level INFO and above are printed; with `show` False nothing changes."""
    log, handler = logging.getLogger("lagrpo"), _Terminal()
    level = log.level
    if show:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
