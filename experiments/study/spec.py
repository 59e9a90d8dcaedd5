"""A study file, such as those in experiments/papers, and its runs. A cell is one label of each axis of the grid; a run
is a cell with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, model_validator

from lagrpo.errors import SettingsError, suggest
from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.runs.directory import plain_name
from lagrpo.runs.metrics import describe_metrics
from lagrpo.settings.load import merged, read_toml, validate
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import Section
from lagrpo.training.checks import check_settings

from .measures import BOUNDS, metrics_of
from .statistics import Cell, Values, Verdict, judge, paired_differences, parse_claim

Sections = dict[str, dict[str, Any]]
DEFAULTS = {"checkpoint": {"save_total_limit": 0}}  # unless the study says otherwise


class Claim(Section):
    """`claim` is LEFT > RIGHT, with >, >=, <, <= or ~ (as good as). A side is a number or labels joined by &. `margin`
    is how much more (>, <), or at most worse (>=, <=) or different (~)."""

    says: str
    claim: str
    measure: str = "pass@1"
    margin: float = Field(default=0.0, ge=0)
    source: str | None = None


class Study(Section):
    """`settings` is the file that all runs begin with, `set` adds to it, and `grid` has axis -> label -> settings.
    `curves` are the metrics drawn by batch, smoothed over `smooth` batches like the measures peak, end and fall."""

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
        labels = [label for axis in self.grid.values() for label in axis]
        for what, values in {"seeds": self.seeds, "grid": labels, "run names": self.names}.items():
            if twice := [value for value in values if values.count(value) > 1]:
                raise ValueError(f"{what}: {twice[0]!r} occurs twice")
        for claim in self.claims:
            parse_claim(claim.claim, self.grid)
        measures = [*self.measures, *(claim.measure for claim in self.claims)]
        for name in [*self.curves, *(name for measure in measures for name in metrics_of(measure))]:
            known = [known for metrics in describe_metrics([name]).values() for known in metrics]
            if name not in {*BOUNDS, *known}:
                raise ValueError(
                    f"there is no metric {name!r}.{suggest(name, known)} docs/metrics.md lists all"
                )
        return self

    @property
    def cells(self) -> list[Cell]:
        return list(product(*self.grid.values()))

    @property
    def names(self) -> list[str]:
        """The names of the cells' runs without their seeds, such as v-1-KL-.04."""
        texts = (plain_name(" ".join(cell)) for cell in self.cells)
        return ["-".join(word for word in text.split("-") if word) for text in texts]

    def verdict(self, claim: Claim, values: Values) -> Verdict:
        comparison = parse_claim(claim.claim, self.grid)
        return judge(
            [*paired_differences(comparison, values, [*self.grid]).values()],
            comparison[1],
            claim.margin,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a study; `path` is its directory."""

    cell: Cell
    seed: int
    settings: Settings
    path: Path

    def is_finished(self) -> bool:
        """Whether the run has all its batches and its last evaluation."""
        batches = self.settings.schedule.batches
        if not (self.path / "config.toml").is_file() or len(load_metrics(self.path)) < batches:
            return False
        evaluated = any(summary["name"] == "after" for summary in load_evaluations(self.path))
        return evaluated or not self.settings.eval.at_start


def load_study(file: Path, directory: Path) -> tuple[Study, list[Run]]:
    """A study and all its runs, seed by seed. Raises SettingsError for a file that is not a study, for settings that
    cannot run, and for settings that differ from those of a run that exists."""
    study = validate(read_toml(file), {}, str(file), Study)
    base, runs = merged(DEFAULTS, read_toml(file.parent / study.settings)), list[Run]()
    for seed, (cell, prefix) in product(
        study.seeds, list(zip(study.cells, study.names, strict=True))
    ):
        name, values = f"{prefix}-seed{seed}".lstrip("-"), base
        labels = (study.grid[axis][label] for axis, label in zip(study.grid, cell, strict=True))
        for sections in (study.set, *labels):
            values = merged(values, sections)
        own = {"output_dir": str(directory), "name": name, "seed": seed}
        settings = validate(merged(values, {"run": own}), {}, f"{file}, run {name}", Settings)
        try:
            check_settings(settings, resume="auto")
        except SettingsError as error:
            raise SettingsError(f"run {name}: {error}") from error
        runs.append(Run(cell, seed, settings, directory / name))
    return study, runs
