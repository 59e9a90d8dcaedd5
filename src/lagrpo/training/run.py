"""From settings to a finished run: `train` builds the parts (build.py); `Training` evaluates, trains (loop.py), writes.

Under torchrun every rank runs this. Rank 0 has the display, the callbacks and the files.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lagrpo import logs
from lagrpo.core.objective import Recipe
from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.errors import as_settings_error
from lagrpo.interrupts import EndedAtOnce, Interrupted, deferring, interruptible
from lagrpo.machine import choose_threads, fixed_threads
from lagrpo.model.backend import pick_device
from lagrpo.model.loading import quiet
from lagrpo.rewards.pool import RewardError
from lagrpo.rewards.reward import Rewards
from lagrpo.rollout.prefetch import VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.sync_check import WeightSyncError
from lagrpo.rollout.vllm.client import SamplerError
from lagrpo.runs.directory import Run, locked
from lagrpo.runs.environment import write_environment
from lagrpo.runs.reading import load_events
from lagrpo.runs.rollouts import rollout_rows
from lagrpo.settings.load import flatten, load_settings, to_toml
from lagrpo.settings.own_loss import keep_sources
from lagrpo.settings.schema import Settings
from lagrpo.tasks import NOT_A_TASK, Task
from lagrpo.terminal.display import Display, make_display
from lagrpo.terminal.text import count_of, formatted_interval, unscored_text
from lagrpo.training import checkpoint as checkpoints
from lagrpo.training import checks
from lagrpo.training.build import TrainerComponents
from lagrpo.training.callbacks import Callback, Status, Trackers
from lagrpo.training.checkpoint import ResumeState
from lagrpo.training.evaluation import Evaluations, sampling_from_policy
from lagrpo.training.explain import meaning
from lagrpo.training.loop import train_loop
from lagrpo.training.metrics import batch_metrics, completion_columns
from lagrpo.training.ranks import Ranks, joined
from lagrpo.training.sources import find_changed_sources
from lagrpo.training.step import Step
from lagrpo.types import Result

FAILURES = (RewardError, WeightSyncError, VersionError, SamplerError, FloatingPointError, OSError)
FAILURES += (MemoryError, torch.OutOfMemoryError)
"""Errors that end a run for reasons outside the program; the command line prints their messages without a traceback."""
MEMORY = "To save memory, lower optimizer.micro_batch_tokens or rollout.max_num_seqs, or set gradient_checkpointing."


def train(
    source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    model: str | os.PathLike[str] | None = None,
    data: Any = None,
    rewards: Sequence[Any] | None = None,
    loss: str | Recipe | Callable | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> Result:
    """Train a model (Algorithm 1 of arXiv 2505.22257), and return where its files are and the evaluations.

    source: path of a TOML file, name of a packaged one (demo, gsm8k, deepscaler), mapping or Settings; None: all
        defaults. `settings` changes single values: {"schedule.sync_every": 4}; `model` is short for model.path.
    data: path, hub id, datasets.Dataset, or list of dicts, with the columns prompt (or question) and answer.
    rewards: functions f(completion, answer) -> float, or in TRL's or verl's signature, or names of built-in ones.
    loss: name of a recipe, lagrpo.Recipe, or function of LossInputs that gives the value of each token [T] to maximize.
    task: object that replaces settings.task (lagrpo.tasks.Task). callbacks: called after each batch is on disk.
    resume: directory of a run to resume with its own settings, or "auto": the run called run.name, if it exists.

    Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 stops the run after the current update and writes a checkpoint. Under torchrun
    every process calls this and gets the same Result; only rank 0 calls `callbacks`. Raises SettingsError for input
    that cannot be run, TypeError for arguments of a wrong type, and an error of FAILURES if the run fails.
    """
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task: {task!r:.80} {NOT_A_TASK}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks: {callback!r:.80} is not an instance of a class that inherits lagrpo.Callback"
            )
    device = pick_device().type
    checks.check_ranks(device)
    resume = None if resume is None else os.fspath(resume)
    rewards = rewards if isinstance(rewards, list | tuple | None) else [rewards]
    checks.check_one_loss(loss, settings)
    arguments = checks.in_memory_arguments(task, data, rewards, loss)
    if not isinstance(source, Settings):
        source = load_settings(
            source, {**checks.as_settings(model, data, rewards, loss), **(settings or {})}, resume
        )
    given = {"task": task, "data": data, "rewards": rewards, "loss": loss}
    checks.check_arguments(source, resume, [name for name in given if given[name] is not None])
    with as_settings_error():
        task = task or checks.build_task(source, data, rewards)
    resolved = checks.name_rewards(source, task)
    recipe = checks.check_settings(resolved, task, resume, loss)
    threads = fixed_threads(
        choose_threads(checks.recorded_threads(resolved, resume), checks.local_size())
    )
    shard_layers = resolved.distributed.strategy == "fsdp2"
    with interruptible(), freed_memory_kept(), threads, joined(device, shard_layers) as ranks:
        from torch.distributed.elastic.multiprocessing.errors import record

        call: Any = (
            run_rank if ranks.size == 1 else record(run_rank)
        )  # torchrun prints the error of the first rank
        return call(resolved, recipe, task, callbacks, ranks, resume, arguments)


def run_rank(
    settings: Settings,
    recipe: Recipe,
    task: Task | None,
    callbacks: Sequence[Callback],
    ranks: Ranks,
    resume: str | None,
    arguments: Sequence[str],
) -> Result:
    """The run on this rank; `arguments` are the ones of `train` that its settings cannot hold."""
    directory = ranks.on_rank0(lambda: checks.find_run(settings, resume))
    with (
        nullcontext() if ranks.is_first else logs.shown_by(logs.print_line, logging.WARNING),
        locked(directory) if directory and ranks.is_first else nullcontext(),
    ):
        earlier = (
            ranks.on_rank0(lambda: ResumeState.find(directory, settings)) if directory else None
        )
        started = earlier.started if earlier else None
        recorded = earlier.places if earlier else {}
        parts = TrainerComponents.build(settings, recipe, task, ranks, started, recorded)
        with closing(parts):
            return Training(parts, callbacks, earlier, arguments).run()


class Training:
    """One run, on this rank. Rank 0 shows and records it, and calls callbacks.

    earlier: the run that it resumes. arguments: the ones of `train` that its settings cannot hold.
    """

    def __init__(
        self,
        components: TrainerComponents,
        callbacks: Sequence[Callback] = (),
        earlier: ResumeState | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.components, self.settings, self.policy, self.ranks = (
            components,
            components.settings,
            components.trainer.policy,
            components.ranks,
        )
        run, self.earlier, self.first = self.settings.run, earlier, components.ranks.is_first
        self.display, self.now = make_display() if self.first else Display(), "start"
        self.evaluations = Evaluations(components)
        self.environment = checkpoints.describe_environment(components, earlier)
        self.environment["arguments"] = [*arguments]
        self.resume_arguments = [*arguments, *(["callbacks"] if callbacks else [])]
        self.store = earlier.run if earlier else self.ranks.on_rank0(self.create_run)
        components.keep_logs(self.store.path)
        if self.first:
            keep_sources(components.trainer.recipe, self.store.path)
        self.folder, self.saved, self.saved_at = (
            self.store.path / "checkpoints",
            0,
            time.monotonic(),
        )
        self.callbacks = (
            [Trackers(run.report_to, run.log_completions), *callbacks] if self.first else []
        )
        self.started = self.warned = False  # a run that could not be restored stays as it was
        self.unscored = Counter[int]()  # completions without a reward, by batch
        self.shown = set[str]()  # outcomes without a reward that a line was shown for
        self.set_state(LoopState(pi_ref=self.policy.version))

    def create_run(self) -> Run:
        run, named = (
            self.settings.run,
            self.settings.model_dump() | {"task": {"name": self.components.main.task.name}},
        )
        return Run.create(Path(run.output_dir), run.name, named, self.config(), self.environment)

    def config(self) -> str:
        own = "# The task was the caller's own object; of [task] only system_prompt was read.\n"
        return own * self.components.own_task + to_toml(self.settings)

    def run(self) -> Result:
        """Evaluate, train, evaluate; after an interruption or an error, write what was learned."""
        weights, interrupted = None, None
        status: Status = "failed"
        with (
            logs.shown_by(self.display.note) if self.first else nullcontext(),
            locked(self.store.path) if self.first and not self.earlier else nullcontext(),
            deferring(),
        ):
            try:
                self.begin()
                self.learn()
                weights, status = self.write_weights(self.store.record_weights), "finished"
            except EndedAtOnce:
                status = "interrupted"
                raise
            except Interrupted as stop:
                interrupted, status = stop.signal, "interrupted"
                weights = self.rescue(stop, was_asked=True)
            except BaseException as error:
                self.rescue(error, was_asked=False)
                raise
            finally:
                self.end(status, interrupted)
        before, after = map(self.evaluations.summary, ("before", "after"))
        made = {name: found.summary for name, found in self.evaluations.made.items()}
        return Result(
            self.store.path,
            before,
            after,
            weights,
            self.policy.version,
            self.loop.batch,
            interrupted,
            made,
        )

    def begin(self) -> None:
        """Show what the run is, and resume it if it is an earlier one."""
        settings, parts = self.settings.model_dump(), self.components
        settings["run"] |= {"name": self.store.path.name, "output_dir": str(self.store.path.parent)}
        settings["task"]["reward_range"] = self.settings.task.reward_range
        checkpoint = self.earlier.checkpoint if self.earlier else None
        self.display.on_start(settings, self.environment, checkpoint.batch if checkpoint else 0)
        if self.first:
            computed = f"{self.environment['computation']}, {count_of(self.environment['threads'], 'thread')}"
            found = {
                "computation": computed,
                "agreement": parts.check_weight_sync.agreement,
                "offline": parts.offline,
            }
            lines = [f"{name:<11} {value}" for name, value in found.items() if value is not None]
            self.display.note("\n".join([*meaning(self.settings, parts.trainer.recipe), *lines]))
        if self.earlier is not None:
            self.resume(self.earlier)
        self.started = True
        for callback in self.callbacks:
            callback.on_start(settings, self.environment, self.loop.batch)

    def resume(self, earlier: ResumeState) -> None:
        """Restore the parts, and cut the run's records back to the checkpoint."""
        checkpoint, old, new = (
            earlier.checkpoint,
            flatten(earlier.environment),
            flatten(self.environment),
        )
        moved = {
            n: [old.get(n), new.get(n)]
            for n in checkpoints.MACHINE
            if old and old.get(n) != new.get(n)
        }
        recorded = earlier.environment.get("sources", {}) if checkpoint else {}
        code = find_changed_sources(recorded, self.environment["sources"])
        if checkpoint is not None:
            self.phase("restoring the checkpoint")
            self.set_state(checkpoints.restore_checkpoint(self.components, checkpoint, code))
            self.saved = checkpoint.batch
        self.ranks.gather(None)  # all have read the checkpoint
        with as_settings_error():
            load = partial(
                self.evaluations.load, self.store, checkpoint.batch if checkpoint else -1
            )
            self.evaluations.made = self.ranks.on_rank0(load)
        for name, evaluation in self.evaluations.made.items():
            self.display.on_evaluation(name, evaluation.summary, evaluation.records)
        if self.first:
            earlier.cut_back(moved=moved, code=code, git=self.environment["git"])
            for event in load_events(self.store):
                if event["event"] in ("unscored", "failed") and "evaluation" not in event:
                    self.unscored[event["step"]] += event["count"]
            self.store.write_config(self.config())
            if checkpoint is None or not earlier.environment:
                write_environment(self.store.path, self.environment)
        if moved:
            differ = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in moved.items())
            self.display.note(
                f"results may differ in the last bits from a run that never stopped: {differ}"
            )
        if code:
            self.warn(
                f"changed since the run started: {', '.join(code)}; batches from now on use the new code"
            )
        self.display.note(
            f"resumed after batch {self.loop.batch}"
            if checkpoint
            else "no checkpoint: starting again"
        )

    def learn(self) -> None:
        if self.settings.eval.at_start and not self.loop.batch:
            self.evaluate("before")
        self.evaluate()
        for step in train_loop(self.components, self.loop, self.phase):
            self.record(step)
            self.evaluate()
            if self.ranks.on_rank0(self.checkpoint_is_due):
                self.write_checkpoint()
        self.write_checkpoint()
        if self.settings.eval.at_start:
            self.evaluate("after")

    def evaluate(self, moment: str = "") -> None:
        """Evaluate π on the sets whose turn it is after this batch, or on all before and after training. Keep it if it
        is the best so far."""
        due = self.evaluations.find_due(self.loop.batch, moment)
        with sampling_from_policy(self.components, self.loop) if due else nullcontext():
            for name, each in due.items():
                self.phase(f"evaluation ({name})")
                found = self.evaluations.make(name, each, self.loop.batch)
                if self.first:
                    self.store.record_evaluation(name, found.summary, found.records)
                for callback in (self.display, *self.callbacks):
                    callback.on_evaluation(name, found.summary, found.records)
                self.note_evaluation(name, found.summary)
        best = self.ranks.on_rank0(
            partial(self.evaluations.find_best, self.store, self.loop.batch, moment)
        )
        if self.loop.batch and best:
            self.write_weights(partial(self.store.record_best, found=best))

    def note_evaluation(self, name: str, summary: Mapping[str, Any]) -> None:
        """Show pass@1 and how many completions could not be scored; these are an event, too."""
        line = f"evaluation ({name}): pass@1 {formatted_interval(summary, 'pass@1', '.1%')}"
        if summary["unscored"]:
            reason = summary["unscored_reason"]
            line += f"   {unscored_text(summary)}; the first: {reason}"
            count, completions = summary["unscored"], summary["prompts"] * summary["samples"]
            facts = {"count": count, "completions": completions, "reason": reason}
            if self.first:
                self.store.record_event("unscored", self.loop.batch, evaluation=name, **facts)
        self.display.note(line)

    def record(self, step: Step) -> None:
        """Record a batch, then show it, call the callbacks, and write weights if they are due."""
        metrics, rows = self.record_files(step) if self.first else ({}, [])
        self.set_state(step.state)
        for callback in (self.display, *self.callbacks):
            callback.on_batch(metrics, rows)
        if (every := self.settings.checkpoint.export_every) and step.b % every == 0:
            self.write_weights(partial(self.store.record_weights, version=self.policy.version))

    def record_files(self, step: Step) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Write the metrics and the rollouts of a batch, which are returned, and its events. The metrics come last:
        their line says that the batch is whole."""
        names = Rewards.from_reward(self.components.main.task.reward).names
        place: Any = {"step": step.b, "policy_version": step.version}
        metrics = batch_metrics(
            step, names, self.settings.task.reward_range
        ) | self.evaluations.metrics(step.b - 1)
        columns = completion_columns(step, self.components.trainer.recipe.eps_std)
        rows = list(rollout_rows(step.batch.groups, columns, **place, rewards=names))
        self.store.record_rollouts(step.b, rows)
        if step.stage > 1 and (step.b - 1) % self.settings.schedule.stage_length == 0:
            self.store.record_event("reference_sync", step.b, stage=step.stage)
        if step.reason:
            facts = {"reason": step.reason, "policy_version": step.state.alpha}
            self.store.record_event("weight_sync", step.b, **facts, **step.state.sync)
        if step.sampling.get("recoveries"):
            self.store.record_event("recovery", step.b, **step.sampling)
        self.store.record(metrics)
        self.record_unscored(rows, step.b)
        low, high = self.settings.task.reward_range
        if not self.warned and any(
            not low <= row["reward"] <= high for row in rows if row["reward"] is not None
        ):
            self.warned = True
            self.warn(
                f"rewards lie outside [{low:g}, {high:g}], so pass@1 is wrong: set range in task.rewards"
            )
        return metrics, rows

    def record_unscored(self, rows: Sequence[Mapping[str, Any]], batch: int) -> None:
        """Record how many completions of a batch have no reward, and why the first has none. Show the first such batch
        only: later ones may say the same a thousand times."""
        for kind in ("unscored", "failed"):
            reasons = [row["reason"] for row in rows if row["outcome"] == kind]
            if not reasons:
                continue
            facts = {"count": len(reasons), "completions": len(rows), "reason": reasons[0]}
            self.store.record_event(kind, batch, **facts)
            self.unscored[batch] += len(reasons)
            if kind not in self.shown:
                self.shown.add(kind)
                count = f"{len(reasons)} of {len(rows)} completions are {kind}"
                self.display.note(f"batch {batch}: {count}; the first: {reasons[0]}")

    def checkpoint_is_due(self) -> bool:
        c, waited = self.settings.checkpoint, time.monotonic() - self.saved_at
        by_time = c.save_minutes > 0 and waited >= 60 * c.save_minutes
        return by_time or (c.save_every > 0 and self.loop.batch % c.save_every == 0)

    def write_checkpoint(self, finish: bool = True) -> None:
        """A checkpoint of this batch, unless there is one; older ones are removed."""
        if self.loop.batch == self.saved:
            return
        self.phase("checkpoint")
        started = time.monotonic()
        checkpoints.save_checkpoint(self.folder, self.components, self.loop, self.synced, finish)
        self.saved, self.saved_at = self.loop.batch, time.monotonic()
        if self.first:
            checkpoints.prune_checkpoints(
                self.folder, max(1, self.settings.checkpoint.save_total_limit)
            )
            self.store.record_event("checkpoint", self.loop.batch, seconds=self.saved_at - started)

    def write_weights(self, record: Callable[[Callable[[Path], None]], Path]) -> Path:
        """`record` π as it is now: it gets a function that fills a directory. Collective."""
        self.phase("writing weights")
        save = self.components.gather_policy()
        with quiet():
            return self.ranks.on_rank0(lambda: record(save))

    def rescue(self, error: BaseException, was_asked: bool) -> Path | None:
        """After a signal or an error, write the policy, and a checkpoint if no update was made since the last batch.
        After an error several ranks cannot: it may be of one of them."""
        if not self.started:
            return error.add_note(f"The run is unchanged: {self.store.path}")
        error.add_note(
            f"The run so far: {self.store.path} ({self.progress()}; stopped during: {self.now})"
        )
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
            error
        ):
            error.add_note(MEMORY)
        if was_asked:
            self.warn(
                f"{error}: saving the run ({self.progress()}). A second signal exits at once, without saving"
            )
        weights = None
        try:
            if was_asked or self.ranks.size == 1:
                if self.loop.batch and self.policy.version == self.version:
                    self.write_checkpoint(finish=False)
                if was_asked or self.policy.version:
                    weights = self.write_weights(self.store.record_weights)
        except (OSError, ArithmeticError, MemoryError, RuntimeError) as second:
            error.add_note(f"Saving partial results also failed: {second}")
        error.add_note(self.resume_command())
        return weights

    def end(self, status: Status, interrupted: signal.Signals | None) -> None:
        """Record, show and call back that the run is over."""
        detail = self.describe_end(status, interrupted)
        with suppress(OSError):  # a full disk has its own error
            if self.started and self.first:
                self.store.record_event("end", self.loop.batch, status=status, detail=detail)
                if status == "finished" and not self.settings.checkpoint.save_total_limit:
                    checkpoints.prune_checkpoints(self.folder, 0)
        with ExitStack() as last:  # each is called, whatever another one raises
            for callback in reversed(self.callbacks if self.started else []):
                last.callback(callback.on_end, status, detail)
            self.display.on_end(status, detail)

    def describe_end(self, status: Status, interrupted: signal.Signals | None) -> str:
        """How the run ended, how many of its completions had no reward, and how it is resumed."""
        if not self.started:
            return f"The run is unchanged: {self.store.path}"
        sentences = ["Finished" if status == "finished" else self.progress()]
        if interrupted:
            sentences = [f"Stopped by {interrupted.name}: {self.progress()}"]
        if self.unscored:
            count = count_of(sum(self.unscored.values()), "completion")
            batches = count_of(len(self.unscored), "batch", "es")
            sentences.append(f"{count} of {batches} had no reward (events.jsonl says why)")
        if interrupted:
            sentences.append(self.resume_command())
        return ". ".join(sentences) + ("." if status == "finished" else "")

    def set_state(self, loop: LoopState) -> None:
        """The run stands after a batch; a checkpoint may be made of it until the next update."""
        self.loop, self.version, self.synced = (
            loop,
            self.policy.version,
            self.components.trainer.synced,
        )

    def phase(self, name: str) -> None:
        self.now = name
        self.display.phase(name)

    def warn(self, text: str) -> None:
        """Show a line, and record it as an event."""
        self.display.note(text)
        if self.first:
            self.store.record_event("warning", self.loop.batch, text=text)

    def progress(self) -> str:
        updates, total = count_of(self.policy.version, "update"), self.settings.schedule.batches
        return f"{self.loop.batch} of {total} batches finished, {updates} made"

    def resume_command(self) -> str:
        """The command, or the call in Python, that resumes the run."""
        place = (
            f"To resume after batch {self.saved}"
            if self.saved
            else "No checkpoint yet; to start again"
        )
        if self.resume_arguments:
            return f"{place}: {checks.resume_call(self.store.path, self.resume_arguments)}"
        lagrpo = "lagrpo"
        if self.ranks.size > 1:
            one_host = checks.local_size() == self.ranks.size
            lagrpo = (
                f"torchrun {f'--nproc-per-node {self.ranks.size}' if one_host else '…'} -m lagrpo"
            )
        return f"{place}: {lagrpo} train --resume {shlex.quote(str(self.store.path))}"
