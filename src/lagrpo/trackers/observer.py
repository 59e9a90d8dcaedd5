"""The trackers of a run, as the run has them: an observer (training/observers.py) that never waits before the end."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from lagrpo.terminal.text import count_of
from lagrpo.trackers import TRACKERS
from lagrpo.trackers.serving import serve
from lagrpo.trackers.tracker import About, Row, Status
from lagrpo.workers import ENDING, Process

logger = logging.getLogger("lagrpo")

CLOSING = 60.0  # seconds for all trackers to take what they lack, at the end of a run
SAID = 2.0  # seconds after which it is said that they are waited for
BEHIND, SILENT = 16, 60.0  # batches and seconds: a tracker that lacks so many and took none for so long is warned of
PERIOD = 0.5  # seconds between two looks at the time, at the end
_LARGEST = 1 << 16  # bytes of a message


class Link:
    """The process of one tracker, from this side."""

    def __init__(self, name: str, about: About, completions: int) -> None:
        self.name = name
        self.connection, theirs = multiprocessing.get_context("spawn").Pipe()
        arguments = (theirs, name, TRACKERS[name], about, completions)
        self.process = Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.over = False  # closed, failed or ended
        self.batch, self.since = 0, time.monotonic()  # what it has, and since when

    def read(self) -> Iterator[tuple[str, Any]]:
        """What it has said since the last call; ("ended", how) where it ended without a word."""
        try:
            while not self.over and self.connection.poll():
                for key, value in json.loads(self.connection.recv_bytes(_LARGEST)).items():
                    self.over |= key in ("closed", "failed")
                    if key == "batch":
                        self.batch, self.since = value, time.monotonic()
                    yield key, value
        except (EOFError, OSError):
            self.over = True
            self.process.join(ENDING)
            yield "ended", self.process.end or "does not answer"

    def tell_end(self, status: Status) -> None:
        try:
            self.connection.send_bytes(json.dumps({"status": status}).encode())
        except OSError:  # it has ended; `read` says so
            return

    def close(self) -> None:
        self.process.kill()
        self.process.join(ENDING)
        self.connection.close()


class Trackers:
    """An observer of a run. Its trackers follow the run's files; it hears what they say, and ends them. `completions`:
    how many of each batch they get."""

    def __init__(self, names: Sequence[str], completions: int) -> None:
        self.names, self.completions = names, completions
        self.links: list[Link] = []
        self._warn: Callable[[str], None] = logger.warning
        self._warned: set[tuple[str, str]] = set()
        self._lost: dict[str, int] = {}

    def begin(self, about: About, warn: Callable[[str], None]) -> None:
        """The run begins or goes on, and its files have what it made so far. `warn` is told what goes wrong until the
        run is over."""
        self._warn = warn
        for name in self.names:
            try:
                self.links.append(Link(name, about, self.completions))
            except OSError as error:
                self._warn_once(
                    name, "start", f"its process could not be started ({error}); the run goes on without it"
                )

    def start(self, settings: Row, environment: Row) -> None: ...
    def phase(self, name: str) -> None: ...
    def note(self, text: str) -> None: ...

    def batch(self, step: Any, metrics: Row, rollouts: Sequence[Row]) -> None:
        self._listen()
        for link in self.links:
            silent, behind = time.monotonic() - link.since, step.b - link.batch
            if not link.over and behind >= BEHIND and silent > SILENT:
                taken = f"it has taken nothing for {silent:.0f} s and lacks {behind} batches; the run does not wait"
                self._warn_once(link.name, "behind", taken)

    def evaluation(self, name: str, batch: int, summary: Row, records: Sequence[Row]) -> None:
        self._listen()

    def end(self, status: Status, detail: str) -> None:
        """Wait until every tracker has what it lacks, but no longer than CLOSING; then end their processes."""
        self._warn = logger.warning  # the run's files are closed
        begun = time.monotonic()
        try:
            for link in self.links:
                link.tell_end(status)
            self._listen()
            while (open_ := [link for link in self.links if not link.over]) and time.monotonic() - begun < CLOSING:
                if time.monotonic() - begun > SAID:
                    self._say_once(f"waiting for {', '.join(link.name for link in open_)}, at most {CLOSING:g} s")
                wait([link.connection for link in open_], PERIOD)
                self._listen()
            for link in open_:
                behind = f"it has the batches until {link.batch}; the others are in the run's files, and go there when"
                self._warn_once(link.name, "end", f"not done within {CLOSING:g} s: {behind} the run is resumed")
            for name, lost in self._lost.items():
                self._warn_once(name, "lost", f"it would not take {count_of(lost, 'point')}")
        finally:
            for link in self.links:
                link.close()
            self.links = []

    def _listen(self) -> None:
        for link in self.links:
            for key, value in link.read():
                self._hear(link.name, key, value)

    def _hear(self, name: str, key: str, value: Any) -> None:
        if key == "opened":
            logger.info("tracker %s: %s", name, value)
        elif key == "warning":
            self._warn_once(name, key, f"{value} (said once; it is tried again)")
        elif key == "failed":
            self._warn_once(name, key, f"{value}; the run goes on without it")
        elif key == "ended":
            self._warn_once(name, key, f"its process {value}; the run goes on without it")
        elif key == "lost":
            self._lost[name] = value

    def _warn_once(self, name: str, kind: str, text: str) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            self._warn(f"tracker {name}: {text}")

    def _say_once(self, text: str) -> None:
        if ("", text) not in self._warned:
            self._warned.add(("", text))
            logger.info("%s", text)
