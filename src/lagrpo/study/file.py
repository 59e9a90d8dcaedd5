"""What a study's file says, and the settings of every run that it asks for.

    title = "What v costs"
    settings = "../addition/base.toml"          # of every run; beside this file
    seeds = [0, 1, 2, 3, 4]
    measures = ["pass_at_1", "mean reward_mean"]

    [set]                                        # on top, of every run
    optimizer.lr = 2e-5

    [grid.v]                                     # an axis: labels, and the settings that each stands for
    "v = 1" = { schedule.v = 1 }
    "v = 10" = { schedule.v = 10 }

    [[claims]]
    says = "Off-policy GRPO is as good as on-policy GRPO"
    measure = "pass_at_1"
    claim = "v = 10 >= v = 1"
    margin = 0.02

A cell is a label of each axis; a run is a cell with a seed.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from lagrpo.errors import SettingsError
from lagrpo.runs.directory import plain_name
from lagrpo.settings.schema import Settings
from lagrpo.settings.section import Section
from lagrpo.settings.toml import flatten, merged, read_toml, validate
from lagrpo.study.claims import Comparison
from lagrpo.study.measures import check_measure, metrics_of
from lagrpo.view.meanings import check_metric


def _check_names(measure: str) -> str:
    for name in metrics_of(measure):
        check_metric(name)
    return measure


Measure = Annotated[str, AfterValidator(check_measure), AfterValidator(_check_names)]
Curve = Annotated[str, AfterValidator(check_metric)]
Seed = Annotated[int, Field(strict=True, ge=0)]
Sections = dict[str, dict[str, Any]]
Cell = tuple[str, ...]
"""A label of each axis, in the order of the axes."""
OWN = ("run.directory", "run.name", "run.seed", "run.resume", "run.allow", "run.display")
"""Settings that are the study's."""
LEFT_OUT = {"save_weights": False, "keep_optimizer": False}
"""What runs of a study do not leave on the disk, unless its file or its settings say so."""


class Claim(Section):
    """A sentence, and the comparison that tests it."""

    says: str
    """The claim in words."""
    claim: str
    """LEFT > RIGHT, with >, >=, <, <= or ~ (as good as). A side is a number, or labels of the grid joined by &; axes
    that it does not name are averaged."""
    measure: Measure = "pass_at_1"
    margin: float = Field(default=0.0, ge=0)
    """By how much more (>, <), or at most worse (>=, <=) or different (~)."""
    source: str | None = None
    """Who says so, and where."""


class Study(Section):
    """An experiment: runs over a grid and seeds, and what they are to tell."""

    title: str
    settings: str
    """The settings file that all runs begin with, relative to this file."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """run.seed of the runs of each cell; the same seeds everywhere, so that cells are compared seed by seed."""
    note: str = ""
    """What the reader of the report should know."""
    measures: tuple[Measure, ...] = ("pass_at_1", "mean reward_mean", "sum seconds_total")
    curves: tuple[Curve, ...] = ("reward_mean",)
    """Metrics that the report draws by batch."""
    smooth: int = Field(default=5, ge=1)
    """Batches that smoothed measures and curves average."""
    jobs: int | None = Field(default=None, ge=1)
    """Runs at a time; by default one for each core or GPU. 1 where seconds are measured."""
    set: Sections = Field(default_factory=dict)
    """Settings of all runs, on top of the file's."""
    grid: dict[str, dict[str, Sections]] = Field(default_factory=dict)
    """Axis -> label -> settings."""
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Study:
        if not self.seeds:
            raise ValueError("seeds is empty")
        if again := [seed for seed in self.seeds if self.seeds.count(seed) > 1]:
            raise ValueError(f"seeds has the seed {again[0]} twice")
        labels = [label for axis in self.grid.values() for label in axis]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"grid has the label {twice!r} twice: claims need to tell them apart")
        if empty := next((axis for axis, values in self.grid.items() if not values), None):
            raise ValueError(f"grid.{empty} has no label")
        for claim in self.claims:
            Comparison.parse(claim.claim, self.grid)
        return self

    @property
    def cells(self) -> list[Cell]:
        """All of them, the last axis fastest."""
        return list(product(*self.grid.values()))

    def name(self, cell: Cell, seed: int) -> str:
        """The directory of a run.

        >>> Study(title="", settings="", grid={"v": {"v = 1": {}}}).name(("v = 1",), 3)
        'v-1-seed3'
        """
        words = [word for label in cell for word in plain_name(label).replace("-", " ").split()]
        return "-".join([*words, f"seed{seed}"])


def load_study(path: Path) -> Study:
    """Raises SettingsError for a file that is missing, no TOML or no study."""
    study = validate(Study, read_toml(path), {}, str(path))
    names = [study.name(cell, 0) for cell in study.cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"{path}: two cells of the grid would both be called {twice!r}; name their labels apart")
    return study


def settings_of(study: Study, path: Path, cell: Cell, seed: int, runs: Path) -> Settings:
    """The settings of a run of the study at `path`, whose runs go to the directory `runs`. Raises SettingsError for
    values that are none, and for those that are the study's own."""
    name = study.name(cell, seed)
    values = merged({"run": LEFT_OUT}, read_toml(path.parent / study.settings))
    chosen = {f"grid.{axis}, {label!r}": study.grid[axis][label] for axis, label in zip(study.grid, cell, strict=True)}
    for source, sections in {"set": study.set, **chosen}.items():
        if own := next((key for key in flatten(sections) if key in OWN), None):
            raise SettingsError(f"{path}, {source}: {own} is set by the study itself")
        values = merged(values, sections)
    own = {"directory": str(runs), "name": name, "seed": seed, "resume": "auto", "allow": (), "display": "plain"}
    return validate(Settings, merged(values, {"run": own}), {}, f"{path}, run {name}")
