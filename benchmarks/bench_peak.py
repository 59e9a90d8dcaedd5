"""How much of the machine learning uses, and how much memory an update takes, beside TRL. See README.md.

make bench-peak
python benchmarks/bench_peak.py --help
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench_trl import DEFAULT, best_settings, described
from measuring import Load, Report, gigabytes, machine, median, spread
from processes import Side
from sides import require_same_work, start_ours, start_trl, values
from work import (
    DTYPE,
    WORKS,
    Work,
    asked_for,
    common_options,
    read_prompts,
    require_peer,
    write_prompts,
)

SIZES = (1024, 2048, 4096)  # of the square matrices


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--peer", type=Path, default=Path(".venv-trl/bin/python"), help="a Python that has TRL"
    )
    parser.add_argument("--work", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--updates", type=int, default=5, help="for the share of the peak")
    parser.add_argument(
        "--micro-batches", type=int, nargs="*", default=[8, 32], help="completions, for the memory"
    )
    return parser.parse_args()


def main() -> None:
    asked = options()
    require_peer(asked, "check-trl")
    works = [asked_for(WORKS[name], asked) for name in asked.work]
    load, versions = Load(), {}
    report = Report("peak", "Share of the peak, and memory", asked.results)
    for work in works:
        share(asked, work, report, load)
    for work in works:
        versions = memory(asked, work, report, load) or versions
    report.write(machine(asked.threads, load, versions))


def share(asked: argparse.Namespace, work: Work, report: Report, load: Load) -> None:
    """Learning: operations that it cannot do without (ours.learning_flops) per second, as a share of what a large
    matrix product of the same dtype reaches in the same process between the updates."""
    rates: dict[int, list[float]] = {size: [] for size in SIZES[: 1 if asked.quick else None]}
    updates = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_ours("ours", work, Path(scratch), asked.threads) as side,
    ):
        side.update()
        for turn in range(asked.updates):
            for size in rates:
                rates[size] += products(side, size)
            updates.append(side.update())
            print(
                f"  {work.name}, update {turn + 1}: learning {updates[-1]['phases']['learning']:.2f} s",
                flush=True,
            )
        load.add(side)
    peak = max(median(rate) for rate in rates.values())
    reached = [update["flops"] / update["phases"]["learning"] for update in updates]
    report.raw[f"share, {work.name}"] = {"rates": rates, "updates": updates}
    report.table(
        f"Learning, {work.title}",
        [
            {
                "": f"{DTYPE} product of square matrices",
                " ": ", ".join(
                    f"{size}: {spread([r / 1e9 for r in rate])} GFLOP/s"
                    for size, rate in rates.items()
                ),
            },
            {"": "peak: the largest of these medians", " ": f"{peak / 1e9:.0f} GFLOP/s"},
            {
                "": "learning, operations",
                " ": f"{median(values(updates, 'flops')) / 1e9:.0f} GFLOP",
            },
            {
                "": "learning, seconds",
                " ": spread([update["phases"]["learning"] for update in updates]),
            },
            {
                "": "learning, operations per second",
                " ": spread([r / 1e9 for r in reached], " GFLOP/s"),
            },
            {
                "": "share of the peak",
                " ": f"**{median(reached) / peak:.0%}** ({min(reached) / peak:.0%} … "
                f"{max(reached) / peak:.0%})",
            },
        ],
    )


def products(side: Side, size: int) -> list[float]:
    return side.ask("question", name="matrix_product", size=size, repetitions=3, dtype=DTYPE)[
        "rates"
    ]


def memory(asked: argparse.Namespace, work: Work, report: Report, load: Load) -> dict[str, str]:
    """The most memory resident in two updates, ours and TRL's, in micro-batches of as many completions."""
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    settings = best_settings(asked.results, work)
    for count in [4] if asked.quick else asked.micro_batches:
        for checkpointing in (False, True):
            trl = {
                **DEFAULT,
                **settings,
                "per_device": count,
                "gradient_checkpointing": checkpointing,
            }
            with tempfile.TemporaryDirectory() as scratch:
                place = (work, Path(scratch), asked.threads)
                tokens = budget(work, count, Path(scratch))
                own = {
                    "learning_rate": 1e-5,
                    "micro_batch_tokens": tokens,
                    "gradient_checkpointing": checkpointing,
                }
                with start_ours("ours", *place, optimizer=own) as side:
                    ours = [side.update() for _ in range(2)]
                    load.add(side)
                with start_trl("trl", *place, python=asked.peer, config=trl) as side:
                    theirs = [side.update() for _ in range(2)]
                    load.add(side)
                    versions = side.facts["versions"]
            require_same_work(ours, theirs)
            peaks = [max(values(measurements, "peak_bytes")) for measurements in (ours, theirs)]
            report.raw[f"memory, {work.name}, {described(trl)}"] = {
                "ours": ours,
                "trl": theirs,
                "tokens": tokens,
            }
            rows.append(
                {
                    "completions in a micro-batch": count,
                    "activation checkpointing": "both" if checkpointing else "neither",
                    "ours": f"{gigabytes(peaks[0])} ({tokens} tokens)",
                    "TRL": gigabytes(peaks[1]),
                    "ours / TRL": f"**{peaks[0] / peaks[1]:.2f}**",
                }
            )
    report.table(f"Most memory resident, {work.title}", rows)
    report.text(f"TRL, but for what the table varies: {described({**DEFAULT, **settings})}.")
    return versions


def budget(work: Work, completions: int, scratch: Path) -> int:
    """Tokens of a micro-batch that holds so many completions of full length with the longest prompts: where they are
    shorter it holds more of them, never fewer."""
    rows = read_prompts(write_prompts(work, scratch / "longest.jsonl"))
    groups = -(-completions // work.G)
    return groups * max(row["tokens"] for row in rows) + completions * (work.max_tokens - 1)


if __name__ == "__main__":
    main()
