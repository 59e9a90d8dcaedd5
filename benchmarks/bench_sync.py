"""What communication costs for each v: bytes and seconds a batch, with a real vLLM server. See README.md.

make bench-sync
python benchmarks/bench_sync.py --peer PYTHON_WITH_VLLM

One run for each v, one after the other: experiments/addition/base.toml, whose server the run starts. Means over whole
cycles from one weight sync to the next, without the first. The table goes to docs/scaling.md, too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measuring import Load, Report, fill, machine, table
from processes import HERE, train
from work import RESULTS, common_options, require_peer

from lagrpo.planning.measured import cost_of_syncs
from lagrpo.runs import load_metrics

PAGE = HERE.parent / "docs" / "scaling.md"
BASE = HERE.parent / "experiments" / "addition" / "base.toml"


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--peer", type=Path, default=Path(".venv-vllm/bin/python"), help="a Python that has vLLM")
    parser.add_argument("--v", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--cycles", type=int, default=3, help="whole cycles of each v, at least")
    parser.add_argument("--least", type=int, default=12, help="batches of a run, at least")
    asked = parser.parse_args()
    if asked.quick:
        asked.v, asked.cycles, asked.least = [1, 2], 1, 3
    return asked


def main() -> None:
    asked = options()
    require_peer(asked, "vllm-env")
    load, report = Load(), Report("sync", "What communication costs for each v", asked.results)
    rows = []
    for v in asked.v:
        with tempfile.TemporaryDirectory() as scratch:
            metrics = run(asked, v, Path(scratch))
        report.raw[f"v = {v}"] = metrics
        rows.append(row(v, cost_of_syncs(metrics, v)))
        print(rows[-1], flush=True)
    report.text("Of a batch, means over whole cycles; the first cycle is left out.")
    report.table("By v", rows)
    load.add_ended()
    report.write(machine(asked.threads, load))
    if asked.results == RESULTS:
        fill(PAGE, "communication by v", table(rows))


def run(asked: argparse.Namespace, v: int, scratch: Path) -> list[dict[str, Any]]:
    """The metrics of a run. The first cycle of Algorithm 1 has v - 1 batches."""
    batches = max(asked.least, v - 1 + asked.cycles * v)
    settings = {
        "run.directory": scratch, "run.name": "run", "run.display": "none", "run.save-weights": False,
        "run.keep-optimizer": False, "run.checkpoint-minutes": 0, "evaluation.before-and-after": False,
        "model.path": asked.model, "schedule.v": v, "schedule.batches": batches, "sampling.sampler": "vllm",
        "vllm.python": asked.peer.absolute(),
    }  # fmt: skip
    train(BASE, settings, ranks=1, threads=asked.threads)
    return load_metrics(scratch / "run")


def row(v: int, cost: dict[str, float]) -> dict[str, str]:
    return {
        "v": str(v),
        "weight syncs a batch": f"{cost['syncs']:.2f}",
        "MB a batch": f"{cost['bytes'] / 1e6:.1f}",
        "weight sync, s a batch": f"{cost['seconds']:.3f}",
        "servers paused, s a batch": f"{cost['paused']:.3f}",
        "waiting for completions, s a batch": f"{cost['waiting']:.2f}",
        "in all, s a batch": f"{cost['total']:.2f}",
        "weight sync, share": f"{cost['seconds'] / cost['total']:.1%}",
    }


if __name__ == "__main__":
    main()
