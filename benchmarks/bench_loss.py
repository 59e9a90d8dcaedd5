"""Seconds of an update by recipe, and beside an earlier version of lagrpo. See README.md.

make bench-loss
python benchmarks/bench_loss.py --recipes grpo m2po --rounds 3 --before ../lagrpo-before

Runs of experiments/addition/full.toml take turns: each recipe in order, then in reverse order, and so on.
The first two batches of each run are left out. `--before` names a checkout of an earlier version, which
runs the first recipe as another side.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measuring import Load, Report, machine, median, ratio, spread
from processes import HERE, train
from work import common_options

from lagrpo.runs import load_metrics

SETTINGS = HERE.parent / "experiments" / "addition" / "full.toml"
PARTS = ("step", "train")
WARM = 2  # batches that are left out


@dataclass(frozen=True, slots=True)
class Side:
    """What runs on one side of the comparison."""

    name: str
    recipe: str
    checkout: Path


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["grpo", "dppo_tv", "m2po"])
    parser.add_argument("--before", type=Path, help="checkout of an earlier version")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--batches", type=int, default=8, help="of each run")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds = 1
        chosen.batches = WARM + 1
    return chosen


def main() -> None:
    chosen = options()
    load = Load()
    report = Report("loss", "Updates by recipe", chosen.results)
    sides = [Side(recipe, recipe, HERE.parent) for recipe in chosen.recipes]
    if chosen.before is not None:
        first = chosen.recipes[0]
        sides.insert(1, Side(f"{first}, before", first, chosen.before.resolve()))
    seconds: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for turn in range(chosen.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            of_run = run(side, chosen)
            seconds[side.name].append(of_run)
            print(f"{side.name}: {of_run['train']:.3f} s an update", flush=True)
    report.raw["seconds"] = seconds
    report.text(f"Medians over {chosen.rounds} runs of the median batch (smallest … largest).")
    report.text(f"The ratio is to {sides[0].name}.")
    for part in PARTS:
        base = [of_run[part] for of_run in seconds[sides[0].name]]
        rows = []
        for side in sides:
            values = [of_run[part] for of_run in seconds[side.name]]
            rows.append(
                {"": side.name, "seconds": spread(values, " s"), "ratio": ratio(values, base)}
            )
        report.table(f"Seconds of a batch: {part}", rows)
    load.add_ended()
    report.write(machine(chosen.threads, load))


def run(side: Side, chosen: argparse.Namespace) -> dict[str, float]:
    """The seconds of the median batch by part."""
    with tempfile.TemporaryDirectory() as scratch, source_of(side.checkout):
        settings = {
            "run.output_dir": scratch,
            "run.name": "run",
            "checkpoint.save-total-limit": 0,
            "checkpoint.save-minutes": 0,
            "eval.at-start": False,
            "model.path": chosen.model,
            "schedule.batches": chosen.batches,
            "loss.recipe": side.recipe,
            "loss.beta": 0.0,
        }
        train(SETTINGS, settings, 1, chosen.threads)
        metrics = load_metrics(Path(scratch, "run"))[WARM:]
    return {part: median(line[f"time/{part}"] for line in metrics) for part in PARTS}


@contextmanager
def source_of(checkout: Path) -> Iterator[None]:
    """Inside, programs that are started import lagrpo from this checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(checkout / "src")
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


if __name__ == "__main__":
    main()
