"""The record of a finished batch, which the loop yields, and the clock that times its phases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

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


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a batch, by phase and in total, and the tokens that were sampled meanwhile."""

    seconds: Mapping[Phase, float]
    total: float
    generated: int = 0
    """tokens of this batch and of later ones"""


class Clock:
    """The clock of a run: seconds of the batch that is being made, by phase.

    Seconds of a phase within another one count for the inner phase alone. Seconds between two
    batches, such as waiting for tokens that an evaluation interrupts, count for the next batch.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[Phase, float] = defaultdict(float)
        self.start()

    def start(self) -> None:
        """Begins a batch."""
        self._started = perf_counter() - sum(self._seconds.values())

    @contextmanager
    def measure(self, phase: Phase) -> Generator[None]:
        """Adds the time that the body takes to a phase, unless the body raises."""
        started = perf_counter()
        before = sum(self._seconds.values())
        yield
        of_inner_phases = sum(self._seconds.values()) - before
        self._seconds[phase] += perf_counter() - started - of_inner_phases

    def stop(self, generated: int) -> Times:
        """Ends a batch, while which so many tokens were sampled."""
        times = Times(self._seconds, perf_counter() - self._started, generated)
        self._seconds = defaultdict(float)
        return times


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
    times: Times
    state: LoopState
