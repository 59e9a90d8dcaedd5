"""What `lagrpo verify` prints: a row for each check, what differs and where, what could not be checked and why."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lagrpo.errors import visible
from lagrpo.replay.findings import Check, Report

SHOWN = 8  # differences shown of each check


def print_report(report: Report, console: Console | None = None) -> None:
    """The whole report."""
    console = console or Console()
    table = Table(box=SIMPLE, header_style="dim", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("checked")
    for name in ("compared", "agree", "undecided", "differ"):
        table.add_column(name, justify="right")
    table.add_column("greatest difference", justify="right")
    for check in report.checks:
        table.add_row(*_cells(check))
    console.print(Text(report.run, "bold"))
    console.print(table)
    for check in report.checks:
        if check.note:
            console.print(Text(f"{check.name}: {check.note}", "dim"))
    for check in report.checks:
        _print_differences(check, console)
    if report.skipped:
        console.print(Text("\nNot checked", "bold"))
    for (what, why), count in report.skipped.items():
        console.print(Text(f"  {count:,} {visible(what)}: {visible(why)}"))
    console.print(Text(f"\n{verdict(report)}", "bold"))


def verdict(report: Report) -> str:
    """The last line.

    >>> verdict(Report("runs/a"))
    'Nothing differs.'
    """
    count = len(report.differences)
    return "Nothing differs." if not count else "1 value differs." if count == 1 else f"{count:,} values differ."


def _cells(check: Check) -> tuple[Text | str, ...]:
    differ = len(check.differences)
    greatest = "" if check.greatest is None else f"{check.greatest:.2g} {check.unit}".rstrip()
    marked = Text(f"{differ:,}", "bold red" if differ else "")
    undecided = f"{check.undecided:,}" if check.undecided else ""
    return check.name, f"{check.compared:,}", f"{check.agree:,}", undecided, marked, greatest


def _print_differences(check: Check, console: Console) -> None:
    if not check.differences:
        return
    console.print(Text(f"\n{check.name}", "bold red"))
    for difference in check.differences[:SHOWN]:
        console.print(Text(f"  {visible(str(difference))}"))
    if len(check.differences) > SHOWN:
        console.print(Text(f"  … and {len(check.differences) - SHOWN:,} more"))
