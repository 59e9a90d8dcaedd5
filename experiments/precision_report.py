"""The table and the figure of experiments/precision.py, from the cells that exist."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from theory import style

from lagrpo.study.measures import smoothed
from lagrpo.study.statistics import Interval
from lagrpo.types import JsonView

ORDER = {"2e-5": (5, 10, 16), "5e-6": (5, 20, 24), "1e-6": (20, 60, 60)}
"""By learning rate: the two updates whose rewards are in the table, and the number of updates."""
MODES = {
    "plain": ("bf16, plain master weights", style.VERMILLION),
    "dithered": ("bf16, dithered master weights", style.BLUE),
    "float32": ("float32", style.GREEN),
    "trl": ("TRL 1.16, bf16", style.PURPLE),
}

# By mode, so that the lines can be told apart without color.
DASHES = ("--", "-", ":", "-.")

Cells = Sequence[JsonView]


def select_cells(cells: Cells, lr: str, mode: str) -> Cells:
    """The cells of this rate and mode, by seed."""
    selected = [cell for cell in cells if cell["lr"] == lr and cell["mode"] == mode]
    return sorted(selected, key=lambda cell: cell["seed"])


def table(cells: Cells) -> str:
    """One row for each learning rate and mode; a dash for what was not measured."""
    rows = [
        "| lr | mode | seeds | weights moved by update 1 | by an update, mean | reward | later "
        "| pass@1 after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lr, (early, late, _) in ORDER.items():
        for mode, (title, _) in MODES.items():
            selected = select_cells(cells, lr, mode)
            # TRL was not run at every learning rate.
            if mode == "trl" and not selected:
                continue
            seeds = ", ".join(str(cell["seed"]) for cell in selected) or "none yet"
            texts = [
                *_moved(selected),
                _reward(selected, early),
                _reward(selected, late),
                _pass_at_1(selected),
            ]
            rows.append(f"| {lr} | {title} | {seeds} | " + " | ".join(texts) + " |")
    return "\n".join(rows)


def _moved(cells: Cells) -> tuple[str, str]:
    """The share of weights that the first update moved, and the mean over the updates."""
    curves = []
    for cell in cells:
        # The shares of a float32 run are None; TRL's cells have none at all.
        shares = [share for share in cell.get("moved", []) if share is not None]
        if shares:
            curves.append(shares)
    first = interval([shares[0] for shares in curves], percent=True)
    mean = interval([statistics.fmean(shares) for shares in curves], percent=True)
    return first, mean


def _pass_at_1(cells: Cells) -> str:
    values = [cell.get("pass_at_1") for cell in cells]
    return interval([value for value in values if value is not None], percent=True)


def _reward(cells: Cells, update: int) -> str:
    """The reward at an update, counted from 1, of the runs that are as long."""
    values = [cell["rewards"][update - 1] for cell in cells if len(cell["rewards"]) >= update]
    return f"{interval(values)} at {update}" if values else "–"


def interval(values: Sequence[float], *, percent: bool = False) -> str:
    """The mean with half the width of its 95 % interval over seeds, by Student's t.

    >>> interval([0.5, 0.6, 0.7]), interval([0.5]), interval([]), interval([0.0123], percent=True)
    ('0.60 ± 0.25', '0.50', '–', '1.23 %')
    """
    if not values:
        return "–"
    estimate = Interval.of(values)
    mean = estimate.mean
    half = estimate.half
    digits = 2
    unit = ""
    if percent:
        digits = _percent_digits(mean)
        mean = 100 * mean
        # A single seed has no interval.
        half = None if half is None else 100 * half
        unit = " %"
    half_text = "" if half is None else f" ± {half:.{digits}f}"
    return f"{mean:.{digits}f}{half_text}{unit}"


def _percent_digits(share: float) -> int:
    """Digits after the point of a share in percent: more for small ones."""
    if share >= 0.05:
        return 1
    if share >= 1e-3:
        return 2
    return 4


def figure(cells: Cells, path: Path) -> None:
    """Draws reward by update at the two small learning rates: mean and range of the seeds."""
    drawing = style.canvas(10, 3.8)
    rates = ("5e-6", "1e-6")
    panels = drawing.subplots(1, len(rates), sharey=True)
    for axes, lr in zip(panels, rates, strict=True):
        y_label = "reward, mean of 3 updates" if axes is panels[0] else ""
        style.plain(axes, f"learning rate {lr}", "update", y_label)
        for (mode, (title, color)), dashes in zip(MODES.items(), DASHES, strict=True):
            curves = [smoothed(cell["rewards"], 3) for cell in select_cells(cells, lr, mode)]
            if not curves:
                continue
            # By update, up to the end of the shortest curve.
            columns = list(zip(*curves, strict=False))
            lowest = [min(column) for column in columns]
            means = [statistics.fmean(column) for column in columns]
            highest = [max(column) for column in columns]
            count = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
            updates = range(1, len(means) + 1)
            axes.fill_between(updates, lowest, highest, color=color, alpha=0.13, lw=0)
            axes.plot(updates, means, dashes, color=color, lw=2, label=f"{title} ({count})")
        axes.set(xlim=(0, ORDER[lr][2] + 1), ylim=(0, 1))
    panels[0].legend(loc="upper left", fontsize=8.5, frameon=False, handlelength=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=110)
