"""How the figures look: colors, axes, labels that do not lie on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito: distinct with any color vision, and in gray.
BLUE, SKY, GREEN, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
PURPLE, MAUVE = "#8E4585", "#CC79A7"
INK, FAINT, GRID = "#222222", "#9a9a9a", "#ececec"


def canvas(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, made with matplotlib's objects: no global state, no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes, title: str, x: str, y: str) -> None:
    """Two spines, a light grid, a title on the left, and the names of what is drawn."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT, which="both")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)


def apart(positions: Sequence[float], gap: float) -> list[float]:
    """The positions moved as little as need be, in their order, until neighbors are at least `gap` apart: runs that
    are too close become rows around their mean.

    >>> apart([0.0, 0.1, 5.0], 1.0)
    [-0.45, 0.55, 5.0]
    """
    order = sorted(range(len(positions)), key=lambda at: positions[at])
    rows: list[tuple[float, list[int]]] = []  # the center of a row, and what stands in it
    for at in order:
        center, members = positions[at], [at]
        while rows and center - rows[-1][0] < gap * (len(members) + len(rows[-1][1])) / 2:
            earlier, others = rows.pop()
            total = len(members) + len(others)
            center = (center * len(members) + earlier * len(others)) / total
            members = others + members
        rows.append((center, members))
    moved = [0.0] * len(positions)
    for center, members in rows:
        for place, at in enumerate(members):
            moved[at] = center + gap * (place - (len(members) - 1) / 2)
    return moved
