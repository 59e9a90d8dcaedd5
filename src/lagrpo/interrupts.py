"""Ctrl-C and SIGTERM that never cut an update in two.

Inside `interruptible()` both raise Interrupted in the main thread. Within `whole()` the interruption waits for the end
of the block, so a stopped run leaves a policy of a definite version.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that says which signal it was."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signal = signal.Signals(signum)


def find_interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption behind an error: libraries that load their parts when these are needed make an error of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


_depth = 0  # whole() blocks that the main thread is in
_pending: int | None = None  # the signal that waits for the end of the outermost block


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _pending
    if _depth:
        _pending = signum
    else:
        _pending = None
        raise Interrupted(signum)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def interruptible() -> Iterator[None]:
    """Take over SIGINT and SIGTERM for the time of the block; do nothing outside of the main thread. An ignored signal,
    such as SIGINT in a script's background jobs, stays ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM) if _in_main_thread() else ()
    before = {n: handler for n in numbers if (handler := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_waiting() -> bool:
    """Whether an interruption waits for the end of a `whole()` block."""
    return _pending is not None


@contextmanager
def whole() -> Iterator[None]:
    """Let no interruption cut the block in two: what arrives inside is raised at the end of the outermost such block.
    In other threads, which are never interrupted, this does nothing."""
    global _depth, _pending
    if not _in_main_thread():
        yield
        return
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth and _pending is not None:
            signum, _pending = _pending, None
            raise Interrupted(signum)


@contextmanager
def divisible() -> Iterator[None]:
    """Inside `whole()`: an interruption may cut this block, and what waits for the end of `whole()` is raised now."""
    global _depth, _pending
    if not _in_main_thread():
        yield
        return
    around, _depth = _depth, 0
    try:
        if _pending is not None:
            signum, _pending = _pending, None
            raise Interrupted(signum)
        yield
    finally:
        _depth = around
