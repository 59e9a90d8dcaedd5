"""The threads of this process: their number is set here, and adapted while it computes.

PyTorch's operations and lagrpo's kernels share one OpenMP, so one number holds for both. It may change between any two
calls: what our kernels compute does not depend on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from lagrpo.threads import cores, waiting
from lagrpo.threads.adapting import Adaptation
from lagrpo.threads.readings import Reading, between, read

LOOK = 0.5  # seconds from one reading to the next, at least
DECIDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # with which the user says how many

Say = Callable[[str], None]


class Team:
    """`threads` for good, or with `adapt` as many of them as the readings say that there are cores for. `number` puts a
    number into effect."""

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

    def look(self, say: Say) -> None:
        """Read and adapt; `say` hears of the first change in each direction."""
        before, self._last = self._last, self._read()
        if not self.adapts or before is None or self._last is None:
            return
        threads = self._adaptation.look(between(before, self._last))
        if threads == self.threads:
            return
        fewer, self.threads = threads < self.threads, threads
        self._fewest = min(self._fewest, threads)
        self._number(threads)
        if fewer not in self._told:
            self._told.add(fewer)
            why = "other programs keep cores busy" if fewer else "cores are free again"
            say(f"{why}: computing with {threads} of {self.most} threads (model.threads fixes the number)")

    def metrics(self) -> dict[str, float | None]:
        """Since the last call: the fewest threads, and the seconds for which threads were ready and had no core."""
        before, self._noted, fewest = self._noted, self._read(), self._fewest
        self._fewest = self.threads
        known = before is not None and self._noted is not None
        return {"threads": fewest, "seconds_waiting": between(before, self._noted).waited if known else None}  # type: ignore[arg-type]

    def describe(self) -> str:
        """How many, in words."""
        if not self.adapts or self.most == 1:
            return f"{self.most}"
        if self._last is None:
            return f"{self.most}, always: this system does not say when threads wait for a core"
        return f"{self.most}, fewer while other programs keep cores busy"


_team: Team | None = None
_before = 0  # threads that PyTorch had before ours
_due = 0.0  # when to read again


def _silent(line: str) -> None:
    pass


_say: Say = _silent


def start(asked: int | None, device: str = "cpu") -> None:
    """For this process and the calling thread: `asked` threads, or as many as there are cores for, which is then
    adapted. On a GPU nothing is adapted."""
    global _team, _before
    release()
    waiting.quiet_tokenizers()
    _before = torch.get_num_threads()
    threads = asked or default(_before)
    if threads != _before:
        torch.set_num_threads(threads)
    _team = Team(threads, adapt=asked is None and device == "cpu")


def default(threads: int) -> int:
    """PyTorch's own number, unless the user set it; at most what affinity and the container's quota allow."""
    if any(os.environ.get(name) for name in DECIDED):
        return threads
    return cores.most(threads, cores.quota(), cores.at_hand())


def look() -> None:
    """Reads every half second, and adapts. Called often, by the thread that computes: before each decoding step and
    each layer's attention, forward and backward."""
    global _due
    now = time.monotonic()
    if now >= _due and _team is not None:
        _due = now + LOOK
        _team.look(_say)


def tell(say: Say) -> None:
    """Who hears of changes."""
    global _say
    _say = say


def metrics() -> dict[str, float | None]:
    """Of the metrics: see `Team.metrics`."""
    return _team.metrics() if _team is not None else {"threads": torch.get_num_threads(), "seconds_waiting": None}


def describe() -> str:
    """How many threads compute, in words."""
    return _team.describe() if _team is not None else f"{torch.get_num_threads()}"


def release() -> None:
    """Give PyTorch back the number that it had, unless somebody else has set one since, and the tokenizers theirs;
    nobody hears of changes any more."""
    global _team, _say
    if _team is not None and torch.get_num_threads() == _team.threads != _before:
        torch.set_num_threads(_before)
    _team, _say = None, _silent
    waiting.wake_tokenizers()
