"""The reward curve of a run as a PNG: reward and pass@1, the share of groups without a signal, and the measured lag.
Drawn from the run's files alone, while the run goes on or long after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
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
INK, FAINT, GRID, SYNC = "#222222", "#9a9a9a", "#ececec", "#cdb9d6"
MOST_SYNCS = 40  # more vertical lines than this would be a gray wall


def reward_curve(run_dir: Run | Path | str) -> Path:
    """Draw the run's reward.png and return its path. Raises RunNotFoundError when no batch is finished yet."""
    run = open_run(run_dir)
    metrics = load_metrics(run)
    if not metrics:
        raise RunNotFoundError(f"{run.path} has no metrics yet: its first batch is not finished")
    figure = draw(run.path.name, metrics, load_evaluations(run))
    target = run.path / "reward.png"
    return write_atomically(target, lambda path: figure.savefig(path, format="png", dpi=150))


def draw(title: str, metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Figure:
    """The figure itself, made with matplotlib's objects: no global state, no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.4, 6.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    reward, variance, lag = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (4.2, 1.2, 1.2)})
    for axes in (reward, variance, lag):
        plain_axes(axes)
        _mark_events(axes, metrics)
    _draw_steps(variance, metrics, "zero_variance_share", GREEN)
    variance.set_ylim(0, 1.05)
    variance.set_ylabel("share of groups\nwithout signal", color=INK, fontsize=9)
    _draw_steps(lag, metrics, "lag_max", PURPLE, down_to="lag_min")
    top = max([1.0, *curve(metrics, "lag_max")[1]])
    lag.set_ylim(-0.15 * top, 1.2 * top)
    lag.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    lag.set_ylabel("measured lag\n(updates)", color=INK, fontsize=9)
    _draw_reward(reward, metrics, evaluations)
    lag.set_xlabel("batch k", color=INK)
    last = max([m["batch"] for m in metrics] + [e.get("batch") or 0 for e in evaluations])
    lag.set_xlim(-0.02 * last - 0.5, 1.02 * last + 0.5)
    lag.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean over a window of `width` values (odd) around each, narrower at the ends.

    >>> smooth([0.0, 3.0, 0.0, 0.0], 3)
    [1.5, 1.0, 1.0, 0.0]
    """
    half = width // 2
    windows = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def curve(metrics: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Batches and values of one metric, without the batches that do not have it."""
    points = [(m["batch"], m[key]) for m in metrics if m.get(key) is not None]
    return [batch for batch, _ in points], [value for _, value in points]


def _draw_reward(axes: Axes, metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    batches, values = curve(metrics, "reward_mean")
    width = 2 * max(1, len(values) // 30) + 1
    dots = {"color": BLUE, "alpha": 0.4, "markersize": 4.5 if len(values) > 300 else 7, "markeredgewidth": 0}
    axes.plot(batches, values, ".", label="reward of a batch", **dots)
    if len(values) > width:
        axes.plot(batches, smooth(values, width), color=BLUE, linewidth=1.8, label=f"mean of {width} batches")
    _draw_evaluations(axes, evaluations)
    if all(0 <= value <= 1 for value in values):
        axes.set_ylim(-0.03, 1.06)
    axes.set_ylabel("reward", color=INK)
    # Above the axes, where it hides no point whichever way the curve goes.
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5, frameon=False, fontsize=8.5, columnspacing=1.4)


def _draw_evaluations(axes: Axes, evaluations: Sequence[dict[str, Any]]) -> None:
    points = [e for e in evaluations if e.get("pass_at_1") is not None and e.get("batch") is not None]
    if not points:
        return
    of_set = points[0].get("set")  # of several sets one is drawn; lagrpo view has all of them
    points = [e for e in points if e.get("set") == of_set]
    values = [e["pass_at_1"] for e in points]
    lows = [value - e.get("pass_at_1_low", value) for value, e in zip(values, points, strict=True)]
    highs = [e.get("pass_at_1_high", value) - value for value, e in zip(values, points, strict=True)]
    at = [e["batch"] for e in points]
    style: dict[str, Any] = {"fmt": "o", "color": ORANGE, "markersize": 6, "capsize": 3.5, "zorder": 5}
    axes.errorbar(at, values, yerr=[lows, highs], label=f"pass@1, {of_set or 'held-out prompts'}", **style)
    _name_value(axes, at[0], values[0], "left")
    if at[-1] != at[0]:
        _name_value(axes, at[-1], values[-1], "right")


def _name_value(axes: Axes, batch: int, value: float, align: str) -> None:
    """The value of an evaluation in words: above its point in the lower half of the panel, below it in the upper."""
    from matplotlib.patheffects import withStroke

    offset = (-6 if align == "left" else 6, -26 if value > 0.5 else 18)
    style: dict[str, Any] = {"color": ORANGE, "fontsize": 10.5, "fontweight": "bold", "zorder": 6, "ha": align}
    style["path_effects"] = [withStroke(linewidth=3, foreground="white")]
    axes.annotate(f"{value:.1%}", (batch, value), xytext=offset, textcoords="offset points", **style)


def _draw_steps(axes: Axes, metrics: Sequence[dict[str, Any]], key: str, color: str, down_to: str = "") -> None:
    """A metric as steps of a batch each, filled down to another metric, or to 0; a gap where there is none."""
    edges = [m["batch"] - 0.5 for m in metrics] + [metrics[-1]["batch"] + 0.5]
    values, floor = ([math.nan if m.get(k) is None else float(m[k]) for m in metrics] for k in (key, down_to))
    axes.stairs(values, edges, baseline=floor if down_to else 0, fill=True, color=color, alpha=0.25, linewidth=0)
    axes.stairs(values, edges, baseline=None, color=color, linewidth=1.0 if len(values) <= 300 else 0.4)


def _mark_events(axes: Axes, metrics: Sequence[dict[str, Any]]) -> None:
    """Light vertical lines: solid where the sampler got new weights, dashed where a stage begins."""
    synced = [m["batch"] for m in metrics if m.get("synced")]
    starts = [after["batch"] for before, after in pairwise(metrics) if before.get("stage") != after.get("stage")]
    if len(synced) > min(MOST_SYNCS, len(metrics) // 2):
        synced = []
    _mark(axes, synced, "weight sync", color=SYNC, linewidth=0.8, zorder=0)
    _mark(axes, starts, "new stage", color=FAINT, linewidth=1, linestyle=(0, (5, 3)), zorder=1)


def _mark(axes: Axes, batches: Sequence[int], label: str, **style: Any) -> None:
    for at, batch in enumerate(batches):
        axes.axvline(batch - 0.5, label=None if at else label, **style)


def plain_axes(axes: Axes) -> None:
    """Two spines and light horizontal lines."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
