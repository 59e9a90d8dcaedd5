"""Claims, intervals over seeds, and verdicts. A claim compares two sides seed by seed: both share their prompts and
random numbers, so much of the variation between seeds cancels in the difference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, cast

from lagrpo.errors import suggest

CONFIDENCE = 0.95
MIN_IDENTICAL = 3  # how many identical differences count as evidence

Relation = Literal[">", ">=", "<", "<=", "~"]
Cell = tuple[str, ...]
Values = Mapping[tuple[Cell, int], float | None]
"""The value of a measure by cell (a label of each axis) and seed; None if the run has none."""
Side = Mapping[str, str] | float  # axis -> label, or a number
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
        return Interval(
            fmean(values), t_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None, n
        )


class Verdict(NamedTuple):
    outcome: Literal["supported", "refuted", "inconclusive"]
    difference: Interval | None


def judge(differences: Sequence[float], relation: Relation, margin: float = 0.0) -> Verdict:
    """Test left `relation` right, given left − right of each seed. With a margin m ≥ 0 and the interval [a, b]:

        relation   supported             refuted
        >          a > m                 b < m
        >=         a ≥ −m                b < −m
        ~          a > −m and b < m      a > m or b < −m

    and <, <= as > and >= with signs changed. Anything else is inconclusive. An interval of width 0 counts from
    MIN_IDENTICAL seeds on. If the true difference is at the bound and differences are normal, 2.5 % of all studies
    support the claim."""
    if not differences:
        return Verdict("inconclusive", None)
    found, sign = Interval.of(differences), -1 if relation in ("<", "<=") else 1
    if found.half is None or (found.half == 0 and found.n < MIN_IDENTICAL):
        return Verdict("inconclusive", found)
    low, high = sign * found.mean - found.half, sign * found.mean + found.half
    if relation == "~":
        supported, refuted = -margin < low and high < margin, low > margin or high < -margin
    elif relation in (">", "<"):
        supported, refuted = low > margin, high < margin
    else:
        supported, refuted = low >= -margin, high < -margin
    return Verdict("supported" if supported else "refuted" if refuted else "inconclusive", found)


@cache
def t_quantile(degrees: int) -> float:
    """The t with P(|T| ≤ t) = CONFIDENCE for Student's distribution."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < CONFIDENCE:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(|T| ≤ t) for Student's distribution: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def parse_claim(text: str, grid: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """The sides and the relation of a claim such as `masked & v = 10 >= plain & v = 10`. Raises ValueError for text
    that is not a comparison and for labels that the grid does not have."""
    parts = re.split(r"\s+(>=|<=|>|<|~)\s+", text.strip())
    if len(parts) != 3:
        raise ValueError(f"claim {text!r}: write LEFT > RIGHT, with one of >, >=, <, <=, ~")
    left, right = _parse_side(parts[0], grid, text), _parse_side(parts[2], grid, text)
    if not isinstance(left, Mapping):
        raise ValueError(f"claim {text!r}: only the right side can be a number")
    if left == right or (isinstance(right, Mapping) and left.keys() != right.keys()):
        raise ValueError(f"claim {text!r}: the sides must name different labels of the same axes")
    return left, cast(Relation, parts[1]), right


def paired_differences(claim: Comparison, values: Values, axes: Sequence[str]) -> dict[int, float]:
    """Left − right by seed. Both sides average over the same cells of the axes that they do not name: all that have any
    run. A seed that lacks one of these runs, or its value, is left out."""
    left = _select(claim[0], values, axes)
    right = (
        _select(claim[2], values, axes)
        if isinstance(claim[2], Mapping)
        else dict.fromkeys(left, claim[2])
    )
    others, found = {other for _, other in [*left, *right]}, {}
    for seed in sorted({seed for _, seed in values}):
        both = [(left.get((seed, other)), right.get((seed, other))) for other in others]
        known = [one - other for one, other in both if one is not None and other is not None]
        if known and len(known) == len(both):
            found[seed] = fmean(known)
    return found


def _select(
    side: Mapping[str, str], values: Values, axes: Sequence[str]
) -> dict[tuple[int, Cell], float | None]:
    """The values of a side by seed and labels of the axes that it does not name."""
    labeled = [
        (dict(zip(axes, cell, strict=True)), seed, value) for (cell, seed), value in values.items()
    ]
    return {
        (seed, tuple(label for axis, label in labels.items() if axis not in side)): value
        for labels, seed, value in labeled
        if side.items() <= labels.items()
    }


def _parse_side(text: str, grid: Mapping[str, Mapping[str, Any]], claim: str) -> Side:
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text):
        return float(text)
    side: dict[str, str] = {}
    for label in (word.strip() for word in text.split("&")):
        axis = next((axis for axis, labels in grid.items() if label in labels), None)
        if axis is None:
            known = [label for labels in grid.values() for label in labels]
            raise ValueError(
                f"claim {claim!r}: the grid has no label {label!r}.{suggest(label, known)}"
            )
        if axis in side:
            raise ValueError(
                f"claim {claim!r}: {side[axis]!r} and {label!r} are both labels of {axis}"
            )
        side[axis] = label
    return side
