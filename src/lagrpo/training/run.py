"""From settings to a finished run: `train` builds the parts (build.py); `Training` evaluates, trains (loop.py), writes.

Under torchrun every rank runs this. Rank 0 has the display, the callbacks and the files.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lagrpo import logs
from lagrpo.core.objective import Recipe
from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.errors import refusing
from lagrpo.interrupts import EndedAtOnce, Interrupted, deferring, interruptible
from lagrpo.model.backend import pick_device
from lagrpo.model.loading import without_progress_bars
from lagrpo.rewards.pool import RewardError
from lagrpo.rollout.prefetch import VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.sync_check import WeightSyncError
from lagrpo.rollout.vllm.client import SamplerError
from lagrpo.runs.directory import locked
from lagrpo.runs.environment import write_environment
from lagrpo.runs.rollouts import rollout_rows
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings
from lagrpo.tasks import NOT_A_TASK, Task, reward_names
from lagrpo.terminal.display import make_display
from lagrpo.terminal.text import count_of
from lagrpo.threads import choose_threads, fixed_threads
from lagrpo.training.beginning import create_run, describe_environment, write_config
from lagrpo.training.build import TrainerComponents
from lagrpo.training.callbacks import Callback, CallbackList, Status, check_callbacks
from lagrpo.training.checkpoint import (
    CheckpointError,
    CheckpointManager,
    TrainState,
    restore_checkpoint,
    save_checkpoint,
)
from lagrpo.training.checks import check_settings, local_size, resume_after_restart, world_size
from lagrpo.training.evaluation import Evaluations, load_run_evaluations, moment_of
from lagrpo.training.explain import meaning
from lagrpo.training.lag import completion_columns, lag_is_complete, lag_metrics
from lagrpo.training.loop import Step, train_loop
from lagrpo.training.memory import NoMemoryError, explained
from lagrpo.training.metrics import batch_metrics, reward_metrics
from lagrpo.training.ranks import Ranks, joined
from lagrpo.training.resume import ResumeState, check_dtype, cut_back, describe_move, find_run, recorded_threads
from lagrpo.training.trackers import Trackers
from lagrpo.training.warnings import Warnings
from lagrpo.types import Result

FAILURES = (RewardError, WeightSyncError, VersionError, SamplerError, FloatingPointError, NoMemoryError, OSError)
"""Errors that end a run without being the program's: their messages are for the user."""


