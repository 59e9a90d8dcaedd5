"""What a run's files have and a tracker lacks, in order.

The files are the queue between a run and its trackers. A run never waits for a tracker and never drops a point because
one is slow; what a tracker missed, it gets when it can take it, or when the run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import load_evaluations, load_rollouts
from lagrpo.trackers.standing import Standing, moment
from lagrpo.trackers.tracker import Row, Tracker, without_secrets

COLUMNS = (
    *("prompt_key", "completion", "prompt_text", "text", "reward", "outcome", "reason"),
    *("advantage", "masked", "lag", "finished"),
)
"""What trackers get of a completion: columns of the rollouts."""


@dataclass(frozen=True, slots=True)
class Point:
    """Something that a tracker lacks. `begin` notes in its standing that it has it, `send` sends it."""

    batch: int
    begin: Callable[[], None]
    send: Callable[[], None]


class Follower:
    """Follows the files of a run for one tracker. `completions`: how many of each batch it gets."""

    def __init__(self, run: Path, tracker: Tracker, standing: Standing, completions: int) -> None:
        self.run, self.tracker, self.standing, self.count = Run(run), tracker, standing, completions
        self._read = 0  # bytes of metrics.jsonl
        self._seen: set[Path] = set()  # summaries of evaluations

    def missing(self) -> Iterator[Point]:
        """What has come since the last call: metrics, completions and evaluations, batch by batch."""
        evaluations = self._evaluations()
        for metrics in self._metrics():
            batch = metrics["batch"]
            yield from self._made_before(evaluations, batch)
            yield self._numbers(metrics)
            if self.count:
                yield Point(batch, _nothing, lambda batch=batch: self._send_completions(batch))
        yield from self._made_before(evaluations, None)

    def _metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl that were not read, of batches that the tracker lacks."""
        if not self.run.metrics.exists():
            return []
        with self.run.metrics.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [line for line in map(json.loads, whole.splitlines()) if line["batch"] > self.standing.batch]

    def _numbers(self, metrics: Row) -> Point:
        batch = metrics["batch"]

        def begin() -> None:
            self.standing.batch = batch
            self.standing.write()

        return Point(batch, begin, lambda: self.tracker.numbers(batch, numbers(metrics)))

    def _evaluations(self) -> list[dict[str, Any]]:
        """The summaries that the tracker lacks, by batch."""
        there = set((self.run.path / "evaluations").glob("*.json"))
        if there <= self._seen:
            return []
        self._seen |= there
        has = self.standing.evaluations
        return [e for e in load_evaluations(self.run) if moment(e["name"], e.get("batch") or 0) not in has]

    def _made_before(self, evaluations: list[dict[str, Any]], batch: int | None) -> Iterator[Point]:
        """Take those that were made before this batch, or all."""
        while evaluations and (batch is None or (evaluations[0].get("batch") or 0) < batch):
            yield self._evaluation(evaluations.pop(0))

    def _evaluation(self, summary: Row) -> Point:
        batch = summary.get("batch") or 0

        def begin() -> None:
            self.standing.evaluations.add(moment(summary["name"], batch))
            self.standing.write()

        place = f"evaluation/{summary['set']}." if summary.get("set") else "evaluation/"
        values = {f"{place}{name}": n for name, n in numbers(summary).items() if name != "batch"}
        return Point(batch, begin, lambda: self.tracker.numbers(batch, values))

    def _send_completions(self, batch: int) -> None:
        rows = load_rollouts(self.run, [batch], list(COLUMNS))
        self.tracker.completions(batch, without_secrets(spread(rows, self.count)))


def _nothing() -> None: ...


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics; what has no value, and text, is left out.

    >>> numbers({"batch": 3, "loss": None, "name": "after", "synced": True})
    {'batch': 3, 'synced': True}
    """
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most so many rows, evenly over all.

    >>> spread([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 2, 4]
    """
    count = min(count, len(rows))
    return [rows[n * len(rows) // count] for n in range(count)]
