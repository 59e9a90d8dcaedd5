"""The records of several runs, to compare them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import load_config, load_evaluations, load_metrics, open_run
from lagrpo.types import JsonObject, JsonView

PER_SEED = ("seed", "name", "output_dir")
"""Settings of section `run` that differ between the seeds of one method."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The settings and results of one run, which may be unfinished."""

    path: Path

    name: str
    """The name of its directory; the path if another run has the same name."""

    settings: JsonObject
    """config.toml: a table for each section."""

    metrics: list[JsonObject]
    """One dict per batch, as in docs/metrics.md."""

    evaluations: list[JsonObject]
    """Summaries in the order of their steps.

    Each has its `name`, `step`, `set`, and pass@k with its 95 % interval: `pass@1`, `pass@1_low`,
    `pass@1_high`. After the first one of a set, it has `pass@1_change` with an interval, too.
    """

    @property
    def seed(self) -> int | None:
        """`run.seed`; None if config.toml has none."""
        return self.settings.get("run", {}).get("seed")

    @property
    def recent_batches(self) -> int:
        """The number of last batches that say where the run stands.

        It is a whole cycle of weight syncs, because the last batch before a sync is the stalest and
        the first one after it is fresh; 10 if every batch has its sync.
        """
        sync_every = self.settings.get("schedule", {}).get("sync_every", 1)
        return sync_every if sync_every > 1 else 10

    def recent(self, metric: str, batches: int | None = None) -> float | None:
        """Returns a metric over the last `batches` (default: `recent_batches`).

        It is the mean, and for a metric that is a maximum the largest. Batches without the metric
        are left out; None if all are.
        """
        lines = self.metrics[-(batches or self.recent_batches) :]
        values = [line[metric] for line in lines if line.get(metric) is not None]
        if not values:
            return None
        return max(values) if is_maximum(metric) else math.fsum(values) / len(values)


def is_maximum(metric: str) -> bool:
    """True if a metric is the largest value in its batch, such as staleness/max."""
    return metric.endswith("max")


def load_runs(runs: Sequence[Run | Path | str]) -> list[RecordedRun]:
    """Reads what each run has recorded.

    Raises RunNotFoundError for a directory that is not a run, ValueError for damaged files.
    """
    opened = [open_run(run) for run in runs]
    recorded = []
    for run, name in zip(opened, distinct_names([run.path for run in opened]), strict=True):
        recorded.append(
            RecordedRun(
                path=run.path,
                name=name,
                settings=load_config(run),
                metrics=load_metrics(run),
                evaluations=load_evaluations(run),
            )
        )
    return recorded


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Returns the name of each directory, or its path if another directory has the same name."""
    # The directory "." has no name until it is resolved.
    names = [path.resolve().name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def group_seeds(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Returns the runs by method, in the order of each method's first run.

    Runs are of one method if their settings differ only in their seeds, names and directories. A
    method of several runs is named by the beginning that their names share, without "seed", or by
    its first run if a run of another method or another method has that name.
    """
    methods: list[list[RecordedRun]] = []
    for run in runs:
        method = _find_method(methods, run)
        if method is None:
            methods.append([run])
        else:
            method.append(run)
    named: dict[str, list[RecordedRun]] = {}
    for method in methods:
        name = _shared_name([run.name for run in method])
        names_of_other_runs = {run.name for run in runs} - {run.name for run in method}
        # Later methods may still need the names of their runs.
        if name in named or name in names_of_other_runs:
            name = method[0].name
        named[name] = method
    return named


def _find_method(
    methods: Sequence[list[RecordedRun]], run: RecordedRun
) -> list[RecordedRun] | None:
    """Returns the method with the settings of this run and without its seed."""
    settings = _without_seed(run.settings)
    for method in methods:
        if _without_seed(method[0].settings) != settings:
            continue
        # A repeated seed would count twice in the mean over seeds, so it counts as another method.
        if run.seed not in [other.seed for other in method]:
            return method
    return None


def _without_seed(settings: JsonView) -> JsonObject:
    run_section = settings.get("run", {})
    remaining = {name: value for name, value in run_section.items() if name not in PER_SEED}
    return {**settings, "run": remaining}


def _shared_name(names: Sequence[str]) -> str:
    """Returns the name of a run, or the words that the names of several seeds begin with."""
    if len(names) == 1:
        return names[0]
    # The group in the pattern keeps the separators in the list.
    words_by_name = [re.split(r"([-_. ])", name) for name in names]
    shared = ""
    for words in zip(*words_by_name, strict=False):
        if len(set(words)) > 1:
            break
        shared += words[0]
    return re.sub(r"([-_. ]+(seed)?)*$", "", shared) or names[0]
