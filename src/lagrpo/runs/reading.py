"""Reads the files of a run: metrics, evaluations and rollouts. The run may still be running."""

from __future__ import annotations

import glob
import math
import os
import platform
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line, parse_json_object
from lagrpo.logs import redact
from lagrpo.runs.directory import Run, read_holder
from lagrpo.runs.files import numbered
from lagrpo.runs.rollouts import SCHEMA_KEY, SCHEMA_NAME
from lagrpo.types import JsonObject


class RunNotFoundError(FileNotFoundError):
    """The directory is not a run, or does not have the wanted files yet."""


def open_run(run: Run | Path | str) -> Run:
    """Returns the run in a directory.

    Raises RunNotFoundError, which names the runs nearby, if the directory is not a run.
    """
    path = run.path if isinstance(run, Run) else Path(run).expanduser()
    if (path / "config.toml").is_file():
        return Run(path)
    problem = f"there is no run at {path}"
    if path.exists():
        problem = f"{path} is not a run: it has no config.toml"
    folder = path if path.is_dir() else path.parent
    nearby = sorted(str(config.parent) for config in folder.glob("*/config.toml"))
    if nearby:
        problem += f". Runs in {folder}: {', '.join(nearby[-5:])}"
    raise RunNotFoundError(problem)


def load_config(run: Run | Path | str) -> JsonObject:
    """Returns the settings of the run by its config.toml: a table for each section.

    Raises ValueError for a file that is not TOML.
    """
    path = open_run(run).path / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def load_reward_range(run: Run | Path | str) -> tuple[float, float]:
    """Returns the smallest and the largest reward of the run's task, by its config.toml.

    The default is 0 and 1. Raises ValueError for a file that is not TOML.
    """
    config = load_config(run)
    lows = []
    highs = []
    for reward in config.get("task", {}).get("rewards") or [{}]:
        weight = reward.get("weight", 1.0)
        # A negative weight swaps the ends.
        low, high = sorted(weight * end for end in reward.get("range", (0.0, 1.0)))
        lows.append(low)
        highs.append(high)
    return math.fsum(lows), math.fsum(highs)


def load_metrics(run: Run | Path | str) -> list[JsonObject]:
    """Returns the metrics of the steps so far, in order.

    A torn last line is left out: the run is writing it, or was killed while it did. Raises
    ValueError for any other broken line, with its number.
    """
    return _load_lines(open_run(run).metrics)


def load_events(run: Run | Path | str) -> list[JsonObject]:
    """Returns the events of the run so far, in order: weight syncs with their reasons, warnings.

    Broken lines are treated as by `load_metrics`.
    """
    return _load_lines(open_run(run).events)


def load_status(run: Run | Path | str) -> tuple[str, str]:
    """Returns one word (finished, interrupted, failed, killed, running, unknown) and a detail."""
    run = open_run(run)
    holder = read_holder(run.path)
    if holder:
        writer = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        # Processes of another machine are not visible here.
        if holder["host"] != platform.node():
            return "unknown", f"running or killed: {writer}"
        if Path(f"/proc/{holder['pid']}").exists():
            return "running", writer
        return "killed", f"it was {writer}"
    marks = [event for event in load_events(run) if event.get("event") in ("end", "resumed")]
    if marks and marks[-1]["event"] == "end":
        end = marks[-1]
        return str(end.get("status")), redact(str(end.get("detail")))
    return "unknown", "no end recorded: the run was killed, or is just starting"


def _load_lines(path: Path) -> list[JsonObject]:
    if not path.exists():
        return []
    # What follows the last newline is empty or torn.
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number},"
        row = _parse(line, where, "remove the line")
        if "step" not in row:
            raise ValueError(f"{where} has no step: remove the line")
        rows.append(row)
    return rows


def _parse(text: bytes, where: str, advice: str) -> JsonObject:
    """Reads a JSON object. Raises ValueError with `where` and `advice` in its message."""
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise ValueError(f"{where} is not a JSON object ({error}): {advice}") from error


