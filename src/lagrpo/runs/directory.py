"""The directory of a run, and everything that the run writes into it.

    runs/arithmetic-grpo-v10-i1-20261120-054512/
        config.toml                     the settings as resolved
        environment.json                versions, machine, commit
        metrics.jsonl                   one line of numbers per step
        reward.png                      the reward curve
        events.jsonl                    weight syncs and why, warnings
        rollouts/step-000120.parquet    one row per completion
        evaluations/NAME.json, .parquet the summary, and one row per prompt
        weights/final, weights/v000120  Hugging Face model directories; weights/best on request

Every file but the .jsonl appears whole, by a rename.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lagrpo.errors import parse_json_object
from lagrpo.runs import files
from lagrpo.runs.environment import write_environment
from lagrpo.runs.files import (
    TEMPORARY,
    naming_file,
    sync_to_disk,
    to_json,
    write_atomically,
    write_directory_atomically,
    write_table,
)
from lagrpo.runs.rollouts import REFERENCE_COLUMNS, reward_columns, rollout_schema
from lagrpo.types import JsonObject, JsonView

BEST = "evaluation.json"
"""In weights/best: the result that made these weights the best."""

LOCK = ".lock"
HOLDER = ".lock-holder.json"


class RunLockedError(OSError):
    """Another process is writing into the run."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk, by its directory."""

    path: Path

    @staticmethod
    def create(
        root: Path,
        name: str | None,
        settings: JsonView,
        settings_toml: str,
        environment: JsonView,
    ) -> Run:
        """Makes root/name with config.toml (`settings_toml`) and environment.json.

        Without a name, the name is `default_name`. Raises as `check_new` does.
        """
        check_new(root, name)
        if name is None:
            run = Run(_new_directory(root, default_name(settings)))
        else:
            run = Run(root / name)
        # A process may have been killed at this point of an earlier start.
        files.remove_leftovers(run.path)
        # The first file is config.toml: with it, the directory is a run.
        run.write_config(settings_toml)
        write_environment(run.path, environment)
        return run

    def write_config(self, settings_toml: str) -> None:
        """Writes config.toml."""
        write_atomically(self.path / "config.toml", settings_toml)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def record(self, metrics: Mapping[str, float | None]) -> None:
        """Appends the metrics of one step to metrics.jsonl. NaN and infinities become null."""
        _append_line(self.metrics, metrics)

    def record_event(self, event: str, step: int, **facts: object) -> None:
        """Appends an event to events.jsonl: its name, its step, and facts about it."""
        _append_line(self.events, {"event": event, "step": step, **facts})

    def record_rollouts(self, step: int, rows: Sequence[JsonView]) -> Path:
        """Writes rollouts/step-STEP.parquet, with the rows of `rollouts.rollout_rows`."""
        reward_names = list(reward_columns(rows[0])) if rows else []
        file = self.path / "rollouts" / f"step-{step:06d}.parquet"
        reference = [name for name in REFERENCE_COLUMNS if any(name in row for row in rows)]
        return write_table(file, rows, rollout_schema(reward_names, reference))

    def record_evaluation(self, name: str, summary: JsonView, records: Sequence[JsonView]) -> Path:
        """Writes evaluations/NAME.parquet, one row per prompt, then evaluations/NAME.json.

        The reward curve reads `step`, `pass@1`, `pass@1_low` and `pass@1_high` from the summary.
        """
        folder = self.path / "evaluations"
        # The summary comes last: `load_evaluations` finds an evaluation by it.
        write_table(folder / f"{name}.parquet", records)
        return write_atomically(folder / f"{name}.json", to_json({"name": name, **summary}) + "\n")

    def record_weights(self, write: Callable[[Path], None], version: int | None = None) -> Path:
        """Lets `write` fill weights/final, or weights/v000120 of a version.

        It writes a Hugging Face model.
        """
        name = "final" if version is None else f"v{version:06d}"
        return write_directory_atomically(self.path / "weights" / name, write)

    def record_best(self, write: Callable[[Path], None], found: JsonView) -> Path:
        """Lets `write` fill weights/best, and adds evaluation.json and an event.

        Both have the result that made these weights the best.
        """

        def fill(folder: Path) -> None:
            write(folder)
            (folder / BEST).write_text(to_json(found) + "\n", encoding="utf-8")

        path = write_directory_atomically(self.path / "weights" / "best", fill)
        self.record_event("best", **found)
        return path