def train(
    settings: Settings | Mapping[str, Any] | str | os.PathLike[str],
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run Algorithm 1. `settings` are a Settings, a mapping, or the path of a TOML file; `task` replaces settings.task
    (see lagrpo.tasks.base); the run calls `callbacks` after it has written its files.

    Ctrl-C and SIGTERM end the run after the batch under way, or at once while it samples, and write a checkpoint and
    the weights; a second one ends it at once. With `run.resume` the run resumes from its newest checkpoint. Under
    torchrun all processes call this; the callbacks of rank 0 are called, and all return the same.

    Raises SettingsError for settings that cannot be run, before anything heavy is loaded if that can be seen, TypeError
    for arguments of another type, and errors of FAILURES.
    """
    if settings is None:
        raise TypeError("settings are a Settings, a mapping or the path of a TOML file, not None; {} are the defaults")
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task: {task!r:.80} {NOT_A_TASK}")
    settings = resume_after_restart(settings if isinstance(settings, Settings) else load_settings(settings))
    recipe = check_settings(settings, task)
    check_callbacks(callbacks)
    before = recorded_threads(settings, world_size())
    threads = choose_threads(settings.model.threads, before, local_size())
    device, shard_layers = pick_device(settings.model.device).type, settings.distributed.strategy == "fsdp2"
    with interruptible(), freed_memory_kept(), fixed_threads(threads), joined(device, shard_layers) as ranks:
        from torch.distributed.elastic.multiprocessing.errors import record

        call: Any = run_rank if ranks.size == 1 else record(run_rank)  # torchrun prints the error of the first rank
        return call(settings, recipe, task, callbacks, ranks)


def run_rank(
    settings: Settings, recipe: Recipe, task: Task | None, callbacks: Sequence[Callback], ranks: Ranks
) -> Result:
    """The run, on this rank."""
    shown = settings.run.display != "none" and ranks.is_first
    directory = ranks.from_first(lambda: find_run(settings))
    with (
        logs.shown_by(None, logging.INFO if shown else logging.WARNING),
        locked(directory) if directory and ranks.is_first else nullcontext(),
    ):
        earlier = ranks.from_first(lambda: ResumeState.find(directory, settings)) if directory else None
        if shown:
            among = f", with {count_of(ranks.size, 'rank')}" if ranks.size > 1 else ""
            print(f"loading {settings.model.path} on {pick_device(settings.model.device)}{among} …", flush=True)
        with explained(lambda: "loading"):
            parts = TrainerComponents.build(settings, recipe, task, ranks)
        with closing(parts):
            return Training(parts, callbacks, earlier).run()


class Training:
    """One run, on this rank; `earlier` is the run that it resumes. Rank 0 shows and records it, and calls callbacks."""

    def __init__(
        self, parts: TrainerComponents, callbacks: Sequence[Callback] = (), earlier: ResumeState | None = None
    ) -> None:
        self.parts, self.settings, self.policy, self.ranks = parts, parts.settings, parts.trainer.policy, parts.ranks
        run, self.earlier, first = self.settings.run, earlier, parts.ranks.is_first
        self.display, self.now = make_display(run.display if first else "none"), "start"
        self.evaluations = Evaluations(parts, self.record_evaluation, self.display.note, self.warn, self.phase)
        resumes = earlier is not None and earlier.checkpoint is not None
        self.environment = describe_environment(parts, earlier.environment.get("id") if earlier and resumes else None)
        named = self.settings.model_dump() | {"task": {"name": parts.task.name}}
        create = partial(create_run, run, named, write_config(parts), self.environment)
        self.store = earlier.run if earlier else self.ranks.from_first(create)
        parts.keep_logs(self.store.path)
        kept = self.settings.checkpoint
        when = kept.save_every, kept.save_minutes, kept.save_total_limit
        place = {"rank": self.ranks.rank, "size": self.ranks.size}
        self.checkpoints = CheckpointManager(self.store.path / "checkpoints", *when, **place)
        self.callbacks = CallbackList([Trackers(run.report_to, run.log_completions), *callbacks] if first else [])
        self.started = False  # whether callbacks know of the run
        self.warnings = Warnings(self.settings, str(self.policy.dtype).removeprefix("torch."), parts.task.size("train"))
        self.total = self.settings.schedule.stages * self.settings.schedule.batches
        self.restored = earlier is None  # π is the run's
        self.stand = TrainState.from_parts(parts, LoopState(pi_ref=self.policy.version))

    @property
    def batches(self) -> int:
        """How many are finished."""
        return self.stand.loop.batch

    def phase(self, name: str) -> None:
        """Show what is being done from now on."""
        self.now = name
        self.display.phase(name)

    def place(self) -> str:
        """Where the run is, for errors: "batch 3, learning"."""
        return self.now if self.now.startswith("evaluation") else f"batch {self.batches + 1}, {self.now}"

    def warn(self, text: str) -> None:
        """Show a line, and record it as an event."""
        self.display.note(text)
        if self.ranks.is_first:
            self.store.record_event("warning", self.batches, text=text)

    def run(self) -> Result:
        """Evaluate, train, evaluate; after an interruption or an error, write what was learned."""
        interrupted, weights, first = None, None, self.ranks.is_first
        status: Status = "failed"
        with (
            logs.shown_by(self.display.note) if first else nullcontext(),
            locked(self.store.path) if first and not self.earlier else nullcontext(),
            closing(self.checkpoints),
            deferring(),
        ):
            try:
                with explained(self.place):
                    self.begin()
                    self.learn()
                weights, status = self.save(), "finished"
                self.record_checkpoints()
            except EndedAtOnce:
                status = "interrupted"
                raise
            except Interrupted as stop:
                interrupted, status = stop.signal, "interrupted"
                if self.restored:
                    kept = f"keeping the policy as it is ({self.progress()})"
                    self.warn(f"{stop.signal.name}: {kept}; again: end at once")
                    self.save_last_checkpoint()
                    weights = self.save()
            except BaseException as error:
                self.rescue(error)
                raise
            finally:
                self.tell_end(status, interrupted, sys.exc_info()[1])
            if status == "finished" and first and not self.settings.checkpoint.save_total_limit:
                self.checkpoints.prune(())
        before, after = map(self.evaluations.summary, ("before", "after"))
        made = {name: found.summary for name, found in self.evaluations.made.items()}
        return Result(self.store.path, before, after, weights, self.policy.version, self.batches, interrupted, made)

    def begin(self) -> None:
        """Show what the run is, and resume it if it is an earlier one."""
        settings = self.settings.model_dump()
        settings["run"] |= {"name": self.store.path.name, "directory": str(self.store.path.parent)}
        self.display.on_start(settings, self.environment, 0)
        if self.ranks.is_first:
            lines = meaning(self.settings, self.parts.trainer.recipe, self.parts)
            for line in [*lines, f"threads     {self.environment['threads']}"]:
                self.display.note(line)
        if self.earlier is not None:
            self.resume(self.earlier)
        self.started = True
        self.callbacks.on_start(settings, self.environment, self.batches)

    def resume(self, earlier: ResumeState) -> None:
        """Restore the parts, and cut the run's records back to the checkpoint."""
        checkpoint, stand = earlier.checkpoint, self.stand
        moved = describe_move(earlier.environment, self.environment)
        if checkpoint is not None:  # all that can be rejected is rejected before the records are cut
            self.phase("restoring the checkpoint")
            check_dtype(earlier.environment, self.environment)
            stand = TrainState.from_parts(self.parts, restore_checkpoint(self.parts, checkpoint))
            self.checkpoints.written = [checkpoint.batch]
            self.warnings.restore(checkpoint.state["warnings"])
        self.ranks.gather(None)  # all have read the checkpoint
        with refusing():
            last = checkpoint.batch if checkpoint else -1
            self.evaluations.made = self.ranks.from_first(lambda: load_run_evaluations(self.store, last, self.total))
        self.stand, self.restored, said = stand, True, list[str]()
        if self.ranks.is_first:
            said = cut_back(earlier, moved, len(stand.loop.prefetched))
            self.store.write_config(write_config(self.parts))
            if checkpoint is None or not earlier.environment:
                write_environment(self.store.path, self.environment)
        if moved:
            differ = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in moved.items())
            said.append(f"no longer bit-identical to a run that never stopped: {differ}")
        left = "" if self.batches < self.total else ": all its batches are made"
        place = f"resumed after batch {self.batches} of {self.total}{left}"
        for line in [*said, place if self.batches else "no checkpoint: it begins again"]:
            self.display.note(line)

    def learn(self) -> None:
        """Algorithm 1 between its evaluations."""
        if (around := self.settings.eval.at_start) and not self.batches:
            self.evaluations.make("before", 0, self.stand.loop)
        self.evaluate_where_due()
        for step in train_loop(self.parts, self.stand.loop, self.phase):
            self.record(step)
            self.evaluate_where_due()
            if self.ranks.from_first(lambda: self.checkpoints.is_due(self.batches)):
                self.write_checkpoint()
            self.record_checkpoints(wait=False)
        self.write_checkpoint()
        if around:
            self.evaluations.make("after", self.batches, self.stand.loop)
            self.keep_best("after")

    def record(self, step: Step) -> None:
        """Record a batch: its line of metrics says that the batch is whole. Then show it, call the callbacks, and write
        weights if they are due."""
        metrics, rows = dict[str, Any](), list[dict[str, Any]]()
        if self.ranks.is_first:
            metrics, names = self.measure(step), reward_names(self.parts.task.reward)
            columns = completion_columns(step.batch, [*step.rows, *step.left_out], self.parts.trainer.recipe.eps_std)
            place = {"step": step.b, "policy_version": step.version}
            rows = list(rollout_rows(step.batch.groups, columns, **place, rewards=names))
            self.store.record_rollouts(step.b, rows)
            self.record_events(step)
            self.store.record(metrics)
        self.stand = TrainState.from_parts(self.parts, step.state)
        warnings = self.warnings.look(step)
        self.display.on_batch(metrics, rows)
        self.callbacks.on_batch(metrics, rows)
        for text in warnings:
            self.warn(text)
        if (every := self.settings.checkpoint.export_every) and step.b % every == 0:
            self.write_weights(self.policy.version)

    def record_events(self, step: Step) -> None:
        """Record what happened before the batch was trained on: a new reference, a weight sync, servers that died."""
        if step.stage > 1 and (step.b - 1) % self.settings.schedule.batches == 0:
            self.store.record_event("reference_sync", step.b, stage=step.stage)
        if step.reason:
            facts = {"reason": step.reason, "policy_version": step.alpha}
            self.store.record_event("weight_sync", step.b, **facts, **step.state.sync)
        if step.sampling.get("recoveries"):
            self.store.record_event("recovery", step.b, **step.sampling)

    def measure(self, step: Step) -> dict[str, Any]:
        """The metrics of a batch. Metrics of whole completions are null if the run leaves out some that they need."""
        rows = [*step.rows, *step.left_out] if lag_is_complete(self.settings, self.parts.trainer.recipe) else []
        return (
            batch_metrics(step)
            | lag_metrics(step.batch, rows, self.settings.task.reward_range)
            | reward_metrics(step.batch.groups, reward_names(self.parts.task.reward))
            | self.evaluations.metrics(step.b - 1)
        )

    def evaluate_where_due(self) -> None:
        """The evaluations after this batch, unless they have been made."""
        if 0 < self.batches < self.total:
            moment = moment_of(self.batches)
            self.evaluations.make(moment, self.batches, self.stand.loop, only_due=True)
            self.keep_best(moment)

    def record_evaluation(self, name: str, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        if self.ranks.is_first:
            self.store.record_evaluation(name, summary, records)
            self.display.on_evaluation(name, summary, records)
            self.callbacks.on_evaluation(name, summary, records)

    def keep_best(self, moment: str) -> None:
        """Keep the policy if this evaluation found it to be the best so far, and the run asks for that."""
        if found := self.ranks.from_first(lambda: self.evaluations.find_best(self.store, moment, self.batches)):
            save = partial(self.parts.save_policy, whole=self.parts.whole_weights())
            with without_progress_bars():
                self.ranks.from_first(lambda: self.store.record_best(save, found))

    def write_checkpoint(self, finish: bool = True) -> None:
        """A checkpoint of this batch, written in the background."""
        self.phase("checkpoint")
        self.checkpoints.wait()
        if self.batches in self.checkpoints.written:
            return
        further = {"model": self.parts.model, "warnings": self.warnings.memory()}
        save_checkpoint(self.checkpoints, self.parts, self.stand, further, finish)

    def record_checkpoints(self, wait: bool = True) -> None:
        """Record the checkpoints that were written; with `wait` when all are."""
        if wait:
            self.checkpoints.wait()
        for news in self.checkpoints.pop_news():
            self.store.record_event("checkpoint", **news)

    def save_last_checkpoint(self) -> None:
        """A checkpoint of the last batch before the run ends, if π is still what it was then."""
        if self.batches and self.policy.version == self.stand.version:
            self.write_checkpoint(finish=False)
        self.record_checkpoints()

    def rescue(self, error: BaseException) -> None:
        """After an error, write the policy, and a checkpoint if no update was made since the last batch. Several ranks
        cannot: the error may be of one of them. A run that could not be restored stays as it was."""
        if not self.restored:
            return error.add_note(f"The run is as it was: {self.store.path}")
        error.add_note(f"The run until then: {self.store.path} ({self.progress()})")
        try:
            if self.ranks.size == 1 and not isinstance(error, CheckpointError):
                self.save_last_checkpoint()
            if self.ranks.size == 1 and self.policy.version:
                self.save()
        except (OSError, ArithmeticError, MemoryError, RuntimeError) as second:
            error.add_note(f"Saving partial results also failed: {second}")
        error.add_note(self.way_on())

    def tell_end(self, status: Status, interrupted: signal.Signals | None, error: BaseException | None) -> None:
        """Record and show that the run is over; if the disk does not take that, the first error remains. A run that
        was rejected stays as it was."""
        detail = "Finished." if status == "finished" else self.progress()
        if not self.restored:
            detail = f"Nothing was changed in {self.store.path}."
        elif interrupted:
            detail = f"Stopped by {interrupted.name}: {detail}. {self.way_on()}"
        with ExitStack() as last:
            if self.started:
                last.callback(self.callbacks.on_end, status, detail)
            last.callback(self.display.on_end, status, detail)
            try:
                if self.restored and self.ranks.is_first:
                    self.store.record_event("end", self.batches, status=status, detail=detail)
            except OSError as second:
                if error is None:
                    raise
                error.add_note(f"Recording the end also failed: {second}")

    def way_on(self) -> str:
        """The command that resumes the run."""
        last, command = self.checkpoints.written[-1:], f"lagrpo train --resume {shlex.quote(str(self.store.path))}"
        place = f"Go on after batch {last[0]} with" if last else "No checkpoint yet; to begin again"
        return f"{place}: {command}"

    def progress(self) -> str:
        """How far the run is."""
        updates = f"the policy has had {count_of(self.policy.version, 'update')}"
        policy = updates if self.policy.version else "no update was made: it is the initial one"
        return f"{self.batches} of {self.total} batches are finished; {policy}"

    def save(self) -> Path | None:
        """The final policy as a Hugging Face model directory."""
        if not self.settings.run.save_weights:
            return None
        self.phase("writing weights")
        return self.write_weights()

    def write_weights(self, version: int | None = None) -> Path:
        """π as it is now, as weights/final or under its version. Collective."""
        save = partial(self.parts.save_policy, whole=self.parts.whole_weights())
        with without_progress_bars():
            return self.ranks.from_first(lambda: self.store.record_weights(save, version))
