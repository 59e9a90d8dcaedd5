"""Seconds and memory of a batch of the demo, with adapters and with full training. See README.md.

make bench-lora
python benchmarks/bench_lora.py --r 16 --rounds 3

Runs of the demo (addition/full.toml) take turns: full training, adapters, adapters, full training,
and so on. The first two batches of each are left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from measuring import Load, Report, gigabytes, machine, median, ratio, spread
from processes import train_with_peaks
from work import DEMO, common_options, demo_settings

from lagrpo.runs import load_metrics

PARTS = ("step", "generate", "train", "score", "sync")
# Batches at the start of a run that do not count.
WARM = 2


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--r", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of the adapters")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--batches", type=int, default=10, help="of each run")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
        options.batches = WARM + 1
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    report = Report("lora", f"Adapters (r = {options.r}) beside full training", options.results)
    sides: dict[str, dict[str, object]] = {
        "full training": {},
        "adapters": {"model.lora_r": options.r, "optimizer.learning_rate": options.lr},
    }
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    peaks: dict[str, list[int]] = {name: [] for name in sides}
    for turn in range(options.rounds):
        for name in sides if turn % 2 == 0 else reversed(sides):
            with tempfile.TemporaryDirectory() as scratch:
                run_seconds, peak = run(options, sides[name], Path(scratch))
            seconds[name].append(run_seconds)
            peaks[name].append(peak)
            print(f"{name}: {run_seconds['step']:.2f} s a batch, {gigabytes(peak)}", flush=True)
    report.raw["seconds"] = seconds
    report.raw["peaks"] = peaks
    report.text(f"Medians over {options.rounds} runs of the median batch (smallest … largest).")
    report.table("Seconds of a batch of the demo", [row(part, seconds) for part in PARTS])
    median_peaks = {name: gigabytes(median(side_peaks)) for name, side_peaks in peaks.items()}
    report.table("Most memory", [median_peaks])
    load.add_ended()
    report.write(machine(options.threads, load))


def row(part: str, seconds: Mapping[str, list[dict[str, float]]]) -> dict[str, str]:
    part_seconds = {name: [run[part] for run in runs] for name, runs in seconds.items()}
    spreads = {name: spread(values, " s") for name, values in part_seconds.items()}
    full = part_seconds["full training"]
    adapters = part_seconds["adapters"]
    # A part may take no time that the clock shows.
    adapters_by_full = ratio(adapters, full) if min(full) > 0 else "–"
    return {"": part, **spreads, "adapters / full": adapters_by_full}


def run(
    options: argparse.Namespace, side: Mapping[str, object], scratch: Path
) -> tuple[dict[str, float], int]:
    """Trains once. Returns the seconds of the median batch by part, and the peak in bytes."""
    settings = {**demo_settings(options.model, options.batches, scratch), **side}
    [peak] = train_with_peaks(DEMO, settings, ranks=1, threads=options.threads, scratch=scratch)
    metrics = load_metrics(scratch / "run")[WARM:]
    seconds = {part: median(line[f"time/{part}"] for line in metrics) for part in PARTS}
    return seconds, peak


if __name__ == "__main__":
    main()
