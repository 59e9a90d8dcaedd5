"""The record of a run, for detectors: settings, metrics, rollouts and evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lagrpo.runs import reading
from lagrpo.runs.directory import Run
from lagrpo.runs.recorded import load_runs
from lagrpo.runs.rollouts import REWARD
from lagrpo.settings.load import flatten
from lagrpo.types import JsonObject, JsonView, OutcomeKind, Range, is_correct

COLUMNS = (
    "step",
    "epoch",
    "prompt_id",
    "prompt_text",
    "answer",
    "sample_index",
    "completion",
    "loss_mask",
    "staleness",
    "finished",
    "outcome",
    "reward",
    "reason",
    "advantage",
    "excluded_reason",
)
"""Columns of rollouts that detectors read. Runs with several rewards have more."""

MOST_COMPLETIONS = 20_000
"""Completions that are read, of batches that lie evenly in the run, and of the last ones."""

SHORTEST_WINDOW = 10
"""Batches that the beginning and the end of a run have, if its cycle of weight syncs is shorter."""

SIGMAS = 3
"""A difference of two means counts if it is larger than this many standard errors."""

FIRST_BATCHES = 3
"""Batches that show what the initial policy does."""

ALL_RIGHT = "all right"
ALL_WRONG = "all wrong"


@dataclass(frozen=True)
class RunRecord:
    """The records of a run so far."""

    settings: JsonObject
    """by their names, such as rollout.temperature"""

    metrics: Sequence[JsonView]
    """one dict per batch, as in docs/metrics.md"""

    rollouts: Sequence[JsonView]
    """one dict per completion, with COLUMNS, `length` (sampled tokens) instead of `loss_mask`"""

    evaluations: Sequence[JsonView] = ()
    """summaries in the order of their steps, each with its `records`, one per prompt"""

    reward_range: Range = (0.0, 1.0)
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def window(self) -> int:
        """Batches of the beginning and of the end that detectors compare: whole sync cycles."""
        return window_of(self.settings)

    def values(self, metric: str, metrics: Sequence[JsonView] | None = None) -> list[float]:
        """Returns the values that a metric has, in the order of batches."""
        lines = self.metrics if metrics is None else metrics
        return [line[metric] for line in lines if line.get(metric) is not None]

    def first(self, metric: str) -> float | None:
        """Returns the mean of a metric over the first window; None without a value."""
        return mean(self.values(metric, self.metrics[: self.window]))

    def last(self, metric: str) -> float | None:
        """Returns the mean of a metric over the last window; None without a value."""
        return mean(self.values(metric, self.metrics[-self.window :]))

    @cached_property
    def has_teacher(self) -> bool:
        """True if a teacher may teach, so that groups of equal rewards have a signal, too."""
        names = ("loss.reference", "loss.reference_prompt")
        return any(self.settings.get(name) is not None for name in names)

    @cached_property
    def ignores_reward(self) -> bool:
        """True if only a teacher teaches: no completion has an advantage."""
        return self.has_teacher and not any(row["advantage"] for row in self.rollouts)

    @cached_property
    def nears_teacher(self) -> bool:
        """True if the policy is nearer to its teacher than at the start, by more than chance."""
        distances = self.values("kl") if self.has_teacher else []
        if len(distances) < 2 * self.window:
            return False
        first = distances[: self.window]
        last = distances[-self.window :]
        return statistics.fmean(last) < statistics.fmean(first) and differ(first, last)

    def rises(self) -> bool:
        """True if the reward still rises, or the policy comes nearer to its teacher.

        The last window of rewards is higher than the one before, and by more than chance higher
        than that one or the first one.
        """
        if self.nears_teacher:
            return True
        rewards = self.values("reward")
        first = rewards[: self.window]
        before = rewards[-2 * self.window : -self.window]
        last = rewards[-self.window :]
        if len(before) < 2 or len(last) < 2:
            return False
        level = statistics.fmean(last)
        if level <= statistics.fmean(before):
            return False
        has_risen = level > statistics.fmean(first) and differ(first, last)
        return has_risen or differ(before, last)

    @cached_property
    def stale_batches(self) -> list[JsonView]:
        """Metrics of the batches with stale samples."""
        return [line for line in self.metrics if (line.get("staleness/max") or 0) > 0]

    @cached_property
    def fresh_batches(self) -> list[JsonView]:
        """Metrics of the batches whose samples are all fresh."""
        return [line for line in self.metrics if line.get("staleness/max") == 0]

    @cached_property
    def recent_rows(self) -> list[JsonView]:
        """Completions of the last window."""
        return self._rows_of(self.metrics[-self.window :])

    @cached_property
    def first_rows(self) -> list[JsonView]:
        """Completions of the first window."""
        return self._rows_of(self.metrics[: self.window])

    def _rows_of(self, metrics: Sequence[JsonView]) -> list[JsonView]:
        steps = {line["step"] for line in metrics}
        return [row for row in self.rollouts if row["step"] in steps]

    def height(self, reward: float) -> float:
        """Returns where a reward lies in its range, from 0 to 1."""
        low, high = self.reward_range
        return (reward - low) / (high - low)

    def is_correct(self, row: JsonView) -> bool:
        """True if a completion is correct. With several rewards, the run recorded it."""
        if "correct" in row:
            return bool(row["correct"])
        return bool(is_correct(row["reward"], self.reward_range))

    def kind(self, group: Sequence[JsonView]) -> str:
        """Returns ALL_RIGHT or ALL_WRONG for a group without a signal, else "".

        ALL_WRONG are equal rewards of completions that are not correct.
        """
        scored = scored_rows(group)
        if len(scored) < 2 or len({row["reward"] for row in scored}) > 1:
            return ""
        return ALL_RIGHT if self.is_correct(scored[0]) else ALL_WRONG

    @cached_property
    def has_signal(self) -> bool:
        """True if any update had a gradient."""
        return any(self.values("grad_norm"))

    @cached_property
    def has_collapsed(self) -> bool:
        """True if the policy was clearly better before than it is now.

        Training and evaluation are not compared: their answers may differ.
        """
        last = self.last("reward")
        rewards = self.values("reward")[:FIRST_BATCHES]
        if last is not None and rewards:
            first = math.fsum(rewards) / len(rewards)
            if _has_fallen(self.height(first), self.height(last)):
                return True
        name = self.evaluations[-1].get("set") if self.evaluations else None
        shares = [
            summary["pass@1"]
            for summary in self.evaluations
            if summary.get("set") == name and summary.get("pass@1") is not None
        ]
        return bool(shares) and _has_fallen(max(shares), shares[-1])

    @cached_property
    def is_solved(self) -> bool:
        """True if the last rewards are near the largest one: no signal is lost then."""
        reward = self.last("reward")
        # A tenth of the range: policies that sample hardly get nearer.
        return reward is not None and self.height(reward) > 0.9


def _has_fallen(before: float, now: float) -> bool:
    """True if a share has halved, and lost five points, which is more than chance."""
    return before > 2 * now and before > now + 0.05


def window_of(settings: JsonView) -> int:
    """Returns the batches of a window: a cycle of weight syncs, the lag, at least the shortest."""
    sync_every = settings.get("schedule.sync_every") or 1
    lag = settings.get("schedule.constant_lag") or 0
    return max(SHORTEST_WINDOW, sync_every, lag)


def scored_rows(rows: Iterable[JsonView]) -> list[JsonView]:
    """Returns the completions that have a reward."""
    return [row for row in rows if row["outcome"] == OutcomeKind.SCORED]


def groups_of(rows: Sequence[JsonView]) -> list[list[JsonView]]:
    """Returns the completions by group, in order."""
    groups = groupby(rows, key=lambda row: (row["step"], row["prompt_id"], row["epoch"]))
    return [list(members) for _, members in groups]


def differ(some: Sequence[float], others: Sequence[float]) -> bool:
    """True if the means of two samples differ by more than chance."""
    error = math.sqrt(
        statistics.variance(some) / len(some) + statistics.variance(others) / len(others)
    )
    difference = math.fsum(some) / len(some) - math.fsum(others) / len(others)
    return abs(difference) > SIGMAS * error


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None without values."""
    return math.fsum(values) / len(values) if values else None


