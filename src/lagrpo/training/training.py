"""One run: its parts evaluated before and after, observed, recorded, and stopped cleanly."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lagrpo import logs
from lagrpo.interrupts import Interrupted, divisible, whole
from lagrpo.ranks.signs import RankError
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs.checkpoints import CheckpointError, Checkpoints
from lagrpo.runs.directory import locked
from lagrpo.runs.environment import write_environment
from lagrpo.runs.rollouts import rollout_rows
from lagrpo.tasks import reward_names
from lagrpo.terminal.display import make_display
from lagrpo.terminal.text import count_of
from lagrpo.trackers import Trackers
from lagrpo.training.beginning import create_run, describe_environment, write_config
from lagrpo.training.budget import RewardBudget
from lagrpo.training.build import Parts, without_progress_bars
from lagrpo.training.changes import RUN, plain
from lagrpo.training.checkpoint import Keeper, Stand, capture, restore
from lagrpo.training.evaluations import Evaluations, moment_of
from lagrpo.training.explain import meaning
from lagrpo.training.lag import completion_columns, lag_is_complete, lag_metrics
from lagrpo.training.loop import Step, iterative_grpo
from lagrpo.training.memory import Place, explained
from lagrpo.training.metrics import batch_metrics, reward_metrics, sampler_metrics
from lagrpo.training.observers import Observer, Observers, RunFiles, Status
from lagrpo.training.resume import Earlier, check_dtype, cut_back, describe_move, take_evaluations
from lagrpo.training.warnings import Warnings


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves: its directory, the summaries of its evaluations, where the weights are and how many updates
    they have had, and the signal that stopped it, None for a run that came to its end."""

    run: Path
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    weights: Path | None
    version: int
    batches: int
    interrupted: signal.Signals | None
    evaluations: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """the summaries of all evaluations by the names of their files; `before` and `after` are of the first set"""


