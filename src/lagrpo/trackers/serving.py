"""The process of one tracker: it opens the tracker, follows the run's files, and closes it when it is told to.

Whatever a package does (raise, hang, print, start threads, change signals), it does to this process alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from io import TextIOBase
from multiprocessing.connection import Connection
from typing import Any, TextIO

from lagrpo.errors import one_line
from lagrpo.redaction import redact
from lagrpo.trackers.following import Follower, Point
from lagrpo.trackers.standing import Standing
from lagrpo.trackers.tracker import About, Status, Tracker

PERIOD = 0.5  # seconds between two looks at the files
PAUSES = (1.0, 5.0, 15.0, 60.0)  # seconds before a point is tried again
NICE = 5  # the run has precedence
LONGEST_LOG = 2**20  # bytes of what a package may print


def serve(connection: Connection, name: str, tracker: str, about: About, completions: int) -> None:
    """Run in a process of its own. `tracker`: the "module:class" to use. Says over the connection, in JSON,
    what happens: opened, where the run is; batch, how far the tracker is; warning; lost, how many points it would not
    take; failed, why it goes on no more; closed."""
    os.nice(NICE)
    sys.stdout = sys.stderr = Log(_open_log(about, name))  # to the end of the process: packages print there, too
    session = Session(connection)
    try:
        module, _, kind = tracker.partition(":")
        session.run(getattr(importlib.import_module(module), kind)(), name, about, completions)
    except EOFError:  # the run is gone
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a package can raise anything
        with suppress(OSError):
            session.say(failed=f"{type(error).__name__}: {error}")


class Session:
    """What the process does between its start and its end, and how it says so."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lost, self.takes_points = 0, True
        self.status: Status | None = None  # of the run, once that is over

    def say(self, **what: Any) -> None:
        said = {key: one_line(redact(text)) if isinstance(text, str) else text for key, text in what.items()}
        self.connection.send_bytes(json.dumps(said).encode())

    def run(self, tracker: Tracker, name: str, about: About, completions: int) -> None:
        standing = Standing.read(about.run, name)
        standing.opened(tracker.open(about, standing.id))
        self.say(opened=tracker.place(), batch=standing.batch)
        follower = Follower(about.run, tracker, standing, completions)
        while True:
            last = self.status is not None
            for point in follower.missing():
                self.deliver(point)
                self.say(batch=standing.batch)
            if last:
                break
            self.rest(PERIOD)
        tracker.close(self.status or "failed")
        self.say(closed=True)

    def rest(self, seconds: float) -> bool:
        """Wait, unless the run is over; whether it is."""
        if self.status is None and self.connection.poll(seconds):
            self.status = json.loads(self.connection.recv_bytes())["status"]
        return self.status is not None

    def deliver(self, point: Point) -> None:
        """Send a point, more than once if need be. After one that was lost the others are tried once, until one
        arrives."""
        point.begin()
        for pause in (*(PAUSES if self.takes_points else ()), None):
            try:
                point.send()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a package can raise anything
                self.say(warning=f"{type(error).__name__}: {error}")
                if pause is None or self.rest(pause):
                    break
            else:
                self.takes_points = True
                return
        self.lost, self.takes_points = self.lost + 1, False
        self.say(lost=self.lost)


def _open_log(about: About, name: str) -> TextIO:
    folder = about.run / "trackers"
    folder.mkdir(exist_ok=True)
    return (folder / f"{name}.log").open("a", encoding="utf-8", errors="replace")


class Log(TextIOBase):
    """What a package prints, in whole lines without secrets, up to a limit."""

    encoding = "utf-8"

    def __init__(self, file: TextIO) -> None:
        self._file, self._line, self._left = file, "", LONGEST_LOG

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return sys.__stderr__.fileno() if sys.__stderr__ else 2

    def write(self, text: str) -> int:
        lines, newline, self._line = (self._line + text).rpartition("\n")
        whole = redact(lines) + newline
        if self._left > 0:
            self._file.write(whole)
            self._file.flush()
        self._left -= len(whole)
        return len(text)
