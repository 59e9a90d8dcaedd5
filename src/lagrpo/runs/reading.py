"""A run read back: metrics, evaluations and rollouts, whether the run is finished, killed or still going."""

from __future__ import annotations

import glob
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.errors import one_line
from lagrpo.runs.directory import Run
from lagrpo.runs.rollouts import SCHEMA_KEY, SCHEMA_NAME, rollout_schema
from lagrpo.untrusted import opened, parse_json, read_text

if TYPE_CHECKING:
    import pyarrow.parquet


class RunNotFoundError(FileNotFoundError):
    """There is no run there, or it has not yet written what was asked for."""


def open_run(run: Run | Path | str) -> Run:
    """The run in a directory. Raises RunNotFoundError, which names the runs nearby, when there is none."""
    path = run.path if isinstance(run, Run) else Path(run).expanduser()
    if (path / "config.toml").is_file():
        return Run(path)
    if path.is_dir():
        wrong, folder = f"{path} is not a run: it has no config.toml", path
    else:
        wrong = f"{path} is a file; a run is a directory" if path.exists() else f"there is no run at {path}"
        folder = path.parent
    if runs := sorted(str(config.parent) for config in folder.glob("*/config.toml")):
        wrong += f". Runs in {folder}: {', '.join(runs[-5:])}" + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
    raise RunNotFoundError(wrong)


OWN = (
    *("config.toml", "environment.json", "metrics.jsonl", "events.jsonl", "reward.png", ".lock", ".lock-holder.json"),
    *("rollouts", "evaluations", "weights", "checkpoints", "checkpoints/weights", "tensorboard", "wandb"),
)
"""What a run writes into, or removes something from."""


def check_no_links(run: Path) -> None:
    """Raise ValueError for a run whose own files or directories are symbolic links: it would write and remove what lies
    outside of its directory."""
    if linked := next((run / name for name in OWN if (run / name).is_symlink()), None):
        raise ValueError(
            f"{linked} is a symbolic link, so the run would write outside of its directory; put there what it points to"
        )


def load_reward_range(run: Run | Path | str) -> tuple[float, float]:
    """The least and the greatest reward of the run's task, by its config.toml; 0 and 1 where that does not say. Raises
    ValueError for a config.toml that is none."""
    path = open_run(run).path / "config.toml"
    try:
        config = tomllib.loads(read_text(path))
        low, high = config.get("task", {}).get("reward_range", (0.0, 1.0))
        return float(low), float(high)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} does not say the range of rewards: {error}") from error


def load_metrics(run: Run | Path | str) -> list[dict[str, Any]]:
    """The metrics of the batches so far, in order; empty before the first. A torn last line (the run was killed
    while it wrote, or is writing now) is left out; a broken line anywhere else raises ValueError with its number."""
    return _load_lines(open_run(run).metrics)


def load_events(run: Run | Path | str) -> list[dict[str, Any]]:
    """The events of the run so far, in order: weight syncs with their reasons, and warnings. Read as metrics are."""
    return _load_lines(open_run(run).events)


def load_until(path: Path, length: int) -> list[dict[str, Any]]:
    """The objects in the first `length` bytes of metrics.jsonl or events.jsonl. Raises ValueError where these are not
    there, do not end with a line, or have a broken one."""
    found = path.stat().st_size if path.exists() else 0
    if found < length:
        raise ValueError(f"{path} has {found} bytes, but the checkpoint was made after {length} of them")
    if not length:
        return []
    with opened(path) as file:
        if not (text := file.read(length)).endswith(b"\n"):
            raise ValueError(f"{path} has no end of a line after {length} bytes, where the checkpoint was made")
    return _load_objects(path, text)


def _load_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with opened(path) as file:
        return _load_objects(path, file.read())


def _load_objects(path: Path, text: bytes) -> list[dict[str, Any]]:
    lines = text.split(b"\n")
    whole = enumerate(lines[:-1], start=1)  # after the last newline: nothing, or a torn line
    return [_load_object(line, f"{path}, line {number}") for number, line in whole]


def _load_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        found = parse_json(text.decode())
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place}: this is a {type(found).__name__}, not an object")
    return found


def load_evaluations(run: Run | Path | str) -> list[dict[str, Any]]:
    """The summaries of the run's evaluations, in the order of the batch they were made at. Raises ValueError for a file
    that is no summary."""
    paths = sorted((open_run(run).path / "evaluations").glob("*.json"))
    summaries = [_load_summary(path) for path in paths]
    return sorted(summaries, key=lambda summary: (summary.get("batch") or 0, summary["name"]))


