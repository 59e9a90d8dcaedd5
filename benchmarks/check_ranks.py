"""Several ranks beside one process: are completions, gradients and weights those of one? See README.md.

make check-ranks
python benchmarks/check_ranks.py --ranks 1 2 3 --batches 4

Runs of the demo (addition/full.toml) by each number of ranks, in each dtype, one thread a rank, compared with the
run of one process. No speed is measured. The table goes to reports/scaling.md, too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from measuring import Load, Report, fill, machine, table
from processes import HERE, train
from safetensors.torch import load_file
from work import RESULTS, common_options

from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.reading import rollout_batches

DEMO, PAGE = (
    HERE.parent / "experiments" / "addition" / "full.toml",
    HERE.parent / "reports" / "scaling.md",
)


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, default=4)
    asked = parser.parse_args()
    if asked.quick:
        asked.ranks, asked.dtypes, asked.batches = [1, 2], ["float32"], 2
    return asked


def main() -> None:
    asked = options()
    load, report, rows = (
        Load(),
        Report("check_ranks", "Several ranks beside one process", asked.results),
        [],
    )
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in asked.dtypes:
            runs = {ranks: run(asked, ranks, dtype, Path(scratch)) for ranks in asked.ranks}
            for ranks, path in runs.items():
                if ranks != asked.ranks[0]:
                    rows.append(compare(path, runs[asked.ranks[0]], ranks, dtype, asked.batches))
                    print(rows[-1], flush=True)
    report.table(
        f"Beside {asked.ranks[0]} rank: {asked.batches} batches of the demo, one update each", rows
    )
    report.raw["rows"] = rows
    load.add_ended()
    report.write(machine(1, load))
    if asked.results == RESULTS:
        fill(PAGE, "ranks beside one", table(rows))


def run(asked: argparse.Namespace, ranks: int, dtype: str, scratch: Path) -> Path:
    """The directory of a run."""
    settings = {
        "run.output_dir": scratch,
        "run.name": f"{dtype}-{ranks}",
        "checkpoint.save-minutes": 0,
        "eval.at-start": False,
        "model.path": asked.model,
        "model.dtype": dtype,
        "schedule.batches": asked.batches,
    }
    train(DEMO, settings, ranks, threads=1)
    return scratch / f"{dtype}-{ranks}"


def compare(path: Path, one: Path, ranks: int, dtype: str, batches: int) -> dict[str, str]:
    same = [tokens_of(path, batch) == tokens_of(one, batch) for batch in rollout_batches(one)]
    until = next((n for n, equal in enumerate(same) if not equal), len(same))
    lines = zip(load_metrics(path), load_metrics(one), strict=True)
    gaps = [relative(line["grad_norm"], other["grad_norm"]) for line, other in lines]
    return {
        "dtype": dtype,
        "ranks": str(ranks),
        "batches with the same tokens": f"{until} of {batches}",
        "gradient norm of batch 1, relative": f"{gaps[0]:.1e}",
        "of all batches with the same tokens, at most": f"{max(gaps[: max(1, until)]):.1e}",
        "weights after the last update, relative": f"{apart(path, one):.1e}",
    }


def tokens_of(run: Path, batch: int) -> list[list[int]]:
    return [row["token_ids"] for row in load_rollouts(run, [batch], ["token_ids"])]


def relative(value: float, other: float) -> float:
    return abs(value - other) / max(abs(other), 1e-30)


def apart(run: Path, other: Path) -> float:
    """‖W − W'‖ / ‖W'‖ over all saved weights."""
    weights, others = (load_file(newest(path)) for path in (run, other))
    square = sum(
        float((weights[name].double() - others[name].double()).square().sum()) for name in others
    )
    return (
        square / sum(float(weight.double().square().sum()) for weight in others.values())
    ) ** 0.5


def newest(run: Path) -> Path:
    return max((run / "weights").glob("*/model.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
