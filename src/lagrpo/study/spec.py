"""Study files, such as those in experiments/papers, and their runs.

A cell is one label of each axis of the grid; a run is a cell with a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, model_validator

from lagrpo.errors import SettingsError, suggest
from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.runs.directory import plain_name
from lagrpo.runs.metrics import describe_metrics
from lagrpo.settings.load import merged, read_toml, validate, with_one_length
from lagrpo.settings.schema import Settings
from lagrpo.settings.section import Section, Table
from lagrpo.startup.checks import check_settings
from lagrpo.startup.epochs import with_batches

from .measures import BOUNDS, is_evaluated, metrics_of
from .statistics import Cell, Values, Verdict, count_lacking, judge, paired_differences, parse_claim

Sections = dict[str, dict[str, Any]]
# Settings of all runs, unless the study sets them.
DEFAULTS = {"checkpoint": {"save_total_limit": 0}}


class Claim(Section):
    """A comparison that a study tests.

    `claim` is LEFT > RIGHT, with >, >=, <, <= or ~ (as good as). A side is a number or labels
    joined by &. `margin` is how much more (>, <), or at most worse (>=, <=) or different (~).
    """

    says: str
    claim: str
    measure: str = "pass@1"
    margin: float = Field(default=0.0, ge=0)
    source: str | None = None


class Study(Section):
    """A study file.

    `settings` is the file that all runs begin with, `set` adds to it, and `grid` has axis -> label
    -> settings. `curves` are the metrics drawn by batch. They are smoothed over `smooth` batches,
    like the measures peak, end and fall.
    """

    title: str
    settings: str
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0, 1, 2), min_length=1)
    note: str = ""
    measures: tuple[str, ...] = ("pass@1", "mean reward", "sum time/step")
    curves: tuple[str, ...] = ("reward",)
    smooth: int = Field(default=5, ge=1)
    jobs: int | None = Field(default=None, ge=1)
    set: Sections = Field(default_factory=dict)
    grid: dict[str, dict[str, Sections]] = Field(default_factory=dict)
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Study:
        _reject_repeats("seeds", self.seeds)
        _reject_repeats("grid", [label for axis in self.grid.values() for label in axis])
        _reject_repeats("run names", self.names)
        for claim in self.claims:
            parse_claim(claim.claim, self.grid)
        read_metrics = [name for measure in self.all_measures for name in metrics_of(measure)]
        for name in [*self.curves, *read_metrics]:
            families = describe_metrics([name]).values()
            known_names = [metric for metrics in families for metric in metrics]
            if name not in {*BOUNDS, *known_names}:
                raise ValueError(
                    f"there is no metric {name!r}.{suggest(name, known_names)} "
                    "docs/metrics.md lists all"
                )
        return self

    @property
    def all_measures(self) -> list[str]:
        """The measures of the columns and of the claims, each once."""
        return list(dict.fromkeys([*self.measures, *(claim.measure for claim in self.claims)]))

    @property
    def cells(self) -> list[Cell]:
        """All combinations of labels, in the order of the grid."""
        return list(product(*self.grid.values()))

    @property
    def names(self) -> list[str]:
        """The names of the cells' runs without their seeds, such as v-1-KL-.04."""
        texts = (plain_name(" ".join(cell)) for cell in self.cells)
        return ["-".join(word for word in text.split("-") if word) for text in texts]

    def verdict(self, claim: Claim, values: Values) -> Verdict:
        """The verdict on a claim, given the values of its measure."""
        comparison = parse_claim(claim.claim, self.grid)
        differences = paired_differences(comparison, values, list(self.grid))
        _, relation, _ = comparison
        verdict = judge(list(differences.values()), relation, claim.margin)
        lacking = count_lacking(comparison, values, list(self.grid))
        if lacking:
            # Runs lack a value for a reason, such as a reward never reached. The other seeds alone
            # would make the side with such runs look better than it is.
            return Verdict("inconclusive", verdict.difference, lacking)
        return verdict


def _reject_repeats(name: str, values: Sequence[object]) -> None:
    """Raises ValueError if a value occurs twice."""
    repeated = [value for value in values if values.count(value) > 1]
    if repeated:
        raise ValueError(f"{name}: {repeated[0]!r} occurs twice")


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a study; `path` is its directory."""

    cell: Cell
    seed: int
    settings: Settings
    path: Path

    def is_finished(self) -> bool:
        """True if the run has all its batches and the evaluations after training."""
        if not (self.path / "config.toml").is_file():
            return False
        if len(load_metrics(self.path)) < self.settings.schedule.batches:
            return False
        # eval.at_start also decides on the evaluation after training.
        if not self.settings.eval.at_start:
            return True
        # With evaluation sets, each has its own evaluation, and there is none without a name.
        sets = self.settings.eval.sets
        required_names = {f"after.{evaluation_set.name}" for evaluation_set in sets} or {"after"}
        return required_names <= {summary["name"] for summary in load_evaluations(self.path)}


def load_study(file: Path, directory: Path) -> tuple[Study, list[Run]]:
    """A study and all its runs, seed by seed.

    Raises SettingsError for a file that is not a study, for settings that cannot run, and for
    settings that differ from the ones an existing run was made with.
    """
    study = validate(read_toml(file), {}, str(file), Study)
    settings_file = file.parent / study.settings
    base = merged(DEFAULTS, with_one_length(read_toml(settings_file), {}, str(settings_file)))
    runs: list[Run] = []
    for seed in study.seeds:
        for cell, cell_name in zip(study.cells, study.names, strict=True):
            # Without a grid there is one cell, whose name is empty.
            name = f"{cell_name}-seed{seed}".lstrip("-")
            source = f"{file}, run {name}"
            values = _override(base, study.set, source)
            for axis, label in zip(study.grid, cell, strict=True):
                values = _override(values, study.grid[axis][label], source)
            run_section = {"output_dir": str(directory), "name": name, "seed": seed}
            values = merged(values, {"run": run_section})
            settings = validate(values, {}, source, Settings)
            try:
                # is_finished() needs the number of batches.
                settings = with_batches(settings)
                # With "auto" a run that exists is compared with its settings instead of rejected.
                check_settings(settings, resume="auto")
            except SettingsError as error:
                raise SettingsError(f"run {name}: {error}") from error
            runs.append(Run(cell, seed, settings, directory / name))
    for measure in study.all_measures:
        # Cells may differ in their evaluations; a value in any of them makes the measure useful.
        if not any(is_evaluated(measure, run.settings.eval) for run in runs):
            raise SettingsError(
                f"{file}: no run has {measure!r}: write SET.RESULT with a set of [[eval.sets]], "
                "and pass@k with k = 1, 2, 4, … or eval.num_samples"
            )
    return study, runs


def _override(values: Table, changes: Sections, source: str) -> Table:
    """Both as one, in which changes win. The length of the run that was set last counts.

    Raises SettingsError if the changes, which come from `source`, set batches and epochs.
    """
    with_one_length(changes, {}, source)
    schedule = values.get("schedule")
    # A settings file that is wrong may have a number here, which `validate` rejects.
    is_table = isinstance(schedule, dict)
    if is_table and changes.get("schedule", {}).get("epochs") is not None:
        schedule = {name: value for name, value in schedule.items() if name != "batches"}
        values = {**values, "schedule": schedule}
    return merged(with_one_length(values, changes, source), changes)
