"""Seconds of an update by recipe, and beside an earlier version of lagrpo. See README.md.

make bench-loss
python benchmarks/bench_loss.py --recipes grpo m2po --rounds 3 --before ../lagrpo-before
python benchmarks/bench_loss.py --recipes grpo --entropy

Runs of experiments/addition/full.toml take turns: each recipe in order, then in reverse order, and
so on. The first two batches of each run are left out. `--before` names a checkout of an earlier
version, which runs the first recipe as another side. `--entropy` runs it twice more: with an
entropy term, and without the term but with the completions that it computes, those with an
advantage of 0. The results are then in entropy.md.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from measuring import Load, Report, machine, median, ratio, spread
from processes import CHECKOUT, train
from work import DEMO, common_options, demo_settings

from lagrpo.runs import load_metrics
from lagrpo.types import JsonObject

PARTS = ("step", "train")
# Batches at the start of a run that do not count.
WARM = 2
# Settings that change no update: so small an ESS is always reached, and computes all completions.
ALL_COMPLETIONS: JsonObject = {"optimizer.scale_lr_by_ess": 1e-9}
ENTROPY: JsonObject = {"loss.entropy_coef": 1e-3}


@dataclass(frozen=True, slots=True)
class Side:
    """A side of the comparison: a recipe, and the version of lagrpo that runs it."""

    name: str
    recipe: str
    checkout: Path
    """A checkout of lagrpo."""
    changes: JsonObject = field(default_factory=dict)
    """More settings."""


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["grpo", "dppo_tv", "m2po"])
    parser.add_argument("--before", type=Path, help="checkout of an earlier version")
    parser.add_argument("--entropy", action="store_true", help="the first recipe with the term")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--batches", type=int, default=8, help="of each run")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
        options.batches = WARM + 1
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    name = "entropy" if options.entropy else "loss"
    report = Report(name, "Updates by recipe", options.results)
    sides = [Side(recipe, recipe, CHECKOUT) for recipe in options.recipes]
    if options.entropy:
        first = options.recipes[0]
        sides.insert(1, Side(f"{first}, all completions", first, CHECKOUT, ALL_COMPLETIONS))
        sides.insert(2, Side(f"{first}, entropy", first, CHECKOUT, ENTROPY))
    if options.before is not None:
        first = options.recipes[0]
        # Right after the same recipe of this version, so that the two meet the same machine.
        sides.insert(1, Side(f"{first}, before", first, options.before.resolve()))
    seconds: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for turn in range(options.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            run_seconds = run(side, options)
            seconds[side.name].append(run_seconds)
            print(f"{side.name}: {run_seconds['train']:.3f} s an update", flush=True)
    report.raw["seconds"] = seconds
    report.text(f"Medians over {options.rounds} runs of the median batch (smallest … largest).")
    report.text(f"The ratio is to {sides[0].name}.")
    for part in PARTS:
        base = [run_seconds[part] for run_seconds in seconds[sides[0].name]]
        rows = []
        for side in sides:
            values = [run_seconds[part] for run_seconds in seconds[side.name]]
            rows.append(
                {"": side.name, "seconds": spread(values, " s"), "ratio": ratio(values, base)}
            )
        report.table(f"Seconds of a batch: {part}", rows)
    load.add_ended()
    report.write(machine(options.threads, load))


def run(side: Side, options: argparse.Namespace) -> dict[str, float]:
    """The seconds of the median batch by part."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            **demo_settings(options.model, options.batches, Path(scratch)),
            "loss.recipe": side.recipe,
            # Without the KL terms of some recipes, whose reference policy takes a forward pass.
            "loss.beta": 0.0,
            **side.changes,
        }
        train(DEMO, settings, 1, options.threads, checkout=side.checkout)
        metrics = load_metrics(Path(scratch, "run"))[WARM:]
    return {part: median(line[f"time/{part}"] for line in metrics) for part in PARTS}


if __name__ == "__main__":
    main()
