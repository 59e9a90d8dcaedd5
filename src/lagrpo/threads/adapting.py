"""Decides how many threads compute, from what the system reports.

Every thread of a team waits for the slowest one. Where another program takes one of n cores, one thread has a core only
half of the time, and n - 1 threads with a core each are faster. So the number

- falls when threads wait for cores in two windows in a row. With h other programs and n threads on n cores, all with
  the same share, our threads wait for w = n h / (n + h) cores, which gives h;
- rises when the CPUs have room for one more thread in two windows in a row, after a pause. A thread that has to go
  again doubles the pause before the next one.

This is a function of the windows: nothing here reads a clock or sets the number."""

from __future__ import annotations

from lagrpo.threads.readings import Window

CROWDED = 0.25  # cores that the team waits for, from which a core is lacking
ROOM = 0.75  # of a core that must be free for one more thread
IN_A_ROW = 2  # windows that must agree
PAUSE = 5.0  # seconds from a change to the next thread that is added
LONGEST_PAUSE = 160.0
TRIAL = 10.0  # seconds in which an added thread shows whether it has a core


class Adaptation:
    """Decides how many threads compute, of at most `most`."""

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
            self._remove(lacking)
        elif self._roomy >= IN_A_ROW and self._since >= self._pause:
            self._add(room)
        return self.threads

    def _count_lacking(self, window: Window) -> int:
        """Cores that other programs use."""
        cores = window.waited / window.seconds
        if self.threads == 1 or cores < CROWDED:
            return 0
        if cores >= self.threads:
            return self.threads - 1
        others = self.threads * cores / (self.threads - cores)
        return max(1, min(self.threads - 1, round(others)))

    def _count_room(self, window: Window) -> int:
        """Threads that would find a core of their own; one to try where the system does not report free cores."""
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
