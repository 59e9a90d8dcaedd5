"""When the sampler gets new weights, and which batches it may draw with them.

Batches are counted through all stages: k = 1 .. M inside a stage, b = (stage - 1)·M + k over the run.

`every(v)`      Algorithm 1, lines 8-9: deliver π before sampling batch k when k mod v = 0. α of the first batches is
                the initial policy. The lag is a sawtooth, 0 .. v-1 batches (0 .. v-2 in the first cycle).
`lagged(v)`     α = π_{k-v} as the paper's text has it: a constant lag of v batches (less at the start), a pipeline that
                draws v batches ahead. `lagged(0)` and `every(1)` are on-policy.
`budget(δ, v)`  deliver when the estimated KL(α‖π_k) of a completion (nats, live.spent) passed δ in the batch before,
                and at the latest after v batches. By Pinsker TV(α, π_k) <= sqrt(δ / 2), up to the estimate's error and
                the updates that it is old.
`certified(v)`  deliver when the batch before certified that π_k is better than α (its lower bound on J(π_k) - J(α),
                live.certified, was above 0), and at the latest after v batches.

>>> [every(3).due(k) for k in range(1, 7)]
[False, False, True, False, False, True]
>>> [(due.batch, list(due.draws)) for due in every(3).plan(stages=1, batches=6) if due.reason or due.draws]
[(1, [1, 2]), (3, [3, 4, 5]), (6, [6])]
>>> largest_lag(every(10), stages=1, batches=100, i=1), largest_lag(lagged(2), stages=1, batches=9, i=3)
(9, 6)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["every", "lagged", "budget", "certified"]
Reason = Literal["", "start", "schedule", "budget", "certified", "cap"]


@dataclass(frozen=True, slots=True)
class Due:
    """What happens at the start of batch `batch`: why π is delivered ("" when it is not), and the batches whose
    completions are then drawn with what the sampler has (the batch itself among them, or among those of an earlier
    `Due`)."""

    batch: int
    reason: Reason
    draws: range


@dataclass(frozen=True, slots=True)
class Schedule:
    """`kind` every, lagged, budget or certified; `v` in batches; `delta` in nats, of budget alone. Raises ValueError on
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
        """Whether `every` or `lagged` deliver before batch k = 1 .. M of a stage (Algorithm 1, line 8)."""
        return self.kind == "lagged" or k % self.v == 0

    def plan(
        self, stages: int, batches: int, ahead: bool = True, latest: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Due]:
        """One `Due` for every batch of the run, in order, each when it is asked for. `ahead` asks for all batches up to
        the next delivery as soon as their α is there; without it `every(v)` asks for them one by one. The draws are the
        same. `latest` gives what the last batch says since the delivery: the estimate of KL(α‖π_k) that `budget`
        decides by, or the lower bound on J(π_k) - J(α) of `certified`."""
        total = stages * batches
        if self.kind in ("budget", "certified"):
            yield from self._watch(total, latest)
            return
        drawn = 0  # batches that have been asked for
        for b in range(1, total + 1):
            if self.kind == "lagged":
                last = min(b + self.v, total)
            else:
                last = b
                while ahead and last < total and not self.due(last % batches + 1):
                    last += 1
            reason: Reason = "schedule" if self.due((b - 1) % batches + 1) else ""
            yield Due(b, reason, range(drawn + 1, max(last, drawn) + 1))
            drawn = max(drawn, last)

    def _watch(self, total: int, latest: Callable[[], float]) -> Iterator[Due]:
        passed: Reason = "budget" if self.kind == "budget" else "certified"
        since = 0  # batches drawn by what the sampler has
        for b in range(1, total + 1):
            reason: Reason = passed if since and latest() > (self.delta or 0.0) else "cap" if since >= self.v else ""
            since = 1 if reason else since + 1
            yield Due(b, reason, range(b, b + 1))


def every(v: int) -> Schedule:
    """Deliver every v batches."""
    return Schedule("every", v)


def lagged(v: int) -> Schedule:
    """A constant lag of v batches."""
    return Schedule("lagged", v)


def budget(delta: float, v: int) -> Schedule:
    """Deliver when KL(α‖π_k) passes delta nats per completion, at the latest every v batches."""
    return Schedule("budget", v, delta)


def certified(v: int) -> Schedule:
    """Deliver when π_k is certified to be better than α, at the latest every v batches."""
    return Schedule("certified", v)


def lags(schedule: Schedule, stages: int, batches: int, i: int) -> list[int]:
    """The lag of each batch of a run, in optimiser updates, when every batch makes i updates (budget and
    certified: where nothing comes before their cap)."""
    drawn_at: dict[int, int] = {}  # batch -> version of its sampler
    version_served = 0
    lag = []
    for due in schedule.plan(stages, batches):
        version = (due.batch - 1) * i
        if due.reason:
            version_served = version
        drawn_at.update(dict.fromkeys(due.draws, version_served))
        lag.append(version - drawn_at[due.batch])
    return lag


def largest_lag(schedule: Schedule, stages: int, batches: int, i: int) -> int:
    """The largest lag that a run can show, in optimiser updates."""
    return max(lags(schedule, stages, batches, i))
