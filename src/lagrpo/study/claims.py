"""Which runs a claim compares: `masked & v = 10 >= plain & v = 10`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

from lagrpo.errors import suggest
from lagrpo.study.statistics import Relation, Verdict, judge

RELATIONS = re.compile(r"\s+(>=|<=|>|<|~)\s+")

Values = Mapping[tuple[tuple[str, ...], int], float | None]
"""A number, or none, of every run: by its cell, a label of each axis, and its seed."""
Side = Mapping[str, str] | float
"""Labels by axis, or a number."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides; axes that a side does not name are averaged over."""

    left: Side
    relation: Relation
    right: Side

    @staticmethod
    def parse(text: str, grid: Mapping[str, Mapping[str, Any]]) -> Comparison:
        """Raises ValueError for words that compare nothing, and labels that the grid does not have."""
        parts = RELATIONS.split(text.strip())
        if len(parts) != 3:
            raise ValueError(f"claim {text!r} compares nothing: write LEFT > RIGHT, with one of >, >=, <, <=, ~")
        left, right = (_side(part, grid, text) for part in (parts[0], parts[2]))
        if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() != right.keys():
            raise ValueError(f"claim {text!r}: both sides name labels of the same axes")
        if not isinstance(left, Mapping):
            raise ValueError(f"claim {text!r}: the left side names labels of the grid; only the right one is a number")
        if left == right:
            raise ValueError(f"claim {text!r}: both sides are the same runs")
        return Comparison(left, cast(Relation, parts[1]), right)

    def differences(self, values: Values, axes: Sequence[str]) -> dict[int, float]:
        """Left − right by seed. Both sides average over the same labels of the axes that they do not name: all of which
        there is any run. A seed that lacks one of these runs, or its value, on either side is left out."""
        sides = [_runs(side, values, axes) if isinstance(side, Mapping) else side for side in (self.left, self.right)]
        others = {other for side in sides if isinstance(side, Mapping) for _, other in side}
        of_seed = {}
        for seed in sorted({seed for _, seed in values}):
            left, right = (_mean(side, others, seed) for side in sides)
            if left is not None and right is not None:
                of_seed[seed] = left - right
        return of_seed

    def verdict(self, values: Values, axes: Sequence[str], margin: float) -> Verdict:
        return judge(list(self.differences(values, axes).values()), self.relation, margin)


def _runs(
    side: Mapping[str, str], values: Values, axes: Sequence[str]
) -> dict[tuple[int, tuple[str, ...]], float | None]:
    """The values of a side by seed and the labels of the axes that it does not name."""
    return {
        (seed, tuple(label for axis, label in zip(axes, cell, strict=True) if axis not in side)): value
        for (cell, seed), value in values.items()
        if side.items() <= dict(zip(axes, cell, strict=True)).items()
    }


def _mean(
    side: Mapping[tuple[int, tuple[str, ...]], float | None] | float, others: Collection[tuple[str, ...]], seed: int
) -> float | None:
    if not isinstance(side, Mapping):
        return side
    own = [side.get((seed, other)) for other in others]
    known = [value for value in own if value is not None]
    return fmean(known) if own and len(known) == len(own) else None


def _side(text: str, grid: Mapping[str, Mapping[str, Any]], claim: str) -> Side:
    try:
        number = float(text)
    except ValueError:
        side: dict[str, str] = {}
    else:
        if not math.isfinite(number):
            raise ValueError(f"claim {claim!r}: {text} is no number to compare with")
        return number
    for label in (word.strip() for word in text.split("&")):
        axis = next((axis for axis, labels in grid.items() if label in labels), None)
        if axis is None:
            known = [label for labels in grid.values() for label in labels]
            raise ValueError(f"claim {claim!r}: the grid has no label {label!r}.{suggest(label, known)}")
        if axis in side:
            raise ValueError(f"claim {claim!r}: {side[axis]!r} and {label!r} are both labels of {axis}")
        side[axis] = label
    return side
