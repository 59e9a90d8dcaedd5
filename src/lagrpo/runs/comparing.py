"""Several runs in one table: `lagrpo.compare`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import load_evaluations, load_metrics, open_run
from lagrpo.runs.recorded import distinct_names
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
"""The metrics of a run in the table, as means over its last batches."""

OF_RUN = ("run.name", "run.output_dir")
"""Settings that differ in any two runs."""


def compare(runs: Sequence[Run | Path | str] | Run | Path | str, last: int = 10) -> pd.DataFrame:
    """Returns a table with a row per run, by its `distinct_names`. `runs` may be a single run.

    Its columns are the settings that differ, the number of `batches`, METRICS as means over the
    `last` batches, and the last evaluation of each set with 95 % intervals: eval/pass@1,
    eval/pass@1_low, eval/pass@1_high …, with a set's name eval/SET/pass@1. Raises RunNotFoundError.
    """
    import pandas as pd

    if isinstance(runs, Run | Path | str):
        runs = [runs]
    paths = [open_run(run).path for run in runs]
    configs = [tomllib.loads((path / "config.toml").read_text(encoding="utf-8")) for path in paths]
    settings = pd.json_normalize(configs)
    differing_settings = [
        name
        for name in settings.columns
        if name not in OF_RUN and len({repr(value) for value in settings[name]}) > 1
    ]
    results = pd.DataFrame([_summarize(path, last) for path in paths])
    table = pd.concat([settings[differing_settings], results], axis="columns")
    table.index = pd.Index(distinct_names(paths), name="run")
    return table


def _summarize(run: Path, last: int) -> JsonObject:
    """Returns the numbers of a run, by column."""
    batches = load_metrics(run)
    summary: JsonObject = {"batches": len(batches)}
    for name in METRICS:
        values = [batch[name] for batch in batches[-last:] if batch.get(name) is not None]
        summary[name] = math.fsum(values) / len(values) if values else None
    for evaluation in load_evaluations(run):
        # The evaluations are in order: a later one of a set replaces the earlier.
        summary |= _evaluation_columns(evaluation)
    return summary


def _evaluation_columns(evaluation: JsonView) -> JsonObject:
    """Returns the results of an evaluation that have intervals, and the intervals."""
    set_name = evaluation.get("set")
    prefix = f"eval/{set_name}/" if set_name else "eval/"
    columns: JsonObject = {}
    for name, value in evaluation.items():
        if f"{name}_low" in evaluation:
            columns[f"{prefix}{name}"] = value
            columns[f"{prefix}{name}_low"] = evaluation[f"{name}_low"]
            columns[f"{prefix}{name}_high"] = evaluation[f"{name}_high"]
    return columns
