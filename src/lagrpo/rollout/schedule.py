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
>>> [(due.batch, list(due.to_generate)) for due in every(3).plan(stages=1, batches=6) if due.reason or due.to_generate]
[(1, [1, 2]), (3, [3, 4, 5]), (6, [6])]
>>> largest_lag(every(10), stages=1, batches=100, i=1), largest_lag(lagged(2), stages=1, batches=9, i=3)
(9, 6)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

Kind = Literal["every", "lagged", "budget"]
Reason = Literal["", "start", "schedule", "budget", "cap"]


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where Algorithm 1 stands between two batches. With the weights of these versions and the optimizer it is all
    that the batches to come depend on."""

    batch: int = 0
    """batches that are finished, over all stages"""
    alpha: int = -1
    """version of the sampler's weights; -1 before the first sync"""
    pi_ref: int = 0
    """version of the reference"""
    since_sync: int = 0
    """batches since the last sync"""
    spent: float = 0.0
    """what budget has spent since the last sync: the estimate of KL(α‖π_k), nats per completion"""
    prefetched: tuple[int, ...] = ()
    """the versions of α that sample batches `batch` + 1, + 2, …, which were prefetched"""
    sync: Mapping[str, float] = field(default_factory=dict)
    """metrics of the last weight sync and its parity check"""

    @property
    def asked_ahead(self) -> range:
        """The batches that were prefetched."""
        return range(self.batch + 1, self.batch + 1 + len(self.prefetched))

    def after_sync(self, version: int, sync: Mapping[str, float]) -> LoopState:
        """α <- π_version."""
        return replace(self, alpha=version, since_sync=0, spent=0.0, sync=sync)

    def after_request(self, batches: range) -> LoopState:
        """α was asked for these batches."""
        return replace(self, prefetched=(*self.prefetched, *[self.alpha] * len(batches)))

    def after_stage(self, version: int) -> LoopState:
        """π_ref <- π_version."""
        return replace(self, pi_ref=version)

    def after_batch(self, spent: float | None) -> LoopState:
        """The next batch is finished; `spent` None where it does not tell."""
        later = replace(self, batch=self.batch + 1, since_sync=self.since_sync + 1, prefetched=self.prefetched[1:])
        return later if spent is None else replace(later, spent=spent)


@dataclass(frozen=True, slots=True)
class Due:
    """What happens at the start of batch `batch`: why the sampler gets π ("" when it does not), and the batches that it
    is then asked for. The batch itself is among them, or an earlier `Due` asked for it."""

    batch: int
    reason: Reason
    to_generate: range


@dataclass(frozen=True, slots=True)
class Schedule:
    """`kind` every, lagged or budget; `v` in batches; `delta` in nats, of budget alone. Raises ValueError on
    numbers that the kind does not allow."""

    kind: Kind
    v: int
    delta: float | None = None

    def __post_init__(self) -> None:
        least = 0 if self.kind == "lagged" else 1
        if self.v < least:
            raise ValueError(f"schedule {self.kind}(v) needs v of at least {least}, got {self.v}")
        if (self.kind == "budget") != (self.delta is not None):
            raise ValueError(
                f"delta is what schedule budget spends, and no other: {self.kind} with delta = {self.delta}"
            )
        if self.delta is not None and not self.delta >= 0:
            raise ValueError(f"schedule budget needs a delta of at least 0 nats, got {self.delta}")

    def __str__(self) -> str:
        return f"{self.kind}({self.v})" if self.delta is None else f"{self.kind}({self.delta:g}, {self.v})"

    def due(self, k: int) -> bool:
        """Whether `every` or `lagged` sync weights before batch k = 1 .. M of a stage (Algorithm 1, line 8)."""
        return self.kind == "lagged" or k % self.v == 0

    def next(self, state: LoopState, stages: int, batches: int, prefetch: bool = True) -> Due:
        """What happens at the start of the batch after `state`. `prefetch` asks for all batches up to the next sync as
        soon as their α is there; without it `every(v)` asks for them one by one. The samples are the same."""
        total, b = stages * batches, state.batch + 1
        asked, last = state.asked_ahead.stop - 1, b
        if self.kind == "lagged":
            last = min(b + self.v, total)
        elif self.kind == "every":
            while prefetch and last < total and not self.due(last % batches + 1):
                last += 1
        return Due(b, self._reason(state, (b - 1) % batches + 1), range(asked + 1, max(last, asked) + 1))

    def _reason(self, state: LoopState, k: int) -> Reason:
        if self.kind in ("every", "lagged"):
            return "schedule" if self.due(k) else ""
        if state.since_sync and state.spent > (self.delta or 0.0):
            return "budget"
        return "cap" if state.since_sync >= self.v else ""

    def plan(
        self, stages: int, batches: int, prefetch: bool = True, latest: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Due]:
        """One `Due` for every batch of a run, each when it is asked for. `latest` gives what budget has spent
        (`LoopState.spent`)."""
        state = LoopState()
        for _ in range(stages * batches):
            if self.kind == "budget" and state.since_sync:
                state = replace(state, spent=latest())
            due = self.next(state, stages, batches, prefetch)
            yield due
            state = (state.after_sync(0, {}) if due.reason else state).after_request(due.to_generate).after_batch(None)


every = partial(Schedule, "every")
lagged = partial(Schedule, "lagged")


def budget(delta: float, v: int) -> Schedule:
    """Sync weights when KL(α‖π_k) passes delta nats per completion, at the latest every v batches."""
    return Schedule("budget", v, delta)


def lags(schedule: Schedule, stages: int, batches: int, i: int) -> list[int]:
    """The lag of each batch of a run, in optimizer updates, when every batch makes i updates (budget: if
    nothing is spent before its cap)."""
    alpha, lags, generated_at = 0, [], dict[int, int]()  # batch -> version of its sampler
    for due in schedule.plan(stages, batches):
        version = (due.batch - 1) * i
        alpha = version if due.reason else alpha
        generated_at.update(dict.fromkeys(due.to_generate, alpha))
        lags.append(version - generated_at[due.batch])
    return lags


def largest_lag(schedule: Schedule, stages: int, batches: int, i: int) -> int:
    """The largest lag that a run can show, in optimizer updates: the maximum of `lags`, without a look at every batch.

    Under every(v) α is v - 1 batches old before a sync, v - 2 before the first, and at the end of a stage what is left
    over of it is added, as k begins anew. Where v is beyond the stage α remains the initial policy."""
    v, total = schedule.v, stages * batches
    if schedule.kind == "lagged":
        return min(v, total - 1) * i
    if schedule.kind != "every":
        return (min(v, total) - 1) * i
    if v > batches:
        return (total - 1) * i
    over = batches % v
    between = over + v - 1 if stages > 1 else v - 1 if batches >= 2 * v else 0
    return max(v - 2, between, over) * i
