"""Several runs in one table: `lagrpo.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lagrpo.runs.directory import Run
from lagrpo.runs.recorded import RecordedRun, load_runs
from lagrpo.types import JsonObject, JsonView

if TYPE_CHECKING:
    import pandas as pd

METRICS = (
    "reward",
    "frac_reward_zero_std",
    "staleness/max",
    "rollout/kl",
    "entropy",
    "completions/mean_length",
    "time/step",
)
"""The metrics of a run in the table, over its last batches."""

OF_RUN = ("run.name", "run.output_dir")
"""Settings that differ in any two runs."""


def compare(
    runs: Sequence[Run | Path | str] | Run | Path | str, last: int | None = None
) -> pd.DataFrame:
    """Returns a table with a row per run, by its `distinct_names`. `runs` may be a single run.

    Its columns are the settings that differ, the number of `batches`, METRICS over the `last`
    batches (default: `RecordedRun.recent_batches`), and the last evaluation of each set with 95 %
    intervals: eval/pass@1, eval/pass@1_low, eval/pass@1_high …, with a set's name
    eval/SET/pass@1; eval/batch is the batch after which it was made, 0 before training. Raises
    RunNotFoundError.
    """
    import pandas as pd

    if isinstance(runs, Run | Path | str):
        runs = [runs]
    recorded = load_runs(runs)
    settings = pd.json_normalize([run.settings for run in recorded])
    differing_settings = [
        name
        for name in settings.columns
        if name not in OF_RUN and len({repr(value) for value in settings[name]}) > 1
    ]
    results = pd.DataFrame([_summarize(run, last) for run in recorded])
    table = pd.concat([settings[differing_settings], results], axis="columns")
    table.index = pd.Index([run.name for run in recorded], name="run")
    return table


def _summarize(run: RecordedRun, last: int | None) -> JsonObject:
    """Returns the numbers of a run, by column."""
    summary: JsonObject = {"batches": len(run.metrics)}
    for name in METRICS:
        summary[name] = run.recent(name, last)
    for evaluation in run.evaluations:
        # The evaluations are in order: a later one of a set replaces the earlier.
        summary |= _evaluation_columns(evaluation)
    return summary


def _evaluation_columns(evaluation: JsonView) -> JsonObject:
    """Returns the results of an evaluation that have intervals, and the intervals."""
    set_name = evaluation.get("set")
    prefix = f"eval/{set_name}/" if set_name else "eval/"
    columns: JsonObject = {f"{prefix}batch": evaluation["step"]}
    for name, value in evaluation.items():
        if f"{name}_low" in evaluation:
            columns[f"{prefix}{name}"] = value
            columns[f"{prefix}{name}_low"] = evaluation[f"{name}_low"]
            columns[f"{prefix}{name}_high"] = evaluation[f"{name}_high"]
    return columns
