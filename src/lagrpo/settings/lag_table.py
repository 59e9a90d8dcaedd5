"""The staleness at which each recipe was measured to hold: results of experiments/lag.

They are in lag_table.json, which `python -m experiments.lag --report` writes. The numbers come from
two small tasks: `chain` has one right answer and an exact reward, `gamble` has many answers, graded
rewards and luck. reports/staleness.md has the whole table, docs/staleness.md the limits of its
conclusions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FILE = "lag_table.json"
TASKS = ("chain", "gamble")
HOLDS = 0.6
"""A recipe holds if it keeps this share of the area of the best method at lag 0 on both tasks.

Its mean over the seeds counts, without regard to the interval, at a learning rate at which no seed
collapsed.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs of a recipe at one constant lag, on one task, over learning rates and seeds."""

    kept: float
    """area under the learning curve at the best learning rate, as a share of the area of the best
    method at lag 0"""
    half_interval: float | None
    """half of the 95 % interval of `kept` over the seeds; None for a single seed"""
    seeds: int
    best_learning_rate: float
    living_learning_rates: tuple[float, ...]
    """the learning rates at which no seed collapsed"""

    @property
    def lower_end(self) -> float:
        """Lower end of the interval of `kept`; `kept` itself for a single seed."""
        return self.kept - (self.half_interval or 0.0)

    @property
    def holds(self) -> bool:
        """True if enough of the area is kept, at a learning rate at which no seed collapsed."""
        return self.kept >= HOLDS and self.best_learning_rate in self.living_learning_rates


Lags = Mapping[int, Mapping[str, Measured]]
"""constant lag in updates -> task -> the measurement"""


@cache
def load_table() -> dict[str, Lags]:
    """The table: recipe -> constant lag -> task.

    Lags that were not measured on both tasks are left out.
    """
    text = files("lagrpo.settings").joinpath(FILE).read_text(encoding="utf-8")
    table: dict[str, Lags] = {}
    for recipe, by_lag in json.loads(text).items():
        lags: dict[int, Mapping[str, Measured]] = {}
        for lag, by_task in by_lag.items():
            if set(by_task) != set(TASKS):
                continue
            lags[int(lag)] = {task: _read_measured(by_task[task]) for task in TASKS}
        table[recipe] = dict(sorted(lags.items()))
    return table


def _read_measured(row: Mapping[str, Any]) -> Measured:
    return Measured(
        kept=row["kept"],
        half_interval=row["half_interval"],
        seeds=row["seeds"],
        best_learning_rate=row["best_learning_rate"],
        living_learning_rates=tuple(row["living_learning_rates"]),
    )


def measured_lags(recipe: str) -> list[int]:
    """The constant lags above 0 at which a recipe was measured on both tasks, ascending."""
    return [lag for lag in load_table().get(recipe, {}) if lag > 0]


def held_lag(recipe: str) -> int | None:
    """The largest measured lag up to which a recipe holds on both tasks, in updates.

    0 if it does not hold at the smallest lag that was measured; None if it was not measured.
    """
    lags = measured_lags(recipe)
    if not lags:
        return None
    # Lags ascend: one that fails ends the search, even if a larger one holds by chance.
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
    """The smallest measured lag that is not below `staleness`, and the best of its recipes.

    Returns the largest measured lag if all are below. The recipes, at most `count`, hold up to that
    lag. They are sorted by the number of learning rates without a collapse on both tasks, then by
    the lower end of the interval on the worse task.
    The list is empty if none holds.
    """
    all_lags = sorted({lag for recipe in load_table() for lag in measured_lags(recipe)})
    if not all_lags:
        return 0, []
    lag = next((lag for lag in all_lags if lag >= staleness), all_lags[-1])
    # Not every recipe was measured at every lag.
    measured = [recipe for recipe, by_lag in load_table().items() if lag in by_lag]
    holding = [recipe for recipe in measured if (held_lag(recipe) or 0) >= lag]

    def robustness(recipe: str) -> tuple[int, float]:
        by_task = list(load_table()[recipe][lag].values())
        living = set(by_task[0].living_learning_rates)
        for on_task in by_task[1:]:
            living.intersection_update(on_task.living_learning_rates)
        return len(living), min(on_task.lower_end for on_task in by_task)

    return lag, sorted(holding, key=robustness, reverse=True)[:count]
