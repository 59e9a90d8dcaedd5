"""The reward curve of a run as a PNG: reward and pass@1, groups without a signal, and staleness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lagrpo.logs import visible
from lagrpo.runs.directory import Run
from lagrpo.runs.files import write_atomically
from lagrpo.runs.reading import RunNotFoundError, load_evaluations, load_metrics, open_run
from lagrpo.types import JsonObject

# Okabe and Ito's colors: distinct with any color vision, and in gray.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#8E4585"
INK = "#222222"
FAINT = "#9a9a9a"
GRID = "#ececec"

Rows = Sequence[JsonObject]


def reward_curve(run_dir: Run | Path | str) -> Path:
    """Draws the run's reward.png and returns its path.

    Raises RunNotFoundError before the first step is finished.
    """
    run = open_run(run_dir)
    metrics = load_metrics(run)
    if not metrics:
        raise RunNotFoundError(f"{run.path} has no metrics yet: its first batch is not finished")
    # The directory "." has no name until it is resolved.
    figure = draw(visible(run.path.resolve().name), metrics, load_evaluations(run))
    return write_atomically(
        run.path / "reward.png", lambda path: figure.savefig(path, format="png", dpi=150)
    )


def draw(title: str, metrics: Rows, evaluations: Rows) -> Any:
    """Returns the figure, made of matplotlib's objects: no global state, no window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.6), layout="constrained", facecolor="white")
    reward, variance, staleness = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": (4, 1, 1)}
    )
    steps = [line["step"] for line in metrics]
    rewards = _curve(metrics, "reward")
    reward.plot(steps, rewards, ".-", color=BLUE, linewidth=1, label="reward of a step")
    _draw_pass_at_1(reward, evaluations)
    reward.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5, frameon=False, fontsize=8.5
    )
    _draw_steps(variance, steps, _curve(metrics, "frac_reward_zero_std"), GREEN)
    _draw_steps(staleness, steps, _curve(metrics, "staleness/max"), PURPLE)
    labels = {
        "reward": reward,
        "share of groups\nwithout signal": variance,
        "staleness\n(updates)": staleness,
    }
    for label, axes in labels.items():
        plain_axes(axes)
        axes.set_ylabel(label, color=INK, fontsize=9)
    staleness.set_xlabel("step", color=INK)
    figure.suptitle(
        title,
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
        parse_math=False,  # a name may have two dollar signs
    )
    return figure


def _draw_pass_at_1(axes: Any, evaluations: Rows) -> None:
    """Draws the results of the first evaluation set, with their intervals."""
    results = [summary for summary in evaluations if summary.get("pass@1") is not None]
    if not results:
        return
    first_set = results[0].get("set")
    steps = []
    values = []
    below = []
    above = []
    for summary in results:
        if summary.get("set") != first_set:
            continue
        value = summary["pass@1"]
        steps.append(summary["step"] or 0)
        values.append(value)
        below.append(abs(summary.get("pass@1_low", value) - value))
        above.append(abs(summary.get("pass@1_high", value) - value))
    axes.errorbar(steps, values, [below, above], color=ORANGE, label="pass@1", fmt="o", capsize=3.5)


def _draw_steps(axes: Any, steps: Sequence[int], values: Sequence[float], color: str) -> None:
    axes.step(steps, values, where="mid", color=color, linewidth=1)
    axes.set_ylim(bottom=0)


def _curve(metrics: Rows, key: str) -> list[float]:
    """Returns a metric of each step, NaN without one."""
    values = [line.get(key) for line in metrics]
    return [math.nan if value is None else float(value) for value in values]


def plain_axes(axes: Any) -> None:
    """Leaves two spines and light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