def load_evaluation_records(run: Run | Path | str, name: str) -> list[dict[str, Any]]:
    """One dict per prompt of the evaluation of that name; empty where it has no Parquet file. Raises ValueError for a
    damaged one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = open_run(run).path / "evaluations" / f"{name}.parquet"
    if not path.exists():
        return []
    try:
        with opened(path) as file:
            return pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {one_line(str(error))}") from error


def _load_summary(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        summary = _load_object(file.read(), str(path))
    if not isinstance(summary.get("name"), str) or not isinstance(summary.get("batch", 0), int | None):
        raise ValueError(f"{path} is no summary of an evaluation, which has a name and a batch")
    if summary["name"] != path.stem:
        raise ValueError(f"{path} is the summary of another evaluation, {summary['name']!r:.80}")
    return summary


def rollout_batches(run: Run | Path | str) -> list[int]:
    """The batches whose rollouts are on disk, in order."""
    names = (re.fullmatch(r"step-(\d+)\.parquet", path.name) for path in (open_run(run).path / "rollouts").glob("*"))
    return sorted(int(name[1]) for name in names if name)


def completion_files(data: Iterable[str | Path]) -> list[Path]:
    """The files of completions that are named one by one, by directories of runs, and by globs of both, each once, in
    that order. Of what a glob matches, directories that are no run with batches are left out. Raises FileNotFoundError
    where nothing is there."""
    files: dict[Path, Path] = {}
    for name in data:
        path = Path(name).expanduser()
        if path.is_dir():
            found = _files_at(path)
            missing = f"{path} is a directory without rollouts/step-*.parquet, so it is no run with batches"
        elif path.is_file() or not glob.has_magic(str(path)):
            found, missing = _files_at(path), f"{path}: no such file of completions"
        else:
            found = [file for match in sorted(glob.glob(str(path), recursive=True)) for file in _files_at(Path(match))]
            missing = f"no file or run with batches matches {path}"
        if not found:
            raise FileNotFoundError(missing)
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _files_at(path: Path) -> list[Path]:
    """The rollouts of a run's directory, or the file itself; none where it is neither."""
    return sorted(path.glob("rollouts/step-*.parquet")) if path.is_dir() else [path] if path.is_file() else []


def load_rollouts(
    run: Run | Path | str, batches: Iterable[int] | None = None, columns: list[str] | None = None
) -> list[dict[str, Any]]:
    """One dict per completion of these batches (default: all), in their order; `gold` is still JSON text. Raises
    RunNotFoundError for a batch that is not on disk, ValueError for a file of another schema."""
    run = open_run(run)
    there = rollout_batches(run)
    rows: list[dict[str, Any]] = []
    for batch in there if batches is None else batches:
        if batch not in there:
            span = f"batches {there[0]} to {there[-1]}" if there else "no batch at all"
            raise RunNotFoundError(f"{run.path} has no rollouts of batch {batch}; it has {span}")
        rows += _read_rollouts(run.path / "rollouts" / f"step-{batch:06d}.parquet", columns)
    return rows


def _read_rollouts(path: Path, columns: list[str] | None) -> list[dict[str, Any]]:
    with _opened_rollouts(path) as file:
        return file.read(columns).to_pylist()


def opened_rollouts(run: Run | Path | str, batch: int) -> AbstractContextManager[pyarrow.parquet.ParquetFile]:
    """The rollouts of one batch, for reading column by column. Inside, raises as `load_rollouts` does."""
    return _opened_rollouts(open_run(run).path / "rollouts" / f"step-{batch:06d}.parquet")


@contextmanager
def _opened_rollouts(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with opened(path) as opened_file:
            file = pq.ParquetFile(opened_file)
            schema = (file.schema_arrow.metadata or {}).get(SCHEMA_KEY, b"no schema").decode(errors="replace")
            if schema != SCHEMA_NAME:
                raise ValueError(f"{path} is written in {one_line(schema)}; this version of lagrpo reads {SCHEMA_NAME}")
            types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            for column in rollout_schema():
                if types.get(column.name) != column.type:
                    raise ValueError(f"{path} has no column {column.name} of type {column.type}")
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RunNotFoundError(f"{path} is no whole Parquet file: {one_line(str(error))}") from error
