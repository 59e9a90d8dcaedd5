"""A study from its file to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.runs.lock import RunLockedError, locked
from lagrpo.study.file import Cell, Study, load_study, settings_of
from lagrpo.study.measures import Finished
from lagrpo.study.report import Report, print_summary
from lagrpo.study.running import Planned, check_runs, run_missing
from lagrpo.terminal.text import count_of


@dataclass(frozen=True, slots=True)
class Plan:
    """A study, all its runs by cell and seed, and the directory of runs and report."""

    study: Study
    runs: dict[tuple[Cell, int], Planned]
    directory: Path

    @staticmethod
    def read(file: Path, directory: Path | None = None) -> Plan:
        """Raises SettingsError for a file that is no study, and for settings of a run that are none."""
        study = load_study(file)
        directory = directory or Path("runs") / "studies" / file.stem
        runs: dict[tuple[Cell, int], Planned] = {}
        for seed in study.seeds:  # whole seeds first: what is there early compares all cells
            for cell in study.cells:
                name = study.name(cell, seed)
                settings = settings_of(study, file, cell, seed, directory / "runs")
                runs[cell, seed] = Planned(name, settings, directory / "runs" / name)
        return Plan(study, runs, directory)

    def chosen(self, only: Sequence[str]) -> list[Planned]:
        """The runs whose name has one of these texts in it; all where there are none. Raises SettingsError where no run
        has."""
        found = [run for run in self.runs.values() if not only or any(text in run.name for text in only)]
        if not found:
            raise SettingsError(
                f"--only {' '.join(only)}: no run is called so, as {next(iter(self.runs.values())).name} is"
            )
        return found

    def print_runs(self, only: Sequence[str]) -> None:
        """What would be run, and what is there."""
        runs = self.chosen(only)
        check_runs(runs)
        for run in runs:
            print(f"{run.name}: {'finished' if run.is_finished else count_of(run.batches, 'batch', 'es')}")
        print(f"{count_of(sum(not run.is_finished for run in runs), 'run')} to make")

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
        found = {key: Finished.read(run.path) for key, run in finished.items()}
        report = Report(self.study, found, {key: run.path for key, run in self.runs.items()})
        print_summary(report, report.write(self.directory))
