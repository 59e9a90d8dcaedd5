"""A finished batch, which the loop yields: records of its completions, and seconds by phase."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

import torch
from torch import Tensor

from lagrpo.distributed.ranks import Ranks
from lagrpo.rollout.schedule import LoopState
from lagrpo.training.batch import Batch, MicroBatch
from lagrpo.training.tensors import split, to_ints
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

    Seconds of a phase within another one count for the inner phase alone. Seconds of a phase
    between two batches, as when a checkpoint waits for tokens, count for the next batch.
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
        inner_seconds = sum(self._seconds.values()) - before
        self._seconds[phase] += perf_counter() - started - inner_seconds

    def stop(self, generated: int) -> Times:
        """Ends a batch. `generated` tokens were sampled meanwhile."""
        times = Times(self._seconds, perf_counter() - self._started, generated)
        self._seconds = defaultdict(float)
        return times


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """A scored completion after the updates: π_k at its sampled tokens, [t]."""

    old_logp: Tensor
    """log π_k, float32, nats"""
    entropy: Tensor | None
    """entropy of the distribution that each token came from, float32, nats; None for completions
    that updates leave out"""
    log_ratio: Tensor
    """log π_k - log α, float64, nats; NaN where log α is unknown"""
    ref_logp: Tensor | None = None
    """log π_ref, float32, nats; None if the update does not read it"""


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a batch, by the index of the completion in C, and their sums.

    `log_ratio_C` is ln ρ of each completion, nats, and `kl_C` its estimate of KL(α‖π_k), both
    float64 [C]. The estimate is Σ_t (ρ_t - 1 - ln ρ_t) over the tokens; its variance grows only
    linearly with the length. NaN if log π_k or log α is unknown.
    """

    by_completion: Mapping[int, CompletionRecord]
    log_ratio_C: Tensor
    kl_C: Tensor

    @staticmethod
    def build(
        batch: Batch, logprobs: Mapping[int, tuple[Tensor, Tensor | None, Tensor | None]]
    ) -> Records:
        """Returns the records of the completions with these log π_k, entropy and log π_ref."""
        by_completion: dict[int, CompletionRecord] = {}
        log_ratio_C, kl_C = torch.full((2, len(batch.member_C)), math.nan, dtype=torch.float64)
        for c, (old_logp_T, entropy_T, ref_logp_T) in logprobs.items():
            completion = batch.completion(c)
            rollout_logp_T = completion.rollout_logp[completion.sampled]
            log_ratio_T = (old_logp_T - rollout_logp_T).double()
            by_completion[c] = CompletionRecord(old_logp_T, entropy_T, log_ratio_T, ref_logp_T)
            log_ratio_C[c] = log_ratio_T.sum()
            kl_C[c] = (torch.expm1(log_ratio_T) - log_ratio_T).sum()
        return Records(by_completion, log_ratio_C, kl_C)

    def mean_kl(self) -> float | None:
        """Returns the mean KL(α‖π_k), nats per completion; None if no log α is known.

        The schedule `budget` decides by it.
        """
        # Completions whose log α is unknown are NaN.
        mean = self.kl_C.nanmean().item()
        return None if math.isnan(mean) else mean


def record_completions(
    batch: Batch, rows: Sequence[MicroBatch], ranks: Ranks | None = None
) -> Records:
    """Returns the records of the completions in the rows of all ranks. Collective."""
    logprobs: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
    for row in rows:
        assert row.old_logp_T is not None, "the row has no log π_k yet"
        # The tokens of a row lie completion after completion, in the order of its members.
        lengths = to_ints(row.completion_T.bincount(minlength=len(row.members)))
        old_logps = split(row.old_logp_T.float().cpu(), lengths)
        unknown: Sequence[Tensor | None] = [None] * len(lengths)
        entropies = unknown
        if row.entropy_T is not None:
            entropies = split(row.entropy_T.float().cpu(), lengths)
        ref_logps = unknown
        if row.ref_logp_T is not None:
            ref_logps = split(row.ref_logp_T.float().cpu(), lengths)
        values = zip(old_logps, entropies, ref_logps, strict=True)
        logprobs |= dict(zip(row.members, values, strict=True))
    return Records.build(batch, dict((ranks or Ranks()).join(list(logprobs.items()))))


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
    records: Records
    times: Times
    state: LoopState
