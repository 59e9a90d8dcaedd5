"""Compares completions, gradients and weights of several ranks with those of one. See README.md.

make check-ranks
python benchmarks/check_ranks.py --ranks 1 2 3 --batches 4

Runs of the demo (addition/full.toml) by each number of ranks, in each dtype, one thread a rank, are
compared with the run of one process. No speed is measured. The table also goes to
reports/scaling.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from measuring import Load, Report, fill, machine, table
from processes import HERE, train
from safetensors.torch import load_file
from work import DEMO, RESULTS, common_options, demo_settings

from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.reading import rollout_batches

PAGE = HERE.parent / "reports" / "scaling.md"


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    if options.quick:
        options.ranks = [1, 2]
        options.dtypes = ["float32"]
        options.batches = 2
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    report = Report("check_ranks", "Several ranks beside one process", options.results)
    first, *others = options.ranks
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in options.dtypes:
            runs = {ranks: run(options, ranks, dtype, Path(scratch)) for ranks in options.ranks}
            for ranks in others:
                rows.append(compare(runs[ranks], runs[first], ranks, dtype, options.batches))
                print(rows[-1], flush=True)
    report.table(
        f"Beside {first} rank: {options.batches} batches of the demo, one update each", rows
    )
    report.raw["rows"] = rows
    load.add_ended()
    report.write(machine(1, load))
    if options.results == RESULTS:
        fill(PAGE, "ranks beside one", table(rows))


def run(options: argparse.Namespace, ranks: int, dtype: str, scratch: Path) -> Path:
    """Trains once. Returns the directory of the run."""
    name = f"{dtype}-{ranks}"
    settings = demo_settings(options.model, options.batches, scratch)
    # The weights of the last update are compared, so that the run must keep them.
    del settings["checkpoint.save-total-limit"]
    settings |= {"run.name": name, "model.dtype": dtype}
    train(DEMO, settings, ranks, threads=1)
    return scratch / name


def compare(path: Path, reference: Path, ranks: int, dtype: str, batches: int) -> dict[str, str]:
    """The row of a run beside the run of one process."""
    same_batches = 0
    for batch in rollout_batches(reference):
        if tokens_of(path, batch) != tokens_of(reference, batch):
            break
        same_batches += 1
    lines = zip(load_metrics(path), load_metrics(reference), strict=True)
    differences = [
        relative_difference(line["grad_norm"], other["grad_norm"]) for line, other in lines
    ]
    # Gradients of different tokens say nothing. That of the first batch is shown in any case.
    comparable = differences[: max(1, same_batches)]
    return {
        "dtype": dtype,
        "ranks": str(ranks),
        "batches with the same tokens": f"{same_batches} of {batches}",
        "gradient norm of batch 1, relative": f"{differences[0]:.1e}",
        "of all batches with the same tokens, at most": f"{max(comparable):.1e}",
        "weights after the last update, relative": f"{weight_difference(path, reference):.1e}",
    }


def tokens_of(run: Path, batch: int) -> list[list[int]]:
    return [row["token_ids"] for row in load_rollouts(run, [batch], ["token_ids"])]


def relative_difference(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-30)


def weight_difference(run: Path, reference: Path) -> float:
    """‖W − W'‖ / ‖W'‖ over all saved weights."""
    weights = load_file(newest(run))
    others = load_file(newest(reference))
    # In float64, so that the sums add no rounding of their own to a small difference.
    square_of_difference = sum(
        float((weights[name].double() - others[name].double()).square().sum()) for name in others
    )
    square = sum(float(weight.double().square().sum()) for weight in others.values())
    return (square_of_difference / square) ** 0.5


def newest(run: Path) -> Path:
    """The weights of the last update."""
    return max((run / "weights").glob("*/model.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
