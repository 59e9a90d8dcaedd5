"""`lagrpo verify RUN`: replays a run from its files, with plain transformers and its own formulas.

It shares the definition of the run with the training code: settings, keys of random numbers, chat
template, the task and its rewards. docs/verify.md has the whole list.
"""

from __future__ import annotations

from pathlib import Path

from lagrpo.errors import as_settings_error
from lagrpo.logs import print_text
from lagrpo.runs.environment import naming_start
from lagrpo.tasks import Task
from lagrpo.verify import metric_checks, row_checks, shifts, task_checks, tokens
from lagrpo.verify.record import Difference, RecordedRun, Report

__all__ = ["Difference", "Report", "print_report", "verify_run"]


def verify_run(
    run: Path | str,
    count: int | None = 128,
    seed: int = 0,
    task: Task | None = None,
    *,
    trust_run_code: bool = False,
) -> Report:
    """Replays a run and returns the differences.

    run      the directory of the run
    count    completions whose tokens and log-probs are recomputed; None: all. Everything else is
             checked in full
    seed     decides which completions
    task     replaces the task of the settings, if the run was given a Task
    trust_run_code
             runs the functions that the settings of the run name, and the loss in its directory

    Raises RunNotFoundError if the directory is not a run, and SettingsError for a broken file, a
    run without a finished batch, and code that is not trusted.
    """
    recorded = RecordedRun(run, task, trust_run_code=trust_run_code)
    problem = f"{recorded.path} cannot be replayed: a value is missing"
    with naming_start(recorded.path), as_settings_error(problem, KeyError, TypeError):
        task_checks.check_rewards(recorded, task)
        readings = tokens.read_rows(recorded, count, seed)
        tokens.check_tokens(recorded, readings)
        tokens.check_reference(recorded, readings)
        shifts.check_shifts(recorded, readings)
        row_checks.check_rows(recorded)
        row_checks.check_syncs(recorded)
        row_checks.check_versions(recorded)
        row_checks.check_groups(recorded)
        metric_checks.check_metrics(recorded)
    return recorded.report


def print_report(report: Report, most: int = 20) -> None:
    """Prints a line for each check, what was not checked, and the first `most` differences."""
    print_text(report.run)
    print_text(f"{'check':<20} {'compared':>10} {'undecided':>10} {'differ':>10}")
    for check, compared in report.compared.items():
        undecided = report.undecided[check]
        different = sum(difference.check == check for difference in report.differences)
        print_text(f"{check:<20} {compared:>10,} {undecided:>10,} {different:>10,}")
    lines = [f"not checked: {count:,} {reason}" for reason, count in report.skipped.items()]
    lines += [str(difference) for difference in report.differences[:most]]
    lines.append(f"{len(report.differences):,} differences.")
    print_text("\n".join(lines))
