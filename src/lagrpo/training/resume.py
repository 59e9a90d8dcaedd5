"""Going on with a run after its settings were checked (training/changes.py): its checkpoint, and its records.

`cut_back` removes what was recorded of batches that come again; `describe_move` says what differs from the machine that
the run began on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import SettingsError
from lagrpo.runs import Run, load_evaluations, load_events
from lagrpo.runs.checkpoints import Checkpoint, Checkpoints
from lagrpo.runs.files import remove_directory, remove_leftovers
from lagrpo.runs.reading import rollout_batches
from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.changes import changes
from lagrpo.training.evaluate import Evaluation

MACHINE = ("cpu", "ranks", "threads", "device_name", "dtype", "computation", "decoding")
"""What of environment.json decides the bits, beside the packages."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A run to go on with."""

    run: Run
    checkpoint: Checkpoint | None
    """None: it begins again"""
    said: Sequence[str]
    """what there is to say of checkpoints that are not whole"""
    changed: Mapping[str, Any]
    """settings that differ from those it had"""
    environment: Mapping[str, Any]
    """of its beginning"""

    @staticmethod
    def find(directory: Path, settings: Settings) -> Earlier:
        """Raises SettingsError for a run that cannot go on from any checkpoint, or has more batches than it is to."""
        run, total = Run(directory), settings.schedule.stages * settings.schedule.batches
        checkpoint, said = find_checkpoint(run)
        if checkpoint is not None:
            if total < checkpoint.batch:
                raise SettingsError(f"{directory} has {checkpoint.batch} batches, more than the {total} it is to make")
            gone = {*range(1, checkpoint.batch + 1)} - {*rollout_batches(run)}
            if gone:
                said.append(f"{count_of(len(gone), 'batch', 'es')} before the checkpoint have no rollouts any more")
        environment = read_json(directory / "environment.json")
        return Earlier(run, checkpoint, said, changes(settings, directory), environment)


def find_checkpoint(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and what there is to say of others. Raises SettingsError where there are some and
    none can be read, and for a finished run that kept none: it would begin again in its own place."""
    store = Checkpoints(run.path)
    found, complaints = store.newest()
    said = [f"ignored: {complaint}" for complaint in complaints]
    if found is None:
        if complaints:
            remedy = f"No checkpoint of the run can be read. To begin it again, remove {store.path}"
            raise SettingsError("\n".join([*complaints, remedy]))
        ends = [event for event in load_events(run) if event["event"] == "end"]
        if ends and ends[-1]["status"] == "finished":
            raise SettingsError(
                f"{run.path} is finished and kept no checkpoint to go on from (run.keep_optimizer = false); start a "
                f"new run from its weights: --model.path {run.path / 'weights' / 'final'}"
            )
    return found, said


def cut_back(run: Run, checkpoint: Checkpoint | None) -> list[str]:
    """Remove what was recorded after the checkpoint (everything without one): batches, evaluations, weights and
    temporary files. Returns what there is to say of it. Raises SettingsError where records from before it are gone."""
    batch, version = (checkpoint.batch, checkpoint.state["versions"]["policy"]) if checkpoint else (0, -1)
    lengths = checkpoint.state["lengths"] if checkpoint else {run.metrics.name: 0, run.events.name: 0}
    for name, length in lengths.items():
        _shorten(run.path / name, length)
    for file in (run.path / "rollouts").glob("step-*.parquet"):
        if int(file.stem.partition("-")[2]) > batch:
            file.unlink()
    for folder in (run.path / "weights").glob("v*"):
        if folder.name[1:].isdigit() and int(folder.name[1:]) > version:
            remove_directory(folder)
    Checkpoints(run.path).prune(range(batch + 1))
    for file in (run.path / "evaluations").glob("*.json"):
        made_at = read_json(file).get("batch")
        if checkpoint is None or made_at is None or made_at > batch:
            file.unlink()
            file.with_suffix(".parquet").unlink(missing_ok=True)
    leftovers = remove_leftovers(run.path)
    return [f"ignored, as it was only half written: {path.relative_to(run.path)}" for path in leftovers]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of the run; empty where the file is gone. Raises SettingsError for a damaged one."""
    try:
        return json.loads(file.read_bytes()) if file.exists() else {}
    except ValueError as error:
        raise SettingsError(f"{file} is damaged ({error}); remove it, and the run makes it again") from error


def _shorten(file: Path, length: int) -> None:
    found = file.stat().st_size if file.exists() else 0
    if found < length:
        raise SettingsError(
            f"{file} has {found} bytes, but the checkpoint was made after {length} of them: records of the run are "
            "gone, and it cannot go on from there"
        )
    if found > length:
        with file.open("rb+") as stream:
            stream.truncate(length)


def check_dtype(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SettingsError where the run computed in another dtype than it would now."""
    if before.get("dtype", now["dtype"]) != now["dtype"]:
        raise SettingsError(
            f"the run computes in {before['dtype']}, and here it would in {now['dtype']} ({now['dtype_reason']}): set "
            f"--model.dtype {before['dtype']}"
        )


def describe_move(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two environments and decides the bits of a run: name -> [before, now]."""
    before = {"ranks": 1, **before}
    differing = {name: [before.get(name), now.get(name)] for name in MACHINE if before.get(name) != now.get(name)}
    packages = (before.get("packages", {}), now.get("packages", {}))
    names = [name for name in ("lagrpo", "torch", "transformers") if packages[0].get(name) != packages[1].get(name)]
    return differing | {name: [of.get(name) for of in packages] for name in names}


def read_evaluations(run: Run, total: int) -> dict[str, Evaluation]:
    """The evaluations of a run, by name. One made at its end, before it got more batches, is
    called by its batch from now on."""
    import pyarrow.parquet as pq

    found = {}
    for summary in load_evaluations(run):
        name = summary.pop("name")
        file = run.path / "evaluations" / f"{name}.parquet"
        records = pq.read_table(file).to_pylist()
        if name == "after" and summary["batch"] < total:
            name = f"batch-{summary['batch']:06d}"
            run.record_evaluation(name, summary, records)
            file.unlink()
            file.with_suffix(".json").unlink()
        found[name] = Evaluation({k: v for k, v in summary.items() if k not in ("batch", "version")}, records)
    return found
