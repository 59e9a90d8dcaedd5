"""Numbers from a finished run's files.

    pass_at_1                  of the evaluation after training, `pass_at_1 before` of the one before it; with
                               evaluation.sets SET.pass_at_1, and any other result of a set: SET.reward_mean
    mean reward_mean           any name in metrics.jsonl, with mean, sum, max, min, first or last over the batches
    min NAME - NAME            the same of a difference
    peak reward_mean           the greatest, end the last, fall the largest fall from the greatest so far: of the means
                               over the last `smooth` batches
    seconds_total to 0.9       the sum of a metric until the smoothed reward reaches a level; none where it never does

A run's *stability* is `fall reward_mean`: 0 where the smoothed reward never falls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.runs.environment import read_environment

REWARD = "reward_mean"
OF_LAST_SYNC = ("sync_bytes", "seconds_writing", "seconds_paused")
"""Metrics that repeat what the last weight sync cost: they count in the batch that it came before."""
OVER_BATCHES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
OVER_SMOOTHED: dict[str, Callable[[Sequence[float]], float]] = {
    "peak": max,
    "end": lambda values: values[-1],
    "fall": lambda values: max(best - value for best, value in zip(accumulate(values, max), values, strict=True)),
}
GRAMMAR = re.compile(
    rf"(?P<evaluated>pass_at_\d+|accuracy|(?P<set>[A-Za-z]\w*)\.(?P<result>[A-Za-z]\w*))(?P<before> before)?"
    rf"|(?P<operation>{'|'.join([*OVER_BATCHES, *OVER_SMOOTHED])}) (?P<name>\w+)( - (?P<minus>\w+))?"
    r"|(?P<cost>\w+) to (?P<level>\d+(\.\d*)?|\.\d+)"
)


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished run recorded."""

    metrics: Sequence[dict[str, Any]]
    evaluations: Mapping[str, dict[str, Any]]
    """by the name of their files"""
    where: dict[str, Any] = field(default_factory=dict)
    """Processor or GPU, threads, dtype, commit."""
    run: str = ""
    """Its directory, on the machine that made it."""

    @staticmethod
    def read(run: Path) -> Finished:
        """Raises ValueError for damaged records, RunNotFoundError for none."""
        evaluations, made = {summary["name"]: summary for summary in load_evaluations(run)}, read_environment(run)
        where = {name: made.get(name) for name in ("cpu", "device_name", "threads", "dtype")}
        where["commit"] = (made.get("git") or {}).get("commit")
        return Finished(load_metrics(run), evaluations, where, str(run))

    def curve(self, name: str) -> list[float | None]:
        """A metric by batch; None where it is null or missing."""
        if name in OF_LAST_SYNC:
            return [line.get(name) if line.get("synced") else 0.0 for line in self.metrics]
        return [line.get(name) for line in self.metrics]


def check_measure(text: str) -> str:
    """The measure itself. Raises ValueError for words that name none."""
    if not GRAMMAR.fullmatch(text):
        raise ValueError(
            f"{text!r} is no measure: write pass_at_1, `pass_at_1 before`, SET.pass_at_1, an operation "
            f"({', '.join(OVER_BATCHES)}; smoothed: {', '.join(OVER_SMOOTHED)}) and a metric of metrics.jsonl "
            "(`mean reward_mean`) or a difference of two (`min reward_mean - entropy`), or what it costs to reach a "
            "reward (`seconds_total to 0.9`)"
        )
    return text


def metrics_of(text: str) -> list[str]:
    """The metrics that a measure reads.

    >>> metrics_of("seconds_total to 0.9"), metrics_of("sum sync_bytes"), metrics_of("pass_at_1")
    (['seconds_total', 'reward_mean'], ['sync_bytes', 'synced'], [])
    """
    found = GRAMMAR.fullmatch(check_measure(text))
    assert found is not None
    named = [name for name in (found["cost"], found["cost"] and REWARD, found["name"], found["minus"]) if name]
    return [*named, *(["synced"] if {*named} & {*OF_LAST_SYNC} else [])]


def measure(text: str, run: Finished, smooth: int) -> float | None:
    """The number of a measure; None where the run has none. Smoothed values are means over the last `smooth` batches,
    of as many as there are."""
    found = GRAMMAR.fullmatch(check_measure(text))
    assert found is not None
    if evaluated := found["evaluated"]:
        moment = "before" if found["before"] else "after"
        summary = run.evaluations.get(f"{moment}.{found['set']}" if found["set"] else moment)
        return summary.get(found["result"] or evaluated) if summary else None
    if found["cost"]:
        return _cost(run, found["cost"], float(found["level"]), smooth)
    curve = run.curve(found["name"])
    if found["minus"]:
        both = zip(curve, run.curve(found["minus"]), strict=True)
        curve = [None if one is None or other is None else one - other for one, other in both]
    values = [value for value in curve if value is not None]
    if not values:
        return None
    operation = found["operation"]
    if operation in OVER_BATCHES:
        return OVER_BATCHES[operation](values)
    return OVER_SMOOTHED[operation](smoothed(values, smooth))


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """Means over the last `over` values, or as many as there are.

    >>> smoothed([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    return [fmean(values[max(0, n - over) : n]) for n in range(1, len(values) + 1)]


def _cost(run: Finished, name: str, level: float, smooth: int) -> float | None:
    rewards = [value for value in run.curve(REWARD) if value is not None]
    reached = next((n for n, value in enumerate(smoothed(rewards, smooth), start=1) if value >= level), None)
    costs = run.curve(name)
    if reached is None or any(cost is None for cost in costs[:reached]):
        return None
    return sum(cost for cost in costs[:reached] if cost is not None)
