"""What a judge can change in its process that the next completion would suffer from."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

if sys.platform != "win32":
    import resource

    _LIMITS = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    _TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    _SIGNALS = [n for n in signal.valid_signals() if n < 32 and n not in (signal.SIGKILL, signal.SIGSTOP)]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The process as one completion finds it: directory, environment, signal handlers, limits, and the files that it
    cannot do without."""

    directory: str | None
    environment: dict[str, str]
    handlers: dict[int, Any]
    limits: dict[int, tuple[int, int]]
    files: list[tuple[int, int] | None]

    @staticmethod
    def read() -> Surroundings:
        directory, environment = _read_directory(), dict(os.environ)
        if sys.platform == "win32":
            return Surroundings(directory, environment, {}, {}, [])
        handlers = {int(number): signal.getsignal(number) for number in _SIGNALS}
        limits = {number: resource.getrlimit(number) for number in _LIMITS}
        parent = multiprocessing.parent_process()
        needed = [1, 2, *([parent.sentinel] if parent is not None else [])]
        return Surroundings(directory, environment, handlers, limits, [_read_file(number) for number in needed])

    def put_back(self) -> None:
        """Make the process as it was. Raises OSError or ValueError where that cannot be done: a needed file is closed,
        a hard limit lowered, the directory gone."""
        if sys.platform != "win32":
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
        now = Surroundings.read()
        if now.files != self.files:
            raise OSError("the judge closed files of its process")
        if now.directory != self.directory and self.directory is not None:
            os.chdir(self.directory)
        if now.environment != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        for number in (n for n, handler in self.handlers.items() if now.handlers[n] != handler and handler is not None):
            signal.signal(number, self.handlers[number])
        for number in (n for n, limit in self.limits.items() if now.limits[n] != limit):
            resource.setrlimit(number, self.limits[number])


def _read_directory() -> str | None:
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None


def _read_file(number: int) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.fstat(number)
        return found.st_dev, found.st_ino
    return None
