"""Detectors of time that a run waits. They cost no signal, but seconds."""

from __future__ import annotations

import statistics
from collections import defaultdict

from lagrpo.diagnosis.finding import Finding, percent, places_of
from lagrpo.diagnosis.record import RunRecord, mean

PHASES = {
    "generate": "sampling",
    "train": "learning",
    "reward": "rewards",
    "sync": "weight syncs",
    "score": "log-probs for metrics",
}
"""Phases of a batch by their metrics time/NAME, with what they are."""

SHORTEST_STEP = 2
"""Seconds of a batch from which a slow phase is worth a finding."""

SHORTEST_WAIT = 2
"""Seconds that a slow phase takes in its median batch."""

SLOW_BATCHES = 5
"""Batches that must have had a slow phase: fewer may only show that the machine was busy."""


def shares_of_time(record: RunRecord) -> dict[str, float]:
    """Returns the share of each phase, by the names of PHASES; empty without timed batches.

    The first batch warms up, so it counts only if it is the only one.
    """
    lines = record.metrics[1:] or record.metrics
    total = sum(record.values("time/step", lines))
    if not total:
        return {}
    return {name: sum(record.values(f"time/{name}", lines)) / total for name in PHASES}


def seconds_of_batch(record: RunRecord) -> float | None:
    """Returns the mean seconds of a batch; None without one."""
    return mean(record.values("time/step", record.metrics[1:] or record.metrics))


def find_slow_rewards(record: RunRecord, threshold: float) -> Finding | None:
    """The run waits for reward functions."""
    return _find_slow_phase(record, threshold, "reward", {})


def find_slow_syncs(record: RunRecord, threshold: float) -> Finding | None:
    """The run waits for weight syncs."""
    sync_every = record.settings.get("schedule.sync_every") or 1
    return _find_slow_phase(record, threshold, "sync", {"schedule.sync_every": 2 * sync_every})


def _find_slow_phase(
    record: RunRecord, threshold: float, phase: str, settings: dict[str, object]
) -> Finding | None:
    """A phase takes this share of the time, and SHORTEST_WAIT in its median batch.

    The median batch must reach the share, too: a machine that was busy for a while makes some
    batches slow.
    """
    lines = [line for line in record.metrics[1:] if line.get(f"time/{phase}")]
    total = sum(record.values("time/step", record.metrics[1:]))
    if len(lines) < SLOW_BATCHES or not total:
        return None
    typical = statistics.median(record.values(f"time/{phase}", lines))
    seconds = seconds_of_batch(record) or 0.0
    share = typical * len(lines) / total
    if typical < SHORTEST_WAIT or share < threshold:
        return None
    return Finding(
        f"{percent(share)} of the time goes to {PHASES[phase]}: {share * seconds:.1f} of "
        f"{seconds:.1f} seconds per batch.",
        cost=share / 10,
        settings=settings,
    )


def find_stragglers(record: RunRecord, threshold: float) -> Finding | None:
    """Sampling bounds the run, and waits for few long completions."""
    share = shares_of_time(record).get("generate", 0.0)
    seconds = seconds_of_batch(record) or 0.0
    rows = record.recent_rows
    lengths_by_batch: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        lengths_by_batch[row["step"]].append(row["length"])
    if not rows or seconds < SHORTEST_STEP or share < 0.5:
        return None
    # The engine samples for as long as the longest of a batch takes.
    longest = mean([max(lengths) for lengths in lengths_by_batch.values()]) or 0.0
    average = mean([statistics.fmean(lengths) for lengths in lengths_by_batch.values()]) or 0.0
    if longest < threshold * average:
        return None
    lengths = [row["length"] for row in rows]
    by_length = sorted(lengths)
    usual = by_length[int(0.99 * (len(by_length) - 1))]
    settings: dict[str, object] = {"schedule.sync_every": 2}
    if (record.settings.get("schedule.sync_every") or 1) > 1:
        settings = {"rollout.max_completion_length": usual}
    return Finding(
        f"Sampling takes {percent(share)} of the time and waits for the longest completion: "
        f"{longest:.0f} tokens in a batch with a mean of {average:.0f}; 99 % have at most {usual}.",
        cost=share / 10,
        places=places_of(row for row in rows if row["length"] >= longest),
        settings=settings,
    )
