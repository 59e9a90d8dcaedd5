"""Going on with a run after its settings were checked (training/changes.py): its checkpoint, and its records.

`Earlier.find` reads all that is needed of it; `cut_back` removes what was recorded of batches that come again;
`describe_move` says what differs from the machine that the run began on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import SettingsError, one_line, refusing
from lagrpo.runs import Run, load_evaluations, load_events, load_metrics
from lagrpo.runs.checkpoints import Checkpoint, Checkpoints
from lagrpo.runs.directory import BEST
from lagrpo.runs.environment import read_environment
from lagrpo.runs.files import numbered, remove_directory, remove_leftovers, to_json, write_atomically
from lagrpo.runs.reading import load_until, rollout_batches
from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.changes import changes, checkpoints_of, find_run, own_settings
from lagrpo.training.evaluate import Evaluation

MACHINE = ("cpu", "ranks", "sharded", "threads", "device_name", "dtype", "computation", "decoding")
"""What of environment.json decides the bits, beside the packages."""
COUNTS = ("batch", "completions", "unscored", "failed")
"""Metrics that every line has as whole numbers: a run that goes on counts with them."""
OF_PLACE = ("name", "batch", "version", "set", "reward_range")
"""What the file of an evaluation says of where and how it was made."""
OF_A_PROMPT = ("prompt_key", "samples", "scored", "right")
"""Columns of an evaluation that have a whole number for each prompt."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A run to go on with, and what it recorded until its checkpoint."""

    run: Run
    checkpoint: Checkpoint | None
    """None: it begins again"""
    said: Sequence[str]
    """what there is to say of checkpoints that are not whole"""
    changed: Mapping[str, Any]
    """settings that differ from those it had"""
    environment: Mapping[str, Any]
    """of its beginning; empty where that is gone"""
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Mapping[str, tuple[Mapping[str, Any], list[dict[str, Any]]]]
    """by name: summary and records"""

    @staticmethod
    def find(directory: Path, settings: Settings) -> Earlier:
        """Raises SettingsError for a run that cannot go on from any checkpoint or has more batches than it is to, and
        for damaged records."""
        with refusing():
            return Earlier._find(directory, settings)

    @staticmethod
    def _find(directory: Path, settings: Settings) -> Earlier:
        run, total = Run(directory), settings.schedule.stages * settings.schedule.batches
        checkpoint, said = find_checkpoint(run)
        if checkpoint is not None:
            if total < checkpoint.batch:
                raise SettingsError(f"{directory} has {checkpoint.batch} batches, more than the {total} it is to make")
            gone = {*range(1, checkpoint.batch + 1)} - {*rollout_batches(run)}
            if gone:
                said.append(f"{count_of(len(gone), 'batch', 'es')} before the checkpoint have no rollouts any more")
        return Earlier(
            run,
            checkpoint,
            said,
            changes(settings, directory, checkpoint),
            read_environment(directory),
            read_metrics(run, checkpoint) if checkpoint else (),
            read_evaluations(run, checkpoint.batch) if checkpoint else {},
        )

    @property
    def identity(self) -> str | None:
        """By which the run's checkpoints are told from those of others; None where it begins again."""
        return self.checkpoint.state.get("run", "") if self.checkpoint else None


def recorded_threads(settings: Settings, ranks: int) -> int | None:
    """The number of threads that the run to resume began with; None for a new one and for another number of ranks."""
    with refusing():
        run = find_run(settings)
        before = read_environment(run) if run is not None else {}
    return before.get("threads") if before.get("ranks", 1) == ranks else None


