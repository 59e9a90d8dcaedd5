"""Peak memory of each rank. See README.md.

make bench-memory
python benchmarks/bench_memory.py --ranks 1 2 3

Runs of two batches of the demo (addition/full.toml), without and with a KL term, by each number of
ranks and both ways to shard, one after the other: memory does not depend on other programs. The
table also goes to reports/scaling.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measuring import Load, Report, fill, gigabytes, machine, table
from processes import HERE, train_with_peaks
from work import DEMO, RESULTS, common_options, demo_settings

PAGE = HERE.parent / "reports" / "scaling.md"


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.04], help="of the KL term")
    options = parser.parse_args()
    if options.quick:
        options.ranks = [1, 2]
        options.beta = [0.0]
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    report = Report("memory", "Memory of a rank", options.results)
    rows = []
    for beta in options.beta:
        for ranks in options.ranks:
            # One rank shards nothing, with either strategy.
            for strategy in ("zero1", "fsdp2") if ranks > 1 else ("zero1",):
                with tempfile.TemporaryDirectory() as scratch:
                    peaks = run(options, ranks, strategy, beta, Path(scratch))
                report.raw[f"{ranks} ranks, {strategy}, beta {beta}"] = {"peaks": peaks}
                rows.append(row(ranks, strategy, beta, peaks))
                print(rows[-1], flush=True)
    report.text("The largest VmHWM of a rank's process, loading included.")
    report.table("Of a rank", rows)
    load.add_ended()
    report.write(machine(1, load))
    if options.results == RESULTS:
        fill(PAGE, "memory of a rank", table(rows))


def run(
    options: argparse.Namespace, ranks: int, strategy: str, beta: float, scratch: Path
) -> list[int]:
    """Trains two batches. Returns the peak of each rank, in bytes."""
    settings = {
        **demo_settings(options.model, batches=2, scratch=scratch),
        "schedule.sync_every": 2,
        "loss.beta": beta,
        "distributed.strategy": strategy,
    }
    return train_with_peaks(DEMO, settings, ranks, threads=1, scratch=scratch)


def row(ranks: int, strategy: str, beta: float, peaks: list[int]) -> dict[str, str]:
    return {
        "ranks": str(ranks),
        "sharded": strategy if ranks > 1 else "nothing",
        "KL term": "yes" if beta else "no",
        "measured": gigabytes(max(peaks)),
    }


if __name__ == "__main__":
    main()
