"""From settings to a finished run: `train` builds the parts (build.py); `Training` evaluates, trains (loop.py), writes.

Under torchrun every rank runs this. Rank 0 has the display, the callbacks and the files.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
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
from lagrpo.runs.rollouts import rollout_rows
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings
from lagrpo.tasks import NOT_A_TASK, Task, reward_names
from lagrpo.terminal.display import make_display
from lagrpo.terminal.text import count_of
from lagrpo.threads import choose_threads, fixed_threads
from lagrpo.training.build import TrainerComponents
from lagrpo.training.callbacks import Callback, Status, Trackers, check_callbacks
from lagrpo.training.checkpoint import CheckpointManager, TrainState, restore_checkpoint, save_checkpoint
from lagrpo.training.checks import check_settings, local_size, resume_after_restart, world_size
from lagrpo.training.evaluation import (
    EvalSet,
    Evaluations,
    headline,
    load_run_evaluations,
    moment_of,
    sampling_from_policy,
)
from lagrpo.training.explain import find_warnings, meaning
from lagrpo.training.inputs import as_settings, build_task
from lagrpo.training.lag import completion_columns, lag_is_complete, lag_metrics
from lagrpo.training.loop import Step, train_loop
from lagrpo.training.memory import NoMemoryError, explained
from lagrpo.training.metrics import batch_metrics, reward_metrics
from lagrpo.training.ranks import Ranks, joined
from lagrpo.training.resume import ResumeState, create_run, cut_back, describe_environment, find_run, recorded_threads
from lagrpo.types import Result

FAILURES = (RewardError, WeightSyncError, VersionError, SamplerError, FloatingPointError, NoMemoryError, OSError)
"""Errors that end a run without being the program's: their messages are for the user."""


