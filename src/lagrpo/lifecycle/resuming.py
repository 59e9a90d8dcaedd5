"""Resuming a run: its files are checked, its two sides restored, and its records cut back.

A run resumes from its newest checkpoint, or begins again if it ended before the first one.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from lagrpo.distributed.ranks import Ranks
from lagrpo.distributed.torchrun import local_size
from lagrpo.errors import as_settings_error
from lagrpo.lifecycle.evaluation import Evaluations
from lagrpo.lifecycle.recording import Recorder
from lagrpo.resume.changes import find_changes
from lagrpo.resume.checkpoint_files import Checkpoint, find_checkpoint
from lagrpo.resume.sources import (
    collect_sources,
    find_changed_sources,
    has_digests_of_functions,
)
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs import files
from lagrpo.runs.directory import Run
from lagrpo.runs.environment import collect_environment, read_environment, write_environment
from lagrpo.runs.reading import load_events, load_metrics
from lagrpo.settings.load import flatten
from lagrpo.settings.run_code import TRUST_OPTION, find_code
from lagrpo.settings.schema import Settings
from lagrpo.startup.arguments import resume_call
from lagrpo.terminal.text import typed_command
from lagrpo.training.sampling import Sampling, TaskSetup
from lagrpo.training.trainer import Trainer
from lagrpo.types import JsonObject, JsonView

MACHINE = (
    *("cpu", "ranks", "strategy", "threads", "device_name"),
    *("dtype", "reference_dtype", "computation"),
    *("packages.lagrpo", "packages.torch", "packages.transformers"),
)
"""Entries of environment.json that decide the bits of a run."""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """A run to resume: from its newest checkpoint, or from its beginning without one."""

    run: Run
    checkpoint: Checkpoint | None
    changed: Mapping[str, tuple[object, object]]
    """settings that the command line changes: name -> (before, now)"""
    environment: JsonView
    """environment.json as it was when the run began; empty if the file is lost"""

    @staticmethod
    def find(directory: Path, settings: Settings) -> ResumeState:
        """Returns the state of the run in a directory.

        Raises SettingsError for a run that cannot resume: files are lost or damaged, or it has more
        batches than the settings ask for.
        """
        run = Run(directory)
        with as_settings_error():
            load_metrics(run)  # a damaged line is found here, before the model loads
            checkpoint = find_checkpoint(directory / "checkpoints")
            events = load_events(run)
            had_checkpoint = any(event["event"] in ("checkpoint", "resumed") for event in events)
            if checkpoint is None and had_checkpoint:
                raise ValueError(
                    f"{directory} lost its checkpoints: start a new run from its weights"
                )
            total = settings.schedule.batches
            if checkpoint is not None and total < checkpoint.batch:
                raise ValueError(
                    f"schedule.batches = {total}: {directory} already has {checkpoint.batch}; "
                    "set more"
                )
            return ResumeState(
                run=run,
                checkpoint=checkpoint,
                changed=find_changes(settings, directory),
                environment=read_environment(directory),
            )

    @property
    def started(self) -> str | None:
        """The time at which the run began; None if it begins again."""
        if self.checkpoint is None:
            return None
        return self.environment.get("started")

    @property
    def places(self) -> JsonView:
        """The digests of the rows with which the run began, by place; empty if it begins again."""
        if self.checkpoint is None:
            return {}
        return self.checkpoint.state["data"]["places"]

    def cut_back(
        self,
        machine_changes: Mapping[str, list[object]],
        changed_sources: Sequence[str],
        git: JsonView | None,
    ) -> None:
        """Removes what the run recorded after its checkpoint, and records that the run resumes.

        weights/best stays. Without a checkpoint everything is removed. The run computes the removed
        batches again. The event has what is different now: `machine_changes`, the entries of
        MACHINE as [before, now]; `changed_sources`, their names; `git`, the commit of now.
        """
        run = self.run
        if self.checkpoint is None:
            # Below 0, so that events of step 0 and weights of version 0 are removed, too.
            last_batch = -1
            last_version = -1
        else:
            last_batch = self.checkpoint.batch
            last_version = self.checkpoint.state["versions"]["policy"]

        files.remove_leftovers(run.path)
        _keep_lines(run.metrics, load_metrics(run), last_batch)
        _keep_lines(run.events, load_events(run), last_batch)
        rollouts = files.numbered(run.path / "rollouts", "step-", ".parquet")
        _remove_after(rollouts, last_batch)
        weights = files.numbered(run.path / "weights", "v", "")
        _remove_after(weights, last_version)
        # weights/best stays, even if a later batch made it: a resumed run with other evaluations
        # might never find a policy as good, and its weights would be lost.
        if self.checkpoint is None:
            files.remove_directory(run.path / "weights" / "best")
        else:
            run.record_event(
                "resumed",
                last_batch,
                changed=self.changed,
                ahead=len(self.checkpoint.state["loop"]["prefetched"]),
                moved=machine_changes,
                code=changed_sources,
                git=git,
            )


def _keep_lines(file: Path, lines: Sequence[JsonView], last_batch: int) -> None:
    """Writes a file of JSON lines again, without the lines of later batches."""
    texts = [f"{files.to_json(line)}\n" for line in lines if line["step"] <= last_batch]
    files.write_atomically(file, "".join(texts))


def _remove_after(paths: Mapping[int, Path], last: int) -> None:
    """Removes the files or directories whose number is larger than `last`."""
    for number, path in paths.items():
        if number > last:
            files.remove_directory(path)


def describe_environment(
    settings: Settings,
    tasks: Mapping[str, TaskSetup],
    sampling: Sampling,
    trainer: Trainer,
    earlier: ResumeState | None,
) -> JsonObject:
    """Returns environment.json: the run's identity, versions, the machine, and what computes."""
    policy = trainer.policy
    agreement = sampling.weight_check.agreement
    offline = sampling.offline
    rollout = settings.rollout
    own_engine = rollout.engine if rollout.has_own_engine else None
    reference_dtype = None
    if trainer.reference is not None and trainer.has_teacher:
        reference_dtype = str(trainer.reference.dtype).removeprefix("torch.")
    # W&B finds its run by the id, so a run that resumes keeps it.
    identity = None
    if earlier is not None and earlier.checkpoint is not None:
        identity = earlier.environment.get("id")
    return {
        "id": identity or secrets.token_hex(8),
        **collect_environment(str(policy.device)),
        "started": policy.chat.started.isoformat(),
        "sources": collect_sources(policy.chat, tasks, trainer.recipe, own_engine),
        "ranks": trainer.ranks.size,
        "strategy": settings.distributed.strategy,
        "computation": policy.model.computation,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "reference_dtype": reference_dtype,
        "agreement": asdict(agreement) if agreement else None,
        "offline": None if offline is None else str(offline),
    }


