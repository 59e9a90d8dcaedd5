"""Recipes against stale samples: advice, and the results of experiments/lag that it rests on.

The results are in lag_table.json, which `python -m experiments.lag --report` writes; it also writes
ADVICE as the table of docs/off-policy.md. The numbers come from two small tasks: `chain` has one
right answer and an exact reward, `gamble` has many answers, graded rewards and luck.
reports/staleness.md has the whole table, docs/staleness.md the limits of its conclusions.

f is the best learning rate with fresh samples, on both tasks FRESH_RATE.
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
FRESH_RATE = 1e-3
"""f: the best of four learning rates with fresh samples, for nearly all losses"""
SHARED_RATE = 3e-4
"""The learning rate of all recipes in the table: f / 3"""
LARGEST_KL = 0.05
"""Nats per token: the mean of `rollout/kl` below which the learning rate may be raised toward f"""
UNSTABLE_KL = 0.1
"""Nats per token: the mean of `rollout/kl` above which the learning rate should be lowered"""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to start with if samples get that old."""

    staleness: int | None
    """updates, at most; None for older samples"""
    recipes: tuple[str, ...]
    rate: str
    """the learning rate, f being the best one with fresh samples"""
    more: str = ""
    """what else helps"""


FOLLOWS_KL = f"f with optimizer.scale_lr_by_kl = {LARGEST_KL}"
"""The rate of ADVICE for stale samples"""
ADVICE = (
    Advice(4, ("grpo",), "f"),
    Advice(16, ("prime_rl",), FOLLOWS_KL),
    Advice(64, ("prime_rl", "rec_one_side_nois_wide"), FOLLOWS_KL),
    Advice(
        None, ("rec_one_side_nois_wide", "prime_rl"), FOLLOWS_KL, "a smaller `schedule.sync_every`"
    ),
)
"""By ascending staleness."""


def advice_for(staleness: int) -> Advice:
    """The advice for samples that get `staleness` updates old."""
    return next(
        advice for advice in ADVICE if advice.staleness is None or staleness <= advice.staleness
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Runs of a recipe at one constant lag, on one task, over learning rates and seeds."""

    kept: float
    """area under the learning curve at SHARED_RATE, as a share of the area of the best method at
    lag 0"""
    half_interval: float | None
    """half of the 95 % interval of `kept` over the seeds; None for a single seed"""
    final: float
    """score in the last tenth of the runs at SHARED_RATE, as a share of the same of the best method
    at lag 0"""
    living_rate: float | None
    """the highest learning rate at which no seed died, nor at a lower one; None if there is none"""
    kl: float | None
    """mean KL(alpha || pi) of the runs at `living_rate`, nats per token"""


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
        final=row["final"],
        living_rate=row["living_rate"],
        kl=row["kl"],
    )


def measured_lags(recipe: str) -> list[int]:
    """The constant lags at which a recipe was measured on both tasks, ascending."""
    return list(load_table().get(recipe, {}))


def nearest_lag(recipe: str, staleness: int) -> int | None:
    """The smallest measured lag of a recipe that is not below `staleness`, or its largest.

    None if it was not measured.
    """
    lags = measured_lags(recipe)
    if not lags:
        return None
    return next((lag for lag in lags if lag >= staleness), lags[-1])


def kept_text(recipe: str, lag: int) -> str:
    """What a recipe keeps on each task at a lag: "82 ± 1 % on chain, 29 ± 2 % on gamble"."""
    parts: list[str] = []
    for task, measured in load_table()[recipe][lag].items():
        half = measured.half_interval
        interval = "" if half is None else f" ± {100 * half:.0f}"
        parts.append(f"{100 * measured.kept:.0f}{interval} % on {task}")
    return ", ".join(parts)


def shares_kept(recipe: str, lag: int) -> str:
    """The shares that a recipe keeps at a lag, in the order of TASKS: "82 and 29 %"."""
    measured = load_table()[recipe][lag].values()
    return " and ".join(f"{100 * of_task.kept:.0f}" for of_task in measured) + " %"


def rate_text(rate: float) -> str:
    """A learning rate of the table in terms of f: "f / 3"."""
    factor = rate / FRESH_RATE
    if factor >= 0.99:
        return "f" if factor < 1.01 else f"{factor:.0f} f"
    return f"f / {1 / factor:.0f}"
