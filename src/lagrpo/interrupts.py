"""Ctrl-C, SIGTERM, a closed terminal, and the signals by which schedulers warn of a job's end.

Inside `interruptible()` a signal raises Interrupted in the main thread. Inside `deferring()` the
first signal is only noted, and a run asks for it between batches and between decoding steps
(`raise_if_asked`). Ctrl-C after that raises EndedAtOnce; other signals then change nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""A handler of a signal, as the module `signal` gives it back."""


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that says which signal it was."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signal = signal.Signals(signum)

    def __str__(self) -> str:
        return self.signal.name


class EndedAtOnce(Interrupted):
    """Ctrl-C after another signal: it interrupts whatever the process does, also an update."""


WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""SIGHUP, when a terminal is closed, and signals of schedulers: Slurm's `--signal=USR1@120`.

Without a handler they end the process at once. `nohup` lets a program ignore SIGHUP.
"""

REPEATED_WITHIN = 1.0
"""Seconds in which another SIGINT is the same Ctrl-C, which has reached the process twice."""

# Signals reach the process, not a caller, so its handler keeps its state in the module.
_is_deferring = False
_first_signal: int | None = None  # that has come inside `deferring`
_first_time = 0.0  # when it came, in seconds of time.monotonic()


def _on_signal(signum: int, _frame: FrameType | None) -> None:
    global _first_signal, _first_time
    if signum == signal.SIGHUP:
        drop_closed_terminal()
    if _first_signal is None:
        if not _is_deferring:
            raise Interrupted(signum)
        _first_signal = signum
        _first_time = time.monotonic()
    elif _asks_again(signum):
        raise EndedAtOnce(signum)


def drop_closed_terminal() -> None:
    """Discards what is printed if the terminal is closed: printing would raise OSError."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _asks_again(signum: int) -> bool:
    """True if a signal after the first is another request, by someone who cannot wait.

    One request may come as several signals. Slurm sends SIGTERM to every process of a job, torchrun
    then sends its ranks another one, and srun a third when the first node is done.
    """
    return signum == signal.SIGINT and time.monotonic() - _first_time > REPEATED_WITHIN


@contextmanager
def interruptible() -> Iterator[None]:
    """Handles SIGINT, SIGTERM and WARNINGS inside, in the main thread.

    An ignored signal, such as SIGINT in a script's background jobs, stays ignored; a program's own
    handler of a warning stays, too.
    """
    handlers_before: dict[signal.Signals, Handler] = {}
    try:
        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # None: a handler that was not set by Python, which could not be restored.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    handlers_before[number] = signal.signal(number, _on_signal)
            for number in WARNINGS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    handlers_before[number] = signal.signal(number, _on_signal)
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


@contextmanager
def deferring() -> Iterator[None]:
    """Keeps the first signal inside until `raise_if_asked`."""
    global _is_deferring, _first_signal
    _is_deferring = True
    _first_signal = None
    try:
        yield
    finally:
        _is_deferring = False
        _first_signal = None


def raise_if_asked() -> None:
    """Raises Interrupted if a signal has asked this process to stop."""
    if _first_signal is not None:
        raise Interrupted(_first_signal)


def is_from_signal(error: BaseException) -> bool:
    """True if a signal has raised the error, and not code such as a completion that is executed."""
    if isinstance(error, Interrupted):
        return True
    # Outside `interruptible`, Ctrl-C raises a plain KeyboardInterrupt.
    is_python_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and is_python_default


def find_interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Returns the interruption behind an error, if there is one.

    Libraries that import lazily raise another error for it.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
