"""Sets the number of this process's threads, and adapts it while the process computes.

PyTorch's operations and lagrpo's kernels share one OpenMP, so one number holds for both. It may change between any two
calls: the results of our kernels do not depend on it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from lagrpo.threads import cores, waiting
from lagrpo.threads.adapting import Adaptation
from lagrpo.threads.readings import Reading, compare, read

LOOK = 0.5  # seconds between readings, at least
DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which the user sets the number

logger = logging.getLogger("lagrpo")


class Team:
    """The number of threads: always `threads`, or with `adapt` as many of them as find a core, by the readings.
    `number` puts a number into effect."""

    def __init__(
        self,
        threads: int,
        adapt: bool,
        reading: Callable[[], Reading | None] = read,
        number: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
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
            text = "%s: computing with %d of %d threads (model.threads fixes the number)"
            logger.info(text, why, threads, self.most)

    def metrics(self) -> dict[str, float | None]:
        """Metrics since the last call: the fewest threads, and the seconds that threads were ready and had no core."""
        before, self._noted, fewest = self._noted, self._read(), self._fewest
        self._fewest = self.threads
        known = before is not None and self._noted is not None
        return {"threads": fewest, "seconds_waiting": compare(before, self._noted).waited if known else None}  # type: ignore[arg-type]

    def describe(self) -> str:
        """The number of threads in words."""
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
    """The number the user set, else PyTorch's own, but at most what affinity and the container's quota allow."""
    if any(os.environ.get(name) for name in DECIDED):
        return threads
    return cores.limit_threads(threads, cores.read_quota(), cores.count_cores())


def look() -> None:
    """Read every half second, and adapt. The computing thread calls this often: before each decoding step and each
    layer's attention, forward and backward."""
    global _due
    now = time.monotonic()
    if now >= _due and _team is not None:
        _due = now + LOOK
        _team.look()


def metrics() -> dict[str, float | None]:
    """The metrics of `Team.metrics`."""
    return _team.metrics() if _team is not None else {"threads": torch.get_num_threads(), "seconds_waiting": None}


def describe() -> str:
    """The number of computing threads in words."""
    return _team.describe() if _team is not None else f"{torch.get_num_threads()}"


def release() -> None:
    """Give PyTorch back the number that it had, unless other code set one since, and the tokenizers their threads."""
    global _team
    if _team is not None and torch.get_num_threads() == _team.threads != _before:
        torch.set_num_threads(_before)
    _team = None
    waiting.wake_tokenizers()