def find_checkpoint(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and why newer ones are ignored. Raises SettingsError where there is none, and the
    run would lose something if it began again in its own place."""
    store = checkpoints_of(run.path)
    found, complaints = store.newest()
    if found is None:
        why = f"No checkpoint of {run.path} can be read" if complaints else what_is_lost(run, store)
        if why:
            final = run.path / "weights" / "final"
            weights = f" from its weights: --model.path {final}" if final.is_dir() else ""
            raise SettingsError("\n".join([*complaints, f"{why}; start a new run{weights}"]))
    return found, [f"ignored: {complaint}" for complaint in complaints]


def what_is_lost(run: Run, store: Checkpoints) -> str:
    """Why a run without a checkpoint must not begin again; "" where it had not come to its first one."""
    events = load_events(run)
    ends = [event.get("status") for event in events if event.get("event") == "end"]
    schedule = own_settings(run.path).schedule
    made = len(load_metrics(run)) >= schedule.stages * schedule.batches and (run.path / "weights" / "final").exists()
    if ends[-1:] == ["finished"] or (made and not ends):
        return f"{run.path} is finished, and kept no checkpoint to go on from"
    had = any(e.get("event") == "checkpoint" or (e.get("event") == "resumed" and e.get("batch")) for e in events)
    return f"{run.path} had checkpoints, and {store.path} has none of them any more" if had else ""


def read_metrics(run: Run, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The metrics of the batches until the checkpoint. Raises ValueError where metrics.jsonl or events.jsonl do not
    have what they had then."""
    lengths = checkpoint.state["lengths"]
    try:
        load_until(run.events, lengths["events.jsonl"])
        metrics = load_until(run.metrics, lengths["metrics.jsonl"])
        for number, line in enumerate(metrics, start=1):
            for name in COUNTS:
                if not isinstance(line.get(name), int):
                    raise ValueError(f"{run.metrics}, line {number}: {name} is {line.get(name)!r:.80}, not a number")
        if [line["batch"] for line in metrics] != [*range(1, checkpoint.batch + 1)]:
            raise ValueError(f"{run.metrics} does not have one line for each batch until {checkpoint.batch}")
    except ValueError as error:
        raise ValueError(f"{error}: the records of the run are not those of {checkpoint.path}") from error
    return metrics


def read_evaluations(run: Run, batch: int) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """By name, summary and records of the evaluations that were made until this batch. Raises ValueError for a damaged
    one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = {}
    try:
        summaries = load_evaluations(run)
    except ValueError as error:
        raise ValueError(f"{error}. To go on without this evaluation, remove the file") from error
    for summary in summaries:
        if (made_at := summary.get("batch")) is None or made_at > batch:
            continue
        name = summary["name"]
        file = run.path / "evaluations" / f"{name}.parquet"
        try:
            table = pq.read_table(file)
            for column in OF_A_PROMPT:
                if column not in table.column_names or not pa.types.is_integer(table[column].type):
                    raise ValueError(f"it has no whole numbers {column}")
            found[name] = summary, table.to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"{file} is damaged ({one_line(str(error))}). To go on without this evaluation, remove it and its .json"
            ) from error
    return found


def cut_back(earlier: Earlier, moved: Mapping[str, Any], ahead: int) -> list[str]:
    """Remove what was recorded after the checkpoint (everything without one): batches, evaluations, weights and
    temporary files. In place of the events after it comes, in one step, that the run was resumed: what changed and
    `moved`, and how many batches it had asked for `ahead`. Returns what there is to say of it."""
    run, checkpoint = earlier.run, earlier.checkpoint
    batch, version = (checkpoint.batch, checkpoint.state["versions"]["policy"]) if checkpoint else (0, -1)
    lengths = checkpoint.state["lengths"] if checkpoint else {"metrics.jsonl": 0, "events.jsonl": 0}
    kept = run.events.read_bytes()[: lengths["events.jsonl"]] if run.events.exists() else b""
    resumed = {"event": "resumed", "batch": batch, "changed": earlier.changed, "moved": moved, "ahead": ahead}
    write_atomically(run.events, kept + to_json(resumed).encode() + b"\n")
    if run.metrics.exists():
        os.truncate(run.metrics, lengths["metrics.jsonl"])
    for number, file in numbered(run.path / "rollouts", "step-", ".parquet").items():
        if number > batch:
            file.unlink()
    for number, folder in numbered(run.path / "weights", "v").items():
        if number > version:
            remove_directory(folder)
    if (best := run.path / "weights" / "best").exists() and _batch_of_best(best) > batch:
        remove_directory(best)  # it comes again
    Checkpoints(run.path).prune(range(batch + 1))
    for summary in (run.path / "evaluations").glob("*.json"):
        if summary.stem not in earlier.evaluations:
            remove_evaluation(run, summary.stem)
    leftovers = remove_leftovers(run.path)
    return [f"ignored, as it was only half written: {path.relative_to(run.path)}" for path in leftovers]


def _batch_of_best(folder: Path) -> int:
    """After which batch weights/best were found to be the best; 0 where it does not say."""
    try:
        return int(json.loads((folder / BEST).read_bytes())["batch"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def remove_evaluation(run: Run, name: str) -> None:
    for ending in ("json", "parquet"):
        (run.path / "evaluations" / f"{name}.{ending}").unlink(missing_ok=True)


def check_dtype(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SettingsError where the run computed in another dtype than it would now."""
    if before.get("dtype", now["dtype"]) != now["dtype"]:
        raise SettingsError(
            f"the run computes in {before['dtype']}, and here it would in {now['dtype']} ({now['dtype_reason']}): set "
            f"--model.dtype {before['dtype']}"
        )


def describe_move(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two environments and decides the bits of a run: name -> [before, now]. Nothing where it is
    not known where the run was before."""
    if not before:
        return {}
    before, now = {"ranks": 1, **before}, json.loads(to_json(now))
    differing = {name: [before.get(name), now.get(name)] for name in MACHINE if before.get(name) != now.get(name)}
    packages = (before.get("packages", {}), now.get("packages", {}))
    names = [name for name in ("lagrpo", "torch", "transformers") if packages[0].get(name) != packages[1].get(name)]
    return differing | {name: [of.get(name) for of in packages] for name in names}


def take_evaluations(earlier: Earlier, total: int) -> dict[str, Evaluation]:
    """The evaluations of a run, by name. One made at its end, before it got more batches, is called by its batch from
    now on."""
    found = {}
    for name, (summary, records) in earlier.evaluations.items():
        moment, dot, of_set = name.partition(".")
        if moment == "after" and summary["batch"] < total:
            of_file = {key: value for key, value in summary.items() if key != "name"}
            name, before = f"batch-{summary['batch']:06d}{dot}{of_set}", name
            earlier.run.record_evaluation(name, of_file, records)
            remove_evaluation(earlier.run, before)
        said = {key: value for key, value in summary.items() if key not in OF_PLACE}
        found[name] = Evaluation(said, records)
    return found
