"""Finished runs for the tests of `lagrpo verify`, and helpers that change their files as a mistake
or a manipulation would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from running import Section, tiny_settings

import lagrpo
from lagrpo.verify import Difference, verify_run
from lagrpo.verify.record import Row

MetricsLine = dict[str, float | None]
"""A line of metrics.jsonl; null is a metric that the batch does not decide."""


def rollouts_file(step: int) -> str:
    return f"rollouts/step-{step:06d}.parquet"


FIRST_STEP = rollouts_file(1)


def train_run(model: Path, root: Path, /, **sections: Section) -> Path:
    """Returns a run of three batches of two groups, whose weights are all exported.

    Unless `sections` says otherwise, weights are synced every two batches: version 0 samples the
    first batch and version 1 the other two, so the third is one update stale.
    """
    run_settings = {"name": "run"} | sections.pop("run", {})
    schedule = sections.pop("schedule", {})
    # A constant lag syncs at every batch, and excludes sync_every.
    if "constant_lag" not in schedule:
        schedule = {"sync_every": 2} | schedule
    sections.setdefault("checkpoint", {"export_every": 1})
    settings = tiny_settings(model, root, run=run_settings, schedule=schedule, **sections)
    return lagrpo.train(settings).run


def rewrite_rows(run: Path, change: Callable[[list[Row]], object], file: str = FIRST_STEP) -> None:
    """Passes the rows of a Parquet file to `change`, which edits the list in place."""
    table = pq.read_table(run / file)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / file)


def set_cell(run: Path, row: int, column: str, value: object, file: str = FIRST_STEP) -> None:
    rewrite_rows(run, lambda rows: rows[row].update({column: value}), file)


def rewrite_metrics(run: Path, change: Callable[[list[MetricsLine]], object]) -> None:
    """Passes the lines of metrics.jsonl to `change`, which edits the list in place."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def find_differences(
    run: Path, location: str, name: str, recomputed: int | None = 1
) -> list[Difference]:
    """The differences of one column or metric, in places that begin with `location`.

    `recomputed` completions run through the model. One is enough for everything that verify checks
    without the model; None is all of them.
    """
    report = verify_run(run, recomputed, trust_run_code=True)
    return [
        difference
        for difference in report.differences
        if difference.where.startswith(location) and difference.name == name
    ]
