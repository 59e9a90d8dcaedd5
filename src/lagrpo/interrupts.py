"""Ctrl-C and SIGTERM.

Inside `interruptible()` a signal raises Interrupted in the main thread at once. Inside `deferring()` the first signal
only sets a flag, which a run reads between batches and between decoding steps; the second one raises.
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
        super().__init__(signum)
        self.signal = signal.Signals(signum)

    def __str__(self) -> str:
        return self.signal.name


class EndedAtOnce(Interrupted):
    """A second signal: whatever is being done, also an update, is cut."""


_deferring = False
_asked: signal.Signals | None = None  # the signal that asked a run to stop


def find_interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption behind an error: libraries that import lazily raise an error of their own for it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _asked
    if _asked is not None:
        raise EndedAtOnce(signum)
    if not _deferring:
        raise Interrupted(signum)
    _asked = signal.Signals(signum)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside; do nothing outside of the main thread. An ignored signal, such as SIGINT in a
    script's background jobs, stays ignored."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    before = {n: handler for n in numbers if (handler := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, _on_signal)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferring() -> Iterator[None]:
    """Keep the first signal until `raise_if_asked`."""
    global _deferring, _asked
    _deferring, _asked = True, None
    try:
        yield
    finally:
        _deferring, _asked = False, None


def asked_to_stop() -> signal.Signals | None:
    """The first signal that came inside `deferring()`."""
    return _asked


def raise_if_asked() -> None:
    """Raise Interrupted if a signal has asked this process to stop."""
    if _asked is not None:
        raise Interrupted(_asked)
