"""The reward curve of a run as a PNG: reward and pass@1, the share of groups without a signal, and the staleness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lagrpo.runs.directory import Run
from lagrpo.runs.files import write_atomically
from lagrpo.runs.reading import RunNotFoundError, load_evaluations, load_metrics, open_run

# Okabe and Ito's colors: distinct with any color vision, and in gray.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#8E4585"
INK, FAINT, GRID = "#222222", "#9a9a9a", "#ececec"
Rows = Sequence[dict[str, Any]]


def reward_curve(run_dir: Run | Path | str) -> Path:
    """Draw the run's reward.png and return its path. Raises RunNotFoundError before the first step is finished."""
    run = open_run(run_dir)
    if not (metrics := load_metrics(run)):
        raise RunNotFoundError(f"{run.path} has no metrics yet: its first batch is not finished")
    figure = draw(run.path.name, metrics, load_evaluations(run))
    return write_atomically(
        run.path / "reward.png", lambda path: figure.savefig(path, format="png", dpi=150)
    )


def draw(title: str, metrics: Rows, evaluations: Rows) -> Any:
    """The figure, made of matplotlib's objects: no global state, no window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.6), layout="constrained", facecolor="white")
    panels = reward, variance, stale = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": (4, 1, 1)}
    )
    steps = [m["step"] for m in metrics]
    reward.plot(
        steps, _curve(metrics, "reward"), ".-", color=BLUE, linewidth=1, label="reward of a step"
    )
    measured = [e for e in evaluations if e.get("pass@1") is not None]
    if points := [
        e for e in measured if e.get("set") == measured[0].get("set")
    ]:  # of the first set
        values = [e["pass@1"] for e in points]
        ends = [
            [abs(e.get(f"pass@1_{end}", e["pass@1"]) - e["pass@1"]) for e in points]
            for end in ("low", "high")
        ]
        when = [e["step"] or 0 for e in points]
        reward.errorbar(when, values, ends, color=ORANGE, label="pass@1", fmt="o", capsize=3.5)
    reward.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5, frameon=False, fontsize=8.5
    )
    for axes, key, color in (
        (variance, "frac_reward_zero_std", GREEN),
        (stale, "staleness/max", PURPLE),
    ):
        axes.step(steps, _curve(metrics, key), where="mid", color=color, linewidth=1)
        axes.set_ylim(bottom=0)
    labels = ("reward", "share of groups\nwithout signal", "staleness\n(updates)")
    for axes, label in zip(panels, labels, strict=True):
        plain_axes(axes)
        axes.set_ylabel(label, color=INK, fontsize=9)
    stale.set_xlabel("step", color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _curve(metrics: Rows, key: str) -> list[float]:
    return [math.nan if m.get(key) is None else float(m[key]) for m in metrics]


def plain_axes(axes: Any) -> None:
    """Two spines and light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
