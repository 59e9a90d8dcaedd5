"""`lagrpo verify RUN`: replays a run from its files, with plain transformers and plain formulas.

It shares only the run's definition with it: settings, keys of random numbers, the task and its rewards."""

from __future__ import annotations

from pathlib import Path

from lagrpo.errors import as_settings_error, visible
from lagrpo.tasks import Task
from lagrpo.verify import checks, tokens
from lagrpo.verify.record import Difference, RecordedRun, Report

__all__ = ["Difference", "Report", "print_report", "verify_run"]


def verify_run(
    run: Path | str, count: int | None = 128, seed: int = 0, task: Task | None = None
) -> Report:
    """Recompute tokens and log-probs of `count` completions (None: all), chosen by `seed`, and check everything else in
    full. `task` replaces the task of the settings if the run was given a Task. Raises RunNotFoundError for no run,
    SettingsError for a broken file or no finished batch."""
    recorded = RecordedRun(run)
    with as_settings_error(
        f"{recorded.path} cannot be replayed: a value is missing", KeyError, TypeError
    ):
        checks.check_rewards(recorded, task)
        tokens.check_tokens(recorded, count, seed)
        for check in (
            checks.check_rows,
            checks.check_syncs,
            checks.check_versions,
            checks.check_groups,
        ):
            check(recorded)
        checks.check_metrics(recorded)
    return recorded.report


def print_report(report: Report, most: int = 20) -> None:
    """Print a line for each check, what could not be checked, and the first differences."""
    print(f"{report.run}\n{'check':<20} {'compared':>10} {'undecided':>10} {'differ':>10}")
    for check, count in report.compared.items():
        differ = sum(difference.check == check for difference in report.differences)
        print(f"{check:<20} {count:>10,} {report.undecided[check]:>10,} {differ:>10,}")
    lines = [f"not checked: {n:,} {what}" for what, n in report.skipped.items()]
    lines += [*map(str, report.differences[:most]), f"{len(report.differences):,} differences."]
    print(visible("\n".join(lines)))