class Training:
    """One run: what it does with its parts, and whom it tells. `earlier`: the run that it goes on with."""

    def __init__(self, parts: Parts, observers: Sequence[Observer] = (), earlier: Earlier | None = None) -> None:
        self.parts, self.settings, self.policy = parts, parts.settings, parts.learner.policy
        run, self.earlier = self.settings.run, earlier
        self.environment = describe_environment(parts, earlier.identity if earlier else None)
        if earlier is None:
            named = self.settings.model_dump() | {"task": {"name": parts.task.name}}
            self.store = create_run(run, named, write_config(parts), self.environment)
        else:
            self.store = earlier.run
        parts.keep_logs(self.store.path)
        if parts.world is not None:
            parts.world.own.remember(RUN, str(self.store.path.resolve()))
        self.keeper = Keeper(
            Checkpoints(self.store.path), run.checkpoint_every, run.checkpoint_minutes, run.keep_checkpoints
        )
        self.display = make_display(run.display)
        self.place = Place()
        self.files = RunFiles(self.store)
        self.trackers = Trackers(run.trackers, run.tracked_completions)
        self.observers = Observers(self.files, self.display, self.place, self.trackers, *observers)
        dtype = str(self.policy.dtype).removeprefix("torch.")
        self.warnings = Warnings(self.settings, dtype, parts.task.size("train"))
        self.total = self.settings.schedule.stages * self.settings.schedule.batches
        self.budget = RewardBudget(self.settings.verifier.max_without_reward_run)
        self.evaluations = Evaluations(parts, self.observers, self.display.note)
        self.restored = earlier is None  # π is the run's
        self.stand = Stand.of(parts, LoopState(pi_ref=self.policy.version))
        self.seconds_checkpoint = 0.0

    @property
    def batches(self) -> int:
        """How many are finished."""
        return self.stand.state.batch

    def run(self) -> Result:
        """Evaluate, train, evaluate; whatever happens, what was learned is written."""
        interrupted, weights = None, None
        status: Status = "failed"
        with (
            logs.shown_by(self.display.note),
            nullcontext() if self.earlier else locked(self.store.path),
            closing(self.keeper),
        ):
            try:
                with explained(lambda: self.place.at(self.batches)):
                    self.begin()
                    self.learn()
                weights, status = self.finish(), "finished"
            except Interrupted as stop:
                interrupted, status = stop.signal, "interrupted"
                weights = self.keep_as_it_is(stop.signal.name) if self.restored else None
            except BaseException as error:
                self.rescue(error)
                raise
            finally:
                self.tell_end(status, interrupted, sys.exc_info()[1])
            if status == "finished" and not self.settings.run.keep_optimizer:  # after the event that says so
                self.keeper.store.prune(())
        before, after = map(self.evaluations.summary, ("before", "after"))
        made = {name: found.summary for name, found in self.evaluations.made.items()}
        return Result(self.store.path, before, after, weights, self.policy.version, self.batches, interrupted, made)

    def begin(self) -> None:
        """Tell the observers what the run is."""
        parts, settings = self.parts, self.settings.model_dump()
        settings["run"] |= {"name": self.store.path.name, "directory": str(self.store.path.parent)}
        lines = meaning(self.settings, parts.learner.recipe, parts)
        self.observers.start(settings, self.environment)
        for line in [*lines, f"threads     {self.environment['threads']}"]:
            self.display.note(line)
        if self.earlier is not None:
            self.resume(self.earlier)
        kept = None if self.earlier is None else self.batches
        self.trackers.open(self.store.path, settings, self.environment, kept)

    def resume(self, earlier: Earlier) -> None:
        """Go on where the run stood: restore the parts, and cut its records back to the checkpoint."""
        checkpoint, stand = earlier.checkpoint, self.stand
        moved = describe_move(earlier.environment, self.environment)
        if checkpoint is not None:  # all that can be refused is refused before the records are cut
            self.observers.phase("restoring the checkpoint")
            check_dtype(earlier.environment, self.environment)
            stand = Stand.of(self.parts, restore(self.parts, checkpoint, self.parts.model))
            self.keeper.take_over(checkpoint.batch, checkpoint.state["best"])
            self.warnings.restore(checkpoint.state["warnings"])
            for of_batch in earlier.metrics:
                self.budget.count(of_batch)
        self.stand, self.restored, self.files.finished = stand, True, stand.state.batch
        with whole():
            said = [*earlier.said, *cut_back(earlier, moved, len(stand.state.prefetched))]
            self.store.write_config(write_config(self.parts))
            if checkpoint is None or not earlier.environment:
                write_environment(self.store.path, self.environment)
            self.evaluations.made = take_evaluations(earlier, self.total)
            self.rank_again()
        if moved:
            differ = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in moved.items())
            said.append(f"no longer bit-identical to a run that never stopped: {differ}")
        left = "" if self.batches < self.total else ": all its batches are made"
        place = f"resumed after batch {self.batches} of {self.total}{left}"
        for line in [*said, place if self.batches else "no checkpoint: it begins again"]:
            self.display.note(line)

    def rescue(self, error: BaseException) -> None:
        """Write the policy after an error, and a checkpoint where no update was made since the last batch; if that
        fails too, the first error remains the one that is told. A run that could not be restored stays as it was."""
        if not self.restored:
            return error.add_note(f"The run is as it was: {self.store.path}")
        error.add_note(f"The run until then: {self.store.path} ({self.progress()})")
        try:
            if not isinstance(error, CheckpointError | RankError):
                self.save_checkpoint()
            if self.policy.version:
                self.save()
        except (OSError, ArithmeticError, MemoryError, RuntimeError) as second:
            error.add_note(f"Nor could all of it be written to {self.store.path}: {second}")
        error.add_note(self.way_on())

    def tell_end(self, status: Status, interrupted: signal.Signals | None, error: BaseException | None) -> None:
        """Tell the observers that the run is over; where the disk does not take that, the first error is told."""
        observers = self.observers if self.restored else self.display  # a run that was refused stays as it was
        try:
            observers.end(status, self.describe_end(status, interrupted))
        except OSError as second:
            if error is None:
                raise
            error.add_note(f"Nor could its end be recorded: {second}")

    def keep_as_it_is(self, name: str) -> Path | None:
        """What an interruption leaves: a checkpoint and the policy; the policy also where a rank has ended, which was
        why torchrun interrupted."""
        self.observers.note(f"{name}: keeping the policy as it is ({self.progress()}); again: end at once")
        try:
            self.save_checkpoint()
        finally:
            weights = self.save()
        return weights

    def describe_end(self, status: Status, interrupted: signal.Signals | None) -> str:
        """What is said last."""
        if status == "finished":
            return "Finished."
        if not self.restored:
            return f"Nothing was changed in {self.store.path}."
        return f"Stopped by {interrupted.name}: {self.progress()}. {self.way_on()}" if interrupted else self.progress()

    def way_on(self) -> str:
        """The command that goes on from here."""
        last, command = self.keeper.written[-1:], f"lagrpo train --resume {shlex.quote(str(self.store.path))}"
        place = f"Go on after batch {last[0]} with" if last else "No checkpoint yet; to begin again"
        return f"{place}: {command}"

    def learn(self) -> None:
        """Algorithm 1 between its evaluations."""
        around, evaluations = self.settings.evaluation.before_and_after, self.evaluations
        if around and not self.batches:
            evaluations.make("before", 0, self.stand.state)
        self.evaluate_where_due()
        with closing(iterative_grpo(self.parts, self.stand.state, self.observers.phase)) as steps:
            for step in steps:
                self.record(step)
                with divisible():
                    self.evaluate_where_due()
                    self.keep()
        if self.settings.run.keep_optimizer:
            self.write_checkpoint()
        if around:
            evaluations.make("after", self.batches, self.stand.state)
            self.rank("after")

    def evaluate_where_due(self) -> None:
        """The evaluations after this batch, unless they have been made."""
        b, moment = self.batches, moment_of(self.batches)
        if 0 < b < self.total:
            self.evaluations.make(moment, b, self.stand.state, lambda exam: exam.every and b % exam.every == 0)
            self.rank(moment)

    def rank(self, moment: str) -> None:
        """Keep the policy where this evaluation found it to be the best so far, and the run asks for that."""
        value, settings = self.evaluations.value(moment), self.settings.evaluation
        if (settings.best is None and moment == "after") or not self.keeper.rank(self.batches, value):
            return
        if settings.best is not None and value is not None:
            found = {"best": settings.best, "value": value if settings.best_is == "greatest" else -value}
            found |= {"batch": self.batches, "version": self.policy.version}
            with without_progress_bars():
                self.store.record_best(self.save_policy, found)

    def rank_again(self) -> None:
        """Which policy was the best so far, by the evaluations that a run made before it was resumed."""
        if self.settings.evaluation.best is None:
            return
        self.keeper.best = None
        for moment in sorted({name.partition(".")[0] for name in self.evaluations.made} - {"before"}):
            batch = self.total if moment == "after" else int(moment.removeprefix("batch-"))
            self.keeper.rank(batch, self.evaluations.value(moment))

    def keep(self) -> None:
        """A checkpoint where one is due; and what there is to tell of those that were written."""
        if self.keeper.due(self.batches):
            self.write_checkpoint()
        self.tell_of_checkpoints()

    def tell_of_checkpoints(self) -> None:
        for news in self.keeper.tell():
            self.store.record_event("checkpoint", **news)

    def write_checkpoint(self, finish: bool = True) -> None:
        """A checkpoint of this batch, written in the background."""
        started, waited = time.perf_counter(), self.parts.prefetcher.seconds
        self.observers.phase("checkpoint")
        self.keeper.wait()
        if self.batches in self.keeper.written:
            return
        further = {
            "run": self.environment["id"],
            "settings": plain(self.settings),
            "model": self.parts.model,
            "lengths": {f.name: f.stat().st_size if f.exists() else 0 for f in (self.store.metrics, self.store.events)},
            "warnings": self.warnings.memory(),
            "best": self.keeper.best,
        }
        with whole():
            path = self.keeper.store.path
            self.keeper.write(lambda: capture(self.parts, self.stand, further, path, finish))
        sampling = self.parts.prefetcher.seconds - waited  # the next batch counts it
        self.seconds_checkpoint += time.perf_counter() - started - sampling

    def save_checkpoint(self) -> None:
        """A checkpoint of the last batch before the run ends, if π is still what it was then."""
        if self.batches and self.policy.version == self.stand.version:
            self.write_checkpoint(finish=False)
        self.keeper.wait()
        self.tell_of_checkpoints()

    def finish(self) -> Path | None:
        """Write what the finished run leaves: its weights."""
        weights = self.save()
        self.keeper.wait()
        self.tell_of_checkpoints()
        return weights

    def progress(self) -> str:
        """How far the run has come."""
        updates = f"the policy has had {count_of(self.policy.version, 'update')}"
        policy = updates if self.policy.version else "no update was made: it is the initial one"
        return f"{self.batches} of {self.total} batches are finished; {policy}"

    def record(self, step: Step) -> None:
        """Tell the observers of a batch; then write weights where it is time."""
        b, metrics = step.b, self.measure(step)
        columns = completion_columns(step.batch, step.rows, self.parts.learner.recipe.composition.eps_std)
        place = {"batch": b, "stage": step.stage, "pi_k_version": step.version}
        rows = rollout_rows(step.batch.groups, columns, **place, rewards=reward_names(self.parts.task.judge))
        self.observers.batch(step, metrics, list(rows))
        for text in self.warnings.look(step):
            self.observers.note(text)
        if (every := self.settings.run.save_every) and b % every == 0:
            self.write_weights(self.policy.version)
        self.stand = Stand.of(self.parts, step.state)
        self.budget.count(metrics)
        self.budget.check()

    def measure(self, step: Step) -> dict[str, Any]:
        """The metrics of a batch. Metrics of the lag are null where the run leaves out completions that they need."""
        s, recipe = self.settings, self.parts.learner.recipe
        rows, after_T = (step.rows, step.after_T) if lag_is_complete(s, recipe) else ((), None)
        return (
            batch_metrics(step)
            | sampler_metrics(step.state.sync, step.sampling)
            | lag_metrics(step.batch, rows, recipe.composition.eps_std, s.task.reward_range, after_T)
            | reward_metrics(step.batch.groups, reward_names(self.parts.task.judge))
            | self.evaluations.after(step.b - 1)
            | {"seconds_checkpoint": self.spent_on_checkpoints()}
        )

    def spent_on_checkpoints(self) -> float:
        """Seconds for which the run waited for checkpoints since the last call."""
        spent, self.seconds_checkpoint = self.seconds_checkpoint, 0.0
        return spent

    def save(self) -> Path | None:
        """The final policy as a Hugging Face model directory."""
        if not self.settings.run.save_weights:
            return None
        self.observers.phase("writing weights")
        return self.write_weights()

    def write_weights(self, version: int | None = None) -> Path:
        """π as it is now, as weights/final or under its version."""
        with without_progress_bars():
            return self.store.record_weights(self.save_policy, version)

    def save_policy(self, directory: Path) -> None:
        """π as it is now: a model, or its adapter."""
        if self.settings.model.lora.merge:
            self.policy.save_merged(directory)
        else:
            self.policy.save(directory)
