"""The directory of a run, and everything that the run writes into it.

    runs/arithmetic-grpo-v10-i1-20261120-054512/
        config.toml                     the settings as resolved          environment.json   versions, machine, commit
        metrics.jsonl                   one line of numbers per step      reward.png         the reward curve
        events.jsonl                    weight syncs and why, warnings
        rollouts/step-000120.parquet    one row per completion
        evaluations/NAME.json, .parquet the summary, and one row per prompt
        weights/final, weights/v000120  Hugging Face model directories; weights/best, if the run asks for it

Every file but the .jsonl appears whole, by a rename.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lagrpo.runs import files
from lagrpo.runs.environment import write_environment
from lagrpo.runs.files import (
    TEMPORARY,
    to_json,
    write_atomically,
    write_directory_atomically,
    write_table,
)
from lagrpo.runs.rollouts import reward_columns, rollout_schema

BEST = "evaluation.json"  # in weights/best: which result made it the best
LOCK, HOLDER = ".lock", ".lock-holder.json"


class RunLockedError(OSError):
    """Another process is writing into the run."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk; it holds only the path."""

    path: Path

    @staticmethod
    def create(
        root: Path,
        name: str | None,
        settings: Mapping[str, Any],
        settings_toml: str,
        environment: Mapping[str, Any],
    ) -> Run:
        """Make root/name with config.toml (`settings_toml`) and environment.json; without a name, root/`default_name`.
        Raises as `check_new` does."""
        check_new(root, name)
        run = Run(root / name if name is not None else _new_directory(root, default_name(settings)))
        files.remove_leftovers(run.path)  # of a process that was killed at this point
        run.write_config(settings_toml)  # first: with it the directory is a run
        write_environment(run.path, environment)
        return run

    def write_config(self, settings_toml: str) -> None:
        """Write config.toml."""
        write_atomically(self.path / "config.toml", settings_toml)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def record(self, metrics: Mapping[str, float | None]) -> None:
        """Append the metrics of one step to metrics.jsonl. NaN and infinities become null."""
        _append_line(self.metrics, metrics)

    def record_event(self, event: str, step: int, **facts: Any) -> None:
        """Append an event to events.jsonl: its name, its step, and facts about it."""
        _append_line(self.events, {"event": event, "step": step, **facts})

    def record_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write rollouts/step-STEP.parquet, with the rows of `rollouts.rollout_rows`."""
        schema = rollout_schema([*reward_columns(rows[0])] if rows else ())
        return write_table(self.path / "rollouts" / f"step-{step:06d}.parquet", rows, schema)

    def record_evaluation(
        self, name: str, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
    ) -> Path:
        """Write evaluations/NAME.parquet, one row per prompt, then evaluations/NAME.json. The reward curve reads
        `step`, `pass@1`, `pass@1_low` and `pass@1_high` from the summary."""
        folder = self.path / "evaluations"
        write_table(folder / f"{name}.parquet", records)
        return write_atomically(folder / f"{name}.json", to_json({"name": name, **summary}) + "\n")

    def record_weights(self, write: Callable[[Path], None], version: int | None = None) -> Path:
        """Have `write` fill weights/final with a Hugging Face model, or weights/v000120 for a version."""
        name = "final" if version is None else f"v{version:06d}"
        return write_directory_atomically(self.path / "weights" / name, write)

    def record_best(self, write: Callable[[Path], None], found: Mapping[str, Any]) -> Path:
        """Likewise weights/best, with evaluation.json, which says why; and an event."""

        def fill(folder: Path) -> None:
            write(folder)
            (folder / BEST).write_text(to_json(found) + "\n", encoding="utf-8")

        path = write_directory_atomically(self.path / "weights" / "best", fill)
        self.record_event("best", **found)
        return path


def _append_line(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(line) + "\n")


def default_name(settings: Mapping[str, Any], now: datetime.datetime | None = None) -> str:
    """A readable name from what tells runs apart, and the local time to the second."""
    chosen = (
        settings.get(section, {}).get(key)
        for section, key in (("task", "name"), ("loss", "recipe"))
    )
    parts = [
        plain_name((name or "").rpartition(":")[2]) for name in chosen
    ]  # package.module:function: the function
    schedule = settings.get("schedule", {})
    lagged = schedule.get("constant_lag") is not None
    letters = {"lag": "constant_lag"} if lagged else {"v": "sync_every"}
    letters["i"] = "num_iterations"
    parts += [f"{letter}{schedule[key]}" for letter, key in letters.items() if key in schedule]
    parts.append(f"{now or datetime.datetime.now():%Y%m%d-%H%M%S}")
    return "-".join(filter(None, parts))


def plain_name(name: str) -> str:
    """A part of a file's name, at most 60 characters, made of any text."""
    return re.sub(r"[^\w.]", "-", name)[:60]


def check_new(root: Path, name: str | None) -> None:
    """Raise what `Run.create` would, before anything heavy is loaded: FileExistsError for a run that exists, ValueError
    for a name that is not a directory's name, OSError for a root that cannot be written."""
    if name is not None:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(
                f"run.name = {name!r} is not a directory name: put a path into run.output_dir"
            )
        path = root / name
        if path.exists() and not all(TEMPORARY.fullmatch(file.name) for file in path.iterdir()):
            raise FileExistsError(
                f"{path} already exists and is not empty: choose another run.name, or remove it"
            )
    check_writable(root)


def check_writable(directory: Path) -> None:
    """Raise OSError for a directory that cannot be written, or be made."""
    nearest = next(
        folder for folder in (directory, *directory.absolute().parents) if folder.exists()
    )
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise PermissionError(f"cannot write to {directory}: {nearest} is not a writable directory")


def _new_directory(root: Path, name: str, number: int = 1) -> Path:
    """Runs that start within one second are numbered."""
    path = root / (name if number == 1 else f"{name}-{number}")
    with suppress(FileExistsError):
        path.mkdir(parents=True)
        return path
    return _new_directory(root, name, number + 1)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the run at `path`: one process writes into it at a time, and the system gives the lock back when
    its process ends. Raises RunLockedError, which names the holder, at once if another process has it."""
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        holder = read_holder(path)
        who = (
            f": process {holder['pid']} on {holder['host']}, since {holder['since']}"
            if holder
            else ""
        )
        raise RunLockedError(
            f"another process is writing to {path}{who}; wait until it ends, or stop it"
        ) from error
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    write_atomically(
        path / HOLDER, to_json({"pid": os.getpid(), "host": platform.node(), "since": now})
    )
    try:
        yield
    finally:
        (path / HOLDER).unlink(missing_ok=True)
        lock.release()


def read_holder(path: Path) -> dict[str, Any]:
    """The `pid` and the `host` of the process that writes into the run at `path`, or was killed while it did, and
    `since` when; empty if there is none."""
    file = path / HOLDER
    return json.loads(file.read_bytes()) if file.exists() else {}
