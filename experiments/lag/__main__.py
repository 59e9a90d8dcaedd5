"""Make the missing runs of the benchmark of methods against staleness, then its report.

From the checkout's root:

    python -m experiments.lag             all runs, the most informative first; goes on after a stop
    python -m experiments.lag --quick     a small table of short runs, in two to three minutes
    python -m experiments.lag --report    only the report, of the runs made so far
    python -m experiments.lag --only topr only the runs of this method

It uses one core, and torch.compile if there is a C++ compiler. Records land in
experiments/lag/results, those of --quick in runs/lag/quick. A run that has a record is not made
again; a stop loses the runs that are being trained, at most some minutes of work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import torch

from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.runs.environment import cpu_model, git_state

from .methods import Method, Table, load_methods
from .plan import QUICK_METHODS, Methods, Pass, full_plan, passes_where_some_die, quick_plan
from .publish import publish
from .records import RESULTS, Record, append_records, load_records
from .report import write_figure, write_report
from .starts import load_start, load_teacher, mean_score
from .tasks import TASKS
from .train import Run, train

QUICK_RESULTS = Path("runs") / "lag" / "quick"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.lag",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a small table in 2 to 3 minutes")
    parser.add_argument("--report", action="store_true", help="make no runs")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="only runs of these methods")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    methods: Methods = {table: load_methods(table) for table in get_args(Table)}
    for name in options.only or []:
        if not any(name in rows for rows in methods.values()):
            parser.error(f"--only {name}: experiments/lag/methods.toml has no such method")
    directory = QUICK_RESULTS if options.quick else RESULTS
    only = tuple(options.only or ())
    plan = quick_plan(methods, only or QUICK_METHODS) if options.quick else full_plan(methods)
    if not options.report:
        try:
            with freed_memory_kept():  # a quarter of the time of an update on the chain
                make_runs(plan, methods, directory, only=only, is_whole=not options.quick)
        except KeyboardInterrupt:
            print("stopped: the same command makes the rest")
    records = load_records(directory, methods)
    write_report(directory, records, plan, methods["published"])
    if options.quick:
        write_figure(directory / "area.png", records)
    else:
        publish(records, methods["published"])


def make_runs(
    plan: Iterable[Pass],
    methods: Methods,
    directory: Path,
    *,
    only: Sequence[str],
    is_whole: bool,
) -> None:
    """Make the missing runs of a plan, or those of some methods if `only` has names.

    The whole benchmark then makes more seeds where some die.
    """

    def selected(passes: Iterable[Pass]) -> Iterable[Pass]:
        return (item for item in passes if not only or item.method in only)

    # Compiling takes a minute, which a small table does not save.
    compiled = is_whole and can_compile()
    make_missing(selected(plan), methods, directory, compiled=compiled)
    if is_whole:
        passes = passes_where_some_die(load_records(directory, methods))
        make_missing(selected(passes), methods, directory, compiled=compiled)


def can_compile() -> bool:
    """True if torch.compile finds a C++ compiler."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def make_missing(
    plan: Iterable[Pass], methods: Methods, directory: Path, *, compiled: bool = False
) -> None:
    """Make the runs of a plan that have no record, pass by pass, and append their records."""
    # Without runs of methods that have changed since: these are made again.
    done = load_records(directory, methods)
    began = time.monotonic()
    for item in plan:
        missing = [key for key in item.keys if key not in done]
        if not missing:
            continue
        method = methods[item.table][item.method]
        runs = [Run(key.learning_rate, key.seed, key.control) for key in missing]
        records = make_pass(item, method, runs, compiled=compiled)
        append_records(directory, records)
        seconds = sum(record.seconds for record in records)
        print(
            f"{(time.monotonic() - began) / 3600:6.2f} h  {item.table:9} {item.task:12} "
            f"{item.schedule.kind:8} {item.schedule.lag:3}  {item.method:16} {len(runs):2} runs, "
            f"{1000 * seconds / len(runs) / item.updates:.1f} ms per update",
            flush=True,
        )


def make_pass(item: Pass, method: Method, runs: Sequence[Run], *, compiled: bool) -> list[Record]:
    """Train runs of a pass; returns their records."""
    architecture, start = load_start(item.task)
    outcomes = train(
        TASKS[item.task](),
        architecture,
        start,
        method,
        item.schedule,
        runs,
        item.updates,
        teacher=load_teacher(item.task) if item.table == "distilled" else None,
        compiled=compiled,
    )
    state = git_state(Path(__file__).parent) or {"commit": "unknown"}
    return [
        Record(
            table=item.table,
            task=item.task,
            method=item.method,
            recipe=method.recipe_name,
            overrides=method.overrides,
            max_grad_norm=method.max_grad_norm,
            scale_lr_by_ess=method.scale_lr_by_ess,
            schedule=item.schedule.kind,
            lag=item.schedule.lag,
            learning_rate=outcome.run.learning_rate,
            seed=outcome.run.seed,
            updates=item.updates,
            start=round(start_score(item.task), 4),
            curve=[round(score, 4) for score in outcome.curve],
            diagnostics={name: round(mean, 4) for name, mean in outcome.diagnostics.items()},
            seconds=round(outcome.seconds, 2),
            commit=state["commit"][:12],
            cpu=cpu_model(),
            torch=torch.__version__,
            control=outcome.run.control,
        )
        for outcome in outcomes
    ]


@cache
def start_score(task: str) -> float:
    """The mean score of a task's starting point."""
    architecture, start = load_start(task)
    return mean_score(TASKS[task](), architecture, start)


if __name__ == "__main__":
    main()