def load_record(run: Run | Path | str) -> RunRecord:
    """Reads what a run has recorded.

    Raises RunNotFoundError for a directory that is not a run, ValueError for damaged files.
    """
    run = reading.open_run(run)
    recorded = load_runs([run])[0]
    settings = flatten(recorded.settings)
    evaluations = [
        summary | {"records": reading.load_evaluation_records(run, summary["name"])}
        for summary in recorded.evaluations
    ]
    return RunRecord(
        settings=settings,
        metrics=recorded.metrics,
        rollouts=_load_rollouts(run, window_of(settings)),
        evaluations=evaluations,
        reward_range=reading.load_reward_range(run),
        path=run.path,
    )


def _load_rollouts(run: Run, window: int) -> list[JsonObject]:
    """Returns the rows of as many batches as MOST_COMPLETIONS allow, the ends among them."""
    batches = reading.rollout_batches(run)
    rows: list[JsonObject] = []
    if not batches:
        return rows
    with reading.opened_rollouts(run, batches[-1]) as file:
        completions = max(1, file.metadata.num_rows)
    stride = math.ceil(len(batches) * completions / MOST_COMPLETIONS)
    chosen = {*batches[::stride], *batches[:window], *batches[-window:]}
    for batch in sorted(chosen):
        with reading.opened_rollouts(run, batch) as file:
            names = [name for name in file.schema_arrow.names if _is_read(name)]
            rows += [shorten(row) for row in file.read(names).to_pylist()]
    return rows


def _is_read(column: str) -> bool:
    return column in COLUMNS or column == "correct" or column.startswith(REWARD)


def shorten(row: Mapping[str, Any]) -> JsonObject:
    """Returns the columns of a completion that detectors read, and its `length`."""
    short = {name: value for name, value in row.items() if _is_read(name)}
    short["length"] = sum(short.pop("loss_mask") or ())
    return short
