"""Success amplification (Mroueh, arXiv 2503.06639): what becomes of the success probability when each iteration solves
max E[A] - beta KL(pi || pi_ref) exactly, with A normalized by the policy before it: p_n = h(p_{n-1}), see
core.bounds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from theory.style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, apart, canvas, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPS_STD = 1e-4
PATHS = {  # (beta, p_ref): color
    (1.0, 0.05): VERMILLION,
    (2.0, 0.05): ORANGE,
    (2.0, 0.2): GREEN,
    (2.0, 0.5): BLUE,
    (5.0, 0.05): PURPLE,
    (5.0, 0.2): SKY,
}
ITERATIONS = 12


def draw() -> Figure:
    """Above, paths from p_ref; below, h itself with its fixed points, once where the lowest is stable, once where the
    iterations around it end in a cycle."""
    figure = canvas(9.2, 8.2)
    panels = figure.subplot_mosaic([["paths", "paths"], ["stable", "cycle"]], height_ratios=(1, 1.15))
    _draw_paths(panels["paths"])
    _draw_map(panels["stable"], 1.0, 0.05, r"from $p_\mathrm{ref}$ to the lowest")
    _draw_path(panels["stable"], 1.0, 0.05, 0.05, VERMILLION, "")
    lowest = _draw_map(panels["cycle"], 1.0, 0.005, "the lowest is unstable")
    _draw_path(panels["cycle"], 1.0, 0.005, lowest + 1e-3, VERMILLION, "from near the lowest: a cycle of two")
    _draw_path(panels["cycle"], 1.0, 0.005, 0.005, ORANGE, r"from $p_\mathrm{ref}$: to certainty")
    panels["cycle"].legend(loc="upper center", bbox_to_anchor=(0.46, 0.88), frameon=False, fontsize=9)
    return figure


def _fixed_points(beta: float, p_ref: float) -> list[tuple[float, bool]]:
    from lagrpo.core.bounds import fixed_points

    return fixed_points(p_ref, beta, EPS_STD)


def _draw_paths(axes: Axes) -> None:
    from lagrpo.core.bounds import trajectory

    ends = []
    for (beta, p_ref), color in PATHS.items():
        path = trajectory(p_ref, beta, EPS_STD, ITERATIONS)
        axes.plot(path, ".-", color=color, linewidth=1.6, markersize=7)
        ends.append(_fixed_points(beta, p_ref)[0][0])
    for ((beta, p_ref), color), end, at in zip(PATHS.items(), ends, apart(ends, 0.062), strict=True):
        label = rf"$\beta = {beta:g}$, $p_\mathrm{{ref}} = {p_ref:g}$:  $p^* = {end:.4f}$"
        axes.plot([ITERATIONS, ITERATIONS + 0.6], [end, at], color=color, linewidth=1, linestyle=":")
        axes.text(ITERATIONS + 0.7, at, label, color=color, fontsize=9.5, va="center")
    axes.set(xlim=(-0.2, ITERATIONS + 5.1), ylim=(0, 0.92), xticks=range(0, ITERATIONS + 1, 2))
    plain(axes, "Every fixed point beats the reference; the way there need not rise", "", r"success probability $p_n$")
    axes.set_xlabel("iteration $n$", x=(ITERATIONS / 2) / (ITERATIONS + 5.1), color=INK)
    axes.spines["bottom"].set_bounds(0, ITERATIONS)


def _draw_map(axes: Axes, beta: float, p_ref: float, what: str) -> float:
    """h, the diagonal and the fixed points, filled where they are stable; returns the lowest."""
    from lagrpo.core.bounds import amplified

    grid = [at / 2000 for at in range(2001)]
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
    axes.plot(grid, [amplified(p, p_ref, beta, EPS_STD) for p in grid], color=BLUE, linewidth=2)
    found = _fixed_points(beta, p_ref)
    offsets = ((9, -2), (-42, -8), (8, -3))
    for (p, stable), offset in zip(found, offsets, strict=True):
        axes.plot(
            p, p, "o", color=INK, markerfacecolor=INK if stable else "white", markersize=7, zorder=5, clip_on=False
        )
        axes.annotate(f"{p:.4g}", (p, p), offset, textcoords="offset points", fontsize=9, color=INK)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    title = rf"$\beta = {beta:g}$, $p_\mathrm{{ref}} = {p_ref:g}$: {what}"
    plain(axes, title, "$p_{n-1}$  (filled: stable, open: unstable)", "$p_n = h(p_{n-1})$")
    return found[0][0]


def _draw_path(axes: Axes, beta: float, p_ref: float, start: float, color: str, label: str) -> None:
    """The cobweb of 400 iterations from `start`."""
    from lagrpo.core.bounds import amplified

    path = [start]
    for _ in range(400):
        path.append(amplified(path[-1], p_ref, beta, EPS_STD))
    x, y = [start], [start]
    for before, after in pairwise(path):
        x += [before, after]
        y += [after, after]
    axes.plot(x, y, color=color, linewidth=0.9, alpha=0.85, label=label)
