"""A run read back: metrics, evaluations and rollouts, whether the run is finished, killed or still running."""

from __future__ import annotations

import glob
import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.runs.directory import Run
from lagrpo.runs.files import numbered
from lagrpo.runs.rollouts import SCHEMA_KEY, SCHEMA_NAME


class RunNotFoundError(FileNotFoundError):
    """The directory is not a run, or has not yet what was asked for."""


def open_run(run: Run | Path | str) -> Run:
    """The run in a directory. Raises RunNotFoundError, which names the runs nearby, if it is not one."""
    path = run.path if isinstance(run, Run) else Path(run).expanduser()
    if (path / "config.toml").is_file():
        return Run(path)
    wrong = (
        f"{path} is not a run: it has no config.toml"
        if path.exists()
        else f"there is no run at {path}"
    )
    folder = path if path.is_dir() else path.parent
    if runs := sorted(str(config.parent) for config in folder.glob("*/config.toml")):
        wrong += f". Runs in {folder}: {', '.join(runs[-5:])}"
    raise RunNotFoundError(wrong)


def load_reward_range(run: Run | Path | str) -> tuple[float, float]:
    """The smallest and the largest reward of the run's task, by its config.toml; by default 0 and 1."""
    path = open_run(run).path / "config.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    rewards = config.get("task", {}).get("rewards") or [{}]
    ends = [
        sorted(each.get("weight", 1.0) * end for end in each.get("range", (0.0, 1.0)))
        for each in rewards
    ]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)


def load_metrics(run: Run | Path | str) -> list[dict[str, Any]]:
    """The metrics of the steps so far, in order. A torn last line (the run was killed while it wrote, or is writing) is
    left out; a broken line anywhere else raises ValueError with its number."""
    return _load_lines(open_run(run).metrics)


def load_events(run: Run | Path | str) -> list[dict[str, Any]]:
    """The events of the run so far, in order: weight syncs with their reasons, warnings. Read as metrics are."""
    return _load_lines(open_run(run).events)


def _load_lines(path: Path) -> list[dict[str, Any]]:
    lines = (
        path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    )  # the last one is empty, or torn
    rows = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number},"
        rows.append(_parse(line, where, "remove the line"))
        if "step" not in rows[-1]:
            raise ValueError(f"{where} has no step: remove the line")
    return rows


def _parse(text: bytes, where: str, cure: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where} is not a JSON object ({error}): {cure}") from error


def load_evaluations(run: Run | Path | str) -> list[dict[str, Any]]:
    """The summaries of the run's evaluations, in the order of their steps. Raises ValueError for a damaged file."""
    paths = (open_run(run).path / "evaluations").glob("*.json")
    cure = "remove the evaluation's files"
    found = [_parse(path.read_bytes(), str(path), cure) | {"name": path.stem} for path in paths]
    return sorted(found, key=lambda summary: (summary.get("step") or 0, summary["name"]))


def load_evaluation_records(run: Run | Path | str, name: str) -> list[dict[str, Any]]:
    """One dict per prompt of an evaluation; empty if it has no Parquet file. Raises ValueError for a damaged one."""
    path = open_run(run).path / "evaluations" / f"{name}.parquet"
    if not path.exists():
        return []
    with _opened_table(path) as file:
        return file.read().to_pylist()


def rollout_batches(run: Run | Path | str) -> list[int]:
    """The steps whose rollouts are on disk, in order."""
    return sorted(numbered(open_run(run).path / "rollouts", "step-", ".parquet"))


def load_rollouts(
    run: Run | Path | str, steps: Iterable[int] | None = None, columns: list[str] | None = None
) -> list[dict[str, Any]]:
    """One dict per completion of these steps (default: all), in their order; `answer` is still JSON text. Raises
    RunNotFoundError for a step that is not on disk, ValueError for a damaged file or one of another schema."""
    run, rows = open_run(run), list[dict[str, Any]]()
    there = rollout_batches(run)
    for step in there if steps is None else steps:
        if step not in there:
            span = f"steps {there[0]} to {there[-1]}" if there else "none"
            raise RunNotFoundError(f"{run.path} has no rollouts of step {step}; it has {span}")
        with opened_rollouts(run, step) as file:
            rows += file.read(columns).to_pylist()
    return rows


@contextmanager
def opened_rollouts(run: Run | Path | str, step: int) -> Iterator[Any]:
    """The Parquet file of one step's rollouts, to be read by columns. Raises ValueError as `load_rollouts` does."""
    path = open_run(run).path / "rollouts" / f"step-{step:06d}.parquet"
    with _opened_table(path) as file:
        schema = (
            (file.schema_arrow.metadata or {})
            .get(SCHEMA_KEY, b"no schema")
            .decode(errors="replace")
        )
        if schema != SCHEMA_NAME:
            raise ValueError(
                f"{path} is written in {one_line(schema)}; this version of lagrpo reads {SCHEMA_NAME}"
            )
        yield file


@contextmanager
def _opened_table(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a whole Parquet file ({one_line(str(error))}): restore or remove it"
        ) from error


def completion_files(data: Iterable[str | Path]) -> list[Path]:
    """The files of completions that are named one by one, by directories of runs, or by globs of both, each once, in
    that order. Raises FileNotFoundError for a name without files."""
    files: dict[Path, Path] = {}
    for path in (Path(name).expanduser() for name in data):
        # The name of an existing directory is no pattern, even if it has brackets.
        folder = glob.escape(str(path.parent)) if path.parent.is_dir() else str(path.parent)
        pattern = os.path.join(folder, path.name)
        matches = [path] if path.exists() else map(Path, sorted(glob.glob(pattern, recursive=True)))
        found = [
            f
            for m in matches
            for f in (sorted(m.glob("rollouts/step-*.parquet")) if m.is_dir() else [m])
        ]
        if not found:
            raise FileNotFoundError(
                f"{path} is neither a file of completions nor a run with rollouts"
            )
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())