def load_evaluations(run: Run | Path | str) -> list[JsonObject]:
    """Returns the summaries of the run's evaluations, in the order of their steps.

    Each has the `name` of its file. Raises ValueError for a damaged file.
    """
    summaries = []
    for path in (open_run(run).path / "evaluations").glob("*.json"):
        summary = _parse(path.read_bytes(), str(path), "remove the evaluation's files")
        summary["name"] = path.stem
        summaries.append(summary)
    return sorted(summaries, key=lambda summary: (summary.get("step") or 0, summary["name"]))


def load_evaluation_records(run: Run | Path | str, name: str) -> list[JsonObject]:
    """Returns one dict per prompt of an evaluation; empty if it has no Parquet file.

    Raises ValueError for a damaged file.
    """
    path = open_run(run).path / "evaluations" / f"{name}.parquet"
    if not path.exists():
        return []
    with _opened_table(path) as file:
        return file.read().to_pylist()


def rollout_batches(run: Run | Path | str) -> list[int]:
    """Returns the steps whose rollouts are on disk, in order."""
    return sorted(numbered(open_run(run).path / "rollouts", "step-", ".parquet"))


def last_batch_with_signal(run: Run | Path | str) -> int | None:
    """Returns the last batch on disk in which a completion has an advantage other than 0.

    Returns None if no batch has one. Raises ValueError as `load_rollouts` does.
    """
    for step in reversed(rollout_batches(run)):
        if any(row["advantage"] for row in load_rollouts(run, [step], ["advantage"])):
            return step
    return None


def load_rollouts(
    run: Run | Path | str, steps: Iterable[int] | None = None, columns: list[str] | None = None
) -> list[JsonObject]:
    """Returns one dict per completion of these steps (default: all), in their order.

    `answer` is still JSON text. Raises RunNotFoundError for a step that is not on disk, ValueError
    for a damaged file or one of another schema.
    """
    run = open_run(run)
    steps_on_disk = rollout_batches(run)
    rows: list[JsonObject] = []
    for step in steps_on_disk if steps is None else steps:
        if step not in steps_on_disk:
            available = "none"
            if steps_on_disk:
                available = f"steps {steps_on_disk[0]} to {steps_on_disk[-1]}"
            raise RunNotFoundError(f"{run.path} has no rollouts of step {step}; it has {available}")
        with opened_rollouts(run, step) as file:
            rows += file.read(columns).to_pylist()
    return rows


@contextmanager
def opened_rollouts(run: Run | Path | str, step: int) -> Iterator[Any]:
    """Opens the Parquet file of one step's rollouts, whose columns can be read one by one.

    Raises ValueError as `load_rollouts` does.
    """
    path = open_run(run).path / "rollouts" / f"step-{step:06d}.parquet"
    with _opened_table(path) as file:
        metadata = file.schema_arrow.metadata or {}
        schema = metadata.get(SCHEMA_KEY, b"no schema").decode(errors="replace")
        if schema != SCHEMA_NAME:
            problem = f"{path} is written in {one_line(schema)}"
            raise ValueError(f"{problem}; this version of lagrpo reads {SCHEMA_NAME}")
        yield file


@contextmanager
def _opened_table(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        problem = f"{path} is not a whole Parquet file ({one_line(str(error))})"
        raise ValueError(f"{problem}: restore or remove it") from error


def completion_files(data: Iterable[str | Path]) -> list[Path]:
    """Returns the files of completions that `data` names, each once, in that order.

    An entry is a file, the directory of a run, or a glob of either. Raises FileNotFoundError for an
    entry without files.
    """
    files: dict[Path, Path] = {}  # by their real locations
    for entry in data:
        path = Path(entry).expanduser()
        files_of_entry: list[Path] = []
        for match in _matches(path):
            if match.is_dir():
                files_of_entry += sorted(match.glob("rollouts/step-*.parquet"))
            else:
                files_of_entry.append(match)
        if not files_of_entry:
            problem = "is neither a file of completions nor a run with rollouts"
            raise FileNotFoundError(f"{path} {problem}")
        for file in files_of_entry:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _matches(path: Path) -> list[Path]:
    """Returns the path itself if it exists, else what it matches as a glob, sorted."""
    if path.exists():
        return [path]
    # An existing directory is meant literally, even if its name has brackets.
    folder = glob.escape(str(path.parent)) if path.parent.is_dir() else str(path.parent)
    pattern = os.path.join(folder, path.name)
    return [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
