"""Learning curves of lagrpo and TRL on the same prompts, by updates and by seconds. See README.md.

make bench-curve
python benchmarks/bench_curve.py --seeds 0 1 2 --updates 16

The two sides of a seed make their updates in turn, so that both meet the same machine. lagrpo has
its default master weights, TRL has float32 weights, and both multiply in lagrpo's default dtype for
this CPU. The table also goes to reports/claims.md, the figure to docs/images.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypedDict

from bench_trl import DEFAULT
from measuring import Load, Report, fill, machine, table
from processes import HERE
from sides import interleaved, require_same_work, start_ours, start_trl
from work import RESULTS, SHORT, Work, apply_options, common_options, require_peer

from lagrpo.runs.plots import INK, plain_axes

sys.path.append(str(HERE.parent / "experiments"))
from lagrpo.study.measures import RunResult, measure, smoothed
from lagrpo.study.report import COLORS
from lagrpo.study.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = HERE.parent / "reports" / "claims.md"
FIGURE = HERE.parent / "docs" / "images" / "trl.png"
SIDES = ("lagrpo", "TRL")
SMOOTH = 3  # updates that a smoothed reward averages
LEVEL = 0.8  # the smoothed reward whose cost is shown


class Point(TypedDict):
    """The reward and the seconds of an update."""

    reward: float
    seconds: float


Curve = list[Point]
Curves = dict[str, list[Curve]]
"""A curve for each side and seed."""


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--peer", type=Path, default=Path(".venv-trl/bin/python"), help="a Python that has TRL"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=16, help="of each side and seed")
    parser.add_argument("--lr", type=float, default=2e-5, help="constant learning rate of both")
    options = parser.parse_args()
    if options.quick:
        options.seeds = options.seeds[:1]
        options.updates = 2
    return options


def main() -> None:
    options = parse_options()
    require_peer(options, "check-trl")
    work = apply_options(SHORT, options)
    load = Load()
    curves: Curves = {name: [] for name in SIDES}
    for number, seed in enumerate(options.seeds, start=1):
        versions = add_seed(options, work, seed, load, curves)
        report = Report("curve", "What is learned, ours and TRL", options.results)
        seeds = options.seeds[:number]
        seeds_text = ", ".join(map(str, seeds))
        report.text(f"{work.title}, learning rate {options.lr:g}, seeds {seeds_text}.")
        table_rows = rows(curves, options.updates)
        report.table("By updates and by seconds", table_rows)
        report.raw["seeds"] = seeds
        report.raw["curves"] = curves
        # Written after each seed, so that a later one that fails loses nothing.
        report.write(machine(options.threads, load, versions))
        if options.results == RESULTS:
            fill(PAGE, "beside TRL", table(table_rows))
            draw(curves, FIGURE)


def add_seed(
    options: argparse.Namespace, work: Work, seed: int, load: Load, curves: Curves
) -> dict[str, str]:
    """Measures both sides in turn with this seed and adds to `curves`. Returns TRL's versions."""
    config = {
        "per_device": min(DEFAULT["per_device"], work.completions),
        "learning_rate": options.lr,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with (
            start_ours(
                "ours",
                work,
                scratch,
                options.threads,
                reward=work.judge,
                run={"seed": seed},
                optimizer={"learning_rate": options.lr},
            ) as ours,
            start_trl(
                "trl",
                work,
                scratch,
                options.threads,
                python=options.peer,
                config=config,
                reward=work.judge,
            ) as trl,
        ):
            # No warm-up: the first update is part of the learning curve.
            our_updates, trl_updates = interleaved([ours, trl], 0, options.updates)
            load.add(ours, trl)
    require_same_work(our_updates, trl_updates)
    for side, updates in zip(SIDES, (our_updates, trl_updates), strict=True):
        curve: Curve = [{"reward": u["reward"], "seconds": u["seconds"]} for u in updates]
        curves[side].append(curve)
    return trl.facts["versions"]


def rows(curves: Curves, updates: int) -> list[dict[str, str]]:
    """A row for each side: rewards at a third, two thirds and the end, seconds, cost of LEVEL."""
    shown_updates = sorted({max(1, updates // 3), max(1, 2 * updates // 3), updates})
    return [{"": side, **row(seeds, shown_updates)} for side, seeds in curves.items()]


def row(seeds: Sequence[Curve], shown_updates: Sequence[int]) -> dict[str, str]:
    """The cells of a side. `shown_updates` are counted from 1."""
    rewards = [smoothed_rewards(curve) for curve in seeds]
    cells = {}
    for update in shown_updates:
        cells[f"reward at update {update}"] = mean_text([curve[update - 1] for curve in rewards])
    seconds_per_update = [fmean(point["seconds"] for point in curve) for curve in seeds]
    cells["seconds an update"] = mean_text(seconds_per_update)

    updates_until_level = costs_until_level("updates", seeds)
    seconds_until_level = costs_until_level("seconds", seeds)
    if updates_until_level:
        costs = f"{mean_text(updates_until_level)} / {mean_text(seconds_until_level)}"
    else:
        costs = "–"
    seeds_with_level = f"{len(updates_until_level)} of {len(seeds)} seeds"
    cells[f"updates / seconds until {LEVEL:g}"] = f"{costs} ({seeds_with_level})"
    return cells


def smoothed_rewards(curve: Curve) -> list[float]:
    return smoothed([point["reward"] for point in curve], SMOOTH)


def costs_until_level(unit: str, seeds: Sequence[Curve]) -> list[float]:
    """The "updates" or "seconds" until the smoothed reward is LEVEL, of the seeds that reach it."""
    costs = []
    for curve in seeds:
        # `measure` adds up a column until the level is reached, and a point is one update.
        run = RunResult([{**point, "updates": 1} for point in curve], {})
        cost = measure(f"{unit} to {LEVEL:g}", run, SMOOTH)
        if cost is not None:
            costs.append(cost)
    return costs


def mean_text(numbers: Sequence[float]) -> str:
    """The mean, with half the width of its 95 % interval over the seeds."""
    interval = Interval.of(numbers)
    if interval.half is None:
        return f"{interval.mean:.3g}"
    return f"{interval.mean:.3g} ± {interval.half:.2g}"


def draw(curves: Curves, path: Path) -> None:
    """Draws smoothed rewards by updates and by seconds: the mean of the seeds, and their range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    for color, style, (name, seeds) in zip(COLORS, ("-", "--"), curves.items(), strict=False):
        # By update: the rewards of all seeds.
        rewards = list(zip(*map(smoothed_rewards, seeds), strict=True))
        lowest = [min(of_update) for of_update in rewards]
        means = [fmean(of_update) for of_update in rewards]
        highest = [max(of_update) for of_update in rewards]

        updates = [float(number) for number in range(1, len(rewards) + 1)]
        elapsed = [list(accumulate(point["seconds"] for point in curve)) for curve in seeds]
        seconds = [fmean(of_update) for of_update in zip(*elapsed, strict=True)]

        label = f"{name} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
        for x, axes in zip((updates, seconds), panels, strict=True):
            axes.fill_between(x, lowest, highest, color=color, alpha=0.15, lw=0)
            axes.plot(x, means, color=color, ls=style, lw=2, label=label)
    for axes, label in zip(panels, ("update", "seconds"), strict=True):
        plain_axes(axes)
        axes.set(xlabel=label, ylim=(0, 1))
    # One side takes several times the seconds of the other.
    panels[1].set_xscale("log")
    panels[0].set_ylabel(f"reward, mean of {SMOOTH} updates", color=INK)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
