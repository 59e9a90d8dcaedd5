"""Measures everything that is worth knowing about one GPU, the most informative first.

make measure-gpu
make measure-gpu OPTIONS="--only peak tests learn"
python benchmarks/measure_gpu.py --dry-run         # the steps and their limits
python benchmarks/measure_gpu.py --quick           # tiny sizes, also on a CPU, without the tests

Each step is a process of its own with its own time limit. Its output goes to a file as it comes, so
that it is there even if the step, a later one or the machine ends too early. `summary.md` beside it
has a line for each step.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "measure-gpu"
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
CPU_STEPS = ("peak", "learn", "sample", "rows", "bench")


@dataclass(frozen=True)
class Step:
    """A command that is stopped after `limit` seconds."""

    name: str
    limit: int
    command: Sequence[str]


def steps(results: Path, *, quick: bool) -> list[Step]:
    """All steps, the most informative first. Add new ones here."""
    options = ["--results", str(results)]
    if quick:
        options.append("--quick")
    bench = [sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), *options]
    probe = [sys.executable, str(ROOT / "benchmarks" / "probe_gpu.py"), *options]
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-v"]
    return [
        Step("peak", 60, [*probe, "peak"]),
        Step("tests", 300, tests),
        Step("learn", 120, [*probe, "learn"]),
        Step("sample", 150, [*probe, "sample"]),
        Step("bench", 360, bench),
        Step("rows", 60, [*probe, "rows"]),
        Step("rows-no-split", 60, [*probe, "rows-no-split"]),
        Step("attention", 60, [*probe, "attention"]),
        Step("free", 120, [*probe, "free"]),
        Step("learn-135m", 90, [*probe, "learn-135m"]),
    ]


def main() -> None:
    parser = make_parser(__doc__, steps(RESULTS, quick=False), RESULTS)
    options = parser.parse_args()
    selected = choose_steps(steps(options.results, quick=options.quick), options, CPU_STEPS)
    outcomes = run_steps(selected, options.results)
    sys.exit(any(outcome != "done" for outcome in outcomes))


def make_parser(
    description: str | None, steps: Sequence[Step], results: Path
) -> argparse.ArgumentParser:
    """Returns the parser of a program that runs steps. Its results go to `results` by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in steps]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and their limits")
    return parser


def choose_steps(
    steps: Sequence[Step], options: argparse.Namespace, cpu_steps: Sequence[str]
) -> list[Step]:
    """Returns the steps to run: without a GPU the ones that a CPU can compute, by name.

    Exits after a dry run, and without a GPU unless the options say --quick.
    """
    selected = [step for step in steps if not options.only or step.name in options.only]
    if options.dry_run:
        for step in selected:
            print(f"{step.name:12} {step.limit:4} s  {shlex.join(step.command)}")
        together = sum(step.limit for step in selected)
        print(f"limits: {together} s together; output in {options.results}")
        sys.exit()
    if not has_gpu():
        if not options.quick:
            sys.exit(
                "PyTorch sees no GPU here (`lagrpo env` says more). "
                "--dry-run lists the steps; --quick tries what a CPU can compute."
            )
        selected = [step for step in selected if step.name in cpu_steps]
        print("PyTorch sees no GPU: only the steps that a CPU can compute, without the tests")
    return selected


def run_steps(selected: list[Step], results: Path) -> list[str]:
    """Runs the steps and writes logs and summary.md. Returns how each step ended."""
    results.mkdir(parents=True, exist_ok=True)
    summary = results / "summary.md"
    summary.write_text("| step | s | end | output |\n|---|---|---|---|\n", encoding="utf-8")
    outcomes = []
    for number, step in enumerate(selected, start=1):
        log = results / f"{number}-{step.name}.log"
        print(f"\n== {step.name}: at most {step.limit} s, output in {log}", flush=True)
        started = time.monotonic()
        outcome = run(step, log)
        seconds = time.monotonic() - started
        outcomes.append(outcome)
        print(last_lines(log), f"== {step.name}: {outcome}, {seconds:.0f} s", flush=True)
        with summary.open("a", encoding="utf-8") as file:
            file.write(f"| {step.name} | {seconds:.0f} | {outcome} | {log.name} |\n")
    print(f"\n{summary.read_text(encoding='utf-8')}")
    return outcomes


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(step: Step, log: Path) -> str:
    """Runs a step with its output in `log`. Returns how it ended, "done" if well."""
    with log.open("wb") as out:
        # In a session of its own, so that `stop` reaches everything that the step started.
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=step_environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"stopped after {step.limit} s"
        # Also on Ctrl-C, which the step's own session does not get.
        except BaseException:
            stop(process)
            raise
    return "done" if code == 0 else f"failed ({code})"


def step_environment() -> dict[str, str]:
    """The environment of a step, which finds lagrpo also where it is not installed."""
    paths = [str(ROOT / "src"), str(ROOT)]
    if existing := os.environ.get("PYTHONPATH"):
        paths.append(existing)
    return os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a step with everything that it started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(log: Path, count: int = 15) -> str:
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines()[-count:]
    return "".join(f"   {line[:200]}\n" for line in lines)


if __name__ == "__main__":
    main()
