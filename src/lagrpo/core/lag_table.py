"""The staleness at which each recipe was measured to hold: results of experiments/lag, in lag_table.json.

`python -m experiments.lag --report` writes the file. Its numbers come from two small tasks: `chain` has one right
answer and an exact reward, `gamble` has many answers, graded rewards and luck. docs/off-policy.md has the whole table
and says what it does not show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

FILE = "lag_table.json"
TASKS = ("chain", "gamble")
HOLDS = 0.7
"""A recipe holds if it keeps this share of the area of the best method at lag 0, on both tasks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs of a recipe at one constant lag, on one task, over learning rates and seeds."""

    kept: float
    """area under the learning curve at the best learning rate, as a share of that of the best method at lag 0"""
    half_interval: float | None
    """half of the 95 % interval of `kept` over the seeds; None for a single seed"""
    seeds: int
    best_learning_rate: float
    living_learning_rates: tuple[float, ...]
    """those at which no seed died"""

    @property
    def lower_end(self) -> float:
        """Lower end of the interval of `kept`; `kept` itself for a single seed."""
        return self.kept - (self.half_interval or 0.0)

    @property
    def holds(self) -> bool:
        """True if enough of the area is kept, at a learning rate at which no seed died."""
        return self.kept >= HOLDS and self.best_learning_rate in self.living_learning_rates


Lags = Mapping[int, Mapping[str, Measured]]
"""constant lag in updates -> task -> what was measured"""


@cache
def load_table() -> dict[str, Lags]:
    """The table: recipe -> constant lag -> task. Lags that were not measured on both tasks are left out."""
    text = files("lagrpo.core").joinpath(FILE).read_text(encoding="utf-8")
    table = {}
    for recipe, by_lag in json.loads(text).items():
        lags = {}
        for lag, by_task in by_lag.items():
            if set(by_task) != set(TASKS):
                continue
            lags[int(lag)] = {task: _measured(by_task[task]) for task in TASKS}
        table[recipe] = dict(sorted(lags.items()))
    return table


def _measured(row: Mapping[str, object]) -> Measured:
    rates = row["living_learning_rates"]
    return Measured(**{**row, "living_learning_rates": tuple(rates)})  # type: ignore[arg-type]


def measured_lags(recipe: str) -> list[int]:
    """The constant lags above 0 at which a recipe was measured on both tasks, in ascending order."""
    return [lag for lag in load_table().get(recipe, {}) if lag > 0]


def held_lag(recipe: str) -> int | None:
    """The largest measured lag up to which a recipe holds on both tasks, in updates.

    0 if it does not hold at the smallest lag that was measured; None if it was not measured.
    """
    lags = measured_lags(recipe)
    if not lags:
        return None
    held = 0
    for lag in lags:
        if not holds_at(recipe, lag):
            break
        held = lag
    return held


def holds_at(recipe: str, lag: int) -> bool:
    """True if a recipe holds on both tasks at a lag at which it was measured."""
    return all(measured.holds for measured in load_table()[recipe][lag].values())


def recipes_that_hold(staleness: int, count: int = 2) -> tuple[int, list[str]]:
    """The smallest measured lag that is not below `staleness`, and the recipes that keep most there.

    Returns the largest measured lag if all are below. The recipes, at most `count`, hold up to that
    lag. First come those that keep most for certain: by the lower end of the interval, on the task
    that is worse for them. The list is empty if none holds.
    """
    all_lags = sorted({lag for recipe in load_table() for lag in measured_lags(recipe)})
    if not all_lags:
        return 0, []
    lag = next((lag for lag in all_lags if lag >= staleness), all_lags[-1])
    holding = [recipe for recipe in load_table() if (held_lag(recipe) or 0) >= lag]

    def kept_for_certain(recipe: str) -> float:
        return min(measured.lower_end for measured in load_table()[recipe][lag].values())

    return lag, sorted(holding, key=kept_for_certain, reverse=True)[:count]
