"""Everything that a run shows and records: metrics, rollouts, events, evaluations, lines of text.

Weights and checkpoints are not here: lifecycle.py writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from lagrpo.core.objective import Recipe
from lagrpo.errors import one_line
from lagrpo.lifecycle.callbacks import Callback, Status
from lagrpo.lifecycle.evaluation import Evaluation
from lagrpo.rewards.reward import Rewards
from lagrpo.runs.directory import Run
from lagrpo.runs.rollouts import rollout_rows
from lagrpo.settings.schema import Settings
from lagrpo.terminal.display import Display
from lagrpo.terminal.text import count_of, formatted_interval, unscored_text
from lagrpo.training.metrics import Metrics, batch_metrics, completion_columns
from lagrpo.training.step import Step
from lagrpo.types import JsonObject, JsonView, OutcomeKind

WITHOUT_REWARD = (OutcomeKind.UNSCORED, OutcomeKind.FAILED)
"""Kinds of outcomes without a reward; each is also the name of an event."""


class Recorder:
    """Shows a run, writes its records, and calls its callbacks, all on rank 0.

    Other ranks have a recorder too, with a display that shows nothing, and without callbacks. Their
    recorder writes no files.
    """

    def __init__(
        self,
        settings: Settings,
        rewards: Rewards,
        recipe: Recipe,
        run: Run,
        display: Display,
        callbacks: Sequence[Callback],
        *,
        is_first: bool,
    ) -> None:
        self.reward_range = settings.task.reward_range
        self.stage_length = settings.schedule.stage_length
        self.rewards = rewards
        self.recipe = recipe
        self.is_first = is_first
        self.run = run
        self.display = display
        self.callbacks = callbacks
        self.activity = "start"  # what the run is doing now
        self._unscored_by_batch = Counter[int]()  # completions without a reward
        self._reasons = Counter[str]()  # of these completions
        self._shown_outcomes = set[OutcomeKind]()  # kinds of WITHOUT_REWARD that have had a line
        self._warnings_of_range = set[str]()  # that have been shown
        self._error_of_callback: Exception | None = None

    # Lines and events

    def announce(self, activity: str) -> None:
        """Shows what the run is doing now."""
        self.activity = activity
        self.display.phase(activity)

    def note(self, text: str) -> None:
        """Shows a line."""
        self.display.note(text)

    def warn(self, text: str, batch: int) -> None:
        """Shows a line, and records it as an event of this batch."""
        self.note(text)
        self.record_event("warning", batch, text=text)

    def record_event(self, event: str, batch: int, **facts: object) -> None:
        """Appends an event to events.jsonl."""
        if self.is_first:
            self.run.record_event(event, batch, **facts)

    # A batch

    def record_batch(
        self, step: Step, evaluation_metrics: Metrics
    ) -> tuple[Metrics, list[JsonObject]]:
        """Writes the rollouts of a batch, its events and its metrics.

        Returns the metrics and the rows of the rollouts; other ranks than 0 do nothing, and return
        them empty. `evaluation_metrics` join the metrics. A line of metrics.jsonl says that the
        rollouts and the syncs of its batch are on disk.
        """
        if not self.is_first:
            return {}, []
        reward_names = self.rewards.names
        loss_metrics = self.recipe.own_metrics
        metrics = batch_metrics(step, reward_names, self.reward_range, loss_metrics)
        metrics |= evaluation_metrics
        rows = list(
            rollout_rows(
                step.batch.groups,
                completion_columns(step, self.recipe.eps_std),
                step=step.b,
                policy_version=step.version,
                rewards=reward_names,
            )
        )
        self.run.record_rollouts(step.b, rows)
        self._record_syncs(step)
        metrics |= self._measure_own(metrics, rows)
        self.run.record(metrics)
        self._record_unscored(rows, step.b)
        completions = [c for group in step.batch.groups for c in group.completions]
        outcomes = [c.outcome for c in completions if c.outcome is not None]
        # Warnings name the last finished batch. This batch is finished once the loop state says so.
        self._warn_of_range(self.rewards.describe_outside(outcomes), step.b - 1)
        return metrics, rows

    def _measure_own(self, metrics: JsonView, rows: Sequence[JsonView]) -> Metrics:
        """Returns the metrics of callbacks. An error of theirs is raised by `show_batch`."""
        own: Metrics = {}
        for callback in self.callbacks:
            try:
                own |= callback.measure(metrics, rows)
            except Exception as error:  # noqa: BLE001 - raised when the batch is on disk
                self._error_of_callback = error
        taken = sorted(own.keys() & metrics.keys())
        if taken:
            self._error_of_callback = ValueError(
                f"a callback measures {taken[0]!r}, which is a metric of lagrpo or of the loss"
            )
        return {name: value for name, value in own.items() if name not in metrics}

    def _record_syncs(self, step: Step) -> None:
        """Records events of the reference, of the weight sync before the batch, and of servers."""
        first_of_stage = (step.b - 1) % self.stage_length == 0
        if step.stage > 1 and first_of_stage:
            self.record_event("reference_sync", step.b, stage=step.stage)
        if step.reason:
            self.record_event(
                "weight_sync",
                step.b,
                reason=step.reason,
                policy_version=step.state.alpha,
                **step.state.sync,
            )
        recoveries = step.sampling.get("recoveries")
        if recoveries:
            self.record_event("recovery", step.b, recoveries=recoveries)

    def _record_unscored(self, rows: Sequence[JsonView], batch: int) -> None:
        """Records how many completions have no reward, and why the first of them has none.

        Only the first such batch has a line: later ones may say the same a thousand times.
        """
        for kind in WITHOUT_REWARD:
            reasons = [row["reason"] for row in rows if row["outcome"] == kind]
            if not reasons:
                continue
            self.record_event(
                kind.value, batch, count=len(reasons), completions=len(rows), reason=reasons[0]
            )
            self._unscored_by_batch[batch] += len(reasons)
            self._reasons.update(reasons)
            if kind not in self._shown_outcomes:
                self._shown_outcomes.add(kind)
                count = f"{len(reasons)} of {len(rows)} completions are {kind}"
                self.note(f"batch {batch}: {count}; the first: {reasons[0]}")

    def _warn_of_range(self, warnings: Sequence[str], batch: int) -> None:
        """Warns of rewards outside their range, of each of them once."""
        for text in warnings:
            if text not in self._warnings_of_range:
                self._warnings_of_range.add(text)
                self.warn(text, batch)

    def show_batch(self, metrics: Metrics, rows: Sequence[JsonView]) -> None:
        """Shows a batch, then passes it to the callbacks."""
        self.display.on_batch(metrics, rows)
        if self._error_of_callback is not None:
            raise self._error_of_callback
        for callback in self.callbacks:
            callback.on_batch(metrics, rows)

    # An evaluation

    def record_evaluation(self, name: str, evaluation: Evaluation, batch: int) -> None:
        """Writes an evaluation, passes it to display and callbacks, and shows its pass@1."""
        summary = evaluation.summary
        if self.is_first:
            self.run.record_evaluation(name, summary, evaluation.records)
        self.display.on_evaluation(name, summary, evaluation.records)
        for callback in self.callbacks:
            callback.on_evaluation(name, summary, evaluation.records)

        line = f"evaluation ({name}): pass@1 {formatted_interval(summary, 'pass@1', '.1%')}"
        if summary["unscored"]:
            line += f"   {unscored_text(summary)}"
            self.record_event(
                OutcomeKind.UNSCORED.value,
                batch,
                evaluation=name,
                count=summary["unscored"],
                completions=summary["prompts"] * summary["samples"],
                reason=summary["unscored_reason"],
            )
        self.note(line)
        self._warn_of_range(evaluation.warnings, batch)

    # The start and the end

    def restore_evaluations(self, evaluations: Mapping[str, Evaluation]) -> None:
        """Gives the display the evaluations of a resumed run."""
        for name, evaluation in evaluations.items():
            self.display.on_evaluation(name, evaluation.summary, evaluation.records)

    def restore_unscored(self, events: Iterable[JsonView]) -> None:
        """Counts the completions without a reward that a resumed run has had in its batches."""
        for event in events:
            if event["event"] in WITHOUT_REWARD and "evaluation" not in event:
                self._unscored_by_batch[event["step"]] += event["count"]
                # Events name only the first reason of a batch.
                self._reasons[event["reason"]] += event["count"]

    def unscored_sentence(self) -> str:
        """Says how many completions had no reward, and why; "" if all had one."""
        if not self._unscored_by_batch:
            return ""
        completions = count_of(self._unscored_by_batch.total(), "completion")
        batches = count_of(len(self._unscored_by_batch), "batch", "es")
        ((reason, _),) = self._reasons.most_common(1)
        return f"{completions} of {batches} had no reward, most often: {one_line(reason, 80)}"

    def start(self, settings: JsonView, environment: JsonView, batch: int) -> None:
        """Tells the callbacks that the run starts, or resumes after `batch` batches."""
        for callback in self.callbacks:
            callback.on_start(settings, environment, batch)

    def end(self, status: Status, detail: str, *, was_started: bool) -> None:
        """Tells display and callbacks that the run is over.

        Callbacks that were not told of the start are not told of the end.
        """
        # A stack calls each of its callbacks, whatever another one or the display raises.
        with ExitStack() as calls:
            if was_started:
                for callback in reversed(self.callbacks):
                    calls.callback(callback.on_end, status, detail)
            self.display.on_end(status, detail)
