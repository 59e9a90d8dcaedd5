"""Ctrl-C and SIGTERM that never cut an update in two.

Inside `interruptible()` both raise KeyboardInterrupt in the main thread, except within `whole()`, where the
interruption waits for the end of the block. A run that is stopped so leaves a policy of a definite version.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_depth = 0
_pending = False


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _pending
    if _depth:
        _pending = True
    else:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Take over SIGINT and SIGTERM for the time of the block (in the main thread; elsewhere do nothing)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def whole() -> Iterator[None]:
    """A block that is done entirely or not at all as far as interruptions go."""
    global _depth, _pending
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _pending and not _depth:
            _pending = False
            raise KeyboardInterrupt
