"""When the sampler gets new weights, and which batches it may generate with them.

Batches are counted through all stages: k = 1 .. M inside a stage, b = (stage - 1)·M + k over the run.

`every(v)`      Algorithm 1, lines 8-9: sync π before sampling batch k when k mod v = 0. α of the first batches is
                the initial policy. The lag is a sawtooth, 0 .. v-1 batches (0 .. v-2 in the first cycle).
`lagged(v)`     α = π_{k-v} as the paper's text has it: a constant lag of v batches (less at the start), a pipeline that
                generates v batches ahead. `lagged(0)` and `every(1)` are on-policy.
`budget(δ, v)`  sync when the estimated KL(α‖π_k) of a completion (nats) passed δ in the batch before,
                and at the latest after v batches. By Pinsker TV(α, π_k) <= sqrt(δ / 2), up to the estimate's error and
                the updates that it is old.

>>> [every(3).due(k) for k in range(1, 7)]
[False, False, True, False, False, True]
>>> lags(every(4), total=9, M=9, i=1), lags(lagged(2), total=5, M=5, i=3)
([0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 3, 6, 6, 6])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

Kind = Literal["every", "lagged", "budget"]
Reason = Literal["", "start", "schedule", "budget", "cap"]


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where Algorithm 1 stands between two batches. With the weights of these versions and the optimizer, all later
    batches follow from it."""

    batch: int = 0  # batches that are finished, over all stages
    alpha: int = -1  # version of the sampler's weights; -1 before the first sync
    pi_ref: int = 0  # version of the reference
    since_sync: int = 0  # batches since the last sync
    spent: float = 0.0  # the estimate of KL(α‖π_k) since the last sync, nats per completion
    prefetched: tuple[int, ...] = ()  # the versions of α that sample batches `batch` + 1, + 2, …
    sync: Mapping[str, float] = field(
        default_factory=dict
    )  # metrics of the last weight sync and its check

    @property
    def asked_ahead(self) -> range:  # the batches that were prefetched
        return range(self.batch + 1, self.batch + 1 + len(self.prefetched))

    def after_sync(self, version: int, sync: Mapping[str, float]) -> LoopState:  # α <- π_version
        return replace(self, alpha=version, since_sync=0, spent=0.0, sync=sync)

    def after_request(self, batches: range) -> LoopState:  # these batches were submitted to α
        return replace(self, prefetched=(*self.prefetched, *[self.alpha] * len(batches)))

    def after_stage(self, version: int) -> LoopState:  # π_ref <- π_version
        return replace(self, pi_ref=version)

    def after_batch(self, spent: float | None) -> LoopState:
        """The next batch is finished; `spent` None if it does not tell."""
        later = replace(
            self,
            batch=self.batch + 1,
            since_sync=self.since_sync + 1,
            prefetched=self.prefetched[1:],
        )
        return later if spent is None else replace(later, spent=spent)


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """What happens at the start of batch `batch`: why the sampler gets π ("" if it does not), and the batches that are
    then submitted. The batch itself is among them, or an earlier decision submitted it."""

    batch: int
    reason: Reason
    to_generate: range


@dataclass(frozen=True, slots=True)
class Schedule:
    """`kind` every, lagged or budget; `v` in batches; `delta` in nats, for budget alone."""

    kind: Kind
    v: int
    delta: float | None = None

    def due(self, k: int) -> bool:
        """Whether `every` or `lagged` sync weights before batch k = 1 .. M of a stage (Algorithm 1, line 8)."""
        return self.kind == "lagged" or k % self.v == 0

    def next(self, state: LoopState, total: int, M: int, prefetch: bool = True) -> SyncDecision:
        """What happens at the start of the batch after `state`, of `total` in stages of M. `prefetch` submits all
        batches up to the next sync as soon as their α is there; without it `every(v)` submits them one by one. The
        samples are the same."""
        b = state.batch + 1
        submitted, last = state.asked_ahead.stop - 1, b
        if self.kind == "lagged":
            last = min(b + self.v, total)
        elif self.kind == "every":
            while prefetch and last < total and not self.due(last % M + 1):
                last += 1
        to_generate = range(submitted + 1, max(last, submitted) + 1)
        reason: Reason = "schedule" if self.kind != "budget" and self.due((b - 1) % M + 1) else ""
        if self.kind == "budget":
            spent = state.since_sync and state.spent > (self.delta or 0.0)
            reason = "budget" if spent else "cap" if state.since_sync >= self.v else ""
        return SyncDecision(b, reason, to_generate)


every = partial(Schedule, "every")
lagged = partial(Schedule, "lagged")


def lags(schedule: Schedule, total: int, M: int, i: int) -> list[int]:
    """The lag of each batch of a run, in optimizer updates, when every batch makes i updates (budget: if nothing is
    spent before its cap)."""
    state, found = LoopState(alpha=0), []
    for version in range(0, total * i, i):
        decision = schedule.next(state, total, M, prefetch=False)
        state = state.after_sync(version, {}) if decision.reason else state
        state = state.after_request(decision.to_generate)
        found.append(version - state.prefetched[0])
        state = state.after_batch(None)
    return found
