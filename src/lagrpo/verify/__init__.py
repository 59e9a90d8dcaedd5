"""`lagrpo verify RUN`: a run replayed from its files, with plain transformers and plain formulas.

It shares with the run only what defines it: settings, keys of random numbers, the task and its rewards."""

from __future__ import annotations

from pathlib import Path

from lagrpo.errors import refusing
from lagrpo.tasks import Task
from lagrpo.verify import rewards, rows, tokens
from lagrpo.verify.record import Difference, RecordedRun, Report, print_report

__all__ = ["Difference", "Report", "print_report", "verify_run"]


def verify_run(run: Path | str, count: int | None = 128, seed: int = 0, task: Task | None = None) -> Report:
    """Recompute tokens and log-probs of `count` completions (None: all), chosen by `seed` and spread over the versions
    on disk, and check everything else in full. `task` replaces the task of the settings if the run was given a Task.
    Raises RunNotFoundError for no run or no finished batch, SettingsError for a broken file."""
    recorded = RecordedRun(run)
    report = Report(str(recorded.path))
    with refusing(f"{recorded.path} cannot be replayed: a value is missing", KeyError, TypeError):
        completions = rows.check_rows(recorded, report)
        weights = tokens.Weights(recorded)
        rewards.check_rewards(recorded, weights, completions, task, report)
        tokens.check_tokens(recorded, weights, completions, count, seed, report)
        rows.check_syncs(recorded, report)
        rows.check_versions(recorded, completions, report)
        rows.check_groups(recorded, completions, report)
        rows.check_metrics(recorded, completions, report)
    return report
