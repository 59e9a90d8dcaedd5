"""The reward curve of a run as a PNG: reward and pass@1, the share of groups without a signal, and the staleness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.runs.directory import Run
from lagrpo.runs.files import write_atomically
from lagrpo.runs.reading import RunNotFoundError, load_evaluations, load_metrics, open_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    return write_atomically(run.path / "reward.png", lambda path: figure.savefig(path, format="png", dpi=150))


def draw(title: str, metrics: Rows, evaluations: Rows) -> Figure:
    """The figure, made of matplotlib's objects: no global state, no window."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.4, 6.6), layout="constrained", facecolor="white")
    panels = reward, variance, stale = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (4, 1, 1)})
    for axes in panels:
        plain_axes(axes)
    _draw_reward(reward, metrics)
    _draw_evaluations(reward, [e for e in evaluations if None not in (e.get("pass@1"), e.get("step"))])
    reward.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5, frameon=False, fontsize=8.5)
    _draw_steps(variance, metrics, "frac_reward_zero_std", GREEN, "share of groups\nwithout signal")
    _draw_steps(stale, metrics, "staleness/max", PURPLE, "staleness\n(updates)")
    stale.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    stale.xaxis.set_major_locator(MaxNLocator(integer=True))
    stale.set_xlabel("step", color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _draw_reward(axes: Axes, metrics: Rows) -> None:
    """The reward of each step, and a running mean over a thirtieth of the run."""
    points = [(m["step"], m["reward"]) for m in metrics if m.get("reward") is not None]
    steps, values = [step for step, _ in points], [value for _, value in points]
    half = max(1, len(values) // 30)
    windows = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    axes.plot(steps, values, ".", color=BLUE, alpha=0.4, label="reward of a step")
    if len(values) > 2 * half + 1:
        means = [sum(window) / len(window) for window in windows]
        axes.plot(steps, means, color=BLUE, linewidth=1.8, label=f"mean of {2 * half + 1} steps")
    if all(0 <= value <= 1 for value in values):
        axes.set_ylim(-0.03, 1.06)
    axes.set_ylabel("reward", color=INK)


def _draw_evaluations(axes: Axes, evaluations: Rows) -> None:
    """pass@1 of the first set with its intervals, and the first and last value in words."""
    if not evaluations:
        return
    of_set = evaluations[0].get("set")
    points = [e for e in evaluations if e.get("set") == of_set]
    at, values = [e["step"] for e in points], [e["pass@1"] for e in points]
    ends = [[abs(e.get(f"pass@1_{end}", e["pass@1"]) - e["pass@1"]) for e in points] for end in ("low", "high")]
    label = f"pass@1, {of_set or 'held-out prompts'}"
    axes.errorbar(at, values, yerr=ends, color=ORANGE, label=label, fmt="o", capsize=3.5, zorder=5)
    for n in {0, len(points) - 1}:
        place: dict[str, Any] = {"xytext": (8 if n == 0 else -8, 6), "ha": "left" if n == 0 else "right"}
        place |= {"color": ORANGE, "fontweight": "bold", "textcoords": "offset points"}
        axes.annotate(f"{values[n]:.1%}", (at[n], values[n]), **place)


def _draw_steps(axes: Axes, metrics: Rows, key: str, color: str, label: str) -> None:
    """A metric as a stair, filled down to 0; a gap where it is null."""
    edges = [m["step"] - 0.5 for m in metrics] + [metrics[-1]["step"] + 0.5]
    values = [math.nan if m.get(key) is None else float(m[key]) for m in metrics]
    axes.stairs(values, edges, fill=True, color=color, alpha=0.25, linewidth=0)
    axes.stairs(values, edges, baseline=None, color=color, linewidth=1.0 if len(values) <= 300 else 0.4)
    axes.set_ylim(0, 1.05 * max([1.0, *(value for value in values if not math.isnan(value))]))
    axes.set_ylabel(label, color=INK, fontsize=9)


def plain_axes(axes: Axes) -> None:
    """Two spines and light horizontal lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
