"""How the cost of ours grows: with the completions of a prompt, and with the batches drawn by one α. See README.md.

make bench-scaling
python benchmarks/bench_scaling.py --help
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import Load, Report, gigabytes, machine, median, ratio, spread
from processes import Side
from sides import Figures, interleaved, start_ours, values
from work import LONG, SHORT, Work, asked_for, common_options

BUDGET = {"lr": 1e-5, "tokens": 512}  # the smallest batch fills two such micro-batches, so that all sizes hold the same
ROWS = 64  # completions decoded at a time, those of the smallest batch
CYCLE = 10  # batches between two deliveries, the larger v


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--completions", type=int, nargs="+", default=[8, 16, 32, 64], help="of each prompt")
    parser.add_argument("--updates", type=int, default=5, help="of each size")
    parser.add_argument("--cycles", type=int, default=3, help=f"of {CYCLE} batches, of each v")
    return parser.parse_args()


def main() -> None:
    asked = options()
    load = Load()
    report = Report("scaling", "How the cost grows", asked.results)
    report.text(
        "Medians, with the least and the greatest value; ratios of the medians, with the least and the greatest of the "
        "measurements that were made one after the other."
    )
    doubling(asked, report, load)
    for work in (SHORT, LONG):
        ahead(asked, work, report, load)
    report.write(machine(asked.threads, load))


def doubling(asked: argparse.Namespace, report: Report, load: Load) -> None:
    """Whole updates of the same prompts with more and more completions, in micro-batches of a fixed size."""
    work = asked_for(SHORT, asked)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        sides = [
            stack.enter_context(
                start_ours(f"G{G}", sized, Path(scratch), asked.threads, optimizer=BUDGET, sampling=sampled(sized))
            )
            for G in asked.completions
            for sized in [replace(work, G=G)]
        ]
        taken = interleaved(sides, 1, asked.updates)
        load.add(*sides)
    report.raw["doubling"] = dict(zip(map(str, asked.completions), taken, strict=True))
    report.table(
        f"Completions of a prompt double: {work.N} prompts × G × ≤ {work.max_tokens} tokens; {BUDGET['tokens']} tokens "
        f"in a micro-batch, {ROWS} completions decoded at a time",
        [size_row(G, figures) for G, figures in zip(asked.completions, taken, strict=True)],
    )
    steps = [
        {"from … to": f"{few} … {many}", "seconds": ratio(values(after, "seconds"), values(before, "seconds")),
         "completion tokens": ratio(values(after, "sampled"), values(before, "sampled"))}
        for (few, before), (many, after) in pairwise(zip(asked.completions, taken, strict=True))
    ]  # fmt: skip
    report.table("For each doubling, times", steps)


def sampled(work: Work) -> dict[str, int]:
    """Settings of the sampler with a fixed number of rows, so that memory has the same bound at every size."""
    return {"G": work.G, "max_tokens": work.max_tokens, "rows": max(ROWS, work.G)}


def size_row(G: int, figures: Figures) -> dict[str, Any]:
    return {
        "G": G,
        "seconds per update": spread(values(figures, "seconds")),
        "completion tokens": spread(values(figures, "sampled"), digits=5),
        "micro-batches": spread(values(figures, "micro_batches")),
        "most memory resident": gigabytes(max(values(figures, "peak_bytes"))),
    }


def ahead(asked: argparse.Namespace, work: Work, report: Report, load: Load) -> None:
    """The time that a batch waits for its completions, at v = 1 and at v = 10, where they are asked for together."""
    work = replace(asked_for(work, asked), N=2, G=8)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        one, ten = (
            stack.enter_context(
                start_ours(f"v{v}", work, Path(scratch), asked.threads, schedule=schedule(work, v), sampling=wide(work))
            )
            for v in (1, CYCLE)
        )
        for side in (one, ten):  # batches 1 to 9; π is delivered before batch 10, 20, …
            cycle(side, CYCLE - 1)
        taken: tuple[list[Figures], list[Figures]] = ([], [])
        for turn in range(asked.cycles):
            for n in (0, 1) if turn % 2 == 0 else (1, 0):
                taken[n].append(cycle((one, ten)[n], CYCLE))
                print(f"  {(one, ten)[n].name}, cycle {turn + 1}: {sampling(taken[n][-1]):.3f} s a batch", flush=True)
        load.add(one, ten)
    report.raw[f"ahead, {work.name}"] = {"v = 1": taken[0], f"v = {CYCLE}": taken[1]}
    seconds = [[sampling(batches) for batches in side] for side in taken]
    tokens = [[sum(values(batches, "sampled")) / len(batches) for batches in side] for side in taken]
    rows = [
        {"v": v, "seconds of sampling per batch": spread(s), "completion tokens per batch": spread(t, digits=4),
         "milliseconds per token": f"{1000 * median(s) / median(t):.3g}"}
        for v, s, t in zip((1, CYCLE), seconds, tokens, strict=True)
    ]  # fmt: skip
    report.table(f"Sampling ahead, {work.title}", rows)
    report.text(f"v = {CYCLE} / v = 1: {ratio(seconds[1], seconds[0])}.")


def wide(work: Work) -> dict[str, int]:
    """Settings of a sampler that decodes all completions of a cycle at a time."""
    return {"G": work.G, "max_tokens": work.max_tokens, "rows": CYCLE * work.completions}


def schedule(work: Work, v: int) -> dict[str, Any]:
    return {"prompts": work.N, "batches": 100_000, "v": v}


def cycle(side: Side, batches: int) -> Figures:
    return [side.update() for _ in range(batches)]


def sampling(batches: Sequence[dict[str, Any]]) -> float:
    """Seconds of waiting for the sampler, a batch."""
    return sum(batch["phases"].get("sampling", 0.0) for batch in batches) / len(batches)


if __name__ == "__main__":
    main()
