"""A finding, and the detector that makes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lagrpo.diagnosis.record import RunRecord
from lagrpo.terminal.text import clipped
from lagrpo.types import JsonView

GRAVE = 0.5
"""Share of the signal from which a run says a finding at once: more is lost than is left."""

MOST_PLACES = 3
"""Completions that a finding names."""

MOST_CHARACTERS = 160
"""Characters of an example."""


@dataclass(frozen=True, slots=True)
class Place:
    """A completion, by its columns in the rollouts."""

    batch: int
    prompt: int
    sample: int

    def __str__(self) -> str:
        return f"batch {self.batch}, prompt {self.prompt}, sample {self.sample}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps a run from learning."""

    sentence: str
    """what is wrong, with its numbers"""

    cost: float
    """about which share of the signal it costs, from 0 to 1; findings are ordered by it"""

    places: tuple[Place, ...] = ()
    """completions that show it"""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """what to set, by names such as rollout.temperature"""

    advice: str = ""
    """what else to do; the detector's advice, unless the finding has its own"""

    example: str = ""
    """a text of the run that shows it"""

    detector: str = ""
    """the name of the detector, which `diagnose` adds"""

    @property
    def is_grave(self) -> bool:
        """True if it costs at least half of the signal."""
        return self.cost >= GRAVE


@dataclass(frozen=True, slots=True)
class Detector:
    """A fault that runs can have."""

    name: str

    reads: str
    """the metrics, columns and settings that it reads"""

    threshold: float
    """the second argument of `find`"""

    advice: str
    """what to do"""

    find: Callable[[RunRecord, float], Finding | None]
    """returns what is wrong; None if nothing is, or if too little is recorded to say so"""


def places_of(rows: Iterable[JsonView]) -> tuple[Place, ...]:
    """Returns where the last of these completions are, at most MOST_PLACES, in order."""
    places = [Place(row["step"], row["prompt_id"], row["sample_index"]) for row in rows]
    return tuple(places[-MOST_PLACES:])


def lower_rate(record: RunRecord) -> dict[str, Any]:
    """Returns the setting of a third of the learning rate, for a policy that has broken down."""
    rate = record.settings.get("optimizer.learning_rate") or 0.0
    return {"optimizer.learning_rate": float(f"{rate / 3:.2g}")}


def raise_rate(record: RunRecord) -> dict[str, Any]:
    """Returns the setting of three times the learning rate, for a policy that hardly moves."""
    rate = record.settings.get("optimizer.learning_rate") or 0.0
    return {"optimizer.learning_rate": float(f"{3 * rate:.2g}")}


def percent(share: float) -> str:
    """Returns a share in percent: 61 %; below one percent with its first digits."""
    number = 100 * share
    if 0 < number < 1:
        return f"{number:.2g} %"
    return f"{number:.0f} %"


def show_completion(row: JsonView) -> str:
    """Returns the end of a completion, with its reward and the reference answer."""
    text = " ".join(row["completion"].split())
    if len(text) > MOST_CHARACTERS:
        text = f"… {text[-MOST_CHARACTERS:]}"
    answer = json.loads(row["answer"])
    expected = "" if answer is None else f", answer {clipped(str(answer), 40)!r}"
    reward = "none" if row["reward"] is None else f"{row['reward']:g}"
    return f"{text!r} (reward {reward}{expected})"
