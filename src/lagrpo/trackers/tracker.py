"""What a tracker is asked to do, in its own process (serving.py). Each has a file, which alone imports its package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lagrpo.redaction import redact

PROJECT = "lagrpo"
"""Project or experiment of the runs, unless the tracker's own environment variable names one."""
TABLE = "completion_texts"
"""Name of the table of completions; `completions` is a metric, their number."""
Row = Mapping[str, Any]
Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class About:
    """What a tracker is told of a run at its start, without secrets."""

    run: Path
    """its directory, absolute"""
    name: str
    settings: Row
    """by section"""
    environment: Row
    """as in environment.json"""

    @staticmethod
    def of(run: Path, settings: Row, environment: Row) -> About:
        return About(run.absolute(), run.name, without_secrets(settings), without_secrets(environment))


class Tracker(Protocol):
    """A tracker raises what its package raises."""

    def open(self, about: About, known: str | None) -> str:
        """Begin a run there, or go on with the one that `known` names; returns the name that a resumed run is to
        know. It is another than `known` where that is not there any more."""
        ...

    def place(self) -> str:
        """Where a person finds the run, as the end of a sentence: a URL, or a command."""
        ...

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        """Metrics of a batch, or of an evaluation after it."""

    def completions(self, batch: int, rows: Sequence[Row]) -> None:
        """Some completions of a batch, all with the same columns."""

    def close(self, status: Status) -> None:
        """The run is over. Returns when all has been sent or written."""


def without_secrets(value: Any) -> Any:
    """The value with *** in place of secrets, as JSON would have it: maps, lists and paths become plain."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if isinstance(value, str | Path):
        return redact(str(value))
    return value
