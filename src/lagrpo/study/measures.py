"""Measures: numbers read from the files of a finished run.

pass@1              of the evaluation after training; `pass@1 before` of the one before training;
                    SET.pass@1 or SET.reward of an evaluation set
mean reward         a metric of metrics.jsonl: its mean, sum, max, min, first or last over batches
min NAME - NAME     the same for a difference of two metrics
peak reward         max of the smoothed metric; end: its last value; fall: its largest fall from the
                    best so far. Smoothed: the mean of the last `smooth` batches
time/step to 0.9    the sum of a metric until the smoothed reward reaches a level; None if never
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from lagrpo.core import bounds
from lagrpo.core.kl import prefers_bounded
from lagrpo.core.recipes import resolve
from lagrpo.runs import load_evaluations, load_events, load_metrics, load_rollouts
from lagrpo.runs.environment import read_environment
from lagrpo.settings.load import load_settings
from lagrpo.settings.sections import EvalSettings
from lagrpo.types import JsonObject, JsonView

REWARD = "reward"
OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "peak": max,
    "first": itemgetter(0),
    "last": itemgetter(-1),
    "end": itemgetter(-1),
    "fall": lambda values: max(
        best - value for best, value in zip(accumulate(values, max), values, strict=True)
    ),
}
BOUNDS = ("bounds/improvement", "bounds/theorem1", "bounds/identity")
SMOOTHED = ("peak", "end", "fall")
GRAMMAR = re.compile(
    r"(?P<evaluated>pass@\d+|accuracy|(?P<set>[A-Za-z]\w*)\.(?P<result>[A-Za-z][\w/@]*))"
    r"(?P<before> before)?"
    rf"|(?P<operation>{'|'.join(OPERATIONS)}) (?P<name>[\w/@]+)( - (?P<minus>[\w/@]+))?"
    r"|(?P<cost>[\w/@]+) to (?P<level>\d+(\.\d*)?|\.\d+)"
)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The records of a finished run."""

    metrics: Sequence[JsonObject]
    """A line per batch."""
    evaluations: Mapping[str, JsonObject]
    """By name."""
    where: JsonObject = field(default_factory=dict)
    """The machine and the commit."""
    path: Path | None = None
    """The directory; None for runs that come from a record."""

    @staticmethod
    def load(run: Path) -> RunResult:
        """Reads the files of a run. Raises ValueError for damaged files."""
        environment = read_environment(run)
        names = ("cpu", "device_name", "threads", "dtype")
        where = {name: environment.get(name) for name in names}
        where["commit"] = commit_text(environment.get("git"), load_events(run))
        evaluations = {evaluation["name"]: evaluation for evaluation in load_evaluations(run)}
        return RunResult(load_metrics(run), evaluations, where, run)

    def curve(self, name: str) -> list[float | None]:
        """A metric by batch; None if it is null or missing.

        Bounds are computed from the rollouts.
        """
        if name in BOUNDS and self.path is not None:
            return [step_bounds(self.path, line["step"])[name] for line in self.metrics]
        return [line.get(name) for line in self.metrics]


def commit_text(git: JsonView | None, events: Sequence[JsonView]) -> str | None:
    """The commit at which a run started, and the others at which it resumed.

    Each has "(modified)" if the tree had changes. None outside of a repository.
    """
    states = [git, *(event.get("git") for event in events if event["event"] == "resumed")]
    commits = [
        f"{state['commit']}{' (modified)' if state['dirty'] else ''}" for state in states if state
    ]
    return " and ".join(dict.fromkeys(commits)) or None


def step_bounds(run: Path, step: int) -> dict[str, float | None]:
    """Both sides of the bounds on J(π_k) - J(α), as means over the groups of a step.

    The bounds come from arXiv 2505.22257, Corollary 1 with α as π_k (reports/theory.md), in units
    of the range of rewards. The rewards must lie in that range.
    """
    settings = load_settings(run / "config.toml")
    eps_std = resolve(settings.loss.recipe, settings.loss.knobs).eps_std
    groups = _rewards_and_log_ratios(run, step)
    is_bounded = prefers_bounded(torch.cat([log_ratio for _, log_ratio in groups]))
    sides = []
    for rewards, log_ratio in groups:
        scaled_rewards = bounds.scaled(rewards, *settings.task.reward_range)
        on_policy = torch.zeros_like(log_ratio)  # log-ratios of α to itself
        side = bounds.sampled(scaled_rewards, log_ratio, on_policy, eps_std, bounded=is_bounded)
        own_gain = bounds.sampled(scaled_rewards, on_policy, on_policy, eps_std).gain
        gain = side.gain - own_gain
        sides.append((float(gain), float(side.theorem1), float(side.identity_bound)))
    means = [fmean(column) for column in zip(*sides, strict=True)]
    return dict(zip(BOUNDS, means, strict=True))