def train(
    source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    rewards: Sequence[Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Run Algorithm 1. The run calls `callbacks` after it has written its files.

    `source` is the path of a TOML file, the name of a packaged one (demo, gsm8k, deepscaler), a mapping or a Settings;
    `settings` changes it: {"schedule.sync_every": 4}. `data` is a path, a hub id, a datasets.Dataset or a list of dicts
    with the columns prompt (or question) and answer; `rewards` are functions or the names of built-in ones. A `task`
    replaces settings.task (see lagrpo.tasks.base).

    Ctrl-C and SIGTERM end the run after the batch under way, or at once while it samples, and write a checkpoint and
    the weights; a second one ends it at once. With `run.resume` the run resumes from its newest checkpoint. Under
    torchrun all processes call this; the callbacks of rank 0 are called, and all return the same.

    Raises SettingsError for settings that cannot be run, before anything heavy is loaded if that can be seen, TypeError
    for arguments of another type, and errors of FAILURES.
    """
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task: {task!r:.80} {NOT_A_TASK}")
    if not isinstance(source, Settings):
        source = load_settings(source, {**as_settings(model, data, rewards), **(settings or {})})
    with refusing():
        task = task or build_task(source, data, rewards)
    return start(resume_after_restart(source), task, callbacks)


def start(settings: Settings, task: Task | None, callbacks: Sequence[Callback]) -> Result:
    """Check what can be checked, and run on this rank."""
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
        self.evaluations = Evaluations(parts)
        identity = earlier.environment.get("id") if earlier and earlier.checkpoint else None
        self.environment = describe_environment(parts, identity)
        self.store = earlier.run if earlier else self.ranks.from_first(lambda: create_run(parts, self.environment))
        parts.keep_logs(self.store.path)
        kept = self.settings.checkpoint
        when = kept.save_every, kept.save_minutes, kept.save_total_limit
        self.checkpoints = CheckpointManager(self.store.path / "checkpoints", *when, self.ranks)
        self.callbacks = [Trackers(run.report_to, run.log_completions), *callbacks] if first else []
        self.started = False  # a run that could not be restored stays as it was
        self.warned, self.had_gradient = set[str](), False
        self.total = self.settings.schedule.stages * self.settings.schedule.batches
        self.stand = TrainState.from_parts(parts, LoopState(pi_ref=self.policy.version))

    def run(self) -> Result:
        """Evaluate, train, evaluate; after an interruption or an error, write what was learned."""
        interrupted, weights, first = None, None, self.ranks.is_first
        status: Status = "failed"
        with (
            logs.shown_by(self.display.note) if first else nullcontext(),
            locked(self.store.path) if first and not self.earlier else nullcontext(),
            deferring(),
        ):
            try:
                with explained(self.place):
                    self.begin()
                    self.learn()
                weights, status = self.save(), "finished"
            except EndedAtOnce:
                status = "interrupted"
                raise
            except BaseException as error:
                stop = error if isinstance(error, Interrupted) else None
                interrupted, status = (stop.signal, "interrupted") if stop else (None, "failed")
                weights = self.rescue(error, stop is not None)
                if stop is None:
                    raise
            finally:
                self.end(status, interrupted)
            if status == "finished" and first and not self.settings.checkpoint.save_total_limit:
                self.checkpoints.prune(())
        before, after = map(self.evaluations.summary, ("before", "after"))
        made = {name: found.summary for name, found in self.evaluations.made.items()}
        return Result(self.store.path, before, after, weights, self.policy.version, self.batches, interrupted, made)

    def begin(self) -> None:
        """Show what the run is, and resume it if it is an earlier one."""
        settings, parts = self.settings.model_dump(), self.parts
        settings["run"] |= {"name": self.store.path.name, "output_dir": str(self.store.path.parent)}
        self.display.on_start(settings, self.environment, 0)
        if self.ranks.is_first:
            for line in meaning(self.settings, parts.trainer.recipe):
                self.display.note(line)
            for name in ("computation", "threads"):
                self.display.note(f"{name:<11} {self.environment[name]}")
            for name, found in (("agreement", parts.agreement), ("offline", parts.offline)):
                if found is not None:
                    self.display.note(f"{name:<11} {found}")
        if self.earlier is not None:
            self.resume(self.earlier)
        for text in () if self.batches else self.evaluations.find_warnings():
            self.warn(text)
        self.started = True
        for callback in self.callbacks:
            callback.on_start(settings, self.environment, self.batches)

    def resume(self, earlier: ResumeState) -> None:
        """Restore the parts, and cut the run's records back to the checkpoint."""
        checkpoint, stand, said = earlier.checkpoint, self.stand, list[str]()
        if checkpoint is not None:  # all that can be rejected is rejected before the records are cut
            self.phase("restoring the checkpoint")
            earlier.check_dtype(self.environment)
            stand = TrainState.from_parts(self.parts, restore_checkpoint(self.parts, checkpoint))
            self.checkpoints.written = [checkpoint.batch]
        self.ranks.gather(None)  # all have read the checkpoint
        with refusing():
            load = partial(load_run_evaluations, self.store, checkpoint.batch if checkpoint else -1, self.total)
            self.evaluations.made = self.ranks.from_first(load)
        if self.ranks.is_first:
            said = cut_back(earlier, self.parts, self.environment)
        self.stand = stand
        place = f"resumed after batch {self.batches} of {self.total}"
        for line in [*said, place if self.batches else "no checkpoint: it begins again"]:
            self.display.note(line)

    def learn(self) -> None:
        """Algorithm 1 between its evaluations."""
        if (around := self.settings.eval.at_start) and not self.batches:
            self.evaluate("before")
        self.evaluate()
        for step in train_loop(self.parts, self.stand.loop, self.phase):
            self.record(step)
            self.evaluate()
            if self.ranks.from_first(lambda: self.checkpoints.is_due(self.batches)):
                self.write_checkpoint()
        self.write_checkpoint()
        if around:
            self.evaluate("after")

    def evaluate(self, around: str = "") -> None:
        """Evaluate π on the sets whose turn it is after this batch, or on all before and after training, unless that
        was done. Keep it if it is the best so far, and the run asks for that."""
        if not around and not 0 < self.batches < self.total:
            return
        moment = around or moment_of(self.batches)
        sets = self.evaluations.find_due(moment, self.batches, not around)
        with sampling_from_policy(self.parts, self.stand.loop) if sets else nullcontext():
            for each in sets:
                self.evaluate_set(each, moment)
        find_best = partial(self.evaluations.find_best, self.store, moment, self.batches)
        if self.batches and (best := self.ranks.from_first(find_best)):
            self.write_weights(partial(self.store.record_best, found=best))

    def evaluate_set(self, each: EvalSet, moment: str) -> None:
        shown = f"evaluation ({moment}, {each.name})" if each.name else f"evaluation ({moment})"
        self.phase(shown)
        found = self.evaluations.make(each, moment)
        if self.ranks.is_first:
            name, of_set = each.file_name(moment), {"set": each.name, "reward_range": list(each.reward_range)}
            place = {"step": self.batches, "policy_version": self.policy.version} | (of_set if each.name else {})
            self.store.record_evaluation(name, place | found.summary, found.records)
            for callback in (self.display, *self.callbacks):
                callback.on_evaluation(name, place | found.summary, found.records)
        self.display.note(f"{shown}: {headline(found.summary)}")

    def record(self, step: Step) -> None:
        """Record a batch: its line of metrics says that the batch is whole. Then show it, call the callbacks, and write
        weights if they are due."""
        metrics, rows = self.record_files(step) if self.ranks.is_first else ({}, [])
        self.stand = TrainState.from_parts(self.parts, step.state)
        for callback in (self.display, *self.callbacks):
            callback.on_batch(metrics, rows)
        for name, text in find_warnings(self.settings, step, self.had_gradient).items():
            if name not in self.warned:
                self.warned.add(name)
                self.warn(text)
        has_gradient = any(update.get("grad_norm") for update in step.updates)
        self.had_gradient = has_gradient or (self.had_gradient and not step.reason)
        if (every := self.settings.checkpoint.export_every) and step.b % every == 0:
            self.write_weights(partial(self.store.record_weights, version=self.policy.version))

    def record_files(self, step: Step) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Write the metrics and the rollouts of a batch, which are returned."""
        names, metrics = reward_names(self.parts.task.reward), self.measure(step)
        columns = completion_columns(step, self.parts.trainer.recipe.eps_std)
        place = {"step": step.b, "policy_version": step.version}
        rows = list(rollout_rows(step.batch.groups, columns, **place, rewards=names))
        self.store.record_rollouts(step.b, rows)
        self.record_events(step)
        self.store.record(metrics)
        return metrics, rows

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
        complete = lag_is_complete(self.settings, self.parts.trainer.recipe)
        logp_k = {**step.logp_k, **step.left_out} if complete else {}
        return (
            batch_metrics(step)
            | lag_metrics(step.batch, logp_k, self.settings.task.reward_range)
            | reward_metrics(step.batch.groups, reward_names(self.parts.task.reward))
            | self.evaluations.metrics(step.b - 1)
        )

    def write_checkpoint(self, finish: bool = True) -> None:
        """A checkpoint of this batch, unless there is one."""
        if self.batches in self.checkpoints.written:
            return
        self.phase("checkpoint")
        facts = save_checkpoint(self.checkpoints, self.parts, self.stand, finish)
        if self.ranks.is_first:
            self.store.record_event("checkpoint", self.batches, **facts)

    def save(self) -> Path | None:
        """The final policy as a Hugging Face model directory."""
        if not self.settings.run.save_weights:
            return None
        self.phase("writing weights")
        return self.write_weights(self.store.record_weights)

    def write_weights(self, record: Any) -> Path:
        """`record` π as it is now: it gets a function that fills a directory. Collective."""
        save = partial(self.parts.save_policy, whole=self.parts.whole_weights())
        with without_progress_bars():
            return self.ranks.from_first(lambda: record(save))

    def rescue(self, error: BaseException, was_asked: bool) -> Path | None:
        """After a signal or an error, write the policy, and a checkpoint if no update was made since the last batch.
        After an error several ranks cannot: it may be of one of them. A run that was not restored stays as it was."""
        if not self.started:
            return error.add_note(f"The run is as it was: {self.store.path}")
        error.add_note(f"The run until then: {self.store.path} ({self.progress()})")
        if was_asked:
            self.warn(f"{error}: keeping the policy as it is ({self.progress()}); again: end at once")
        weights = None
        try:
            at_batch = self.batches and self.policy.version == self.stand.version
            if at_batch and (was_asked or self.ranks.size == 1):
                self.write_checkpoint(finish=False)
            if was_asked or (self.ranks.size == 1 and self.policy.version):
                weights = self.save()
        except (OSError, ArithmeticError, MemoryError, RuntimeError) as second:
            error.add_note(f"Saving partial results also failed: {second}")
        error.add_note(self.way_on())
        return weights

    def end(self, status: Status, interrupted: signal.Signals | None) -> None:
        """Record, show and call back that the run is over."""
        detail = "Finished." if status == "finished" else self.progress()
        if not self.started:
            detail = f"Nothing was changed in {self.store.path}."
        elif interrupted:
            detail = f"Stopped by {interrupted.name}: {detail}. {self.way_on()}"
        with suppress(OSError):  # a full disk has its own error
            if self.started and self.ranks.is_first:
                self.store.record_event("end", self.batches, status=status, detail=detail)
        with ExitStack() as last:  # each is called, whatever another one raises
            for callback in reversed(self.callbacks if self.started else []):
                last.callback(callback.on_end, status, detail)
            self.display.on_end(status, detail)

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

    def progress(self) -> str:
        """How far the run is."""
        updates = f"the policy has had {count_of(self.policy.version, 'update')}"
        policy = updates if self.policy.version else "no update was made: it is the initial one"
        return f"{self.batches} of {self.total} batches are finished; {policy}"

    def way_on(self) -> str:
        """The command that resumes the run."""
        last, command = self.checkpoints.written[-1:], f"lagrpo train --resume {shlex.quote(str(self.store.path))}"
        place = f"Go on after batch {last[0]} with" if last else "No checkpoint yet; to begin again"
        return f"{place}: {command}"
