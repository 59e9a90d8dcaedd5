"""Numbers and texts, formatted for people who read them on a terminal."""

from __future__ import annotations

import math
import numbers
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rich.text
from rich.style import Style, StyleType

from lagrpo.errors import one_line
from lagrpo.logs import visible
from lagrpo.types import JsonView

ABSENT = "–"
ROUNDING = 1e-10
"""Smaller numbers are rounding errors of float32 log-probs, such as a KL of 2.1e-14 nats."""
MOST_REASONS = 3
"""Reasons of missing rewards that a line names."""
MOST_OF_REASON = 80
"""Characters of each."""
MARKS = {
    None: ("?", "yellow"),
    True: ("✓", "green"),
    False: ("✗", "red"),
}
"""The mark and the color of a completion, by whether it is correct; None: it has no reward."""


class Text(rich.text.Text):
    """A text of rich, as `visible` shows it: no part of it acts on the terminal."""

    def __init__(self, text: str = "", *styles: Any, **options: Any) -> None:
        super().__init__(visible(text), *styles, **options)

    @classmethod
    def assemble(cls, *parts: rich.text.Text | str | tuple[str, StyleType], **options: Any) -> Text:
        text = cls(**options)
        for part in parts:
            text.append(*part) if isinstance(part, tuple) else text.append(part)
        return text

    def append(
        self, text: rich.text.Text | str, style: str | Style | None = None
    ) -> rich.text.Text:
        return super().append(visible(text) if isinstance(text, str) else text, style)


def typed_command() -> str:
    """Returns the command `lagrpo` as it can be typed: with its path, unless it is on the PATH.

    >>> typed_command()  # doctest: +SKIP
    '.venv/bin/lagrpo'
    """
    if shutil.which("lagrpo"):
        return "lagrpo"
    script = Path(sys.executable).with_name("lagrpo")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m lagrpo"
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return shlex.quote(str(script))


def clipped(text: str, limit: int) -> str:
    """Returns the text, or its beginning and "…", in at most `limit` characters."""
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…"


def duration(seconds: float) -> str:
    """Returns minutes and seconds, with hours if there are any: 2:41, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def finite(value: Any) -> float | None:
    """Returns the number; None for a missing metric, NaN or an infinity."""
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    return None


def formatted(value: Any, form: str) -> str:
    """Returns a metric in a format of Python's mini-language ("d" for counts), "–" without one."""
    number = finite(value)
    if number is None:
        return ABSENT
    if form == "d":
        return format(int(number), form)
    if form.endswith("e") and abs(number) < ROUNDING:
        return "0"
    return format(number, form)


def formatted_interval(metrics: JsonView, name: str, form: str) -> str:
    """Returns a metric with its interval: `NAME`, `NAME_low` and `NAME_high`."""
    value = formatted(metrics.get(name), form)
    low = formatted(metrics.get(f"{name}_low"), form)
    high = formatted(metrics.get(f"{name}_high"), form)
    return f"{value:>6}   95 % interval {low} to {high}"


def unscored_text(summary: JsonView) -> str:
    """Returns how many completions of an evaluation have no reward, and why; "" if all have one.

    For example "3 of 8 not scored: 2 × past the deadline of 5 s; 1 × ValueError".
    """
    unscored = summary.get("unscored") or 0
    if not unscored:
        return ""
    completions = summary["prompts"] * summary["samples"]
    text = f"{unscored:,} of {completions:,} not scored"
    reason = summary.get("unscored_reason")
    return f"{text}: {reason}" if reason else text


def count_reasons(reasons: Iterable[str]) -> str:
    """Returns the most frequent reasons, shortened: "2 × past the deadline; 1 × ValueError"."""
    counts = Counter(one_line(reason, MOST_OF_REASON) for reason in reasons)
    return "; ".join(f"{count:,} × {reason}" for reason, count in counts.most_common(MOST_REASONS))


def count_of(number: int, what: str, plural: str = "s") -> str:
    """Returns a number with its noun, `what`: 1 batch, 1,200 batches. `plural` is the ending."""
    ending = "" if number == 1 else plural
    return f"{number:,} {what}{ending}"
