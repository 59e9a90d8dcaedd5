"""From what the system says to a number of threads.

Every thread of a team waits for the slowest one. Where another program takes one of n cores, that is a thread which has
a core half of the time, and n - 1 threads with a core each are faster. So:

- fewer, when threads wait for cores in two windows in a row. With h other programs and n threads on n cores, each with
  the same share, our threads wait for w = n h / (n + h) cores; from that, h;
- more, when the CPUs have room for one more in two windows in a row, after a pause. A thread that has to go again
  doubles the pause before the next one.

Nothing here reads a clock or sets a number: it is a function of the windows."""

from __future__ import annotations

from lagrpo.threads.readings import Window

CROWDED = 0.25  # cores that the team waits for, from which on one is lacking
ROOM = 0.75  # of a core that must be free for one more thread
IN_A_ROW = 2  # windows that must say the same
PAUSE = 5.0  # seconds from a change to the next thread that is added
LONGEST_PAUSE = 160.0
TRIAL = 10.0  # seconds within which a thread that is added shows whether it has a core


class Adaptation:
    """How many threads compute, of at most `most`."""

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self._crowded = self._roomy = 0  # windows in a row
        self._since = 0.0  # seconds since the last change
        self._pause = PAUSE
        self._added = False  # whether the last change was a thread more

    def look(self, window: Window) -> int:
        """The number of threads after one more window."""
        self._since += window.seconds
        lacking, room = self._lacking(window), self._room(window)
        self._crowded = self._crowded + 1 if lacking else 0
        self._roomy = self._roomy + 1 if room else 0
        if self._crowded == IN_A_ROW:
            self._remove(lacking)
        elif self._roomy >= IN_A_ROW and self._since >= self._pause:
            self._add(room)
        return self.threads

    def _lacking(self, window: Window) -> int:
        """Cores that others have."""
        cores = window.waited / window.seconds
        if self.threads == 1 or cores < CROWDED:
            return 0
        if cores >= self.threads:
            return self.threads - 1
        others = self.threads * cores / (self.threads - cores)
        return max(1, min(self.threads - 1, round(others)))

    def _room(self, window: Window) -> int:
        """Threads that would find a core of their own; where the system does not say, one may be tried."""
        if self.threads == self.most:
            return 0
        if window.free is None:
            return 1
        cores = (window.used + window.free) / window.seconds - self.threads
        return min(self.most - self.threads, int(cores + 1 - ROOM))

    def _remove(self, count: int) -> None:
        failed = self._added and self._since < TRIAL
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if failed else PAUSE
        self._change(-count)

    def _add(self, count: int) -> None:
        self._change(count)

    def _change(self, count: int) -> None:
        self.threads += count
        self._added = count > 0
        self._crowded = self._roomy = 0
        self._since = 0.0
