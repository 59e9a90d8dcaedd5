"""The record of a finished batch, which the loop yields, and the clock that times its phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from lagrpo.rollout.schedule import LoopState
from lagrpo.training.batch import Batch, MicroBatch
from lagrpo.types import SyncReason

LOGGED_SUM = ":sum"
LOGGED_COUNT = ":count"
"""Ends of the names of what an update returns of a metric that the loss logs with `x.log`."""


class Phase(StrEnum):
    """A part of a batch's time. metrics.py names the parts in metrics.jsonl."""

    SYNC = "sync"
    """the weight sync"""
    SAMPLING = "sampling"
    """waiting for the sampler"""
    SCORING = "scoring"
    """waiting for rewards"""
    LOGPROBS = "log-probs"
    """log-probs for metrics alone"""
    LEARNING = "learning"
    """the updates"""


def ignore_activity(activity: str) -> None:
    """Ignores what the loop is doing: for callers without a display."""


class Clock:
    """Seconds of a batch, by phase and in total.

    `announce` tells the display what is being done now. The total includes `earlier_seconds`, which
    passed before the clock was made: waiting for tokens that were prefetched.
    """

    def __init__(
        self, announce: Callable[[str], None] = ignore_activity, earlier_seconds: float = 0.0
    ) -> None:
        self.announce = announce
        self.seconds: defaultdict[Phase, float] = defaultdict(float)
        self.generated = 0  # tokens that were sampled meanwhile, of this batch and of later ones
        self._started = time.perf_counter() - earlier_seconds

    @contextmanager
    def measure(self, phase: Phase) -> Generator[None]:
        """Adds the time that the body takes to a phase, unless the body raises."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    @property
    def total(self) -> float:
        """Seconds from the start of the batch until now."""
        return time.perf_counter() - self._started


@dataclass(frozen=True, slots=True)
class Step:
    """A finished batch, and the loop state after it."""

    stage: int
    b: int
    version: int  # of π_k, the policy before the updates on this batch
    reason: SyncReason  # why weights were synced just before this batch
    sampling: Mapping[str, float]  # metrics of the sampler since the batch before
    batch: Batch
    rows: Sequence[MicroBatch]  # this rank's micro-batches of the objective
    updates: Sequence[dict[str, float]]  # metrics of each of the i updates
    logp_k: Mapping[int, Tensor]
    """log π_k of the sampled tokens of each scored completion, float32 [t], by its index in C"""
    entropy: Mapping[int, Tensor]
    """entropy of the distribution that each of these tokens came from, nats, float32 [t]; only for
    completions in the objective"""
    clock: Clock
    state: LoopState
