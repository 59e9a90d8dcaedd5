"""Where the time of a batch goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by phase, and in all since it was made. `tell` hears what is being done now; `generated` counts the
    sampled tokens that came from the sampler meanwhile, for this batch or a later one."""

    def __init__(self, tell: Callable[[str], None] = lambda phase: None) -> None:
        self.tell, self.generated = tell, 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started

    def add(self, phase: str, seconds: float) -> None:
        """Book seconds from before it was made, in all too."""
        self.seconds[phase] += seconds
        self._started -= seconds

    def move(self, source: str, to: str, seconds: float) -> None:
        """Book seconds that were measured inside one phase under another."""
        self.seconds[source] -= seconds
        self.seconds[to] += seconds

    @property
    def total(self) -> float:
        return time.perf_counter() - self._started
