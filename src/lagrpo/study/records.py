"""What a report keeps of each run, so that runs of other machines, and of other days, count without being made again.

A record has what the study reads of a run (the metrics that its measures, curves and costs name, by batch, and the
scores of its evaluations), where it was made, and its settings, as far as they differ from the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lagrpo.errors import SettingsError
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import flatten
from lagrpo.study.measures import Finished
from lagrpo.training.changes import FREE
from lagrpo.untrusted import parse_json, read_text

SEEN_IN_MEASURES = ("model.dtype", "evaluation.")
"""Of the settings that a resumed run may change, how those begin that change what a study compares."""
DIGITS = 6
"""Significant digits of a recorded metric."""
HELD = {"cell": dict, "seed": int, "run": str, "settings": dict, "where": dict, "curves": dict, "evaluations": dict}
"""The type of every entry of a record that is read back."""


def settings_that_matter(settings: Settings) -> dict[str, Any]:
    """section.name -> value, of the settings that differ from the defaults; without those that cannot change what a run
    learns.

    >>> from lagrpo.settings.toml import load_settings
    >>> settings_that_matter(load_settings({"run": {"name": "x"}, "schedule": {"v": 10}}))
    {'schedule.v': 10}
    """
    now, default = (flatten(json.loads(each.model_dump_json())) for each in (settings, Settings()))
    left_out = {name for name in FREE if not name.startswith(SEEN_IN_MEASURES)}
    return {name: value for name, value in now.items() if name not in left_out and value != default.get(name)}


def to_record(run: Finished, settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """A record of the metrics `names`, without places of one machine; cell, seed and measures are added by the
    report."""
    scores = {
        name: {key: value for key, value in summary.items() if isinstance(value, int | float)}
        for name, summary in run.evaluations.items()
    }
    curves = {name: [_rounded(line.get(name)) for line in run.metrics] for name in names}
    return {
        "run": Path(run.run).name, "settings": settings_that_matter(settings), "where": run.where,
        "evaluations": scores, "curves": curves,
    }  # fmt: skip


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a report.json. Raises SettingsError for a file that is none."""
    try:
        found = parse_json(read_text(file))
        runs = found["runs"] if isinstance(found, dict) else None
        if not isinstance(runs, list):
            raise ValueError("it has no runs")
        for number, run in enumerate(runs):
            for name, kind in HELD.items():
                if not isinstance(run, dict) or not isinstance(run.get(name), kind):
                    raise ValueError(f"run {number} has no {name}, as reports of earlier versions have none")
            lengths = {len(curve) if isinstance(curve, list) else -1 for curve in run["curves"].values()}
            if len(lengths) != 1 or lengths & {-1, 0}:
                raise ValueError(f"run {number} has no curves, or of different lengths")
    except (ValueError, OSError, KeyError) as error:
        raise SettingsError(f"--results {file}: not the report.json of a study ({error})") from error
    return runs


def from_record(record: Mapping[str, Any], settings: Settings, source: Path) -> Finished:
    """The run of a record. Raises SettingsError where the study asks for a run with other settings or more batches."""
    wanted, had = settings_that_matter(settings), record["settings"]
    other = next((name for name in sorted({*wanted, *had}) if wanted.get(name) != had.get(name)), None)
    if other is not None:
        now, then = (repr(values[other]) if other in values else "the default" for values in (wanted, had))
        raise SettingsError(
            f"--results {source}: the run {record['run']} had {other} = {then}, and the study has {now}"
        )
    curves = record["curves"]
    lines = [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]
    if len(lines) != settings.schedule.stages * settings.schedule.batches:
        raise SettingsError(
            f"--results {source}: the run {record['run']} has {len(lines)} batches, not those asked for"
        )
    return Finished(lines, record["evaluations"], record["where"], record["run"])


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
