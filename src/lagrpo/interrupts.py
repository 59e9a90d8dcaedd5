"""Ctrl-C, SIGTERM, and the signals by which schedulers warn before they end a job.

Inside `interruptible()` a signal raises Interrupted in the main thread. Inside `deferring()` the first signal only sets
a flag, which a run reads between batches and between decoding steps; the second one raises EndedAtOnce.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that says which signal it was."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signal = signal.Signals(signum)

    def __str__(self) -> str:
        return self.signal.name


class EndedAtOnce(Interrupted):
    """A second signal: it cuts whatever is being done, also an update."""


WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's `--signal=USR1@120` and similar: without a handler they end the process at once."""

_deferring = False
_asked: int | None = None  # the first signal inside `deferring`


def _on_signal(signum: int, frame: Any) -> None:
    global _asked
    if _asked is not None:
        raise EndedAtOnce(signum)
    if not _deferring:
        raise Interrupted(signum)
    _asked = signum


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGINT, SIGTERM and WARNINGS inside, in the main thread. An ignored signal, such as SIGINT in a script's
    background jobs, stays ignored; a program's own handler of a warning stays, too."""
    before = dict[int, Any]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, _on_signal)
            for number in WARNINGS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    before[number] = signal.signal(number, _on_signal)
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


def raise_if_asked() -> None:
    """Raise Interrupted if a signal has asked this process to stop."""
    if _asked is not None:
        raise Interrupted(_asked)


def find_interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption behind an error: libraries that import lazily raise another error for it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
