"""Resuming a run: which one, whether its settings allow it, and what becomes of its records.

A resumed run has its saved settings (config.toml). The command line may change what cannot alter past batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.errors import SettingsError, refusing
from lagrpo.runs.directory import Run
from lagrpo.runs.environment import read_environment
from lagrpo.runs.files import numbered, remove_directory, remove_leftovers, to_json, write_atomically
from lagrpo.runs.reading import load_events, load_metrics, open_run
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import flatten, load_settings

if TYPE_CHECKING:  # it loads PyTorch
    from lagrpo.training.checkpoint import Checkpoint

OF_CALL = ("run.name", "run.output_dir", "run.resume")
FREE = (
    *("run.display", "run.save_weights", "checkpoint.export_every", "run.report_to", "run.log_completions"),
    *("checkpoint.save_minutes", "checkpoint.save_every", "checkpoint.save_total_limit"),
    *("model.threads", "model.dtype", "model.lora_merge", "optimizer.offload_optimizer"),
    *("eval.every", "eval.at_start", "eval.sampler", "eval.best_metric"),
    *("verifier.workers", "verifier.max_without_reward", "distributed.", "vllm."),
)
"""Settings, and sections, that a resumed run may change: they cannot alter its past batches. model.dtype may change
from auto to what that chose: `check_dtype` compares what a run computes in."""
FIXED = ("vllm.on_weight_sync",)
MACHINE = ("cpu", "ranks", "sharded", "threads", "device_name", "dtype", "computation", "decoding")
"""What in environment.json decides the bits of a run, besides the packages."""


def find_run(settings: Settings) -> Path | None:
    """The directory of the run to resume; None for a new one. Raises FileNotFoundError if it is not a run."""
    run = settings.run
    if run.resume is None:
        return None
    path = Path(run.output_dir) / str(run.name) if run.resume == "auto" else Path(run.resume).expanduser()
    return None if run.resume == "auto" and not (path / "config.toml").is_file() else open_run(path).path


def recorded_threads(settings: Settings, ranks: int) -> int | None:
    """The number of threads that the run to resume began with; None for a new run or another number of ranks."""
    with refusing():
        run = find_run(settings)
        before = read_environment(run) if run is not None else {}
    return before.get("threads") if before.get("ranks", 1) == ranks else None


def check_changes(settings: Settings, run: Path) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those in the run's config.toml: name -> (before, now). Raises SettingsError, by name,
    for those that could have changed its past."""
    saved = load_settings(run / "config.toml")
    before, now = flatten(saved.model_dump()), flatten(settings.model_dump())
    names = [name for name in now | before if name not in OF_CALL and before.get(name) != now.get(name)]
    changed = {name: (before.get(name), now.get(name)) for name in names}
    wrong = {name: values for name, values in changed.items() if not _may_change(name, settings, saved)}
    if wrong:
        lines = [f"{name} = {_shown(now)}, and the run has {_shown(before)}" for name, (before, now) in wrong.items()]
        raise SettingsError("\n".join(lines) + ": a resumed run keeps its settings")
    return changed


def _may_change(name: str, settings: Settings, saved: Settings) -> bool:
    """More batches or stages change nothing if the learning rate does not depend on their number."""
    if name in ("schedule.batches", "schedule.stages"):
        now, before = settings.schedule, saved.schedule
        more = now.batches >= before.batches and now.stages >= before.stages
        same_stages = now.batches == before.batches or before.stages == 1
        return more and same_stages and settings.optimizer.lr_scheduler_type == "constant"
    return name in FREE or (f"{name.partition('.')[0]}." in FREE and name not in FIXED)


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, default=str)


@dataclass(frozen=True, slots=True)
class ResumeState:
    """A run to resume."""

    run: Run
    checkpoint: Checkpoint | None
    """None: it begins again"""
    problems: Sequence[str]
    """what is wrong with newer checkpoints"""
    changed: Mapping[str, tuple[Any, Any]]
    """settings that the command line changes: name -> (before, now)"""
    environment: Mapping[str, Any]
    """where it began; empty if that is lost"""

    @staticmethod
    def find(directory: Path, settings: Settings) -> ResumeState:
        """Raises SettingsError for a run that cannot resume: its checkpoints are lost, or its metrics, or it has made
        more batches than the settings ask for."""
        from lagrpo.training.checkpoint import find_checkpoint

        run, total = Run(directory), settings.schedule.stages * settings.schedule.batches
        checkpoint, problems = find_checkpoint(directory / "checkpoints")
        with refusing():
            if checkpoint is None and (problems or _had_checkpoint(run)):
                lost = f"{directory} has no checkpoint to resume from: start a new run, from its weights if it has some"
                raise SettingsError("\n".join([*problems, lost]))
            if checkpoint is not None and total < checkpoint.batch:
                raise SettingsError(f"schedule.batches: {directory} has made {checkpoint.batch} already, not {total}")
            if checkpoint is not None and len(lines := load_metrics(run)) < checkpoint.batch:
                raise SettingsError(f"{run.metrics} has {len(lines)} batches; the checkpoint is of {checkpoint.batch}")
            changed = check_changes(settings, directory)
            return ResumeState(run, checkpoint, problems, changed, read_environment(directory))


def _had_checkpoint(run: Run) -> bool:
    events = load_events(run)
    return any(e.get("event") == "checkpoint" or (e.get("event") == "resumed" and e.get("step")) for e in events)


def cut_back(resume: ResumeState, moved: Mapping[str, Any], ahead: int) -> list[str]:
    """Remove what the run recorded after its checkpoint (without one: everything), and record that it was resumed:
    what changed and `moved`, and how many batches it had asked for `ahead`. Returns what is to be said."""
    run, checkpoint = resume.run, resume.checkpoint
    batch, version = (checkpoint.batch, checkpoint.state["versions"]["policy"]) if checkpoint else (-1, -1)
    for file, lines in ((run.metrics, load_metrics(run)), (run.events, load_events(run))):
        write_atomically(file, "".join(f"{to_json(line)}\n" for line in lines if line["step"] <= batch))
    run.record_event("resumed", max(batch, 0), changed=resume.changed, moved=moved, ahead=ahead)
    for number, file in numbered(run.path / "rollouts", "step-", ".parquet").items():
        if number > batch:
            file.unlink()
    for folder, prefix, last in (("weights", "v", version), ("checkpoints", "step-", batch)):
        for number, path in numbered(run.path / folder, prefix).items():
            if number > last and path.is_dir():
                remove_directory(path)
    leftovers = remove_leftovers(run.path)
    ignored = [f"ignored, as it was only half written: {path.relative_to(run.path)}" for path in leftovers]
    return [*(f"ignored: {problem}" for problem in resume.problems), *ignored]


def check_dtype(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SettingsError if the run computed in another dtype than it would now."""
    if before.get("dtype", now["dtype"]) != now["dtype"]:
        raise SettingsError(
            f"the run computes in {before['dtype']}, and here it would in {now['dtype']} ({now['dtype_reason']}): set "
            f"--model.dtype {before['dtype']}"
        )


def describe_move(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two environments and decides the bits of a run: name -> [before, now]."""
    if not before:
        return {}
    before, now = {"ranks": 1, **before}, json.loads(to_json(now))
    found = {name: [before.get(name), now.get(name)] for name in MACHINE}
    for name in ("lagrpo", "torch", "transformers"):
        found[name] = [environment.get("packages", {}).get(name) for environment in (before, now)]
    return {name: values for name, values in found.items() if values[0] != values[1]}
