"""A batch of the demo with adapters, beside one with full training: seconds, and the most memory. See README.md.

make bench-lora
python benchmarks/bench_lora.py --r 16 --rounds 3

Runs of the demo (addition/full.toml) take turns: full training, adapters, adapters, full training, and so on. The
first two batches of each are left out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import Load, Report, gigabytes, machine, median, ratio, spread
from processes import HERE, train
from work import common_options

from lagrpo.runs import load_metrics

DEMO = HERE.parent / "experiments" / "addition" / "full.toml"
PARTS = ("step", "generate", "train", "score", "sync")
WARM = 2  # batches that are left out


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--r", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of the adapters")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--batches", type=int, default=10, help="of each run")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.batches = 1, WARM + 1
    return asked


def main() -> None:
    asked = options()
    load, report = (
        Load(),
        Report("lora", f"Adapters (r = {asked.r}) beside full training", asked.results),
    )
    sides = {
        "full training": {},
        "adapters": {"model.lora_r": asked.r, "optimizer.learning_rate": asked.lr},
    }
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    peaks: dict[str, list[int]] = {name: [] for name in sides}
    for turn in range(asked.rounds):
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as scratch:
                found, peak = run(asked, sides[name], Path(scratch))
            seconds[name].append(found)
            peaks[name].append(peak)
            print(f"{name}: {found['step']:.2f} s a batch, {gigabytes(peak)}", flush=True)
    report.raw["seconds"], report.raw["peaks"] = seconds, peaks
    report.text(f"Medians over {asked.rounds} runs of the median batch (smallest … largest).")
    report.table("Seconds of a batch of the demo", [row(part, seconds) for part in PARTS])
    report.table("Most memory", [{name: gigabytes(median(of)) for name, of in peaks.items()}])
    load.add_ended()
    report.write(machine(asked.threads, load))


def row(part: str, seconds: Mapping[str, list[dict[str, float]]]) -> dict[str, str]:
    of_sides = {name: [run[part] for run in runs] for name, runs in seconds.items()}
    full, adapters = of_sides.values()
    shown = {name: spread(values, " s") for name, values in of_sides.items()}
    return {"": part, **shown, "adapters / full": ratio(adapters, full) if min(full) > 0 else "–"}


def run(
    asked: argparse.Namespace, side: Mapping[str, Any], scratch: Path
) -> tuple[dict[str, float], int]:
    """The seconds of the median batch by part, and the peak in bytes."""
    settings = {
        "run.output_dir": scratch,
        "run.name": "run",
        "checkpoint.save-total-limit": 0,
        "checkpoint.save-minutes": 0,
        "eval.at-start": False,
        "model.path": asked.model,
        "schedule.batches": asked.batches,
        **side,
    }
    (scratch / "peaks").mkdir()
    os.environ["PEAK_OF_RANKS"] = str(scratch / "peaks")
    train(DEMO, settings, 1, asked.threads, program=[str(HERE / "peak_of_rank.py")])
    metrics = load_metrics(scratch / "run")[WARM:]
    found = {part: median(line[f"time/{part}"] for line in metrics) for part in PARTS}
    return found, int((scratch / "peaks" / "0").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
