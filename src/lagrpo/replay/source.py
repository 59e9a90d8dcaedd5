"""A run's files as a replay reads them: settings, recipe, environment, rows, metrics, evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lagrpo.objective.compose import Recipe
from lagrpo.objective.recipes import resolve
from lagrpo.replay.findings import UnreadableError
from lagrpo.runs import RunNotFoundError, load_events, load_metrics, load_rollouts
from lagrpo.runs.reading import open_run, rollout_batches
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings

OWN_TASK = "# The task was the caller's own object"
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Row:
    """One completion as recorded: its columns, and where they stand. `group` numbers the groups of its batch."""

    columns: dict[str, Any]
    file: str
    number: int
    group: int

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    @property
    def length(self) -> int:
        """How many of its tokens were sampled."""
        return sum(self["sampled"])

    def sampled(self, column: str) -> list[Any]:
        """The entries of a column of the tokens that were sampled."""
        return [value for value, own in zip(self[column], self["sampled"], strict=True) if own]

    @property
    def generated(self) -> bool:
        """Whether the sampler generated it: it is not from a file and did not fail."""
        return self["source"] == "sampler" and self["outcome"] != "failed"

    @property
    def scored(self) -> bool:
        return self["outcome"] == "scored"

    @property
    def place(self) -> str:
        return f"row {self.number} (prompt {self['prompt_key']}, completion {self['completion']})"

    @property
    def address(self) -> tuple[int, int, int, int]:
        """Where its random numbers come from, within the run's seed and the purpose "sample"."""
        return self["batch"], self["epoch"], self["prompt_key"], self["completion"]


@dataclass(frozen=True, slots=True)
class Source:
    """A run on disk."""

    path: Path
    settings: Settings
    recipe: Recipe
    environment: dict[str, Any]
    lines: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    metrics: dict[int, tuple[int, dict[str, Any]]]
    """The same by batch, each with its line number."""
    events: list[dict[str, Any]]
    batches: dict[int, list[Row]]
    own_task: bool
    """Whether the caller gave the run a task of its own."""

    @property
    def dtype(self) -> str:
        """The dtype in which the run sampled and learned."""
        return self.environment["dtype"]

    @property
    def exact(self) -> bool:
        """Whether learner and sampler were found to agree to the bit."""
        return (self.environment.get("parity") or {}).get("grade") == "exact"

    @property
    def fresh(self) -> int:
        """How many prompts of a batch are not from a file."""
        offline, count = self.settings.offline, self.settings.schedule.prompts
        return count if offline.data is None else count - max(1, round(offline.share * count))

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches.values() for row in rows]

    @staticmethod
    def open(run_dir: Path | str) -> Source:
        """Read a run. Raises RunNotFoundError for no run or no finished batch, UnreadableError for a broken file."""
        path = open_run(run_dir).path
        try:
            settings = load_settings(path / "config.toml")
            recipe = resolve(settings.objective.recipe, settings.objective.overrides)
            environment = _environment(path / "environment.json")
            lines, events = load_metrics(path), load_events(path)
            metrics = {line["batch"]: (n, line) for n, line in enumerate(lines, start=1)}
            _require(path / "metrics.jsonl", lines)
            batches = {batch: _rows(path, batch) for batch in rollout_batches(path)}
        except RunNotFoundError:
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UnreadableError(f"{path} cannot be replayed: {error}") from error
        if not batches:
            raise RunNotFoundError(f"{path} has no rollouts yet: its first batch is not finished")
        own = (path / "config.toml").read_text(encoding="utf-8").startswith(OWN_TASK)
        return Source(path, settings, recipe, environment, lines, metrics, events, batches, own)


def groups_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of each group."""
    for _, members in groupby(rows, key=lambda row: (row["batch"], row.group)):
        yield list(members)


def scored_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The scored rows of each group that has some."""
    return groups_of(row for row in rows if row.scored)


def _environment(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; it says in which dtype the run computed")
    environment = json.loads(path.read_bytes())
    if not isinstance(environment, dict) or environment.get("dtype") not in DTYPES:
        raise ValueError(f"{path} does not say in which dtype the run computed ({' or '.join(DTYPES)})")
    return environment


def _require(path: Path, lines: list[dict[str, Any]]) -> None:
    """Raise ValueError where a line lacks a number that every check needs."""
    for number, line in enumerate(lines, start=1):
        for name in ("version", "synced"):
            if not isinstance(line.get(name), int):
                raise ValueError(f"{path}, line {number}: {name} is {line.get(name)!r}, not a number")


def _rows(run: Path, batch: int) -> list[Row]:
    """The rows of a batch. A group begins where the completions start at 0 again, or another prompt comes."""
    rows: list[Row] = []
    group, before = -1, None
    for number, columns in enumerate(load_rollouts(run, [batch])):
        key = (columns["source"], columns["epoch"], columns["prompt_key"])
        group += key != before or columns["completion"] == 0
        rows.append(Row(columns, f"rollouts/step-{batch:06d}.parquet", number, group))
        before = key
    return rows
