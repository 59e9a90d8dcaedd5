"""Measures: numbers read from the files of a finished run.

pass@1                  of the evaluation after training; `pass@1 before` of the one before training;
                           SET.pass@1 or SET.reward of an evaluation set
mean reward           a metric of metrics.jsonl, with mean, sum, max, min, first or last over the batches
min NAME - NAME            the same for a difference of two metrics
peak reward           max of the smoothed metric; end: its last value; fall: its largest fall from the best so
                           far. Smoothed: the mean of the last `smooth` batches
time/step to 0.9       the sum of a metric until the smoothed reward reaches a level; None if it never does
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

import torch

from lagrpo.core import bounds
from lagrpo.core.kl import prefers_bounded
from lagrpo.core.recipes import resolve
from lagrpo.runs import load_evaluations, load_events, load_metrics, load_rollouts
from lagrpo.runs.environment import read_environment
from lagrpo.settings.load import load_settings

REWARD = "reward"
OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    **{"mean": fmean, "sum": sum, "max": max, "min": min, "peak": max},
    **{"first": itemgetter(0), "last": itemgetter(-1), "end": itemgetter(-1)},
    "fall": lambda values: max(
        best - value for best, value in zip(accumulate(values, max), values, strict=True)
    ),
}
BOUNDS = ("bounds/improvement", "bounds/theorem1", "bounds/identity")
SMOOTHED = ("peak", "end", "fall")
GRAMMAR = re.compile(
    r"(?P<evaluated>pass@\d+|accuracy|(?P<set>[A-Za-z]\w*)\.(?P<result>[A-Za-z][\w/@]*))(?P<before> before)?"
    rf"|(?P<operation>{'|'.join(OPERATIONS)}) (?P<name>[\w/@]+)( - (?P<minus>[\w/@]+))?"
    r"|(?P<cost>[\w/@]+) to (?P<level>\d+(\.\d*)?|\.\d+)"
)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run recorded: a line per batch, evaluations by name, and where it ran."""

    metrics: Sequence[dict[str, Any]]
    evaluations: Mapping[str, dict[str, Any]]
    where: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @staticmethod
    def load(run: Path) -> RunResult:
        """Raises ValueError for damaged files."""
        environment = read_environment(run)
        where = {name: environment.get(name) for name in ("cpu", "device_name", "threads", "dtype")}
        where["commit"] = commit_text(environment.get("git"), load_events(run))
        return RunResult(
            load_metrics(run), {each["name"]: each for each in load_evaluations(run)}, where, run
        )

    def curve(self, name: str) -> list[float | None]:
        """A metric by batch; None if it is null or missing. The bounds are computed from the rollouts."""
        if name in BOUNDS and self.path is not None:
            return [step_bounds(self.path, line["step"])[name] for line in self.metrics]
        return [line.get(name) for line in self.metrics]


def commit_text(git: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]]) -> str | None:
    """The commit at which a run started, and the others at which it resumed, each with "(modified)" if the tree had
    changes; None outside of a repository."""
    states = [git, *(event.get("git") for event in events if event["event"] == "resumed")]
    commits = [f"{s['commit']}{' (modified)' if s['dirty'] else ''}" for s in states if s]
    return " and ".join(dict.fromkeys(commits)) or None


def step_bounds(run: Path, step: int) -> dict[str, float | None]:
    """Both sides of the bounds on J(π_k) - J(α) (arXiv 2505.22257, Corollary 1 with α as π_k; reports/theory.md), as
    means over the groups of a step, in units of the range of rewards. Its rewards must lie in that range."""
    settings, rows = load_settings(run / "config.toml"), load_rollouts(run, [step])
    eps_std = resolve(settings.loss.recipe, settings.loss.knobs).eps_std
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in (row for row in rows if row["outcome"] == "scored"):
        ratio = sum(
            k - a for k, a in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)
        )
        groups.setdefault((row["prompt_id"], row["epoch"]), []).append((row["reward"], ratio))
    of_groups = [
        torch.tensor(group, dtype=torch.float64).T for group in groups.values() if len(group) > 1
    ]
    bounded = prefers_bounded(torch.cat([log_ratio for _, log_ratio in of_groups]))
    sides = []
    for rewards, log_ratio in of_groups:
        scaled, same = (
            bounds.scaled(rewards, *settings.task.reward_range),
            torch.zeros_like(log_ratio),
        )
        side = bounds.sampled(scaled, log_ratio, same, eps_std, bounded)
        gain = side.gain - bounds.sampled(scaled, same, same, eps_std).gain
        sides.append((float(gain), float(side.theorem1), float(side.identity_bound)))
    return dict(zip(BOUNDS, map(fmean, zip(*sides, strict=True)), strict=True))


def parse_measure(text: str) -> re.Match[str]:
    """Raises ValueError for text that is not a measure."""
    if (found := GRAMMAR.fullmatch(text)) is None:
        raise ValueError(
            f"{text!r} is not a measure: write pass@1, SET.pass@1, an operation ({', '.join(OPERATIONS)}) and a "
            "metric (`mean reward`), or what a reward costs (`time/step to 0.9`)"
        )
    return found


def metrics_of(text: str) -> list[str]:
    """The metrics that a measure reads."""
    found = parse_measure(text)
    return [
        name
        for name in (found["cost"], found["cost"] and REWARD, found["name"], found["minus"])
        if name
    ]


def measure(text: str, run: RunResult, smooth: int) -> float | None:
    """The value of a measure; None if the run has none."""
    found = parse_measure(text)
    if evaluated := found["evaluated"]:
        moment = "before" if found["before"] else "after"
        summary = run.evaluations.get(f"{moment}.{found['set']}" if found["set"] else moment)
        return summary.get(found["result"] or evaluated) if summary else None
    if found["cost"]:
        rewards = smoothed([value for value in run.curve(REWARD) if value is not None], smooth)
        reached = next(
            (n for n, reward in enumerate(rewards, start=1) if reward >= float(found["level"])), 0
        )
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
