"""What several runs have recorded, so that they can be compared."""

from __future__ import annotations

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
    """The settings and results of one run, as far as it has got."""

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
        # A repeated seed would count twice in the mean over seeds, so the run stands by itself.
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
