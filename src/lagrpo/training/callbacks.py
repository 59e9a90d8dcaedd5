"""Callbacks: what a run calls after its own files and its display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

Row = Mapping[str, Any]
Status = Literal["finished", "interrupted", "failed"]


class Callback:
    """Inherit from it and override what you need. A run calls it in its main thread, on rank 0."""

    def on_start(self, settings: Row, environment: Row, batch: int) -> None:
        """The run begins, or resumes after `batch` batches. `settings` by section, with the name of the run's directory
        in settings["run"]["name"]; `environment` as in environment.json."""

    def on_batch(self, metrics: Row, rollouts: Sequence[Row]) -> None:
        """A batch is finished: its line of metrics.jsonl, and one row per completion (docs/metrics.md)."""

    def on_evaluation(self, name: str, summary: Row, records: Sequence[Row]) -> None:
        """The policy was evaluated after summary["step"] batches; `records` has one row per prompt."""

    def on_end(self, status: Status, detail: str) -> None:
        """The run is over. Nothing else is called after it."""


class CallbackList(Callback):
    """Several callbacks, called in their order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = callbacks

    def on_start(self, settings: Row, environment: Row, batch: int) -> None:
        for callback in self.callbacks:
            callback.on_start(settings, environment, batch)

    def on_batch(self, metrics: Row, rollouts: Sequence[Row]) -> None:
        for callback in self.callbacks:
            callback.on_batch(metrics, rollouts)

    def on_evaluation(self, name: str, summary: Row, records: Sequence[Row]) -> None:
        for callback in self.callbacks:
            callback.on_evaluation(name, summary, records)

    def on_end(self, status: Status, detail: str) -> None:
        """Call all of them, even if one raises."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_end, status, detail)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise TypeError for an object that is not a Callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks: {callback!r:.80} is not an instance of a class that inherits lagrpo.Callback")
