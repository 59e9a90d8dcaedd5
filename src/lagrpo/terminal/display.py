"""What a run shows while it goes on, and at its end.

On a terminal: a live table of the last batches, a progress bar and what is being done right now. Elsewhere (a file, a
pipe, a CI log): one plain line per batch under a header, narrower than 120 columns. Both get the same metrics dict that
is recorded in metrics.jsonl; a metric that is missing, None or NaN is shown as "–".

    with make_display(total_batches=120, title="arithmetic-grpo-v10-i1") as display:
        display.phase("sampling", "128 completions")
        display.batch(metrics)
        display.note("weights v000060 written")
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lagrpo.errors import visible
from lagrpo.terminal.columns import LEGEND, PLAIN_WIDTH, Metrics, columns_for
from lagrpo.terminal.text import ABSENT, clipped, duration, finite, formatted, sparkline

ROWS = 10  # batches in the live table


class Display(Protocol):
    """A listener of the loop. Entered before the first batch; leaving it, by an error or Ctrl-C too, gives the terminal
    back as it was."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *error: object) -> None: ...
    def phase(self, name: str, detail: str = "") -> None:
        """What is being done from now on: "sampling", "judging", "learning" …"""
        ...

    def batch(self, metrics: Metrics) -> None:
        """A batch is finished."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...


def make_display(
    total_batches: int,
    title: str,
    mode: Literal["auto", "live", "plain", "none"] = "auto",
    console: Console | None = None,
) -> Display:
    """The live display on a terminal and plain lines elsewhere, or what `mode` says. `total_batches` is S·M."""
    console = console or Console(force_terminal=True if mode == "live" else None)
    if mode == "auto":
        # The file is asked, not the console: FORCE_COLOR makes a console of a CI log a terminal.
        mode = "live" if console.file.isatty() and not console.is_dumb_terminal else "plain"
    if mode == "none":
        return SilentDisplay()
    return (LiveDisplay if mode == "live" else PlainDisplay)(total_batches, title, console)


class SilentDisplay:
    """Shows nothing."""

    def __enter__(self) -> SilentDisplay:
        return self

    def __exit__(self, *error: object) -> None: ...
    def phase(self, name: str, detail: str = "") -> None: ...
    def batch(self, metrics: Metrics) -> None: ...
    def note(self, text: str) -> None: ...


class PlainDisplay:
    """One line per batch."""

    def __init__(self, total_batches: int, title: str, console: Console) -> None:
        self._title = f"{title}: {total_batches} batches"
        self._console = console

    def __enter__(self) -> PlainDisplay:
        self.note(f"{self._title}\n{LEGEND}")
        self._print("  ".join(column.heading.rjust(column.width) for column in columns_for(PLAIN_WIDTH)))
        return self

    def __exit__(self, *error: object) -> None:
        self._console.file.flush()

    def phase(self, name: str, detail: str = "") -> None:
        """Nothing: a line for each phase would hide the batches."""

    def batch(self, metrics: Metrics) -> None:
        self._print("  ".join(column.text(metrics).rjust(column.width) for column in columns_for(PLAIN_WIDTH)))

    def note(self, text: str) -> None:
        self._print(visible(text))

    def _print(self, line: str) -> None:
        self._console.file.write(line.rstrip() + "\n")
        self._console.file.flush()


class LiveDisplay:
    """A table of the last batches, the reward so far as a line of blocks, a progress bar and the present phase."""

    def __init__(self, total_batches: int, title: str, console: Console) -> None:
        self._total, self._title, self._console = total_batches, title, console
        # Replaced, never changed in place: the thread that redraws reads them at any moment.
        self._rows: tuple[Metrics, ...] = ()
        self._rewards: tuple[float, ...] = ()
        self._phase: tuple[str, float] = ("starting", time.monotonic())
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=5)

    def __enter__(self) -> LiveDisplay:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._phase = ("", time.monotonic())
        self._live.stop()

    def phase(self, name: str, detail: str = "") -> None:
        self._phase = (f"{name} {detail}".strip(), time.monotonic())

    def batch(self, metrics: Metrics) -> None:
        self._rows = (*self._rows, dict(metrics))[-ROWS:]
        if (reward := finite(metrics.get("reward_mean"))) is not None:
            self._rewards = (*self._rewards, reward)

    def note(self, text: str) -> None:
        self._console.print(Text(visible(text), style="dim"))

    def _render(self) -> Group:
        legend = Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(self._table(), legend, self._progress(), self._activity())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), title=Text(self._title, style="bold"), title_justify="left")
        chosen = columns_for(self._console.width)
        for column in chosen:
            table.add_column(column.heading, justify="right", min_width=column.width, no_wrap=True, header_style="dim")
        for row in self._rows[-max(1, self._console.height - 7) :]:  # never taller than the terminal
            table.add_row(*(column.text(row) for column in chosen))
        return table

    def _progress(self) -> Table:
        done = int(self._rows[-1].get("batch") or 0) if self._rows else 0
        grid = Table.grid(padding=(0, 1))
        left = time_left(self._rows, self._total - done)
        bar = ProgressBar(total=max(self._total, 1), completed=done, width=max(10, min(40, self._console.width - 50)))
        grid.add_row(f"batch {done} of {self._total}", bar, f"{done / max(self._total, 1):.0%}", f"{left} left")
        return grid

    def _activity(self) -> Table:
        name, since = self._phase
        grid = Table.grid(padding=(0, 1))
        for _ in range(5):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        cells: list[Any] = [Text("reward"), Text(sparkline(self._rewards), style="cyan")] if self._rewards else []
        if name:
            cells += [self._spinner, Text(visible(name)), Text(duration(time.monotonic() - since), style="dim")]
        grid.add_row(*cells)
        return grid


def time_left(recent: Sequence[Metrics], batches: int) -> str:
    """The time that `batches` more will take at the mean pace of the recent ones, for example 2:41."""
    paces = [pace for metrics in recent if (pace := finite(metrics.get("seconds_total"))) is not None]
    return duration(batches * sum(paces) / len(paces)) if paces else ABSENT


def summary(
    before: Metrics | None,
    after: Metrics | None,
    run_dir: Path,
    png: Path | None,
    samples_before: Sequence[Metrics],
    samples_after: Sequence[Metrics],
    next_command: str,
    headline: str = "Finished.",
    console: Console | None = None,
) -> None:
    """What is printed at the end of a run: pass@1 before and after with their intervals, some completions before and
    after side by side, where the run lies, and the command to try next.

    `before` and `after` are the summaries of evaluations (`pass_at_1`, `pass_at_1_low`, `pass_at_1_high`, and if known
    `prompts`, `samples` and the paired `pass_at_1_change`), None where there was none. A sample has `prompt`, `text`
    and `right` (None where it could not be scored); the two lists are of the same prompts in the same order.
    """
    console = console or Console()
    console.print(Text(f"\n{headline}", style="bold"))
    for name, evaluation in (("before", before), ("after", after)):
        if evaluation is not None:
            console.print(Text(f"  pass@1 {name:<7}{_interval(evaluation)}"), soft_wrap=True)
    if after is not None and after.get("pass_at_1_change") is not None:
        console.print(Text(f"  change        {_change(after)}"), soft_wrap=True)
    if samples_before or samples_after:
        console.print(_samples(samples_before, samples_after))
    for name, what in (("run", run_dir), ("reward curve", png), ("next", next_command)):
        if what is not None:
            # Never broken at the edge of the terminal: it is there to be copied.
            console.print(Text.assemble((f"  {name:<14}", "dim"), str(what)), soft_wrap=True)


def _interval(evaluation: Metrics) -> str:
    value, low, high = (formatted(evaluation.get(f"pass_at_1{end}"), ".1%") for end in ("", "_low", "_high"))
    counts = [f"{evaluation[key]:,} {what}" for key, what in COUNTS if evaluation.get(key) is not None]
    return f"{value:>6}   95 % interval {low} to {high}" + (f"   ({', '.join(counts)})" if counts else "")


def _change(after: Metrics) -> str:
    value, low, high = (formatted(100 * after[f"pass_at_1_change{end}"], "+.1f") for end in ("", "_low", "_high"))
    return f"{value:>6} points   95 % interval {low} to {high}   (paired by prompt; intervals: for all such prompts)"


COUNTS = (("prompts", "held-out prompts"), ("samples", "samples of each"))


MARKS = {None: ("?", "yellow"), True: ("✓", "green"), False: ("✗", "red")}


def _samples(before: Sequence[Metrics], after: Sequence[Metrics]) -> Table:
    table = Table(show_lines=True, header_style="dim", border_style="dim")
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, overflow="fold")
    for old, new in zip_longest(before, after, fillvalue={}):
        prompt = old.get("prompt") or new.get("prompt") or ""
        table.add_row(Text(clipped(visible(prompt), 300)), _sample(old), _sample(new))
    return table


def _sample(sample: Metrics) -> Text:
    if not sample:
        return Text(ABSENT)
    mark, style = MARKS[sample.get("right")]
    return Text.assemble((f"{mark} ", f"bold {style}"), clipped(visible(sample.get("text") or "(empty)"), 300))
