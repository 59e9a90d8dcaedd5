"""A study from its file to its report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.objective.recipes import resolve
from lagrpo.runs.lock import RunLockedError, locked
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings
from lagrpo.study.expecting import expect
from lagrpo.study.file import Cell, Study, load_study, settings_of
from lagrpo.study.measures import Finished
from lagrpo.study.records import from_record, read_records, settings_that_matter
from lagrpo.study.report import Report
from lagrpo.study.running import Planned, check_runs, run_missing
from lagrpo.terminal.text import count_of


@dataclass(frozen=True, slots=True)
class Plan:
    """A study, all its runs by cell and seed, and the directory of runs and report."""

    study: Study
    runs: dict[tuple[Cell, int], Planned]
    directory: Path
    made: dict[tuple[Cell, int], Finished]
    """Runs that were made elsewhere: in reports of other machines, and in directories of other studies."""

    @staticmethod
    def read(file: Path, directory: Path | None = None, results: Sequence[Path] = ()) -> Plan:
        """`results`: each the report.json of another machine, or a directory of runs. Raises SettingsError for a file
        that is no study, for settings of a run that are none, and for a report of runs with other settings."""
        study = load_study(file)
        directory = directory or Path("runs") / "studies" / file.stem
        runs: dict[tuple[Cell, int], Planned] = {}
        for seed in study.seeds:  # whole seeds first: what is there early compares all cells
            for cell in study.cells:
                name = study.name(cell, seed)
                settings = settings_of(study, file, cell, seed, directory / "runs")
                runs[cell, seed] = Planned(name, settings, directory / "runs" / name)
        made = {key: run for source in results for key, run in _made(source, study, runs).items()}
        return Plan(study, runs, directory, made)

    def chosen(self, only: Sequence[str]) -> list[Planned]:
        """The runs whose name has one of these texts in it, all where there are none; without those that were made
        elsewhere. Raises SettingsError where no run has."""
        found = [key for key, run in self.runs.items() if not only or any(text in run.name for text in only)]
        if not found:
            raise SettingsError(
                f"--only {' '.join(only)}: no run is called so, as {next(iter(self.runs.values())).name} is"
            )
        return [self.runs[key] for key in found if key not in self.made]

    def print_runs(self, only: Sequence[str], gpu: str | None) -> None:
        """What would be run, what is there, and the time and the memory that the rest should take."""
        runs = self.chosen(only)
        check_runs(runs)
        for run in runs:
            print(f"{run.name}: {'finished' if run.is_finished else count_of(run.batches, 'batch', 'es')}")
        if self.made:
            print(f"{count_of(len(self.made), 'run')} made elsewhere")
        missing = [run for run in runs if not run.is_finished]
        print(f"{count_of(len(missing), 'run')} to make")
        for line in expect(missing, gpu):
            print(line)

    def run(self, only: Sequence[str], jobs: int | None) -> None:
        """Make the runs that are missing. Raises RunsFailedError for those that failed, SettingsError for those that
        cannot be made, or where another process makes them."""
        with refusing("", RunLockedError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with locked(self.directory):
                run_missing(self.chosen(only), self.directory, jobs or self.study.jobs)

    def report(self) -> None:
        """Write the report of the finished runs, and print its verdicts. Raises SettingsError for a run that was made
        with other settings."""
        finished = {key: run for key, run in self.runs.items() if run.is_finished}
        check_runs(list(finished.values()))
        own = {key: _read(run.path) for key, run in finished.items()}
        found = {key: (self.made | own)[key] for key in self.runs if key in own or key in self.made}
        report = Report(self.study, found, {key: run.settings for key, run in self.runs.items()})
        with refusing(f"--directory {self.directory}"):
            page = report.write(self.directory)
        report.print_summary(page)


def _made(source: Path, study: Study, runs: Mapping[tuple[Cell, int], Planned]) -> dict[tuple[Cell, int], Finished]:
    """The runs of the study that a report or a directory has; it may have more cells, or more seeds."""
    found = dict(_made_in(source, runs)) if source.is_dir() else dict(_made_of(source, study, runs))
    if not found:
        raise SettingsError(f"--results {source}: it has no run of this study")
    return found


def _made_of(
    source: Path, study: Study, runs: Mapping[tuple[Cell, int], Planned]
) -> Iterator[tuple[tuple[Cell, int], Finished]]:
    """By cell and seed, from a report of this study."""
    for record in read_records(source):
        key = tuple(record["cell"].get(axis, "") for axis in study.grid), record["seed"]
        if key in runs:
            yield key, from_record(record, runs[key].settings, source)


def _made_in(directory: Path, runs: Mapping[tuple[Cell, int], Planned]) -> Iterator[tuple[tuple[Cell, int], Finished]]:
    """By their settings, from the finished runs in a directory, whatever study they were made for."""
    if not (configs := sorted([*directory.glob("*/config.toml"), *directory.glob("runs/*/config.toml")])):
        raise SettingsError(f"--results {directory}: no run is in it, nor in its directory runs")
    there: dict[str, Path] = {}
    for config in configs:
        settings = load_settings(config)
        with refusing(f"--results {config}"):
            if Planned(config.parent.name, settings, config.parent).is_finished:
                there.setdefault(_fingerprint(settings), config.parent)
    for key, run in runs.items():
        if made := there.get(_fingerprint(run.settings)):
            yield key, _read(made)


def _read(run: Path) -> Finished:
    """A finished run. Raises SettingsError for damaged records."""
    with refusing(f"run {run.name}"):
        return Finished.read(run)


def _fingerprint(settings: Settings) -> str:
    """The same for runs that learn the same: one seed, one objective whatever recipe it is written as, and the same of
    all other settings."""
    objective = resolve(settings.objective.recipe, settings.objective.overrides).composition
    matter = settings_that_matter(settings).items()
    others = {name: value for name, value in matter if not name.startswith("objective.")}
    return json.dumps(others | {"run.seed": settings.run.seed, "objective": asdict(objective)}, sort_keys=True)
