"""The real model at every level of instructions that this machine can be lowered to: two updates and a weight sync
each.

    make portability                                     # everything that makes sense here
    python benchmarks/portability.py --quick             # what takes under five minutes

What passes on one processor may fail on another: orders of sums differ, and so does what is fast. Each run is `lagrpo
train` with the settings of demo, v = 2, in a process of its own, with PyTorch's oneDNN and our kernels
lowered to the same level. The table says which arithmetic a run took, its grade (README, "One arithmetic"), by how much
trainer and sampler differed, and how long the second batch took. A run that fails makes the exit status 1. What this
machine has no instructions for is listed as not tried.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Load, Report, machine
from processes import HERE

from lagrpo.cpu.library import ISA, LEVELS, V3, cpu_flags

FULL = HERE.parent / "experiments" / "addition" / "full.toml"
DEADLINE = 300.0  # seconds for a run
WORK = {
    "checkpoint.save-minutes": "0",
    "schedule.sync_every": "2",
    "schedule.batches": "2",
    "schedule.prompts_per_batch": "4",
    "rollout.num_generations": "4",
    "loss.recipe": "asymre",  # has a gradient whatever the rewards are
    "eval.at-start": "False",
    "optimizer.lr_scheduler_type": "constant",  # a falling one ends at 0
}


@dataclass(frozen=True, slots=True)
class Level:
    """What oneDNN and our kernels may use, and what the processor must list for that."""

    name: str
    onednn: str
    ours: str
    needs: frozenset[str]

    @property
    def environment(self) -> dict[str, str]:
        return {"ONEDNN_MAX_CPU_ISA": self.onednn, ISA: self.ours}


ALL = (
    Level("AMX", "ALL", "native", frozenset({"amx_bf16"})),
    Level("AVX512-BF16", "AVX512_CORE_BF16", "avx512_bf16", LEVELS["avx512_bf16"].needs),
    Level("AVX512", "AVX512_CORE", "avx512", LEVELS["avx512"].needs),
    Level("AVX2", "AVX2", "avx2", V3),
)


@dataclass(frozen=True, slots=True)
class Case:
    level: Level
    kernels: str
    dtype: str


def cases(levels: list[Level], quick: bool) -> list[Case]:
    """auto everywhere; the other dtype where it says something new. On AVX2 PyTorch emulates products of bfloat16 and
    takes minutes."""
    found = []
    for level in levels:
        for kernels in ("c", "torch"):
            found.append(Case(level, kernels, "auto"))
            other = "float32" if LEVELS[level.ours].bf16 else "bfloat16"
            slow = level.name == "AVX2"
            if not slow and not (quick and kernels == "torch"):
                found.append(Case(level, kernels, other))
    return found


def run(case: Case, scratch: Path, threads: int | None) -> dict[str, Any]:
    """One row of the table, and whether the run ended well."""
    words = [word for name, value in WORK.items() for word in (f"--{name}", value)]
    words += ["--model.dtype", case.dtype, "--run.output_dir", str(scratch)]
    chosen = {"LAGRPO_KERNELS": case.kernels} | (
        {"OMP_NUM_THREADS": str(threads)} if threads else {}
    )
    words += ["--run.name", name := f"{case.level.name}-{case.kernels}-{case.dtype}"]
    command = [sys.executable, "-c", "from lagrpo.cli import main; main()", "train"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, str(FULL), *words],
            env={**os.environ, **case.level.environment, **chosen},
            capture_output=True,
            encoding="utf-8",
            timeout=DEADLINE,
        )
        error = "" if done.returncode == 0 else said_last(done.stderr)
    except subprocess.TimeoutExpired as late:
        load = ", ".join(f"{mean:.1f}" for mean in os.getloadavg())
        shown = [
            (text or b"").decode(errors="replace").strip()[-400:]
            for text in (late.stdout, late.stderr)
        ]
        error = f"not done after {DEADLINE:.0f} s (load {load}); it had said: {' | '.join(shown)}".replace(
            "\n", " / "
        )
    row = {"instructions": case.level.name, "kernels": case.kernels, "dtype": case.dtype}
    made = scratch / name
    if error or not (made / "metrics.jsonl").is_file():
        return {**row, "result": f"FAILED: {error or 'nothing was recorded'}", "ok": False}
    environment = json.loads((made / "environment.json").read_text(encoding="utf-8"))
    metrics = [
        json.loads(line)
        for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    agreement = environment["agreement"]
    return {
        **row,
        "dtype": environment["dtype"] if case.dtype != "auto" else f"auto: {environment['dtype']}",
        "grade": agreement["grade"],
        "difference at the start, nats (mean, largest)": f"{agreement['mean']:.1e}, {agreement['largest']:.1e}",
        "after the weight sync (largest)": f"{metrics[-1]['weight_sync/logp_difference']:.1e}",
        "seconds of the second batch": f"{metrics[-1]['time/step']:.1f}",
        "seconds in all": f"{time.monotonic() - started:.0f}",
        "ok": metrics[-1]["policy_version"] == 1 and metrics[-1]["weight_sync/performed"] == 1,
    }


def said_last(errors: str) -> str:
    """What a program that failed says of it: the last line of lagrpo's own, else the last."""
    lines = errors.strip().splitlines() or ["no message"]
    return next((line for line in reversed(lines) if line.startswith("lagrpo: ")), lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out what another run says nearly as well"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: lagrpo's own choice)")
    parser.add_argument(
        "--results",
        type=Path,
        help="where the report goes (default: benchmarks/results, or its quick/)",
    )
    asked = parser.parse_args()
    here = [level for level in ALL if level.needs <= cpu_flags()]
    rows = []
    with tempfile.TemporaryDirectory(prefix="portability-") as scratch:
        for case in cases(here, asked.quick):
            row = run(case, Path(scratch), asked.threads)
            rows.append(row)
            print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    directory = asked.results or HERE / "results" / ("quick" if asked.quick else "")
    report = Report("portability", "One run at every level of instructions", directory)
    report.raw["rows"] = rows
    heads = dict.fromkeys(key for row in rows for key in row if key != "ok")
    report.table(
        "SmolLM2-135M, two updates, v = 2",
        [{key: row.get(key, "") for key in heads} for row in rows],
    )
    missing = [level.name for level in ALL if level not in here]
    report.text(
        f"Not tried, as this processor has no such instructions: {', '.join(missing) or 'nothing'}."
    )
    where = machine(asked.threads or os.cpu_count() or 1, Load())
    report.write(
        {name: value for name, value in where.items() if not name.startswith("CPU time")}
    )  # no claim of speed
    if failed := [row for row in rows if not row["ok"]]:
        sys.exit(f"{len(failed)} of {len(rows)} runs failed")


if __name__ == "__main__":
    main()
