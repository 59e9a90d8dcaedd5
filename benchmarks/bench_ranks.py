"""Seconds of a batch: several ranks, and one process with as many threads. See README.md.

make bench-ranks
python benchmarks/bench_ranks.py --ranks 2

The demo's batches (addition/full.toml), no evaluations. One process with R threads and R ranks with
one thread each make runs in turn. The first batch of a run does not count. The seconds are those of
rank 0. Then the exchange between the ranks is timed alone (exchange.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import Load, Report, machine, median, ratio, spread
from processes import HERE, environment, train
from safetensors import safe_open
from work import DEMO, common_options, demo_settings

from lagrpo.model.embedded import resolve_model
from lagrpo.runs import load_metrics
from lagrpo.types import JsonObject

PARTS = ("time/step", "time/generate", "time/train", "time/sync")


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=7, help="of a run")
    parser.add_argument("--runs", type=int, default=3, help="of each side")
    options = parser.parse_args()
    if options.quick:
        options.batches = 2
        options.runs = 1
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    report = Report("ranks", "Several ranks beside one process", options.results)
    one_process = f"one process, {options.ranks} threads"
    several_ranks = f"{options.ranks} ranks of one thread"
    ranks_by_side = {one_process: 1, several_ranks: options.ranks}
    metrics: dict[str, list[JsonObject]] = {side: [] for side in ranks_by_side}
    for turn in range(options.runs):
        for side in ranks_by_side if turn % 2 == 0 else reversed(ranks_by_side):
            with tempfile.TemporaryDirectory() as scratch:
                run_metrics = run(options, ranks_by_side[side], Path(scratch))
            # The first batch warms up: kernels are loaded, memory is touched for the first time.
            metrics[side] += run_metrics[1:]
            seconds = median(batch["time/step"] for batch in metrics[side])
            print(side, f"{seconds:.2f} s a batch", flush=True)
    report.raw |= metrics
    report.text(
        f"{options.runs} runs of each side in turn, "
        f"{options.batches - 1} batches of each counted; medians."
    )
    rows = []
    for part in PARTS:
        row = {"s a batch": part.removeprefix("time/")}
        for side, batches in metrics.items():
            row[side] = spread([batch[part] for batch in batches])
        rows.append(row)
    report.table("Seconds", rows)

    seconds_of_one = [batch["time/step"] for batch in metrics[one_process]]
    seconds_of_several = [batch["time/step"] for batch in metrics[several_ranks]]
    times = ratio(seconds_of_several, seconds_of_one)
    report.text(f"Ranks take {times} times the seconds of one process.")

    exchange_seconds = time_exchange(options, count_weights(options.model))
    report.raw["exchange"] = exchange_seconds
    share = median(exchange_seconds) / median(seconds_of_several)
    report.text(
        f"What the ranks exchange in an update takes {spread(exchange_seconds)} s alone (gloo): "
        f"{share:.1%} of the seconds of their batch."
    )
    load.add_ended()
    report.write(machine(options.ranks, load))


def run(options: argparse.Namespace, ranks: int, scratch: Path) -> list[JsonObject]:
    """Trains once. Returns the metrics of the run's batches."""
    settings = demo_settings(options.model, options.batches, scratch)
    # Both sides have as many threads in all: R ranks of one, or one process of R.
    train(DEMO, settings, ranks, threads=options.ranks // ranks)
    return load_metrics(scratch / "run")


def count_weights(model: str) -> int:
    """The number of weights of a model; tied ones count once."""
    total = 0
    for file in Path(resolve_model(model)).glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            shapes = [shard.get_slice(name).get_shape() for name in shard.offset_keys()]
        total += sum(math.prod(shape) for shape in shapes)
    return total


def time_exchange(options: argparse.Namespace, weights: int) -> list[float]:
    """Seconds of the exchange between the ranks of one update, alone, for each round."""
    rounds = 2 if options.quick else 10
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(options.ranks)]
    command += [str(HERE / "exchange.py"), str(weights), str(rounds)]
    variables = {**os.environ, **environment(threads=1)}
    finished = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8")
    if finished.returncode:
        raise SystemExit(f"the exchange failed:\n{finished.stderr[-2000:]}")
    return json.loads(finished.stdout)


if __name__ == "__main__":
    main()
