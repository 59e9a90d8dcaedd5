"""Two updates and a weight sync of the real model with every instruction set of this processor.

    make portability                                     # everything that makes sense here
    python benchmarks/portability.py --quick             # what takes under five minutes

What passes on one processor may fail on another, because the order of sums differs. Each run is
`lagrpo train` with the settings of the demo, v = 2, in a process of its own, with PyTorch's oneDNN
and our kernels restricted to the same instructions. The table has the kernels and the dtype of a
run, its grade of agreement between trainer and sampler, their largest difference, and the seconds
of the second batch. A run that fails makes the exit status 1. Instruction sets that this processor
does not have are listed as not tried.
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

from measuring import Load, Report, machine
from processes import HERE
from work import DEMO

from lagrpo.cpu.library import ISA, LEVELS, V3, cpu_flags
from lagrpo.types import JsonObject

# Seconds for a run.
DEADLINE = 300.0
WORK = {
    "checkpoint.save-minutes": "0",
    "schedule.sync_every": "2",
    "schedule.batches": "2",
    "schedule.prompts_per_batch": "4",
    "rollout.num_generations": "4",
    # Has a gradient whatever the rewards are.
    "loss.recipe": "asymre",
    "eval.at-start": "False",
    # A falling rate ends at 0: the second update would change nothing.
    "optimizer.lr_scheduler_type": "constant",
}


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set: its names for oneDNN and our kernels, and the CPU flags that it needs."""

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
    """A run: instruction set, kernels ("c" or "torch"), and model.dtype."""

    level: Level
    kernels: str
    dtype: str


def cases(levels: list[Level], *, quick: bool) -> list[Case]:
    """dtype "auto" at every level, and the other dtype if it is new and fast."""
    runs = []
    for level in levels:
        for kernels in ("c", "torch"):
            runs.append(Case(level, kernels, "auto"))
            other_dtype = "float32" if LEVELS[level.ours].bf16 else "bfloat16"
            # On AVX2 PyTorch emulates products of bfloat16 and takes minutes.
            is_slow = level.name == "AVX2"
            is_left_out = quick and kernels == "torch"
            if not is_slow and not is_left_out:
                runs.append(Case(level, kernels, other_dtype))
    return runs


def run(case: Case, scratch: Path, threads: int | None) -> JsonObject:
    """Trains once. Returns a row of the table, and `ok`: True if the run ended well."""
    name = f"{case.level.name}-{case.kernels}-{case.dtype}"
    settings = {
        **WORK,
        "model.dtype": case.dtype,
        "run.output_dir": str(scratch),
        "run.name": name,
    }
    variables = {**os.environ, **case.level.environment, "LAGRPO_KERNELS": case.kernels}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-c", "from lagrpo.cli import main; main()", "train", str(DEMO)]
    for setting, value in settings.items():
        command += [f"--{setting}", value]
    started = time.monotonic()
    error = run_command(command, variables)
    seconds = time.monotonic() - started
    row = {"instructions": case.level.name, "kernels": case.kernels, "dtype": case.dtype}
    run_directory = scratch / name
    if not error and not (run_directory / "metrics.jsonl").is_file():
        error = "nothing was recorded"
    if error:
        return {**row, "result": f"FAILED: {error}", "ok": False}
    environment = json.loads((run_directory / "environment.json").read_text(encoding="utf-8"))
    lines = (run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = json.loads(lines[-1])
    agreement = environment["agreement"]
    dtype = environment["dtype"]
    return {
        **row,
        "dtype": f"auto: {dtype}" if case.dtype == "auto" else dtype,
        "grade": agreement["grade"],
        "difference at the start, nats (mean, largest)": (
            f"{agreement['mean']:.1e}, {agreement['largest']:.1e}"
        ),
        "after the weight sync (largest)": f"{metrics['weight_sync/logp_difference']:.1e}",
        "seconds of the second batch": f"{metrics['time/step']:.1f}",
        "seconds in all": f"{seconds:.0f}",
        "ok": metrics["policy_version"] == 1 and metrics["weight_sync/performed"] == 1,
    }


def run_command(command: list[str], variables: dict[str, str]) -> str:
    """Runs a command for at most DEADLINE seconds. Returns its error in one line, or ""."""
    try:
        finished = subprocess.run(
            command, env=variables, capture_output=True, encoding="utf-8", timeout=DEADLINE
        )
    except subprocess.TimeoutExpired as timeout:
        load = ", ".join(f"{mean:.1f}" for mean in os.getloadavg())
        # After a timeout the output is bytes, even with an encoding, or None.
        ends_of_output = [
            (output or b"").decode(errors="replace").strip()[-400:]
            for output in (timeout.stdout, timeout.stderr)
        ]
        error = (
            f"not done after {DEADLINE:.0f} s (load {load}); "
            f"it had said: {' | '.join(ends_of_output)}"
        )
        return error.replace("\n", " / ")
    return "" if finished.returncode == 0 else error_line(finished.stderr)


def error_line(errors: str) -> str:
    """The last line of lagrpo's own in a program's standard error, else the last line."""
    lines = errors.strip().splitlines() or ["no message"]
    for line in reversed(lines):
        if line.startswith("lagrpo: "):
            return line
    return lines[-1]


def main() -> None:
    options = parse_options()
    levels = [level for level in ALL if level.needs <= cpu_flags()]
    rows = []
    with tempfile.TemporaryDirectory(prefix="portability-") as scratch:
        for case in cases(levels, quick=options.quick):
            row = run(case, Path(scratch), options.threads)
            rows.append(row)
            print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    directory = options.results or HERE / "results" / ("quick" if options.quick else "")
    report = Report("portability", "One run at every level of instructions", directory)
    report.raw["rows"] = rows
    # A run that failed has other columns. The dict keeps their order.
    columns = dict.fromkeys(key for row in rows for key in row if key != "ok")
    report.table(
        "SmolLM2-135M, two updates, v = 2",
        [{column: row.get(column, "") for column in columns} for row in rows],
    )
    missing = ", ".join(level.name for level in ALL if level not in levels)
    report.text(f"Not tried, as this processor has no such instructions: {missing or 'nothing'}.")
    facts = machine(options.threads or os.cpu_count() or 1, Load())
    # The report makes no claim of speed, so that the load of the machine does not matter.
    report.write({name: value for name, value in facts.items() if not name.startswith("CPU time")})
    failures = [row for row in rows if not row["ok"]]
    if failures:
        sys.exit(f"{len(failures)} of {len(rows)} runs failed")


def parse_options() -> argparse.Namespace:
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
    return parser.parse_args()


if __name__ == "__main__":
    main()
