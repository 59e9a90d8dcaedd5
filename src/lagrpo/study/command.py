"""Make the missing runs of a study and write its report.

    lagrpo study FILE.toml                 make the missing runs, then the report
    lagrpo study FILE.toml --only seed0    only runs with this text in their names
    lagrpo study FILE.toml --report        only the report, from the finished runs

A run is `lagrpo train` in its own process, in runs/studies/NAME/RUN; RUN.toml and RUN.log are next
to that directory. Finished runs are kept, unfinished ones resume. Exit codes: 0 done (whatever the
verdicts), 1 a run failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.logs import print_text
from lagrpo.machine import usable_cores
from lagrpo.runs.files import write_atomically
from lagrpo.settings.load import to_toml

from .measures import RunResult
from .report import load_results, write_report
from .spec import Run, load_study
from .statistics import Cell


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. Raises SettingsError for wrong input."""
    options = parse_options(arguments)
    with as_settings_error():
        directory = Path("runs") / "studies" / options.file.stem
        study, runs = load_study(options.file, directory)
        results: dict[tuple[Cell, int], RunResult] = {}
        for file in options.results:
            results |= load_results(file, study)
        selected = select_runs(runs, options.only)
        missing = [
            run for run in selected if (run.cell, run.seed) not in results and not run.is_finished()
        ]
        failed = [] if options.report else run_missing(missing, options.jobs or study.jobs)
        for run in runs:
            if run.is_finished():
                results[run.cell, run.seed] = RunResult.load(run.path)
        write_report(study, results, directory)
    return 1 if failed else 0


class StudyParser(argparse.ArgumentParser):
    """A parser whose messages quote words safely."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print_text(message, file=file or sys.stderr, end="")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the values of the command line, or ends the program with its usage."""
    parser = StudyParser(
        "lagrpo study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument("--report", action="store_true", help="make no runs")
    parser.add_argument(
        "--jobs", type=int, help="runs at a time; by default the file's, else one per core"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only runs with one of these in the name",
    )
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[], help="report.json files whose runs count too"
    )
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: write a number of at least 1")
    return options


def select_runs(runs: Sequence[Run], texts: Sequence[str]) -> Sequence[Run]:
    """The runs with one of the texts in their names; without texts, all runs.

    Raises SettingsError if no run has one.
    """
    if not texts:
        return runs
    selected = [run for run in runs if any(text in run.path.name for text in texts)]
    if not selected:
        raise SettingsError(
            f"--only {' '.join(texts)}: there is no such run; one is {runs[0].path.name}"
        )
    return selected


def run_missing(missing: Sequence[Run], jobs: int | None) -> list[Run]:
    """Makes these runs, `jobs` at a time. Returns those that failed.

    If a signal ends the study, the runs get SIGTERM, write their checkpoints and end.
    """
    if not missing:
        return []
    cores = usable_cores()
    if jobs is None:
        # Runs with vLLM would start servers side by side.
        jobs = 1 if missing[0].settings.rollout.uses_vllm else cores
    print_text(f"{len(missing)} runs to make, {jobs} at a time", flush=True)
    waiting = list(missing)
    active: dict[subprocess.Popen[bytes], Run] = {}
    failed: list[Run] = []
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                active[start_run(run, max(1, cores // jobs))] = run
            time.sleep(0.2)
            for process in [process for process in active if process.poll() is not None]:
                run = active.pop(process)
                if run.is_finished():
                    # Hundreds of runs would fill the disk.
                    weights = run.path / "weights" / "final"
                    # A run that failed after its last evaluation may have none.
                    if weights.is_dir():
                        shutil.rmtree(weights)
                    print_text(f"{run.path.name}: finished", flush=True)
                else:
                    failed.append(run)
                    advice = f"see {run.path}.log; the same command tries again"
                    print_text(f"{run.path.name}: failed, {advice}", flush=True)
    finally:
        for process in active:
            process.terminate()
        for process in active:
            process.wait()
        signal.signal(signal.SIGTERM, handler)
    return failed


def start_run(run: Run, threads: int) -> subprocess.Popen[bytes]:
    """Starts `lagrpo train` in its own session: Ctrl-C reaches it only through the study."""
    write_atomically(Path(f"{run.path}.toml"), to_toml(run.settings))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    # -P: no file of the current directory shadows a module of Python.
    command = [sys.executable, "-P", "-m", "lagrpo"]
    command += ["train", f"{run.path}.toml", "--resume", "auto"]
    with open(f"{run.path}.log", "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
