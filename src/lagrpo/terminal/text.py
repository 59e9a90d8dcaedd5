"""Texts and numbers as people read them on a terminal."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

ABSENT = "–"
MARKS = {None: ("?", "yellow"), True: ("✓", "green"), False: ("✗", "red")}  # of a completion: whether it is right


def clipped(text: str, limit: int) -> str:
    """The text, or as much of its beginning as `limit` characters hold, with a sign that more was there.

    >>> clipped("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours when there are any.

    >>> duration(161), duration(3723)
    ('2:41', '1:02:03')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """The values as blocks of eight heights from the least to the greatest, averaged down to `width` of them.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span)] for mean in means)


def finite(value: Any) -> float | None:
    """The number, or None for what is none: a missing metric, NaN, an infinity."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


def formatted(value: Any, form: str) -> str:
    """A metric in a format of Python's mini-language ("d" for counts), "–" when there is none.

    >>> formatted(0.257, ".0%"), formatted(None, ".0%"), formatted(float("nan"), "d")
    ('26%', '–', '–')
    """
    known = finite(value)
    if known is None:
        return ABSENT
    return format(int(known) if form == "d" else known, form)


def formatted_interval(metrics: Mapping[str, Any], name: str, form: str) -> str:
    """A metric with its interval: `NAME`, `NAME_low` and `NAME_high`."""
    value, low, high = (formatted(metrics.get(name + end), form) for end in ("", "_low", "_high"))
    return f"{value:>6}   95 % interval {low} to {high}"


def count_of(number: int, what: str, plural: str = "s") -> str:
    """A number with its noun.

    >>> count_of(1, "batch", "es"), count_of(1200, "batch", "es")
    ('1 batch', '1,200 batches')
    """
    return f"{number:,} {what}{plural if number != 1 else ''}"
