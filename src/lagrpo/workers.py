"""How other processes are started: by spawning, because a process with torch's threads must not be forked; with SIGINT
blocked, so that Ctrl-C is the parent's alone; without the parent's main module where that is not needed. And how they
end: with their parent, and when they have computed for too long."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from typing import Any

from lagrpo.interrupts import whole


class Process(SpawnProcess):
    """A spawned process that Ctrl-C does not reach. It is started or not: a signal to the parent waits until the new
    process has read what it is to do, and is known to the parent."""

    def start(self) -> None:
        with whole():
            super().start()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name for what starts a process
        with _sigint_blocked():
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class ProcessWithoutMain(Process):
    """A spawned process imports the parent's main module again. Unless something is defined there that would only cost:
    torch and transformers in every process, and a second training run where a script has no main guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return Process._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


def die_with_parent() -> None:
    """End this process when its parent has ended without saying so, whatever it is doing. For a thread of its own."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def limit_cpu_time(seconds: float) -> None:
    """Have the kernel end this process once all its threads have computed for that many seconds from now. Its parent
    ends it at its deadline; this is for a parent that was killed while this process hangs in C code, which keeps
    threads from running."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """A new process inherits the signal mask of the thread that starts it. Ignoring SIGINT in the process itself would
    leave the tenth of a second until it gets there."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
