"""One run from its start to its end: evaluate, train (loop.py), evaluate, and save when it stops.

recording.py shows and writes what happens; resuming.py restores an earlier run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from lagrpo import logs
from lagrpo.interrupts import EndedAtOnce, Interrupted, deferring, drop_closed_terminal
from lagrpo.lifecycle.callbacks import Callback, FaultWatch, Status, Trackers
from lagrpo.lifecycle.checkpoint import collect_checkpoint, restore_checkpoint
from lagrpo.lifecycle.evaluation import Evaluations
from lagrpo.lifecycle.recording import Recorder
from lagrpo.lifecycle.resuming import ResumeState, describe_environment, resume_command, resume_run
from lagrpo.lifecycle.writer import CheckpointWriter
from lagrpo.model.loading import quiet
from lagrpo.resume.checkpoint_files import prune_checkpoints
from lagrpo.rewards.reward import Rewards
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs.card import CARD, model_card
from lagrpo.runs.directory import Run, locked
from lagrpo.runs.evaluation_names import Moment
from lagrpo.runs.reading import load_metrics
from lagrpo.settings.load import to_toml
from lagrpo.settings.stop_rule import StopRule
from lagrpo.settings.user_loss import keep_sources
from lagrpo.startup.build import BuiltRun
from lagrpo.startup.explain import meaning
from lagrpo.terminal.display import Display, make_display
from lagrpo.terminal.text import count_of, finite
from lagrpo.training.loop import train_loop
from lagrpo.training.step import Step
from lagrpo.types import JsonView, Result

OWN_TASK_COMMENT = (
    "# The task was the caller's own object; of [task] only system_prompt was read.\n"
)
MEMORY_ADVICE = (
    "To save memory, lower optimizer.micro_batch_tokens or rollout.max_num_seqs, "
    "or set gradient_checkpointing."
)


class Training:
    """One run, on this rank. Rank 0 shows and records it, and calls callbacks.

    `earlier` is the run that it resumes. `arguments` are names of the arguments of `lagrpo.train`
    that its settings cannot hold.
    """

    def __init__(
        self,
        built: BuiltRun,
        callbacks: Sequence[Callback] = (),
        earlier: ResumeState | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.built = built
        self.settings = built.settings
        self.sampling = built.sampling
        self.trainer = built.trainer
        self.policy = built.trainer.policy
        self.ranks = built.trainer.ranks
        self.earlier = earlier
        display = make_display() if self.ranks.is_first else Display()
        self.evaluations = Evaluations(self.settings, built.tasks, self.policy, self.ranks)
        self.environment = describe_environment(
            self.settings, built.tasks, self.sampling, self.trainer, earlier
        )
        self.environment["arguments"] = list(arguments)
        self.resume_arguments = list(arguments)
        if callbacks:
            self.resume_arguments.append("callbacks")
        if earlier is None:
            self.store = self.ranks.on_rank0(self.create_run)
        else:
            self.store = earlier.run
        self.sampling.engine.keep_logs(self.store.path)

        all_callbacks: list[Callback] = []
        if self.ranks.is_first:
            keep_sources(self.trainer.recipe, self.store.path)
            run_settings = self.settings.run
            trackers = Trackers(run_settings.report_to, run_settings.log_completions)
            all_callbacks = [trackers, FaultWatch(), *callbacks]
        self.recorder = Recorder(
            self.settings,
            Rewards.from_reward(built.main.task.reward),
            self.trainer.recipe,
            self.store,
            display,
            all_callbacks,
            is_first=self.ranks.is_first,
        )

        self.checkpoint_folder = self.store.path / "checkpoints"
        # The newest one stays until the run ends, whatever the limit: it may have to resume.
        limit = max(1, self.settings.checkpoint.save_total_limit)
        self.writer = CheckpointWriter(self.checkpoint_folder, limit, self.ranks)
        self.saved_batch = 0  # of the newest checkpoint
        self.saved_at = time.monotonic()
        stop_at = self.settings.schedule.stop_at
        self.stop_rule = StopRule.parse(stop_at) if stop_at else None
        self.stop_values: list[float] = []  # of its metric, on rank 0
        # False until a resumed run is restored: a run that cannot be restored stays as it was.
        self.is_started = False
        self.set_state(LoopState(pi_ref=self.policy.version))

    def create_run(self) -> Run:
        """Makes the directory of a new run."""
        run_settings = self.settings.run
        task_name = self.built.main.task.name
        settings = self.settings.model_dump() | {"task": {"name": task_name}}
        return Run.create(
            root=Path(run_settings.output_dir),
            name=run_settings.name,
            settings=settings,
            settings_toml=self.config(),
            environment=self.environment,
        )

    def config(self) -> str:
        """Returns the text of config.toml."""
        text = to_toml(self.settings)
        return OWN_TASK_COMMENT + text if self.built.own_task else text

    def set_state(self, loop: LoopState) -> None:
        """Remembers where the run stands after a batch.

        A checkpoint of this state can be written until the next update.
        """
        self.loop = loop
        self.version = self.policy.version  # of `loop`: the policy moves on within the next batch
        self.synced = self.sampling.synced

    # From the start to the end

    def run(self) -> Result:
        """Evaluates, trains, evaluates; after an interruption or error, saves what was learned."""
        weights: Path | None = None
        interrupted: signal.Signals | None = None
        status: Status = "failed"
        is_first = self.ranks.is_first
        # run_rank holds the lock of a resumed run already.
        holds_lock = is_first and self.earlier is None
        with (
            logs.shown_by(self.recorder.note) if is_first else nullcontext(),
            locked(self.store.path) if holds_lock else nullcontext(),
            deferring(),
        ):
            try:
                self.begin()
                self.learn()
                weights = self.write_weights(self.record_final)
                status = "finished"
            except EndedAtOnce:
                status = "interrupted"
                raise
            except Interrupted as stop:
                interrupted = stop.signal
                status = "interrupted"
                weights = self.rescue(stop, was_asked=True)
            except BaseException as error:
                # It may be the error of a print; its signal, SIGHUP, comes later or never.
                drop_closed_terminal()
                self.rescue(error, was_asked=False)
                raise
            finally:
                self.writer.abandon()
                self.end(status, interrupted)
        return Result(
            run=self.store.path,
            before=self.evaluations.summary(Moment.BEFORE),
            after=self.evaluations.summary(Moment.AFTER),
            weights=weights,
            version=self.policy.version,
            batches=self.loop.batch,
            interrupted=interrupted,
            evaluations={
                name: evaluation.summary for name, evaluation in self.evaluations.finished.items()
            },
        )

    def begin(self) -> None:
        """Shows what the run is, and resumes it if it is an earlier one."""
        settings = self.settings.model_dump()
        settings["run"]["name"] = self.store.path.name
        settings["run"]["output_dir"] = str(self.store.path.parent)
        settings["task"]["reward_range"] = self.settings.task.reward_range
        first_batch = 0
        if self.earlier is not None and self.earlier.checkpoint is not None:
            first_batch = self.earlier.checkpoint.batch
        self.recorder.display.on_start(settings, self.environment, first_batch)
        if self.ranks.is_first:
            self.recorder.note("\n".join(self.describe()))
        if self.earlier is not None:
            self.resume(self.earlier)
        self.is_started = True
        self.recorder.start(settings, self.environment, self.loop.batch)

    def describe(self) -> list[str]:
        """Returns lines that say what the run computes, and how."""
        threads = count_of(self.environment["threads"], "thread")
        facts = {
            "computation": f"{self.environment['computation']}, {threads}",
            "agreement": self.sampling.weight_check.agreement,
            "offline": self.sampling.offline,
        }
        return [
            *meaning(self.settings, self.trainer.recipe),
            *(f"{name:<11} {fact}" for name, fact in facts.items() if fact is not None),
        ]

    def resume(self, earlier: ResumeState) -> None:
        """Restores the run at its newest checkpoint, if it has one."""
        loop = resume_run(
            earlier,
            partial(restore_checkpoint, self.sampling, self.trainer, self.built.inputs),
            self.evaluations,
            self.recorder,
            self.ranks,
            self.environment,
            self.config(),
        )
        if loop is not None:
            self.set_state(loop)
            self.saved_batch = loop.batch
            if self.ranks.is_first:
                for metrics in load_metrics(self.store):
                    self.keep_stop_value(metrics)

    def learn(self) -> None:
        """Trains to the last batch, with the evaluations and checkpoints on the way."""
        if self.settings.eval.at_start and self.loop.batch == 0:
            self.evaluate(Moment.BEFORE)
        self.evaluate()
        # The files of a batch are written in this order: rollouts, events, the line of metrics, and
        # the checkpoint, if one is due. So the records of all batches that a checkpoint covers were
        # written before it. A resumed run removes records of later batches, and computes these
        # batches again.
        if not self.has_reached_goal():
            on_gpu = self.policy.device.type == "cuda"
            steps = train_loop(
                self.sampling,
                self.trainer,
                self.settings.schedule,
                self.loop,
                micro_batch_tokens=self.settings.optimizer.tokens_in_micro_batch(on_gpu=on_gpu),
                announce=self.recorder.announce,
            )
            for step in steps:
                self.record(step)
                self.evaluate()
                has_ended, is_due = self.ranks.on_rank0(
                    lambda: (self.writer.has_ended(), self.checkpoint_is_due())
                )
                if has_ended:
                    self.finish_checkpoint()
                if is_due:
                    is_last = self.loop.batch == self.settings.schedule.batches
                    self.write_checkpoint(in_background=not is_last)
                if self.has_reached_goal():
                    break
        self.write_checkpoint()
        if self.settings.eval.at_start:
            self.evaluate(Moment.AFTER)

    def has_reached_goal(self) -> bool:
        """True if schedule.stop_at ends the run after this batch. Collective if it is set."""
        rule = self.stop_rule
        if rule is None:
            return False
        return self.ranks.on_rank0(lambda: rule.holds(self.stop_values))

    def keep_stop_value(self, metrics: JsonView) -> None:
        """Keeps the value of the metric that schedule.stop_at names."""
        if self.stop_rule is not None:
            value = finite(metrics.get(self.stop_rule.metric))
            if value is not None:
                self.stop_values.append(value)

    def record(self, step: Step) -> None:
        """Records a batch, shows it, calls the callbacks, and writes weights if they are due."""
        evaluation_metrics = self.evaluations.metrics(step.b - 1)
        metrics, rows = self.recorder.record_batch(step, evaluation_metrics)
        self.keep_stop_value(metrics)
        # Before the callbacks: if one raises, the run can still be saved after this batch.
        self.set_state(step.state)
        self.recorder.show_batch(metrics, rows)
        export_every = self.settings.checkpoint.export_every
        if export_every and step.b % export_every == 0:
            self.write_weights(partial(self.store.record_weights, version=self.policy.version))

    def evaluate(self, moment: Moment = Moment.BETWEEN) -> None:
        """Evaluates π on the sets that are due, and keeps its weights if it is the best so far.

        Sets are due after certain batches, and all of them before and after training.
        """
        batch = self.loop.batch
        due = self.evaluations.find_due(batch, moment)
        if due:
            with self.sampling.evaluating(self.policy, self.loop) as evaluator:
                for name, eval_set in due.items():
                    self.recorder.announce(f"evaluation ({name})")
                    evaluation = self.evaluations.make(name, eval_set, evaluator, batch)
                    self.recorder.record_evaluation(name, evaluation, batch)
        find_best = partial(self.evaluations.find_best, self.store, batch, moment)
        best = self.ranks.on_rank0(find_best)
        # Weights of the initial policy are not written: they are the model of the settings.
        if batch and best:
            self.write_weights(partial(self.store.record_best, found=best))

    # Checkpoints and weights

    def checkpoint_is_due(self) -> bool:
        """True if a checkpoint is due after this batch, by the number of batches or by time."""
        settings = self.settings.checkpoint
        waited = time.monotonic() - self.saved_at
        if settings.save_minutes > 0 and waited >= 60 * settings.save_minutes:
            return True
        return settings.save_every > 0 and self.loop.batch % settings.save_every == 0

    def write_checkpoint(self, *, finish: bool = True, in_background: bool = False) -> None:
        """Writes a checkpoint of this batch, unless there is one, and removes older ones.

        It is on disk afterward, or with `in_background` after `finish_checkpoint`. `finish` as for
        `collect_checkpoint`. Collective.
        """
        self.finish_checkpoint()
        if self.loop.batch == self.saved_batch:
            return
        self.recorder.announce("checkpoint")
        started_at = time.monotonic()
        checkpoint = collect_checkpoint(
            self.sampling,
            self.trainer,
            self.built.inputs,
            self.loop,
            self.synced,
            finish=finish,
        )
        goes_on = self.writer.begin(checkpoint, started_at, in_background=in_background)
        self.saved_at = time.monotonic()
        if not goes_on:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Waits until the checkpoint that was begun is on disk, if there is one, and records it."""
        written = self.writer.wait()
        if written is not None:
            self.saved_batch = written.batch
            self.saved_at = time.monotonic()
            self.recorder.record_event(
                "checkpoint", written.batch, seconds=written.seconds, paused=written.paused
            )

    def write_weights(self, record: Callable[[Callable[[Path], None]], Path]) -> Path:
        """Writes π as it is now. `record` gets a function that fills a directory. Collective."""
        self.recorder.announce("writing weights")
        save = self.trainer.gather_policy()
        with quiet():
            return self.ranks.on_rank0(lambda: record(save))

    def record_final(self, save: Callable[[Path], None]) -> Path:
        """Lets `save` fill weights/final, and adds a model card. Called on rank 0."""

        def fill(directory: Path) -> None:
            save(directory)
            finished = self.evaluations.finished
            card = model_card(
                name=self.store.path.name,
                settings=self.settings.model_dump(),
                changed_settings=self.settings.model_dump(exclude_defaults=True, exclude_none=True),
                environment=self.environment,
                evaluations=[
                    evaluation.summary | {"name": name} for name, evaluation in finished.items()
                ],
                version=self.policy.version,
                notes=self.describe_early_end(),
            )
            (directory / CARD).write_text(card, encoding="utf-8")

        return self.store.record_weights(fill)

    # The end

    def rescue(self, error: BaseException, *, was_asked: bool) -> Path | None:
        """Saves what it can after a signal (`was_asked`) or an error, and notes on the error where.

        Writes a checkpoint if no update was made since the last batch, and weights, whose path it
        returns. After an error several ranks begin to save nothing: the error may be on one of them
        only, and saving is collective.
        """
        if not self.is_started:
            error.add_note(f"The run is unchanged: {self.store.path}")
            return None
        stopped_during = self.recorder.activity
        error.add_note(
            f"The run so far: {self.store.path} "
            f"({self.progress()}; stopped during: {stopped_during})"
        )
        if is_out_of_memory(error):
            error.add_note(MEMORY_ADVICE)
        if was_asked:
            self.recorder.warn(
                f"{error}: saving the run ({self.progress()}). "
                "Ctrl-C now exits at once, without saving",
                self.loop.batch,
            )
        weights = None
        try:
            self.finish_checkpoint()
            if was_asked or self.ranks.size == 1:
                # An update since the last batch cannot be undone: then the policy belongs to no
                # state of the loop.
                if self.loop.batch and self.policy.version == self.version:
                    # Completions in flight are dropped: a resumed run samples them again.
                    self.write_checkpoint(finish=False)
                if was_asked or self.policy.version:
                    weights = self.write_weights(self.record_final)
        except (OSError, ArithmeticError, MemoryError, RuntimeError) as second_error:
            # A disk that is full stays full.
            if str(second_error) != str(error):
                error.add_note(f"Saving partial results also failed: {second_error}")
        error.add_note(self.resume_command())
        return weights

    def end(self, status: Status, interrupted: signal.Signals | None) -> None:
        """Records, shows and passes on to the callbacks that the run is over."""
        detail = self.describe_end(status, interrupted)
        with suppress(OSError):  # a full disk has its own error
            if self.is_started and self.ranks.is_first:
                self.recorder.record_event("end", self.loop.batch, status=status, detail=detail)
                if status == "finished" and self.settings.checkpoint.save_total_limit == 0:
                    prune_checkpoints(self.checkpoint_folder, 0)
        self.recorder.end(status, detail, was_started=self.is_started)

    def describe_end(self, status: Status, interrupted: signal.Signals | None) -> str:
        """Says how the run ended, how many completions had no reward, and how the run resumes."""
        if not self.is_started:
            return f"The run is unchanged: {self.store.path}"
        if interrupted is not None:
            sentences = [f"Stopped by {interrupted.name}: {self.progress()}"]
        elif status == "finished":
            sentences = ["Finished", *self.describe_early_end()]
        else:
            sentences = [self.progress()]
        unscored = self.recorder.unscored_sentence()
        if unscored:
            sentences.append(unscored)
        if interrupted is not None:
            sentences.append(self.resume_command())
        text = ". ".join(sentences)
        return f"{text}." if status == "finished" else text

    def describe_early_end(self) -> list[str]:
        """Says why the run has fewer batches than it might have had; empty if it has all."""
        total = self.settings.schedule.batches
        if self.loop.batch == total:
            return []
        return [f"Stopped after batch {self.loop.batch} of {total}: {self.stop_rule}"]

    def progress(self) -> str:
        """Says how many batches are finished and how many updates were made."""
        updates = count_of(self.policy.version, "update")
        total = self.settings.schedule.batches
        return f"{self.loop.batch} of {total} batches finished, {updates} made"

    def resume_command(self) -> str:
        """Returns the sentence that says how the run resumes."""
        return resume_command(
            self.store.path, self.settings, self.saved_batch, self.resume_arguments, self.ranks
        )


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory of the host or of the accelerator ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "allocate memory" in str(error)
