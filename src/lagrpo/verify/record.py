"""A run's files in memory, and the report: differences, how much was compared, and what could not be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lagrpo.errors import as_settings_error, one_line
from lagrpo.runs import reading
from lagrpo.runs.environment import FILE, read_environment
from lagrpo.runs.rollouts import rollout_schema
from lagrpo.settings.load import load_settings
from lagrpo.settings.own_loss import load_recipe_of_run

Row = dict[str, Any]
"""A completion as recorded, with `where` it stands and `group`, its step and the number of its group there."""


class Difference(NamedTuple):
    """A value in a run's files that its replay contradicts."""

    check: str
    what: str
    where: str
    expected: Any
    found: Any

    def __str__(self) -> str:
        found, expected = (one_line(repr(value), 120) for value in (self.found, self.expected))
        return f"{self.where}: {self.what} is {found}, the replay gives {expected}"


@dataclass(slots=True)
class Report:
    """`compared` and `undecided` count values by check, `skipped` what could not be checked by reason."""

    run: str
    differences: list[Difference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def compare(
        self,
        check: str,
        where: str,
        expected: Mapping[str, Any],
        found: Mapping[str, Any],
        near: float = 0.0,
    ) -> None:
        """Note the values, by their names, that are neither equal nor numbers within `near` of each other."""
        for name, value in expected.items():
            self.compared[check] += 1
            numbers = isinstance(value, int | float) and isinstance(found.get(name), int | float)
            if value != found.get(name) and not (numbers and abs(value - found[name]) <= near):
                self.differences.append(Difference(check, name, where, value, found.get(name)))

    def skip(self, what: str, count: int = 1) -> None:
        """Note what could not be checked, and why."""
        self.skipped += Counter({what: count})


class RecordedRun:
    """A run on disk: rows by step (`steps`), the `lines` of metrics.jsonl and by step with their numbers (`metrics`),
    events, evaluations and their `records`. Raises RunNotFoundError for no run, SettingsError for a broken file."""

    def __init__(self, run: Path | str) -> None:
        self.path = path = reading.open_run(run).path
        with as_settings_error(f"{path} cannot be replayed", KeyError, TypeError):
            self.settings, self.environment = (
                load_settings(path / "config.toml"),
                read_environment(path),
            )
            self.recipe = None  # a loss from Python that no module has
            if "loss" not in self.environment.get("arguments", []):
                self.recipe = load_recipe_of_run(self.settings, path)
            for name in ("started", "dtype"):
                if name not in self.environment:
                    raise ValueError(f"{path / FILE} is missing or has no {name!r}: restore it")
            self.own_task = "# The task was the caller's own object" in (
                path / "config.toml"
            ).read_text(encoding="utf-8")
            self.lines, self.events = reading.load_metrics(path), reading.load_events(path)
            self.metrics = {line["step"]: (n, line) for n, line in enumerate(self.lines, start=1)}
            self.evaluations = reading.load_evaluations(path)
            self.records = {
                e["name"]: reading.load_evaluation_records(path, e["name"])
                for e in self.evaluations
            }
            self.steps = {
                step: list(_read_rows(path, step)) for step in reading.rollout_batches(path)
            }
            if not self.steps:
                raise ValueError("it has no rollouts yet: its first batch is not finished")
        self.rows = [row for rows in self.steps.values() for row in rows]
        self.generated = [
            row for row in self.rows if row["source"] == "sampler" and row["outcome"] != "failed"
        ]
        offline, count = self.settings.offline, self.settings.schedule.prompts_per_batch
        self.fresh_prompts = count - (
            max(1, round(offline.fraction * count)) if offline.data else 0
        )
        self.report = Report(str(path))


def _read_rows(path: Path, step: int) -> Iterator[Row]:
    """The rows of a step. A group begins where completions start at 0 again, or another prompt comes."""
    group, before = -1, None
    columns = rollout_schema().names
    for number, row in enumerate(reading.load_rollouts(path, [step])):
        prompt = row["source"], row["epoch"], row["prompt_id"]
        group += prompt != before or row["sample_index"] == 0
        if missing := [name for name in columns if name not in row]:
            file = path / "rollouts" / f"step-{step:06d}.parquet"
            raise ValueError(f"{file} has no column {missing[0]!r}: restore the file")
        where = f"row {number} (prompt {row['prompt_id']}, completion {row['sample_index']})"
        yield row | {"where": f"rollouts/step-{step:06d}.parquet, {where}", "group": (step, group)}
        before = prompt


def groups_of(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each group."""
    return [list(members) for _, members in groupby(rows, key=lambda row: row["group"])]


def sampled(row: Row, column: str) -> list[Any]:
    """The values of a token column for the tokens that a policy sampled."""
    return [value for value, own in zip(row[column], row["loss_mask"], strict=True) if own]