def resume_run(
    earlier: ResumeState,
    restore: Callable[[Checkpoint, Sequence[str]], LoopState],
    evaluations: Evaluations,
    recorder: Recorder,
    ranks: Ranks,
    environment: JsonView,
    config: str,
) -> LoopState | None:
    """Restores the run and its evaluations, and cuts its records back to the checkpoint.

    `restore` restores the two sides; it gets the checkpoint and the names of changed code.
    `environment` and `config` are environment.json and config.toml as they would be now. Returns
    the state of the loop at the checkpoint, or None if the run begins again. Collective. Raises
    SettingsError and CheckpointError.
    """
    checkpoint = earlier.checkpoint
    machine_changes = _find_machine_changes(earlier.environment, environment)
    sources: Mapping[str, str | None] = {}
    if checkpoint is not None:
        sources = earlier.environment.get("sources", {})
    changed_sources = find_changed_sources(sources, environment["sources"])

    loop = None
    batch = 0
    last_batch = -1  # evaluations of later batches are removed
    if checkpoint is not None:
        recorder.announce("restoring the checkpoint")
        loop = restore(checkpoint, changed_sources)
        batch = loop.batch
        last_batch = checkpoint.batch
    ranks.gather(None)  # all have read the checkpoint

    with as_settings_error():
        load = partial(evaluations.load, earlier.run, last_batch)
        finished = ranks.on_rank0(load)
    recorder.restore_evaluations(finished)
    for name, evaluation in finished.items():
        evaluations.add(name, evaluation)

    if ranks.is_first:
        earlier.cut_back(machine_changes, changed_sources, git=environment["git"])
        recorder.restore_unscored(load_events(earlier.run))
        earlier.run.write_config(config)
        # environment.json keeps what the run began with; `resumed` events have what changed.
        if checkpoint is None or not earlier.environment:
            write_environment(earlier.run.path, environment)

    if machine_changes:
        changes = [
            f"{name} was {before}, now {now}" for name, (before, now) in machine_changes.items()
        ]
        recorder.note(
            "results may differ in the last bits from a run that never stopped: "
            + "; ".join(changes)
        )
    if changed_sources:
        recorder.warn(
            f"changed since the run started: {', '.join(changed_sources)}; "
            "batches from now on use the new code",
            batch,
        )
    if has_digests_of_functions(sources):
        recorder.warn(
            "an older version of lagrpo started this run, so changes of your code since then are "
            "not noticed",
            batch,
        )
    if checkpoint is None:
        recorder.note("no checkpoint: starting again")
    else:
        recorder.note(f"resumed after batch {batch}")
    return loop


def _find_machine_changes(before: JsonView, now: JsonView) -> dict[str, list[object]]:
    """Returns the entries of MACHINE that differ, as [before, now]; empty if `before` is lost."""
    if not before:
        return {}
    old = flatten(before)
    new = flatten(now)
    return {
        name: [old.get(name), new.get(name)] for name in MACHINE if old.get(name) != new.get(name)
    }


def resume_command(
    run: Path, settings: Settings, saved_batch: int, arguments: Sequence[str], ranks: Ranks
) -> str:
    """Returns the sentence with the command, or the call in Python, that resumes a run.

    `saved_batch` is the batch of the newest checkpoint, 0 without one. `arguments` are the names of
    the arguments that the call needs because settings cannot hold them.
    """
    if saved_batch:
        purpose = f"To resume after batch {saved_batch}"
    else:
        purpose = "No checkpoint yet; to start again"
    if arguments:
        return f"{purpose}: {resume_call(run, settings, arguments)}"
    program = typed_command()
    if ranks.size > 1:
        has_one_host = local_size() == ranks.size
        processes = f"--nproc-per-node {ranks.size}" if has_one_host else "…"
        program = f"torchrun {processes} -m lagrpo"
    command = f"{program} train --resume {shlex.quote(str(run))}"
    if any(find_code(settings)):
        command += f" {TRUST_OPTION}"
    return f"{purpose}: {command}"
