"""Intervals over seeds, and what they say about a claim.

A claim compares two sides seed by seed: where both sides of a seed share their prompts and random draws, much of what
varies between seeds falls out of the difference. The interval of the mean difference is Student's; a verdict is what
holds all over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Literal

CONFIDENCE = 0.95
MOST_SEEDS = 1000
"""Beyond which "how many seeds it would take" is no advice."""
LEAST_ALIKE = 3
"""How many differences without any variation are taken as evidence."""

Relation = Literal[">", ">=", "<", "<=", "~"]
Outcome = Literal["holds", "does not hold", "cannot be told"]


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of n values, with half the width of its interval at CONFIDENCE; None where one value has none."""

    mean: float
    half: float | None
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        """Student's t interval: mean ± t · s / √n. Raises ValueError for no values."""
        if not values:
            raise ValueError("an interval needs at least one value")
        n = len(values)
        return Interval(fmean(values), t_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None, n)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the seeds say about a claim. `needed` is how many seeds it would take, where it cannot be told: None for
    more than MOST_SEEDS, or where nothing says how much they vary."""

    outcome: Outcome
    difference: Interval | None
    needed: int | None = None


def judge(differences: Sequence[float], relation: Relation, margin: float = 0.0) -> Verdict:
    """Whether left `relation` right, from left − right of each seed. With a margin m ≥ 0 and the interval [a, b]:

        relation   holds                 does not hold
        >          a > m                 b < m
        >=         a ≥ −m                b < −m
        ~          a > −m and b < m      a > m or b < −m

    and <, <= as > and >= the other way round. Otherwise it cannot be told. Where the differences of at least
    LEAST_ALIKE seeds are one number, the interval is that number; of fewer, it says nothing. A true difference at a
    bound is taken for one beyond it in 2.5 % of all studies, where differences are normal."""
    if relation in ("<", "<="):
        mirrored = judge([-d for d in differences], ">" if relation == "<" else ">=", margin)
        turned = mirrored.difference and Interval(-mirrored.difference.mean, mirrored.difference.half, len(differences))
        return Verdict(mirrored.outcome, turned, mirrored.needed)
    if not differences:
        return Verdict("cannot be told", None)
    found = Interval.of(differences)
    bounds = {">": (margin,), ">=": (-margin,), "~": (-margin, margin)}[relation]
    if found.half is None or (found.half == 0 and found.n < LEAST_ALIKE):
        return Verdict("cannot be told", found)
    low, high = found.mean - found.half, found.mean + found.half
    if relation == "~":
        holds, fails = low > bounds[0] and high < bounds[1], low > bounds[1] or high < bounds[0]
    else:
        holds = low > bounds[0] or (relation == ">=" and low == bounds[0])
        fails = high < bounds[0]
    if holds or fails:
        return Verdict("holds" if holds else "does not hold", found)
    return Verdict("cannot be told", found, seeds_needed(differences, min(abs(found.mean - b) for b in bounds)))


def seeds_needed(differences: Sequence[float], distance: float) -> int | None:
    """With how many seeds half the width of the interval is below the distance from the mean to the nearest bound, if
    mean and standard deviation stay what they are; None for more than MOST_SEEDS."""
    spread = stdev(differences)
    counts = range(len(differences) + 1, MOST_SEEDS + 1)
    return next((n for n in counts if t_quantile(n - 1) * spread / math.sqrt(n) < distance), None)


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| ≤ t) = confidence, for Student's distribution with so many degrees of freedom.

    >>> [round(t_quantile(n), 3) for n in (1, 2, 4, 30)]
    [12.706, 4.303, 2.776, 2.042]
    """
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < confidence else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(|T| ≤ t) of Student's distribution: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> round(t_probability(1.0, 1), 6), round(t_probability(2.0, 2), 6)
    (0.5, 0.816497)
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
