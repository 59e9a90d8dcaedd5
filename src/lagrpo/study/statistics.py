"""Claims, intervals over seeds, and verdicts.

A claim compares two sides seed by seed. Both share their prompts and random numbers, so that much
of the variation between seeds cancels in the difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, cast

from lagrpo.core.estimators import student_quantile
from lagrpo.errors import suggest

CONFIDENCE = 0.95
# Identical differences have an interval of width 0. From this number on they count as evidence.
MIN_IDENTICAL = 3
# Differences that are identical up to rounding, such as .9 - .8 and .8 - .7, have half widths below
# this share of their mean, or of 1 for smaller means.
ROUNDING = 1e-12

Relation = Literal[">", ">=", "<", "<=", "~"]
Cell = tuple[str, ...]
Values = Mapping[tuple[Cell, int], float | None]
"""The value of a measure by cell (a label of each axis) and seed; None if the run has none."""
Side = Mapping[str, str] | float
"""Axis -> label, or a number."""
Comparison = tuple[Mapping[str, str], Relation, Side]


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of n values and half the width of its 95 % interval (None for one value)."""

    mean: float
    half: float | None
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Student's t interval: mean ± t · s / √n, of at least one value."""
        n = len(values)
        half = None
        if n > 1:
            half = student_quantile(n - 1, CONFIDENCE) * stdev(values) / math.sqrt(n)
        return Interval(fmean(values), half, n)


class Verdict(NamedTuple):
    """The outcome of a claim, and the interval of the difference that it rests on.

    `lacking` is the number of finished runs of both sides without a value.
    """

    outcome: Literal["supported", "refuted", "inconclusive"]
    difference: Interval | None
    lacking: int = 0


def judge(differences: Sequence[float], relation: Relation, margin: float = 0.0) -> Verdict:
    """Tests left `relation` right, given left − right of each seed.

    With a margin m ≥ 0 and the interval [a, b]:

        relation   supported             refuted
        >          a > m                 b < m
        >=         a ≥ −m                b < −m
        ~          a > −m and b < m      a > m or b < −m

    and <, <= as > and >= with signs changed. Anything else is inconclusive. An interval of width 0,
    up to rounding, counts from MIN_IDENTICAL seeds on. If the true difference is at the bound and
    differences are normal, 2.5 % of all studies support the claim.
    """
    if not differences:
        return Verdict("inconclusive", None)
    interval = Interval.of(differences)
    if interval.half is None:
        return Verdict("inconclusive", interval)
    is_identical = interval.half <= ROUNDING * max(1.0, abs(interval.mean))
    if is_identical and interval.n < MIN_IDENTICAL:
        return Verdict("inconclusive", interval)
    # "left < right" is "-left > -right".
    mean = -interval.mean if relation in ("<", "<=") else interval.mean
    low = mean - interval.half
    high = mean + interval.half
    if relation == "~":
        is_supported = -margin < low and high < margin
        is_refuted = low > margin or high < -margin
    elif relation in (">", "<"):
        is_supported = low > margin
        is_refuted = high < margin
    else:
        is_supported = low >= -margin
        is_refuted = high < -margin
    if is_supported:
        return Verdict("supported", interval)
    if is_refuted:
        return Verdict("refuted", interval)
    return Verdict("inconclusive", interval)


def parse_claim(text: str, grid: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """The sides and the relation of a claim such as `masked & v = 10 >= plain & v = 10`.

    Raises ValueError for text that is not a comparison and for labels that the grid does not have.
    """
    parts = re.split(r"\s+(>=|<=|>|<|~)\s+", text.strip())
    if len(parts) != 3:
        raise ValueError(f"claim {text!r}: write LEFT > RIGHT, with one of >, >=, <, <=, ~")
    left = _parse_side(parts[0], grid, text)
    right = _parse_side(parts[2], grid, text)
    if not isinstance(left, Mapping):
        raise ValueError(f"claim {text!r}: only the right side can be a number")
    if left == right or (isinstance(right, Mapping) and left.keys() != right.keys()):
        raise ValueError(f"claim {text!r}: the sides must name different labels of the same axes")
    return left, cast(Relation, parts[1]), right


def paired_differences(claim: Comparison, values: Values, axes: Sequence[str]) -> dict[int, float]:
    """Left − right by seed.

    Both sides average over the same cells of the axes that they do not name: all that have any run.
    A seed that lacks one of these runs, or its value, is left out.
    """
    left_side, _, right_side = claim
    left = _select(left_side, values, axes)
    if isinstance(right_side, Mapping):
        right = _select(right_side, values, axes)
    else:
        right = dict.fromkeys(left, right_side)
    other_labels = {labels for _, labels in [*left, *right]}
    means = {}
    for seed in sorted({seed for _, seed in values}):
        differences = []
        for labels in other_labels:
            left_value = left.get((seed, labels))
            right_value = right.get((seed, labels))
            if left_value is not None and right_value is not None:
                differences.append(left_value - right_value)
        if differences and len(differences) == len(other_labels):
            means[seed] = fmean(differences)
    return means


def count_lacking(claim: Comparison, values: Values, axes: Sequence[str]) -> int:
    """The number of finished runs of both sides that have no value."""
    left_side, _, right_side = claim
    selected = list(_select(left_side, values, axes).values())
    if isinstance(right_side, Mapping):
        selected += _select(right_side, values, axes).values()
    return selected.count(None)


def _select(
    side: Mapping[str, str], values: Values, axes: Sequence[str]
) -> dict[tuple[int, Cell], float | None]:
    """The values of a side by seed and labels of the axes that it does not name."""
    selected = {}
    for (cell, seed), value in values.items():
        labels = dict(zip(axes, cell, strict=True))
        if side.items() <= labels.items():
            other_labels = tuple(label for axis, label in labels.items() if axis not in side)
            selected[seed, other_labels] = value
    return selected


def _parse_side(text: str, grid: Mapping[str, Mapping[str, Any]], claim: str) -> Side:
    is_label = any(text in labels for labels in grid.values())
    if not is_label and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text):
        return float(text)
    side: dict[str, str] = {}
    for label in (word.strip() for word in text.split("&")):
        axis = next((axis for axis, labels in grid.items() if label in labels), None)
        if axis is None:
            all_labels = [label for labels in grid.values() for label in labels]
            raise ValueError(
                f"claim {claim!r}: the grid has no label {label!r}.{suggest(label, all_labels)}"
            )
        if axis in side:
            raise ValueError(
                f"claim {claim!r}: {side[axis]!r} and {label!r} are both labels of {axis}"
            )
        side[axis] = label
    return side
