"""What is learned, ours and TRL: rewards against updates and against seconds, on the same prompts. See README.md.

make bench-curve
python benchmarks/bench_curve.py --seeds 0 1 2 --updates 16

Of each seed both sides are there at once and make their updates in turn, so that both meet the same machine. Ours is
lagrpo with its default masters, TRL has float32 weights, and both multiply in lagrpo's default dtype for this CPU. The
table goes to reports/claims.md, too, the figure beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_trl import DEFAULT
from measuring import Load, Report, fill, machine, table
from processes import HERE
from sides import interleaved, require_same_work, start_ours, start_trl, values
from work import RESULTS, SHORT, Work, asked_for, common_options, require_peer

from lagrpo.runs.plots import INK, plain_axes

sys.path.append(str(HERE.parent / "experiments"))
from study.measures import RunResult, measure, smoothed
from study.report import COLORS
from study.statistics import Interval

PAGE, FIGURE = HERE.parent / "reports" / "claims.md", HERE.parent / "docs" / "images" / "trl.png"
SIDES = ("lagrpo", "TRL")
SMOOTH = 3  # updates that a smoothed reward averages
LEVEL = 0.8  # the smoothed reward whose cost is shown

Curves = dict[str, list[list[dict[str, float]]]]
"""Of each side, by seed: the reward and the seconds of each update."""


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--peer", type=Path, default=Path(".venv-trl/bin/python"), help="a Python that has TRL"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=16, help="of each side and seed")
    parser.add_argument("--lr", type=float, default=2e-5, help="constant learning rate of both")
    asked = parser.parse_args()
    if asked.quick:
        asked.seeds, asked.updates = asked.seeds[:1], 2
    return asked


def main() -> None:
    asked = options()
    require_peer(asked, "check-trl")
    work, load = asked_for(SHORT, asked), Load()
    curves: Curves = {name: [] for name in SIDES}
    for number, seed in enumerate(asked.seeds, start=1):
        versions = add_seed(asked, work, seed, load, curves)
        report = Report("curve", "What is learned, ours and TRL", asked.results)
        report.text(
            f"{work.title}, learning rate {asked.lr:g}, seeds {', '.join(map(str, asked.seeds[:number]))}."
        )
        report.table("By updates and by seconds", found := rows(curves, asked.updates))
        report.raw["seeds"], report.raw["curves"] = asked.seeds[:number], curves
        report.write(machine(asked.threads, load, versions))  # kept, whatever the next seed does
        if asked.results == RESULTS:
            fill(PAGE, "beside TRL", table(found))
            draw(curves, FIGURE)


def add_seed(
    asked: argparse.Namespace, work: Work, seed: int, load: Load, curves: Curves
) -> dict[str, str]:
    """Both sides in turn with this seed; TRL's versions."""
    config = {
        "per_device": min(DEFAULT["per_device"], work.completions),
        "learning_rate": asked.lr,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as scratch:
        place, own = (
            (work, Path(scratch), asked.threads),
            {"optimizer": {"learning_rate": asked.lr}},
        )
        with (
            start_ours("ours", *place, reward=work.judge, run={"seed": seed}, **own) as ours,
            start_trl("trl", *place, python=asked.peer, config=config, reward=work.judge) as trl,
        ):
            taken = interleaved([ours, trl], 0, asked.updates)
            load.add(ours, trl)
    require_same_work(*taken)
    for name, side in zip(SIDES, taken, strict=True):
        curves[name].append(
            [{part: update[part] for part in ("reward", "seconds")} for update in side]
        )
    return trl.facts["versions"]


def rows(curves: Curves, updates: int) -> list[dict[str, str]]:
    """A line for each side: rewards at a third, two thirds and the end, seconds, and what the level costs."""
    at = sorted({max(1, updates // 3), max(1, 2 * updates // 3), updates})
    return [{"": name, **row(seeds, at)} for name, seeds in curves.items()]


def row(seeds: Sequence[Sequence[dict[str, float]]], at: Sequence[int]) -> dict[str, str]:
    rewards = [smoothed(values(list(of), "reward"), SMOOTH) for of in seeds]
    runs = [
        RunResult([{"reward": u["reward"], "updates": 1, "seconds": u["seconds"]} for u in of], {})
        for of in seeds
    ]
    updates, seconds = (
        [cost for run in runs if (cost := measure(f"{name} to {LEVEL:g}", run, SMOOTH)) is not None]
        for name in ("updates", "seconds")
    )
    costs = f"{shown(updates)} / {shown(seconds)}" if updates else "–"
    return {
        **{f"reward at update {k}": shown([curve[k - 1] for curve in rewards]) for k in at},
        "seconds an update": shown([fmean(values(list(of), "seconds")) for of in seeds]),
        f"updates / seconds until {LEVEL:g}": f"{costs} ({len(updates)} of {len(seeds)} seeds)",
    }


def shown(numbers: Sequence[float]) -> str:
    """The mean, with half the width of its 95 % interval over the seeds."""
    found = Interval.of(numbers)
    return f"{found.mean:.3g}" + (f" ± {found.half:.2g}" if found.half is not None else "")


def draw(curves: Curves, path: Path) -> None:
    """Smoothed rewards against updates, and against seconds: the mean of the seeds, and their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, 2, sharey=True)
    for color, style, (name, seeds) in zip(COLORS, ("-", "--"), curves.items(), strict=False):
        rewards = [smoothed(values(list(updates), "reward"), SMOOTH) for updates in seeds]
        seconds = [list(accumulate(values(list(updates), "seconds"))) for updates in seeds]
        for across, axes in zip(
            ([list(range(1, len(r) + 1)) for r in rewards], seconds), panels, strict=True
        ):
            x = [fmean(column) for column in zip(*across, strict=True)]
            low, mean, high = (
                [of(c) for c in zip(*rewards, strict=True)] for of in (min, fmean, max)
            )
            axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
            axes.plot(
                x,
                mean,
                color=color,
                ls=style,
                lw=2,
                label=f"{name} ({len(seeds)} seed{'s' * (len(seeds) > 1)})",
            )
    for axes, label in zip(panels, ("update", "seconds"), strict=True):
        plain_axes(axes)
        axes.set(xlabel=label, ylim=(0, 1))
    panels[1].set_xscale("log")
    panels[0].set_ylabel(f"reward, mean of {SMOOTH} updates", color=INK)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
