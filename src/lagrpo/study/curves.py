"""The curves of a study: metrics by batch, the mean of the seeds with the range of them, a line for each cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from lagrpo.runs.plots import INK, plain_axes
from lagrpo.study.file import Cell, Study
from lagrpo.study.measures import Finished, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#8E4585", "#E69F00", "#56B4E9", "#CC79A7", "#222222")
"""After Okabe and Ito: distinct with any color vision."""
STYLES = ("-", "--", ":", "-.")


def draw(study: Study, found: Mapping[tuple[Cell, int], Finished]) -> Figure:
    """A row of panels for each metric. With several axes the labels of the last one have a panel each, where there are
    runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    *_, last = [[""], *(list(labels) for labels in study.grid.values())]
    there = {cell[-1] for cell, _ in found if cell}
    panels = [label for label in last if label in there] or last[:1] if len(study.grid) > 1 else [""]
    size = max(7.0, 4.6 * len(panels)), 3.6 * len(study.curves)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(study.curves), len(panels), sharex=True, sharey="row", squeeze=False)
    for metric, row in zip(study.curves, rows, strict=True):
        for label, axes in zip(panels, row, strict=True):
            plain_axes(axes)
            axes.set_title(label, loc="left", fontsize=10, fontweight="bold", color=INK)
            cells = [cell for cell in study.cells if not label or cell[-1] == label]
            for number, cell in enumerate(cells):
                runs = [found[cell, seed] for seed in study.seeds if (cell, seed) in found]
                _draw_cell(axes, ", ".join(cell[:-1] if label else cell), runs, metric, study.smooth, number)
        averaged = f", mean of {study.smooth} batches" if study.smooth > 1 else ""
        row[0].set_ylabel(metric + averaged, color=INK, fontsize=9)
    for axes in rows[-1]:
        axes.set_xlabel("batch k", color=INK)
    _legend(figure, rows[0])
    return figure


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Below the panels, the name of every line that one of them has, in as many columns as there is room for."""
    lines = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if lines:
        inches = 0.6 + 0.075 * max(map(len, lines))  # of an entry: its line, and letters of 8 points
        columns = max(1, min(len(lines), int(figure.get_figwidth() / inches)))
        figure.legend(
            lines.values(), lines.keys(), loc="outside lower center", fontsize=8, frameon=False, ncols=columns
        )


def _draw_cell(axes: Axes, name: str, runs: list[Finished], metric: str, smooth: int, number: int) -> None:
    curves = [smoothed([float("nan") if v is None else v for v in run.curve(metric)], smooth) for run in runs]
    columns = list(zip(*curves, strict=False))
    if not columns:
        return
    color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
    batches = range(1, len(columns) + 1)
    axes.plot(batches, [fmean(column) for column in columns], color=color, linestyle=style, lw=1.8, label=name)
    if len(curves) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(batches, low, high, color=color, alpha=0.12, lw=0)
