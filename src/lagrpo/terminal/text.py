"""Numbers and texts as people read them on a terminal."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

ABSENT = "–"
MARKS = {
    None: ("?", "yellow"),
    True: ("✓", "green"),
    False: ("✗", "red"),
}  # of a completion: whether it is right


def clipped(text: str, limit: int) -> str:
    """The text, or its beginning with a sign that more was there."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any: 2:41, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def finite(value: Any) -> float | None:
    """The number; None for a missing metric, NaN or an infinity."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


def formatted(value: Any, form: str) -> str:
    """A metric in a format of Python's mini-language ("d" for counts), "–" if there is none."""
    known = finite(value)
    if known is None:
        return ABSENT
    return format(int(known) if form == "d" else known, form)


def formatted_interval(metrics: Mapping[str, Any], name: str, form: str) -> str:
    """A metric with its interval: `NAME`, `NAME_low` and `NAME_high`."""
    value, low, high = (formatted(metrics.get(name + end), form) for end in ("", "_low", "_high"))
    return f"{value:>6}   95 % interval {low} to {high}"


def unscored_text(summary: Mapping[str, Any]) -> str:
    """The completions of an evaluation that have no reward: "3 of 8 not scored", or nothing."""
    count = summary.get("unscored") or 0
    return f"{count:,} of {summary['prompts'] * summary['samples']:,} not scored" if count else ""


def count_of(number: int, what: str, plural: str = "s") -> str:
    """A number with its noun: 1 batch, 1,200 batches."""
    return f"{number:,} {what}{plural if number != 1 else ''}"
