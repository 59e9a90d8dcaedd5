"""Measures: numbers read from the files of a finished run.

pass_at_1                  of the evaluation after training; `pass_at_1 before` of the one before training;
                           SET.pass_at_1 or SET.reward_mean of an evaluation set
mean reward_mean           a metric of metrics.jsonl, with mean, sum, max, min, first or last over the batches
min NAME - NAME            the same for a difference of two metrics
peak reward_mean           max of the smoothed metric; end: its last value; fall: its largest fall from the best so
                           far. Smoothed: the mean of the last `smooth` batches
seconds_total to 0.9       the sum of a metric until the smoothed reward reaches a level; None if it never does
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.runs.environment import read_environment

REWARD = "reward_mean"
OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    **{"mean": fmean, "sum": sum, "max": max, "min": min, "peak": max},
    **{"first": itemgetter(0), "last": itemgetter(-1), "end": itemgetter(-1)},
    "fall": lambda values: max(best - value for best, value in zip(accumulate(values, max), values, strict=True)),
}
SMOOTHED = ("peak", "end", "fall")
GRAMMAR = re.compile(
    r"(?P<evaluated>pass_at_\d+|accuracy|(?P<set>[A-Za-z]\w*)\.(?P<result>[A-Za-z]\w*))(?P<before> before)?"
    rf"|(?P<operation>{'|'.join(OPERATIONS)}) (?P<name>\w+)( - (?P<minus>\w+))?"
    r"|(?P<cost>\w+) to (?P<level>\d+(\.\d*)?|\.\d+)"
)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run recorded: a line per batch, evaluations by name, and where it ran."""

    metrics: Sequence[dict[str, Any]]
    evaluations: Mapping[str, dict[str, Any]]
    where: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(run: Path) -> RunResult:
        """Raises ValueError for damaged files."""
        environment = read_environment(run)
        where = {name: environment.get(name) for name in ("cpu", "device_name", "threads", "dtype")}
        where["commit"] = (environment.get("git") or {}).get("commit")
        return RunResult(load_metrics(run), {each["name"]: each for each in load_evaluations(run)}, where)

    def curve(self, name: str) -> list[float | None]:
        """A metric by batch; None if it is null or missing."""
        return [line.get(name) for line in self.metrics]


def parse_measure(text: str) -> re.Match[str]:
    """Raises ValueError for text that is not a measure."""
    if (found := GRAMMAR.fullmatch(text)) is None:
        raise ValueError(
            f"{text!r} is not a measure: write pass_at_1, SET.pass_at_1, an operation ({', '.join(OPERATIONS)}) and a "
            "metric (`mean reward_mean`), or what a reward costs (`seconds_total to 0.9`)"
        )
    return found


def metrics_of(text: str) -> list[str]:
    """The metrics that a measure reads."""
    found = parse_measure(text)
    return [name for name in (found["cost"], found["cost"] and REWARD, found["name"], found["minus"]) if name]


def measure(text: str, run: RunResult, smooth: int) -> float | None:
    """The value of a measure; None if the run has none."""
    found = parse_measure(text)
    if evaluated := found["evaluated"]:
        moment = "before" if found["before"] else "after"
        summary = run.evaluations.get(f"{moment}.{found['set']}" if found["set"] else moment)
        return summary.get(found["result"] or evaluated) if summary else None
    if found["cost"]:
        rewards = smoothed([value for value in run.curve(REWARD) if value is not None], smooth)
        reached = next((n for n, reward in enumerate(rewards, start=1) if reward >= float(found["level"])), 0)
        costs = [cost for cost in run.curve(found["cost"])[:reached] if cost is not None]
        return sum(costs) if reached and len(costs) == reached else None
    curve = run.curve(found["name"])
    if found["minus"]:
        both = zip(curve, run.curve(found["minus"]), strict=True)
        curve = [None if one is None or other is None else one - other for one, other in both]
    if not (values := [value for value in curve if value is not None]):
        return None
    operation = found["operation"]
    return OPERATIONS[operation](smoothed(values, smooth) if operation in SMOOTHED else values)


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """Means of the last `over` values, or of as many as there are."""
    return [fmean(values[max(0, n - over) : n]) for n in range(1, len(values) + 1)]
