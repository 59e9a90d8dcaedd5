"""Training as a share of the machine's peak, and memory compared with TRL. See README.md.

make bench-peak
python benchmarks/bench_peak.py --help
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench_trl import DEFAULT, best_settings, describe
from measuring import Load, Report, gigabytes, machine, median, spread
from processes import Side
from sides import Measurements, require_same_work, start_ours, start_trl, values
from work import (
    DTYPE,
    WORKS,
    Work,
    apply_options,
    common_options,
    read_prompts,
    require_peer,
    write_prompts,
)

SIZES = (1024, 2048, 4096)  # of the square matrices


def parse_options() -> argparse.Namespace:
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
    options = parse_options()
    require_peer(options, "check-trl")
    works = [apply_options(WORKS[name], options) for name in options.work]
    load = Load()
    versions = {}
    report = Report("peak", "Share of the peak, and memory", options.results)
    for work in works:
        share(options, work, report, load)
    for work in works:
        versions = memory(options, work, report, load) or versions
    report.write(machine(options.threads, load, versions))


def share(options: argparse.Namespace, work: Work, report: Report, load: Load) -> None:
    """Compares the rate of learning with that of large matrix products of the same dtype.

    Only the operations that learning needs count (ours.learning_flops). The products run in the
    same process between the updates, so that both meet the same machine.
    """
    sizes = SIZES[:1] if options.quick else SIZES
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    updates: Measurements = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_ours("ours", work, Path(scratch), options.threads) as side,
    ):
        side.update()
        for turn in range(options.updates):
            # The peak is the best of several sizes: neither small nor huge products are the fastest
            # everywhere.
            for size in rates:
                rates[size] += products(side, size)
            updates.append(side.update())
            seconds = updates[-1]["phases"]["learning"]
            print(f"  {work.name}, update {turn + 1}: learning {seconds:.2f} s", flush=True)
        load.add(side)
    peak = max(median(size_rates) for size_rates in rates.values())
    operations = [update["flops"] for update in updates]
    learning_seconds = [update["phases"]["learning"] for update in updates]
    learning_rates = [
        flops / seconds for flops, seconds in zip(operations, learning_seconds, strict=True)
    ]
    product_rates = ", ".join(
        f"{size}: {spread(in_giga(size_rates))} GFLOP/s" for size, size_rates in rates.items()
    )
    report.raw[f"share, {work.name}"] = {"rates": rates, "updates": updates}
    report.table(
        f"Learning, {work.title}",
        [
            table_row(f"{DTYPE} product of square matrices", product_rates),
            table_row("peak: the largest of these medians", f"{peak / 1e9:.0f} GFLOP/s"),
            table_row("learning, operations", f"{median(operations) / 1e9:.0f} GFLOP"),
            table_row("learning, seconds", spread(learning_seconds)),
            table_row(
                "learning, operations per second", spread(in_giga(learning_rates), " GFLOP/s")
            ),
            table_row(
                "share of the peak",
                f"**{median(learning_rates) / peak:.0%}** "
                f"({min(learning_rates) / peak:.0%} … {max(learning_rates) / peak:.0%})",
            ),
        ],
    )


def table_row(name: str, value: str) -> dict[str, str]:
    return {"": name, " ": value}


def in_giga(numbers: list[float]) -> list[float]:
    return [number / 1e9 for number in numbers]


def products(side: Side, size: int) -> list[float]:
    """Operations per second of three matrix products in the side's process."""
    reply = side.ask("question", name="matrix_product", size=size, repetitions=3, dtype=DTYPE)
    return reply["rates"]


def memory(options: argparse.Namespace, work: Work, report: Report, load: Load) -> dict[str, str]:
    """Measures the most memory resident in two updates of each side, alone on the machine.

    Both sides have micro-batches of the same number of completions. Returns TRL's versions.
    """
    rows: list[dict[str, int | str]] = []
    versions: dict[str, str] = {}
    settings = {**DEFAULT, **best_settings(options.results, work)}
    for completions in [4] if options.quick else options.micro_batches:
        for checkpointing in (False, True):
            varied = {"per_device": completions, "gradient_checkpointing": checkpointing}
            config = {**settings, **varied}
            with tempfile.TemporaryDirectory() as name:
                scratch = Path(name)
                tokens = micro_batch_tokens(work, completions, scratch)
                optimizer = {
                    "learning_rate": 1e-5,
                    "micro_batch_tokens": tokens,
                    "gradient_checkpointing": checkpointing,
                }
                threads = options.threads
                # New processes for every row: the peak of a process never falls.
                with start_ours("ours", work, scratch, threads, optimizer=optimizer) as side:
                    our_updates = [side.update() for _ in range(2)]
                    load.add(side)
                with start_trl("trl", work, scratch, threads, options.peer, config) as side:
                    trl_updates = [side.update() for _ in range(2)]
                    load.add(side)
                    versions = side.facts["versions"]
            require_same_work(our_updates, trl_updates)
            our_peak = max(values(our_updates, "peak_bytes"))
            trl_peak = max(values(trl_updates, "peak_bytes"))
            report.raw[f"memory, {work.name}, {describe(config)}"] = {
                "ours": our_updates,
                "trl": trl_updates,
                "tokens": tokens,
            }
            rows.append(
                {
                    "completions in a micro-batch": completions,
                    "activation checkpointing": "both" if checkpointing else "neither",
                    "ours": f"{gigabytes(our_peak)} ({tokens} tokens)",
                    "TRL": gigabytes(trl_peak),
                    "ours / TRL": f"**{our_peak / trl_peak:.2f}**",
                }
            )
    report.table(f"Most memory resident, {work.title}", rows)
    report.text(f"TRL, but for what the table varies: {describe(settings)}.")
    return versions


def micro_batch_tokens(work: Work, completions: int, scratch: Path) -> int:
    """Tokens of a micro-batch that holds `completions` of full length with the longest prompts.

    If completions or prompts are shorter, it holds more of them, never fewer.
    """
    rows = read_prompts(write_prompts(work, scratch / "longest.jsonl"))
    groups = -(-completions // work.G)
    longest_prompt = max(row["tokens"] for row in rows)
    # Each prompt is computed once per group. A completion has a row less than tokens: its last
    # token predicts nothing.
    return groups * longest_prompt + completions * (work.max_tokens - 1)


if __name__ == "__main__":
    main()
