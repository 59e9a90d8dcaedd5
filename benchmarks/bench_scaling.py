"""Cost by number of completions, and by number of batches between weight syncs. See README.md.

make bench-scaling
python benchmarks/bench_scaling.py --help
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from measuring import Load, Report, gigabytes, machine, median, ratio, spread
from processes import Side
from sides import Measurements, interleaved, start_ours, values
from work import LONG, SHORT, Work, apply_options, common_options

# The smallest batch fills two such micro-batches, so that those of all sizes are full.
OPTIMIZER = {"learning_rate": 1e-5, "micro_batch_tokens": 512}
# Completions decoded at a time: those of the smallest batch.
ROWS = 64
# Batches between two weight syncs, the larger v.
CYCLE = 10


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--completions", type=int, nargs="+", default=[8, 16, 32, 64], help="of each prompt"
    )
    parser.add_argument("--updates", type=int, default=5, help="of each size")
    parser.add_argument("--cycles", type=int, default=3, help=f"of {CYCLE} batches, of each v")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    load = Load()
    report = Report("scaling", "How the cost grows", options.results)
    report.text(
        "Medians, with the smallest and largest value; ratios of the medians, with the smallest "
        "and largest of the measurements that were made one after the other."
    )
    doubling(options, report, load)
    for work in (SHORT, LONG):
        prefetch(options, work, report, load)
    report.write(machine(options.threads, load))


def doubling(options: argparse.Namespace, report: Report, load: Load) -> None:
    """Measures updates on the same prompts with more and more completions."""
    work = apply_options(SHORT, options)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        sides = []
        for G in options.completions:
            sized_work = replace(work, G=G)
            side = start_ours(
                f"G{G}",
                sized_work,
                Path(scratch),
                options.threads,
                optimizer=OPTIMIZER,
                rollout=fixed_rollout(sized_work),
            )
            sides.append(stack.enter_context(side))
        measurements = interleaved(sides, 1, options.updates)
        load.add(*sides)
    by_size = list(zip(options.completions, measurements, strict=True))
    report.raw["doubling"] = {str(G): updates for G, updates in by_size}
    report.table(
        f"Completions of a prompt double: {work.N} prompts × G × ≤ {work.max_tokens} tokens; "
        f"{OPTIMIZER['micro_batch_tokens']} tokens in a micro-batch, "
        f"{ROWS} completions decoded at a time",
        [size_row(G, updates) for G, updates in by_size],
    )
    steps = [
        {
            "from … to": f"{few} … {many}",
            "seconds": ratio(values(after, "seconds"), values(before, "seconds")),
            "completion tokens": ratio(values(after, "sampled"), values(before, "sampled")),
        }
        for (few, before), (many, after) in pairwise(by_size)
    ]
    report.table("For each doubling, times", steps)


def fixed_rollout(work: Work) -> dict[str, int]:
    """Settings of [rollout] with the same number of rows, and so bound of memory, for every G."""
    return {
        "num_generations": work.G,
        "max_completion_length": work.max_tokens,
        "max_num_seqs": max(ROWS, work.G),
    }


def size_row(G: int, measurements: Measurements) -> dict[str, int | str]:
    return {
        "G": G,
        "seconds per update": spread(values(measurements, "seconds")),
        "completion tokens": spread(values(measurements, "sampled"), digits=5),
        "micro-batches": spread(values(measurements, "micro_batches")),
        "most memory resident": gigabytes(max(values(measurements, "peak_bytes"))),
    }


def prefetch(options: argparse.Namespace, work: Work, report: Report, load: Load) -> None:
    """Measures how long a batch waits for its completions, at v = 1 and at v = CYCLE.

    At v = CYCLE the batches between two weight syncs are sampled together.
    """
    work = replace(apply_options(work, options), N=2, G=8)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        sides: dict[int, Side] = {}
        for v in (1, CYCLE):
            side = start_ours(
                f"v{v}",
                work,
                Path(scratch),
                options.threads,
                schedule=schedule(work, v),
                rollout=rollout_of_cycle(work),
            )
            sides[v] = stack.enter_context(side)
        # Weights are synced before batches 10, 20, …: after nine batches whole cycles begin.
        for side in sides.values():
            make_batches(side, CYCLE - 1)
        cycles: dict[int, list[Measurements]] = {v: [] for v in sides}
        for turn in range(options.cycles):
            for v in sides if turn % 2 == 0 else reversed(sides):
                cycles[v].append(make_batches(sides[v], CYCLE))
                seconds = waiting_per_batch(cycles[v][-1])
                print(f"  {sides[v].name}, cycle {turn + 1}: {seconds:.3f} s a batch", flush=True)
        load.add(*sides.values())
    report.raw[f"ahead, {work.name}"] = {f"v = {v}": cycles[v] for v in cycles}
    waiting = {v: [waiting_per_batch(batches) for batches in cycles[v]] for v in cycles}
    rows = []
    for v in cycles:
        tokens = [sum(values(batches, "sampled")) / len(batches) for batches in cycles[v]]
        rows.append(
            {
                "v": v,
                "seconds of sampling per batch": spread(waiting[v]),
                "completion tokens per batch": spread(tokens, digits=4),
                "milliseconds per token": f"{1000 * median(waiting[v]) / median(tokens):.3g}",
            }
        )
    report.table(f"Sampling ahead, {work.title}", rows)
    report.text(f"v = {CYCLE} / v = 1: {ratio(waiting[CYCLE], waiting[1])}.")


def rollout_of_cycle(work: Work) -> dict[str, int]:
    """Settings of [rollout] that decode all completions of a cycle at a time."""
    return {
        "num_generations": work.G,
        "max_completion_length": work.max_tokens,
        "max_num_seqs": CYCLE * work.completions,
    }


def schedule(work: Work, v: int) -> dict[str, int]:
    return {"prompts_per_batch": work.N, "batches": 100_000, "sync_every": v}


def make_batches(side: Side, count: int) -> Measurements:
    return [side.update() for _ in range(count)]


def waiting_per_batch(batches: Measurements) -> float:
    """Mean seconds that a batch waits for its completions."""
    return sum(batch["phases"].get("sampling", 0.0) for batch in batches) / len(batches)


if __name__ == "__main__":
    main()
