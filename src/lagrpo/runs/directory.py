"""The directory of a run, and everything that is put into it while it runs.

    runs/arithmetic-grpo-v10-i1-20261120-054512/
        config.toml                     the settings as resolved          environment.json   versions, machine, commit
        metrics.jsonl                   one line of numbers per batch     reward.png         the reward curve
        events.jsonl                    weight syncs and why, warnings
        rollouts/step-000120.parquet    one row per completion
        evaluations/NAME.json, .parquet the summary, and one row per prompt
        weights/final, weights/v000120  Hugging Face model directories

Files are the store: nothing else holds a run's state, and every file but the .jsonl appears whole, by a rename.
"""

from __future__ import annotations

import datetime
import json
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.runs.files import append_line, to_json, write_atomically, write_directory_atomically
from lagrpo.runs.rollouts import write_rollouts


class RunExistsError(FileExistsError):
    """The directory of a new run already has something in it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk. Cheap to make: it holds nothing but the path."""

    path: Path

    @staticmethod
    def create(
        root: Path, name: str | None, settings: Mapping[str, Any], settings_toml: str, environment: Mapping[str, Any]
    ) -> Run:
        """Makes root/name with config.toml (`settings_toml`) and environment.json. Without a name the run is called
        after its settings and the time: task-recipe-vV-iI-YYYYMMDD-HHMMSS.

        Raises RunExistsError if that directory is there and not empty, ValueError for a name that is not one.
        """
        path = _new_directory(root, default_name(settings)) if name is None else _named_directory(root, name)
        run = Run(path)
        write_atomically(path / "environment.json", json.dumps(json.loads(to_json(environment)), indent=2) + "\n")
        write_atomically(path / "config.toml", settings_toml)
        return run

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def record(self, metrics: Mapping[str, float | None]) -> None:
        """Appends the metrics of one batch to metrics.jsonl, flushed. NaN and infinities become null. Raises TypeError
        naming the key of a value that is no number; the place of such a thing is `record_event`."""
        for key, value in metrics.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
                raise TypeError(f"metrics.jsonl holds numbers and nulls, but {key} is {value!r}")
        append_line(self.metrics, to_json(metrics))

    def record_event(self, event: str, batch: int, **facts: Any) -> None:
        """Appends to events.jsonl what no number says: the event's name, its batch and facts."""
        append_line(self.events, to_json({"event": event, "batch": batch, **facts}))

    def record_rollouts(self, batch: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes rollouts/step-BATCH.parquet, with the rows of `rollouts.rollout_rows`."""
        target = self.path / "rollouts" / f"step-{batch:06d}.parquet"
        return write_atomically(target, lambda path: write_rollouts(path, rows))

    def record_evaluation(self, name: str, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Path:
        """Writes evaluations/NAME.parquet, one row per prompt, then evaluations/NAME.json. For the reward curve the
        summary has `batch` (0 before the first), `pass_at_1`, `pass_at_1_low` and `pass_at_1_high`."""

        def write(path: Path) -> None:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist([dict(record) for record in records]), path, compression="zstd")

        folder = self.path / "evaluations"
        write_atomically(folder / f"{name}.parquet", write)
        return write_atomically(folder / f"{name}.json", to_json({"name": name, **summary}) + "\n")

    def record_weights(self, write: Callable[[Path], None], version: int | None = None) -> Path:
        """Has `write` fill a directory with a Hugging Face model and puts it at weights/final, or weights/v000120 for a
        version, in place of what was there."""
        name = "final" if version is None else f"v{version:06d}"
        return write_directory_atomically(self.path / "weights" / name, write)


class RunFiles:
    """The observer of a run (see training/observers.py) that writes its files."""

    def __init__(self, run: Run) -> None:
        self.run, self.finished = run, 0

    def start(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Nothing: config.toml and environment.json were written when the directory was made."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def batch(self, step: Any, metrics: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Rollouts, the weight sync if there was one, and the line of metrics, which says that the batch is whole."""
        self.run.record_rollouts(step.b, rollouts)
        if step.reason:
            self.run.record_event("weight_sync", step.b, reason=step.reason, version=step.alpha)
        self.run.record(metrics)
        self.finished = step.b

    def evaluation(
        self, name: str, batch: int, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Its summary and its rows."""
        self.run.record_evaluation(name, summary, records)

    def note(self, text: str) -> None:
        """A warning."""
        self.run.record_event("warning", self.finished, text=text)

    def end(self, status: str, detail: str) -> None:
        """Nothing: everything is written."""


def default_name(settings: Mapping[str, Any], now: datetime.datetime | None = None) -> str:
    """A readable name from what tells runs apart, and the local time to the second.

    >>> settings = {"task": {"name": "arithmetic"}, "objective": {"recipe": "grpo"}, "schedule": {"v": 10, "i": 1}}
    >>> default_name(settings, datetime.datetime(2026, 11, 20, 5, 45, 12))
    'arithmetic-grpo-v10-i1-20261120-054512'
    """
    schedule = settings.get("schedule", {})
    parts = [
        _short_name(settings.get("task", {}).get("name")),
        _short_name(settings.get("objective", {}).get("recipe")),
    ]
    parts += [f"{knob}{schedule[knob]}" for knob in ("v", "i") if knob in schedule]
    parts.append((now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S"))
    return "-".join(part for part in parts if part)


def check_new(root: Path, name: str | None) -> None:
    """Raises what `Run.create` would, so that nothing heavy is loaded for a run that cannot be written: RunExistsError,
    ValueError for a name that is not one, OSError for a root that cannot be written."""
    if name is not None:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(
                f"run name {name!r} is not the name of a directory: leave out slashes, and set the root instead"
            )
        path = root / name
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunExistsError(f"the run {path} already exists and is not empty: choose another name, or remove it")
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, so there can be no runs in {root}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} cannot be written, so there can be no new run in {root}")


def _short_name(name: str | None) -> str:
    tail = (name or "").rpartition(":")[2]  # package.module:function is called by its function
    return "".join(character if character.isalnum() or character in "_." else "-" for character in tail)


def _named_directory(root: Path, name: str) -> Path:
    check_new(root, name)
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def _new_directory(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):  # runs that start within one second are numbered
        path = root / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise RunExistsError(f"a thousand runs called {root / name} exist already: give this one a name")
