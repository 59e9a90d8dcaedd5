"""Memory of a rank: the most that it ever had. See README.md.

make bench-memory
python benchmarks/bench_memory.py --ranks 1 2 3

Runs of two batches of the demo (addition/full.toml), without and with a KL term, by each number of ranks and both
ways to shard, one after the other. Memory does not depend on what else the machine does. The table goes to
reports/scaling.md, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from measuring import Load, Report, fill, gigabytes, machine, table
from processes import HERE, train
from work import RESULTS, common_options

DEMO = HERE.parent / "experiments" / "addition" / "full.toml"
PAGE = HERE.parent / "reports" / "scaling.md"


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.04], help="of the KL term")
    asked = parser.parse_args()
    if asked.quick:
        asked.ranks, asked.beta = [1, 2], [0.0]
    return asked


def main() -> None:
    asked = options()
    load, report = Load(), Report("memory", "Memory of a rank", asked.results)
    cases = [
        (ranks, shard, beta)
        for beta in asked.beta
        for ranks in asked.ranks
        for shard in (("zero1", "fsdp2") if ranks > 1 else ("zero1",))
    ]
    rows = []
    for ranks, shard, beta in cases:
        with tempfile.TemporaryDirectory() as scratch:
            peaks = run(asked, ranks, shard, beta, Path(scratch))
        report.raw[f"{ranks} ranks, {shard}, beta {beta}"] = {"peaks": peaks}
        rows.append(row(ranks, shard, beta, peaks))
        print(rows[-1], flush=True)
    report.text("The largest VmHWM of a rank's process, loading included.")
    report.table("Of a rank", rows)
    load.add_ended()
    report.write(machine(1, load))
    if asked.results == RESULTS:
        fill(PAGE, "memory of a rank", table(rows))


def run(asked: argparse.Namespace, ranks: int, shard: str, beta: float, scratch: Path) -> list[int]:
    """The peak of each rank, in bytes."""
    settings = {
        "run.output_dir": scratch,
        "run.name": "run",
        "checkpoint.save-total-limit": 0,
        "checkpoint.save-minutes": 0,
        "eval.at-start": False,
        "model.path": asked.model,
        "schedule.batches": 2,
        "schedule.sync_every": 2,
        "loss.beta": beta,
        "distributed.strategy": shard,
    }
    (scratch / "peaks").mkdir()
    os.environ["PEAK_OF_RANKS"] = str(scratch / "peaks")
    train(DEMO, settings, ranks, threads=1, program=[str(HERE / "peak_of_rank.py")])
    return [
        int((scratch / "peaks" / str(rank)).read_text(encoding="utf-8")) for rank in range(ranks)
    ]


def row(ranks: int, shard: str, beta: float, peaks: list[int]) -> dict[str, str]:
    return {
        "ranks": str(ranks),
        "sharded": shard if ranks > 1 else "nothing",
        "KL term": "yes" if beta else "no",
        "measured": gigabytes(max(peaks)),
    }


if __name__ == "__main__":
    main()
