"""The directory of a run: a new one, or the one of a run to resume, whether the settings allow that, and what becomes
of its records.

A resumed run has its saved settings (config.toml). The command line may change what cannot alter past batches.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.errors import SettingsError, refusing
from lagrpo.runs.directory import Run
from lagrpo.runs.environment import collect_environment, read_environment, write_environment
from lagrpo.runs.files import numbered, remove_directory, remove_leftovers, to_json, write_atomically
from lagrpo.runs.reading import load_events, load_metrics, open_run
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import flatten, load_settings, to_toml

if TYPE_CHECKING:  # they load PyTorch
    from lagrpo.training.build import TrainerComponents
    from lagrpo.training.checkpoint import Checkpoint

OF_CALL = ("run.name", "run.output_dir", "run.resume")
FREE = (
    *("run.display", "run.save_weights", "checkpoint.export_every", "run.report_to", "run.log_completions"),
    *("checkpoint.save_minutes", "checkpoint.save_every", "checkpoint.save_total_limit"),
    *("model.threads", "model.dtype", "optimizer.offload_optimizer"),
    *("eval.every", "eval.at_start", "eval.best_metric"),
    *("verifier.workers", "verifier.max_without_reward", "distributed.", "vllm."),
)
"""Settings, and sections, that a resumed run may change: they cannot alter its past batches. model.dtype may change
from auto to what that chose: `check_dtype` compares what a run computes in."""
FIXED = ("vllm.on_weight_sync",)
MACHINE = (
    *("cpu", "ranks", "sharded", "threads", "device_name", "dtype", "computation"),
    *("packages.lagrpo", "packages.torch", "packages.transformers"),
)
"""What in environment.json decides the bits of a run."""


# A new run


def describe_environment(parts: TrainerComponents, identity: str | None = None) -> dict[str, Any]:
    """What environment.json says: the run's identity (a new one by default), versions, machine, and what computes."""
    from lagrpo.model.backend import pick_dtype

    policy, mesh = parts.trainer.policy, parts.ranks.mesh
    dtype, reason = pick_dtype(parts.settings.model.dtype, policy.device)
    return {
        "id": identity or secrets.token_hex(8),
        **collect_environment(str(policy.device)),
        "ranks": parts.ranks.size,
        **({"sharded": f"layers, each over {mesh.size()} ranks"} if mesh is not None else {}),
        "computation": policy.model.computation,
        "dtype": dtype,
        "dtype_reason": reason,
        "agreement": asdict(parts.agreement) if parts.agreement else None,
        "offline": str(parts.offline) if parts.offline is not None else None,
    }


def write_config(parts: TrainerComponents) -> str:
    """config.toml: the settings, and what they do not say if the task is the caller's object."""
    kind, settings = type(parts.task), parts.settings
    own = f"# The task was the caller's own object, a {kind.__module__}.{kind.__qualname__}; of [task] only "
    own += "reward_range and system_prompt (of questions in offline.data) were read.\n"
    of_run = settings.run.model_copy(update={"resume": None})  # given anew each time
    return own * parts.own_task + to_toml(settings.model_copy(update={"run": of_run}))


def create_run(parts: TrainerComponents, environment: Mapping[str, Any]) -> Run:
    """The directory of a new run."""
    run, named = parts.settings.run, parts.settings.model_dump() | {"task": {"name": parts.task.name}}
    return Run.create(Path(run.output_dir), run.name, named, write_config(parts), environment)


# A run that resumes


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
    wrong = [
        f"{name} = {_shown(now)}, and the run has {_shown(before)}"
        for name, (before, now) in changed.items()
        if not _may_change(name, settings, saved)
    ]
    if wrong:
        raise SettingsError("\n".join(wrong) + ": a resumed run keeps its settings")
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

    def check_dtype(self, now: Mapping[str, Any]) -> None:
        """Raise SettingsError if the run computed in another dtype than it would now."""
        before = self.environment.get("dtype", now["dtype"])
        if before != now["dtype"]:
            here = f"here it would in {now['dtype']} ({now['dtype_reason']})"
            raise SettingsError(f"the run computes in {before}, and {here}: set --model.dtype {before}")

    def describe_move(self, now: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What differs between two environments and decides the bits of a run: name -> [before, now]."""
        before, here = flatten(self.environment), flatten(now)
        found = {name: [before.get(name), here.get(name)] for name in MACHINE if before}
        return {name: values for name, values in found.items() if values[0] != values[1]}


def _had_checkpoint(run: Run) -> bool:
    events = load_events(run)
    return any(e.get("event") == "checkpoint" or (e.get("event") == "resumed" and e.get("step")) for e in events)


def cut_back(resume: ResumeState, parts: TrainerComponents, environment: Mapping[str, Any]) -> list[str]:
    """Remove what the run recorded after its checkpoint (without one: everything), and record that it was resumed, with
    what changed. Returns what is to be said."""
    run, checkpoint, moved = resume.run, resume.checkpoint, resume.describe_move(environment)
    batch, version = (checkpoint.batch, checkpoint.state["versions"]["policy"]) if checkpoint else (-1, -1)
    ahead = len(checkpoint.state["loop"]["prefetched"]) if checkpoint else 0
    for file, lines in ((run.metrics, load_metrics(run)), (run.events, load_events(run))):
        write_atomically(file, "".join(f"{to_json(line)}\n" for line in lines if line["step"] <= batch))
    run.record_event("resumed", max(batch, 0), changed=resume.changed, moved=moved, ahead=ahead)
    for folder, prefix, ending, last in (
        ("rollouts", "step-", ".parquet", batch),
        ("weights", "v", "", version),
        ("checkpoints", "step-", "", batch),
    ):
        for number, path in numbered(run.path / folder, prefix, ending).items():
            if number > last:
                remove_directory(path)
    run.write_config(write_config(parts))
    if checkpoint is None or not resume.environment:
        write_environment(run.path, environment)
    said = [f"ignored: {problem}" for problem in resume.problems]
    said += [f"ignored, as it was only half written: {p.relative_to(run.path)}" for p in remove_leftovers(run.path)]
    if moved:
        differ = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in moved.items())
        said.append(f"no longer bit-identical to a run that never stopped: {differ}")
    return said