def _rewards_and_log_ratios(run: Path, step: int) -> list[tuple[Tensor, Tensor]]:
    """Rewards and log π_k(y)/α(y) of each group of a step, each [completions] in float64.

    Only scored completions, and only groups with at least two of them.
    """
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in load_rollouts(run, [step]):
        if row["outcome"] != "scored":
            continue
        # Completions of one turn: tokens of an environment's reply would have None here.
        token_pairs = zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)
        log_ratio = sum(old - rollout for old, rollout in token_pairs)
        groups.setdefault((row["prompt_id"], row["epoch"]), []).append((row["reward"], log_ratio))
    tensors = []
    for group in groups.values():
        if len(group) > 1:
            rewards, log_ratios = torch.tensor(group, dtype=torch.float64).T
            tensors.append((rewards, log_ratios))
    return tensors


def parse_measure(text: str) -> re.Match[str]:
    """The parts of a measure by the names in GRAMMAR. Raises ValueError for other text."""
    match = GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a measure: write pass@1, SET.pass@1, an operation "
            f"({', '.join(OPERATIONS)}) and a metric (`mean reward`), or what a reward costs "
            "(`time/step to 0.9`)"
        )
    return match


def metrics_of(text: str) -> list[str]:
    """The metrics that a measure reads."""
    match = parse_measure(text)
    if match["cost"]:
        return [match["cost"], REWARD]
    return [name for name in (match["name"], match["minus"]) if name]


def is_evaluated(text: str, settings: EvalSettings) -> bool:
    """False for pass@k of a run whose evaluations do not compute it, or a set that it lacks."""
    match = parse_measure(text)
    if not match["evaluated"]:
        return True
    num_samples = settings.num_samples
    if match["set"]:
        named_sets = {evaluation_set.name: evaluation_set for evaluation_set in settings.sets}
        if match["set"] not in named_sets:
            return False
        num_samples = named_sets[match["set"]].num_samples or num_samples
    pass_at = re.match(r"pass@(\d+)", match["result"] or match["evaluated"])
    if pass_at is None:
        return True
    # Evaluations compute pass@k for k = 1, 2, 4, …, and for all samples.
    k = int(pass_at[1])
    return k == num_samples or (k < num_samples and k.bit_count() == 1)


def measure(text: str, run: RunResult, smooth: int) -> float | None:
    """The value of a measure; None if the run has none."""
    match = parse_measure(text)
    if match["evaluated"]:
        return _evaluation_result(match, run)
    if match["cost"]:
        return _cost_until(run, match["cost"], float(match["level"]), smooth)
    curve = run.curve(match["name"])
    if match["minus"]:
        pairs = zip(curve, run.curve(match["minus"]), strict=True)
        curve = [
            None if value is None or other is None else value - other for value, other in pairs
        ]
    values = [value for value in curve if value is not None]
    if not values:
        return None
    operation = match["operation"]
    if operation in SMOOTHED:
        values = smoothed(values, smooth)
    return OPERATIONS[operation](values)


def _evaluation_result(match: re.Match[str], run: RunResult) -> float | None:
    """A result of an evaluation before or after training, of a set if the measure names one."""
    name = "before" if match["before"] else "after"
    if match["set"]:
        name = f"{name}.{match['set']}"
    summary = run.evaluations.get(name)
    if not summary:
        return None
    return summary.get(match["result"] or match["evaluated"])


def _cost_until(run: RunResult, cost: str, level: float, smooth: int) -> float | None:
    """The sum of a metric until the smoothed reward reaches a level; None if it never does."""
    # A batch may have no reward, and still has a cost.
    rewards = {
        number: value
        for number, value in enumerate(run.curve(REWARD), start=1)
        if value is not None
    }
    smoothed_rewards = smoothed(list(rewards.values()), smooth)
    pairs = zip(rewards, smoothed_rewards, strict=True)
    reached = [number for number, reward in pairs if reward >= level]
    if not reached:
        return None
    batches = reached[0]
    costs = [value for value in run.curve(cost)[:batches] if value is not None]
    # A batch without the metric leaves the sum unknown.
    return sum(costs) if len(costs) == batches else None


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """Means of the last `over` values, or of all so far if they are fewer."""
    return [fmean(values[max(0, n - over) : n]) for n in range(1, len(values) + 1)]
