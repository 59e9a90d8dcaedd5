"""The schedule: when the sampler gets new weights, and which batches it may generate with them.

Batches are counted through all stages: k = 1 .. M inside a stage, b = (stage - 1)·M + k over the
run.

`every(v)`      Algorithm 1, lines 8-9: sync π before sampling batch k when k mod v = 0. α of the
                first batches is the initial policy. The lag is a sawtooth, 0 .. v-1 batches
                (0 .. v-2 in the first cycle).
`lagged(v)`     α = π_{k-v} as the paper's text has it: a constant lag of v batches (less at the
                start), a pipeline that generates v batches ahead. `lagged(0)` and `every(1)` are
                on-policy.
`continuous(v)` sync before every batch, and submit the prompts of v batches ahead, as `lagged(v)`.
                Completions in flight at a sync continue with the new weights, so their tokens have
                several versions, and the lag of a token is at most v batches.
`budget(δ, v)`  sync when the estimated KL(α‖π_k) of a completion (nats) passed δ in the batch
                before, and at the latest after v batches. By Pinsker TV(α, π_k) <= sqrt(δ / 2), up
                to the estimate's error and the updates that the estimate is old.

>>> [every(3).due(k) for k in range(1, 7)]
[False, False, True, False, False, True]
>>> lags(every(4), total=9, M=9, i=1), lags(lagged(2), total=5, M=5, i=3)
([0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 3, 6, 6, 6])

With every(2) and one update per batch, batch 3 learns at version 2, and version 1 sampled it: its
weights were synced before batch 2.

>>> lags(every(2), total=5, M=5, i=1)
[0, 0, 1, 0, 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from lagrpo.types import SyncReason

Kind = Literal["every", "lagged", "continuous", "budget"]
AHEAD: tuple[Kind, ...] = ("lagged", "continuous")
"""Schedules that sync weights before every batch, and submit v batches ahead."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """The place of Algorithm 1 between two batches.

    With the weights of these versions and the optimizer, all later batches follow from it.

    - `batch`: the number of finished batches, over all stages
    - `alpha`: the version of the sampler's weights; -1 before the first sync
    - `pi_ref`: the version of the reference
    - `since_sync`: batches since the last sync
    - `kl_since_sync`: the estimate of KL(α‖π_k) since the last sync, nats per completion
    - `prefetched`: the versions of α that sample batches `batch` + 1, `batch` + 2, …
    - `sync`: metrics of the last weight sync and its check
    """

    batch: int = 0
    alpha: int = -1
    pi_ref: int = 0
    since_sync: int = 0
    kl_since_sync: float = 0.0
    prefetched: tuple[int, ...] = ()
    sync: Mapping[str, float] = field(default_factory=dict)

    @property
    def prefetched_batches(self) -> range:
        """The batches that were prefetched."""
        first = self.batch + 1
        return range(first, first + len(self.prefetched))

    def after_sync(self, version: int, sync: Mapping[str, float]) -> LoopState:
        """Returns the state after α <- π_version."""
        return replace(self, alpha=version, since_sync=0, kl_since_sync=0.0, sync=sync)

    def after_request(self, batches: range) -> LoopState:
        """Returns the state after these batches were submitted to α."""
        return replace(self, prefetched=(*self.prefetched, *[self.alpha] * len(batches)))

    def after_stage(self, version: int) -> LoopState:
        """Returns the state after π_ref <- π_version."""
        return replace(self, pi_ref=version)

    def after_batch(self, kl: float | None) -> LoopState:
        """Returns the state after the next batch. `kl`: the new estimate; None to keep the old."""
        return replace(
            self,
            batch=self.batch + 1,
            since_sync=self.since_sync + 1,
            prefetched=self.prefetched[1:],
            kl_since_sync=self.kl_since_sync if kl is None else kl,
        )


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """A decision at the start of batch `batch`.

    - `reason`: why the sampler gets π, or NOT_DUE
    - `to_generate`: the batches that are then submitted. `batch` is among them, or an earlier
      decision submitted it.
    """

    batch: int
    reason: SyncReason
    to_generate: range


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of weight syncs: `v` is in batches, `delta` in nats, for budget alone."""

    kind: Kind
    v: int
    delta: float | None = None

    def due(self, k: int) -> bool:
        """True if weights are synced before batch k = 1 .. M of a stage, unless by a budget.

        This is line 8 of Algorithm 1.
        """
        return self.kind in AHEAD or k % self.v == 0

    def next(self, state: LoopState, total: int, M: int, *, prefetch: bool = True) -> SyncDecision:
        """Decides on the batch after `state`, of `total` batches in stages of M.

        With `prefetch`, all batches up to the next sync are submitted as soon as their α is there;
        without it `every(v)` submits them one by one. The samples are the same.
        """
        batch = state.batch + 1
        last_submitted = state.prefetched_batches.stop - 1
        # If all that may be submitted was submitted before, the range is empty.
        last_to_submit = max(
            self._last_to_submit(batch, total, M, prefetch=prefetch), last_submitted
        )
        to_generate = range(last_submitted + 1, last_to_submit + 1)
        return SyncDecision(batch, self._reason_to_sync(state, M), to_generate)

    def _last_to_submit(self, batch: int, total: int, M: int, *, prefetch: bool) -> int:
        """Returns the last batch that may be generated with the weights of batch `batch`."""
        if self.kind in AHEAD:
            # The weights before batch b sample batch b + v: a lag of v batches. The first decision
            # also submits batches 1 .. v, for which there are no older weights.
            return min(batch + self.v, total)
        last = batch
        if self.kind == "every" and prefetch:
            # Batch `last` + 1 is number last % M + 1 of its stage.
            while last < total and not self.due(last % M + 1):
                last += 1
        return last

    def _reason_to_sync(self, state: LoopState, M: int) -> SyncReason:
        """Returns why weights are synced before the batch after `state`."""
        if self.kind == "budget":
            budget = self.delta or 0.0
            if state.since_sync > 0 and state.kl_since_sync > budget:
                return SyncReason.BUDGET
            is_late = state.since_sync >= self.v
            return SyncReason.CAP if is_late else SyncReason.NOT_DUE
        k = state.batch % M + 1
        return SyncReason.SCHEDULE if self.due(k) else SyncReason.NOT_DUE


every = partial(Schedule, "every")
lagged = partial(Schedule, "lagged")
continuous = partial(Schedule, "continuous")


def lags(schedule: Schedule, total: int, M: int, i: int) -> list[int]:
    """Returns the lag of each batch of a run, in optimizer updates, if a batch makes i updates.

    For budget it is the lag if nothing is spent before the cap, for continuous the lag of the
    oldest possible token.
    """
    state = LoopState(alpha=0)
    lag_of_batch: list[int] = []
    for version in range(0, total * i, i):
        decision = schedule.next(state, total, M, prefetch=False)
        if decision.reason:
            state = state.after_sync(version, {})
        state = state.after_request(decision.to_generate)
        lag_of_batch.append(version - state.prefetched[0])
        state = state.after_batch(None)
    return lag_of_batch
