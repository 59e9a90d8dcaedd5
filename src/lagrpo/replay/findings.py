"""What a replay found, and how it is printed: checks with their counts, differences with their places, and what could
not be checked and why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lagrpo.errors import visible

SHOWN = 8  # differences shown of each check


class UnreadableError(ValueError):
    """A file of a run is not whole, or not in the format that a replay reads."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of a run that its replay contradicts: the file, the place in it, and both values."""

    file: str
    place: str
    name: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = f"{self.file}, {self.place}" if self.place else self.file
        return f"{where}: {self.name} is {_short(self.recorded)}, the replay gives {_short(self.replayed)}"


@dataclass(slots=True)
class Check:
    """One row of the report. `note` is what a reader must know, such as the noise."""

    name: str
    unit: str = ""
    note: str = ""
    compared: int = 0
    undecided: int = 0
    differences: list[Difference] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """|recorded - replayed| of the numbers compared, in `unit`."""

    @property
    def agree(self) -> int:
        return self.compared - self.undecided - len(self.differences)

    def equal(self, file: str, place: str, name: str, recorded: Any, replayed: Any) -> None:
        """Compare values that must be the same."""
        self.compared += 1
        if recorded != replayed:
            self.differences.append(Difference(file, place, name, recorded, replayed))

    def near(
        self, file: str, place: str, name: str, recorded: float | None, replayed: float | None, tolerance: float
    ) -> None:
        """Compare numbers that may differ by rounding, or be absent (None) on both sides."""
        if recorded is None or replayed is None:
            self.equal(file, place, name, recorded, replayed)
            return
        self.compared += 1
        gap = abs(recorded - replayed)
        self.measure(gap)
        if not gap <= tolerance:
            self.differences.append(Difference(file, place, name, recorded, replayed))

    def measure(self, gap: float) -> None:
        """Note a finite |recorded - replayed|."""
        if math.isfinite(gap):
            self.gaps.append(gap)


@dataclass(slots=True)
class Report:
    """All checks of a run, and, as (what, why), how often something could not be checked."""

    run: str
    checks: list[Check] = field(default_factory=list)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)

    def check(self, name: str, unit: str = "", note: str = "") -> Check:
        """A new check at the end of the report."""
        self.checks.append(Check(name, unit, note))
        return self.checks[-1]

    def skip(self, what: str, why: str, count: int = 1) -> None:
        """Note what could not be checked."""
        if count:
            self.skipped[what, why] += count

    @property
    def differences(self) -> list[Difference]:
        return [difference for check in self.checks for difference in check.differences]


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else "absent" if value is None else repr(value)
    return text if len(text) <= 120 else text[:119] + "…"


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a row for each check, what differs and where, what could not be checked and why."""
    console = console or Console()
    table = Table("checked", box=SIMPLE, header_style="dim", title_justify="left", padding=(0, 1, 0, 0))
    for name in ("compared", "agree", "undecided", "differ", "greatest difference"):
        table.add_column(name, justify="right")
    for check in report.checks:
        table.add_row(*_cells(check))
    console.print(Text(report.run, "bold"))
    console.print(table)
    for check in report.checks:
        if check.note:
            console.print(Text(f"{check.name}: {check.note}", "dim"))
    for check in report.checks:
        if check.differences:
            console.print(Text(f"\n{check.name}", "bold red"))
        for difference in check.differences[:SHOWN]:
            console.print(Text(f"  {visible(str(difference))}"))
        if len(check.differences) > SHOWN:
            console.print(Text(f"  … and {len(check.differences) - SHOWN:,} more"))
    if report.skipped:
        console.print(Text("\nNot checked", "bold"))
    for (what, why), count in report.skipped.items():
        console.print(Text(f"  {count:,} {visible(what)}: {visible(why)}"))
    differ = len(report.differences)
    verdict = "Nothing differs." if not differ else "1 value differs." if differ == 1 else f"{differ:,} values differ."
    console.print(Text(f"\n{verdict}", "bold"))


def _cells(check: Check) -> tuple[Text | str, ...]:
    differ = len(check.differences)
    greatest = f"{max(check.gaps):.2g} {check.unit}".rstrip() if check.gaps else ""
    undecided = f"{check.undecided:,}" if check.undecided else ""
    marked = Text(f"{differ:,}", "bold red" if differ else "")
    return check.name, f"{check.compared:,}", f"{check.agree:,}", undecided, marked, greatest
