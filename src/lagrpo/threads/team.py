"""Sets the number of this process's threads, and adapts it while the process computes, to what the system reports.

PyTorch's operations and lagrpo's kernels share one OpenMP, so one number holds for both. It may change between any two
calls: the results of our kernels do not depend on it.

Every thread of a team waits for the slowest one. Where another program takes one of n cores, one thread has a core only
half of the time, and n - 1 threads with a core each are faster. So the number

- falls when threads wait for cores in two windows in a row. With h other programs and n threads on n cores, all with
  the same share, our threads wait for w = n h / (n + h) cores, which gives h;
- rises when the CPUs have room for one more thread in two windows in a row, after a pause. A thread that has to go
  again doubles the pause before the next one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from lagrpo.ranks.rank import Rank
from lagrpo.threads import cores, waiting
from lagrpo.threads.readings import Reading, Window, compare, read

LOOK = 0.5  # seconds between readings, at least
CROWDED = 0.25  # cores that the team waits for, from which a core is lacking
ROOM = 0.75  # of a core that must be free for one more thread
IN_A_ROW = 2  # windows that must agree
PAUSE = 5.0  # seconds from a change to the next thread that is added
LONGEST_PAUSE = 160.0
TRIAL = 10.0  # seconds in which an added thread shows whether it has a core
DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which the user sets the number

logger = logging.getLogger("lagrpo")


class Adaptation:
    """Decides how many threads compute, of at most `most`: a function of the windows; it reads no clock."""

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self._crowded = self._roomy = 0  # windows in a row
        self._since = 0.0  # seconds since the last change
        self._pause = PAUSE
        self._added = False  # whether the last change was a thread more

    def look(self, window: Window) -> int:
        """Take in one more window, and return the number of threads."""
        self._since += window.seconds
        lacking, room = self._count_lacking(window), self._count_room(window)
        self._crowded = self._crowded + 1 if lacking else 0
        self._roomy = self._roomy + 1 if room else 0
        if self._crowded == IN_A_ROW:
            failed = self._added and self._since < TRIAL
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if failed else PAUSE
            self._change(-lacking)
        elif self._roomy >= IN_A_ROW and self._since >= self._pause:
            self._change(room)
        return self.threads

    def _count_lacking(self, window: Window) -> int:
        """Cores that other programs use."""
        cores = window.waited / window.seconds
        if self.threads == 1 or cores < CROWDED:
            return 0
        if cores >= self.threads:
            return self.threads - 1
        return max(1, min(self.threads - 1, round(self.threads * cores / (self.threads - cores))))

    def _count_room(self, window: Window) -> int:
        """Threads that would find a core of their own; one to try where the system does not report free cores."""
        if self.threads == self.most:
            return 0
        if window.free is None:
            return 1
        cores = (window.used + window.free) / window.seconds - self.threads
        return min(self.most - self.threads, int(cores + 1 - ROOM))

    def _change(self, count: int) -> None:
        self.threads += count
        self._added = count > 0
        self._crowded = self._roomy = 0
        self._since = 0.0


class Team:
    """`threads`, or with `adapt` as many of them as find a core, by the readings. `number` puts one into effect."""

    def __init__(
        self, threads: int, adapt: bool, reading: Callable[[], Reading | None] = read,
        number: Callable[[int], None] = torch.set_num_threads,
    ) -> None:  # fmt: skip
        self.most = self.threads = self._fewest = threads
        self.adapts, self._read, self._number = adapt, reading, number
        self._adaptation = Adaptation(threads)
        self._last = self._noted = reading()
        self._told: set[bool] = set()

    def look(self) -> None:
        """Read and adapt. The first change in each direction is logged."""
        before, self._last = self._last, self._read()
        if not self.adapts or before is None or self._last is None:
            return
        threads = self._adaptation.look(compare(before, self._last))
        if threads == self.threads:
            return
        fewer, self.threads = threads < self.threads, threads
        self._fewest = min(self._fewest, threads)
        self._number(threads)
        if fewer not in self._told:
            self._told.add(fewer)
            why = "other programs keep cores busy" if fewer else "cores are free again"
            known = "model.threads fixes the number" if fewer else "later changes: `threads` in metrics.jsonl"
            logger.info("%s: computing with %d of %d threads (%s)", why, threads, self.most, known)

    def metrics(self) -> dict[str, float | None]:
        """Metrics since the last call: the fewest threads, and the seconds that threads were ready and had no core."""
        before, self._noted, fewest = self._noted, self._read(), self._fewest
        self._fewest = self.threads
        known = before is not None and self._noted is not None
        return {"threads": fewest, "seconds_waiting": compare(before, self._noted).waited if known else None}  # type: ignore[arg-type]

    def describe(self) -> str:
        if not self.adapts or self.most == 1:
            return f"{self.most}"
        if self._last is None:
            return f"{self.most}, always: this system does not report when threads wait for a core"
        return f"{self.most}, fewer while other programs keep cores busy"


_team: Team | None = None
_before = 0  # threads that PyTorch had before ours
_due = 0.0  # when to read again


def start(asked: int | None, device: str = "cpu") -> None:
    """Compute with `asked` threads, in this process and the calling thread; without `asked`, with as many as there are
    cores for, adapted from then on. Nothing is adapted on a GPU."""
    global _team, _before
    release()
    waiting.quiet_tokenizers()
    _before = torch.get_num_threads()
    threads = asked or choose_threads(_before)
    if threads != _before:
        torch.set_num_threads(threads)
    _team = Team(threads, adapt=asked is None and device == "cpu")


def choose_threads(threads: int) -> int:
    """The number the user set, else PyTorch's own, but at most what affinity and the container's quota allow. The ranks
    of one host share it; the 1 that torchrun sets for each of them is no choice of the user's."""
    rank = Rank.find()
    sharing = rank.local_size if rank is not None else 1
    decided = {os.environ.get(name) for name in DECIDED} - {None, "", "1" if sharing > 1 else None}
    if decided:
        return threads
    most = cores.count_cores() if sharing > 1 else threads
    return max(1, cores.limit_threads(most, cores.read_quota(), cores.count_cores()) // sharing)


def look() -> None:
    """Read every half second, and adapt. Called before each decoding step and each layer's attention, both ways."""
    global _due
    now = time.monotonic()
    if now >= _due and _team is not None:
        _due = now + LOOK
        _team.look()


def metrics() -> dict[str, float | None]:
    return _team.metrics() if _team is not None else {"threads": torch.get_num_threads(), "seconds_waiting": None}


def most() -> int:
    """Threads that compute while no other program needs a core."""
    return _team.most if _team is not None else torch.get_num_threads()


def describe() -> str:
    return _team.describe() if _team is not None else f"{torch.get_num_threads()}"


def release() -> None:
    """Give PyTorch back the number that it had, unless other code set one since, and the tokenizers their threads."""
    global _team
    if _team is not None and torch.get_num_threads() == _team.threads != _before:
        torch.set_num_threads(_before)
    _team = None
    waiting.wake_tokenizers()
