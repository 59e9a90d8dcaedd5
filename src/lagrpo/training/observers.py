"""Who is told about a run: its files, its display, trackers, benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Protocol

from lagrpo.runs import Run
from lagrpo.training.loop import Step

Row = Mapping[str, Any]
Status = Literal["finished", "interrupted", "failed"]


class Observer(Protocol):
    """What a run calls, in its main thread. A class that inherits from it overrides what it needs."""

    def start(self, settings: Row, environment: Row) -> None:
        """The run begins. `settings` by section, with the name of the run's directory in settings["run"]["name"];
        `environment` as in environment.json."""

    def phase(self, name: str) -> None:
        """What is being done from now on: "sampling", "learning" …"""

    def batch(self, step: Step, metrics: Row, rollouts: Sequence[Row]) -> None:
        """A batch is finished: number `step.b`. `metrics` is its line of metrics.jsonl, `rollouts` has one row per
        completion (docs/metrics.md)."""

    def evaluation(self, name: str, batch: int, summary: Row, records: Sequence[Row]) -> None:
        """The policy was evaluated after `batch` batches; `records` has one row per prompt."""

    def note(self, text: str) -> None:
        """What whoever looks at the run should know: a warning, an interruption."""

    def end(self, status: Status, detail: str) -> None:
        """The run is over; nothing else is called after it."""


class RunFiles(Observer):
    """Writes the files of a run."""

    def __init__(self, run: Run) -> None:
        self.run, self.finished = run, 0

    def batch(self, step: Step, metrics: Row, rollouts: Sequence[Row]) -> None:
        """Rollouts, the weight sync if there was one, and the line of metrics, which says that the batch is whole."""
        self.run.record_rollouts(step.b, rollouts)
        if step.reason:
            self.run.record_event("weight_sync", step.b, reason=step.reason, version=step.alpha)
        self.run.record(metrics)
        self.finished = step.b

    def evaluation(self, name: str, batch: int, summary: Row, records: Sequence[Row]) -> None:
        self.run.record_evaluation(name, summary, records)

    def note(self, text: str) -> None:
        self.run.record_event("warning", self.finished, text=text)

    def end(self, status: Status, detail: str) -> None:
        self.run.record_event("end", self.finished, status=status, detail=detail)


def check_observers(observers: Sequence[Any]) -> None:
    """Raise TypeError for an object that a run cannot tell."""
    calls = [name for name, value in vars(Observer).items() if callable(value) and not name.startswith("_")]
    for observer in observers:
        if isinstance(observer, type):
            raise TypeError(f"observers: {observer!r:.80} is a class; pass an instance of it")
        if missing := ", ".join(name for name in calls if not callable(getattr(observer, name, None))):
            remedy = "inherit from lagrpo.Observer and override what you need"
            raise TypeError(f"observers: {observer!r:.80} has no method {missing}; {remedy}")


def _tell_all(name: str) -> Callable[..., None]:
    def tell(self: Observers, *arguments: Any) -> None:
        for observer in self.observers:
            getattr(observer, name)(*arguments)

    return tell


class Observers(Observer):
    """Several observers as one, told in their order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    start, phase, batch = _tell_all("start"), _tell_all("phase"), _tell_all("batch")
    evaluation, note = _tell_all("evaluation"), _tell_all("note")

    def end(self, status: Status, detail: str) -> None:
        """Tell every one of them, even where another one's end raises."""
        with ExitStack() as told:
            for observer in reversed(self.observers):
                told.callback(observer.end, status, detail)
