"""Records of finished runs: a line of JSON each, in a file per table and task, as they finished."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from .control import Control
from .methods import Method, Table

RESULTS = Path(__file__).parent / "results"


class RunKey(NamedTuple):
    """The key of a run: the benchmark has one run per combination."""

    table: Table
    task: str
    method: str
    schedule: str
    lag: int
    learning_rate: float
    seed: int
    control: Control = "fixed"


@dataclass(frozen=True, slots=True)
class Record:
    """A finished run."""

    table: Table
    task: str
    method: str
    recipe: str
    overrides: dict[str, Any]
    max_grad_norm: float | None
    scale_lr_by_ess: bool
    schedule: str
    lag: int
    learning_rate: float
    seed: int
    updates: int
    start: float
    """score of the starting point"""
    curve: list[float]
    """mean scores of the policy's own samples in equal parts of the run"""
    diagnostics: dict[str, float]
    """see train.Diagnostics"""
    seconds: float
    """time of a core"""
    commit: str
    cpu: str
    torch: str
    control: Control = "fixed"

    @property
    def key(self) -> RunKey:
        return RunKey(
            self.table,
            self.task,
            self.method,
            self.schedule,
            self.lag,
            self.learning_rate,
            self.seed,
            self.control,
        )

    def gain(self, updates: int) -> float:
        """The area under the curve: mean score of the first updates, above the starting point's."""
        return fmean(self._first_points(updates)) - self.start

    def dies(self, updates: int) -> bool:
        """True if the first updates end below the start, or below 80 % of their own peak.

        The end and the peak are means over a tenth of these updates.
        """
        tenths = self._means_of_a_tenth(updates)
        return tenths[-1] < self.start or tenths[-1] < 0.8 * max(tenths)

    def final_score(self, updates: int) -> float:
        """The mean score of the last tenth of the first updates."""
        return self._means_of_a_tenth(updates)[-1]

    def _means_of_a_tenth(self, updates: int) -> list[float]:
        """The moving mean over a tenth of these updates."""
        curve = self._first_points(updates)
        tenth = max(1, round(len(curve) / 10))
        ends = range(tenth, len(curve) + 1)
        return [fmean(curve[end - tenth : end]) for end in ends]

    def _first_points(self, updates: int) -> list[float]:
        # Whatever the length of a run, a point of its curve stands for the same share of it.
        return self.curve[: round(len(self.curve) * updates / self.updates)]

    def was_made_by(self, method: Method) -> bool:
        """True if the method still is what it was when the run was made."""
        return (self.recipe, self.overrides, self.max_grad_norm, self.scale_lr_by_ess) == (
            method.recipe_name,
            method.overrides,
            method.max_grad_norm,
            method.scale_lr_by_ess,
        )


def append_records(directory: Path, records: Iterable[Record]) -> None:
    """Append each record to the file of its table and task.

    A line that a killed process left unfinished is ended first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for record in records:
        path = directory / f"{record.table}-{record.task}.jsonl"
        is_unfinished = path.exists() and not path.read_bytes().endswith(b"\n")
        with open(path, "a", encoding="utf-8") as file:
            if is_unfinished:
                file.write("\n")
            file.write(json.dumps(asdict(record)) + "\n")


def load_records(
    directory: Path, methods: Mapping[Table, Mapping[str, Method]]
) -> dict[RunKey, Record]:
    """The records in a directory.

    Without unfinished lines, and without runs of methods that have changed since.
    """
    records = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = Record(**json.loads(line))
            # The line that a killed process left unfinished.
            except json.JSONDecodeError:
                continue
            method = methods[record.table].get(record.method)
            if method is not None and record.was_made_by(method):
                records[record.key] = record
    return records
