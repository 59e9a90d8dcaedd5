"""The table and the figure of experiments/precision.py, from whatever cells are there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.measures import smoothed
from study.statistics import Interval
from theory import style

ORDER = {"2e-5": (5, 10, 16), "5e-6": (5, 20, 24), "1e-6": (20, 60, 60)}
"""Learning rates; of each the two updates whose rewards are shown, and how many there are."""
MODES = {
    "plain": ("bf16, plain master weights", style.VERMILLION),
    "dithered": ("bf16, dithered master weights", style.BLUE),
    "float32": ("float32", style.GREEN),
    "trl": ("TRL 1.16, bf16", style.PURPLE),
}

Cells = Sequence[dict[str, Any]]


def of(cells: Cells, lr: str, mode: str) -> Cells:
    """The cells of this rate and mode, by seed."""
    return sorted((c for c in cells if (c["lr"], c["mode"]) == (lr, mode)), key=lambda c: c["seed"])


def table(cells: Cells) -> str:
    """One row for each learning rate and mode; a dash where nothing was measured."""
    rows = [
        "| lr | mode | seeds | weights moved by update 1 | by an update, mean | reward | later | pass@1 after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lr, (early, late, _) in ORDER.items():
        for mode, (title, _) in MODES.items():
            found = of(cells, lr, mode)
            if mode == "trl" and not found:
                continue
            seeds = ", ".join(str(c["seed"]) for c in found) or "none yet"
            moved = [[m for m in c.get("moved", []) if m is not None] for c in found]
            cols = (
                interval([m[0] for m in moved if m], percent=True),
                interval([statistics.fmean(m) for m in moved if m], percent=True),
                _reward(found, early),
                _reward(found, late),
                interval(
                    [c["pass_at_1"] for c in found if c.get("pass_at_1") is not None], percent=True
                ),
            )
            rows.append(f"| {lr} | {title} | {seeds} | " + " | ".join(cols) + " |")
    return "\n".join(rows)


def _reward(cells: Cells, update: int) -> str:
    values = [c["rewards"][update - 1] for c in cells if len(c["rewards"]) >= update]
    return f"{interval(values)} at {update}" if values else "–"


def interval(values: Sequence[float], percent: bool = False) -> str:
    """The mean with the half width of its 95 % interval over seeds, by Student's t; one value stands alone.

    >>> interval([0.5, 0.6, 0.7]), interval([0.5]), interval([], True), interval([0.0123], True)
    ('0.60 ± 0.25', '0.50', '–', '1.23 %')
    """
    if not values:
        return "–"
    found = Interval.of(values)
    mean, half = found.mean, found.half
    if percent:
        digits = 1 if mean >= 0.05 else 2 if mean >= 1e-3 else 4
        return (
            f"{100 * mean:.{digits}f}"
            + (f" ± {100 * half:.{digits}f}" if half is not None else "")
            + " %"
        )
    return f"{mean:.2f}" + (f" ± {half:.2f}" if half is not None else "")


def figure(cells: Cells, path: Path) -> None:
    """Reward against updates at the two small learning rates: the mean of the seeds, and their range."""
    drawing, shown = style.canvas(10, 3.8), ("5e-6", "1e-6")
    panels = drawing.subplots(1, len(shown), sharey=True)
    for axes, lr in zip(panels, shown, strict=True):
        style.plain(
            axes,
            f"learning rate {lr}",
            "update",
            "reward, mean of 3 updates" if axes is panels[0] else "",
        )
        for (mode, (title, color)), dashes in zip(
            MODES.items(), ("--", "-", ":", "-."), strict=True
        ):
            if curves := [smoothed(c["rewards"], 3) for c in of(cells, lr, mode)]:
                low, mean, high = (
                    [f(x) for x in zip(*curves, strict=False)] for f in (min, statistics.fmean, max)
                )
                count = f"{len(curves)} seed{'s' * (len(curves) > 1)}"
                updates = range(1, len(mean) + 1)
                axes.fill_between(updates, low, high, color=color, alpha=0.13, lw=0)
                axes.plot(updates, mean, dashes, color=color, lw=2, label=f"{title} ({count})")
        axes.set(xlim=(0, ORDER[lr][2] + 1), ylim=(0, 1))
    panels[0].legend(loc="upper left", fontsize=8.5, frameon=False, handlelength=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=110)
