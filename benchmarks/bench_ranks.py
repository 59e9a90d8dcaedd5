"""Several ranks on one machine beside one process with as many threads: seconds of a batch. See README.md.

make bench-ranks
python benchmarks/bench_ranks.py --ranks 2

The demo's batches (addition/full.toml), no evaluations. One process with R threads and R ranks with one thread each
make runs in turn; a run's first batch is left out. Of ranks, the seconds of rank 0. Then what the ranks exchange in an
update, alone (exchange.py).
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
from typing import Any

from measuring import Load, Report, machine, median, ratio, spread
from processes import HERE, environment, train
from safetensors import safe_open
from work import common_options

from lagrpo.model.embedded import resolve_model
from lagrpo.runs import load_metrics

DEMO = HERE.parent / "experiments" / "addition" / "full.toml"
PARTS = ("time/step", "time/generate", "time/train", "time/sync")


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=7, help="of a run")
    parser.add_argument("--runs", type=int, default=3, help="of each side")
    asked = parser.parse_args()
    if asked.quick:
        asked.batches, asked.runs = 2, 1
    return asked


def main() -> None:
    asked = options()
    load, report = Load(), Report("ranks", "Several ranks beside one process", asked.results)
    sides = {
        f"one process, {asked.ranks} threads": 1,
        f"{asked.ranks} ranks of one thread": asked.ranks,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(asked.runs):
        for name, ranks in list(sides.items())[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as scratch:
                found[name] += run(asked, ranks, Path(scratch))[1:]
            print(name, f"{median(m['time/step'] for m in found[name]):.2f} s a batch", flush=True)
    report.raw |= found
    one, several = found.values()
    report.text(
        f"{asked.runs} runs of each side in turn, {asked.batches - 1} batches of each counted; medians."
    )
    rows = [
        {
            "s a batch": part.removeprefix("time/"),
            **{n: spread([m[part] for m in of]) for n, of in found.items()},
        }
        for part in PARTS
    ]
    report.table("Seconds", rows)
    totals = [[m["time/step"] for m in side] for side in (several, one)]
    report.text(f"Ranks take {ratio(*totals)} times the seconds of one process.")
    report.raw["exchange"] = seconds = exchange(asked, parameters(asked.model))
    share = median(seconds) / median(totals[0])
    report.text(
        f"What the ranks exchange in an update takes {spread(seconds)} s alone (gloo): {share:.1%} of the seconds of "
        "their batch."
    )
    load.add_ended()
    report.write(machine(asked.ranks, load))


def run(asked: argparse.Namespace, ranks: int, scratch: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    settings = {
        "run.output_dir": scratch,
        "run.name": "run",
        "checkpoint.save-total-limit": 0,
        "checkpoint.save-minutes": 0,
        "eval.at-start": False,
        "model.path": asked.model,
        "schedule.batches": asked.batches,
    }
    train(DEMO, settings, ranks, asked.ranks // ranks)
    return load_metrics(scratch / "run")


def parameters(model: str) -> int:
    """How many numbers the weights of a model have, tied ones once."""
    total = 0
    for file in Path(resolve_model(model)).glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            total += sum(
                math.prod(shard.get_slice(name).get_shape()) for name in shard.offset_keys()
            )
    return total


def exchange(asked: argparse.Namespace, numbers: int) -> list[float]:
    """Seconds of what the ranks exchange in an update, and nothing beside it."""
    words = [str(HERE / "exchange.py"), str(numbers), "2" if asked.quick else "10"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(asked.ranks),
        *words,
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment(1)}, capture_output=True, encoding="utf-8"
    )
    if done.returncode:
        raise SystemExit(f"the exchange failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