def _append_line(path: Path, line: JsonView) -> None:
    with naming_file(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
        # A checkpoint covers the lines before it. After a power cut it must not outlive them.
        sync_to_disk(path)


def default_name(settings: JsonView, now: datetime.datetime | None = None) -> str:
    """Returns a readable name from what tells runs apart, and the local time to the second."""
    task = settings.get("task", {}).get("name")
    recipe = settings.get("loss", {}).get("recipe")
    parts = []
    for name in (task, recipe):
        # Of package.module:function, the function.
        short_name = (name or "").rpartition(":")[2]
        parts.append(plain_name(short_name))
    schedule = settings.get("schedule", {})
    if schedule.get("constant_lag") is not None:
        parts.append(f"lag{schedule['constant_lag']}")
    elif schedule.get("max_staleness") is not None:
        parts.append(f"stale{schedule['max_staleness']}")
    elif "sync_every" in schedule:
        parts.append(f"v{schedule['sync_every']}")
    if "num_iterations" in schedule:
        parts.append(f"i{schedule['num_iterations']}")
    parts.append(f"{now or datetime.datetime.now():%Y%m%d-%H%M%S}")
    return "-".join(part for part in parts if part)


def plain_name(name: str) -> str:
    """Returns a part of a file's name, of at most 60 characters, made of any text."""
    return re.sub(r"[^\w.]", "-", name)[:60]


def check_new(root: Path, name: str | None) -> None:
    """Raises the errors of `Run.create`, before anything heavy is loaded.

    Raises FileExistsError for a run that exists, ValueError for a name that is not a directory's
    name, OSError for a root that cannot be written.
    """
    if name is not None:
        if name in ("", ".", "..") or Path(name).name != name:
            problem = f"run.name = {name!r} is not a directory name"
            raise ValueError(f"{problem}: put a path into run.output_dir")
        path = root / name
        if path.exists() and not all(TEMPORARY.fullmatch(file.name) for file in path.iterdir()):
            problem = f"{path} already exists and is not empty"
            raise FileExistsError(f"{problem}: choose another run.name, or remove it")
    check_writable(root)


def check_writable(directory: Path) -> None:
    """Raises OSError for a directory that cannot be written, or cannot be made."""
    folders = (directory, *directory.absolute().parents)
    nearest = next(folder for folder in folders if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        problem = f"cannot write to {directory}: {nearest} is not a writable directory"
        raise PermissionError(f"{problem}, so choose another place")


def _new_directory(root: Path, name: str) -> Path:
    """Makes a directory. Runs that start within one second are numbered: NAME, NAME-2, NAME-3."""
    path = root / name
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = root / f"{name}-{number}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of the run at `path`, so that one process writes into it at a time.

    The system gives the lock back when its process ends. Raises RunLockedError, which names the
    holder, at once if another process has the lock.
    """
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        problem = f"another process is writing to {path}"
        holder = read_holder(path)
        if holder:
            problem += f": process {holder['pid']} on {holder['host']}, since {holder['since']}"
        raise RunLockedError(f"{problem}; wait until it ends, or stop it") from error
    now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    holder = {"pid": os.getpid(), "host": platform.node(), "since": now}
    # Not in the lock file: replacing that would leave the lock on the old file.
    write_atomically(path / HOLDER, to_json(holder))
    try:
        yield
    finally:
        (path / HOLDER).unlink(missing_ok=True)
        lock.release()


def read_holder(path: Path) -> JsonObject:
    """Returns the process that writes into the run at `path`, or was killed while it did.

    The keys are `pid`, `host`, and `since` (when it began). Empty if there is none, and for a
    damaged file: the lock itself does not need it.
    """
    try:
        holder = parse_json_object((path / HOLDER).read_bytes())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(holder.get("pid"), int) and all(
        isinstance(holder.get(key), str) for key in ("host", "since")
    )
    return holder if is_whole else {}
