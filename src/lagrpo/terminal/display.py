"""The display of a run while it trains, and its summary at the end.

A display has the methods of a callback (lifecycle/callbacks.py). On a terminal it shows a table of
the last batches, a progress bar and the present phase. Elsewhere (a file, a pipe, a CI log) it
prints one line per batch under a header. A metric without a value is "–".
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from lagrpo.logs import print_text
from lagrpo.terminal.text import (
    ABSENT,
    MARKS,
    Text,
    clipped,
    count_of,
    duration,
    finite,
    formatted,
    formatted_interval,
    typed_command,
    unscored_text,
)
from lagrpo.types import JsonView, Range, is_correct

Metrics = JsonView

MAX_ROWS = 10
"""Batches in the live table."""

MAX_SAMPLES = 3
"""Prompts whose completions are shown before and after training."""

MAX_CHARACTERS = 300
"""Characters of a prompt or a completion."""

LINES_AROUND_TABLE = 8
"""Lines of the live display besides the batches: title, headings, legend, progress and phase."""

COLUMN_GAP = 2
"""Spaces between two columns."""

LEGEND = (
    "no signal: groups whose rewards are all equal · staleness: max, in updates\n"
    "clipped: tokens outside the clip range · sampled/s, learned/s: tokens per second\n"
    "sampled/s is high for batches sampled ahead: the run hardly waits for them"
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. It shows the sum of some metrics."""

    heading: str
    width: int
    keys: Sequence[str]
    form: str
    """of the number, in Python's format mini-language"""

    def text(self, metrics: Metrics) -> str:
        """Returns the text of a batch in this column."""
        values = []
        for key in self.keys:
            value = finite(metrics.get(key))
            if value is not None:
                values.append(value)
        return formatted(sum(values) if values else None, self.form)


# In order of importance: a narrow terminal shows the first ones.
COLUMNS = (
    Column("step", 6, ["step"], "d"),
    Column("reward", 7, ["reward"], ".3f"),
    Column("no signal", 9, ["frac_reward_zero_std"], ".0%"),
    Column("staleness", 9, ["staleness/max"], ".0f"),
    Column("KL to α", 8, ["rollout/kl"], ".1e"),
    Column("clipped", 7, ["clip_ratio/low_mean", "clip_ratio/high_mean"], ".1%"),
    Column("sampled/s", 9, ["tokens_per_s/generate"], ",.0f"),
    Column("learned/s", 9, ["tokens_per_s/train"], ",.0f"),
    Column("seconds", 7, ["time/step"], ".1f"),
)


def make_display(console: Console | None = None) -> Display:
    """Returns the display of a terminal, of a notebook, or one that prints plain lines."""
    console = console or Console()
    if console.is_jupyter:
        from lagrpo.terminal.notebook import NotebookDisplay  # it builds on this module

        return NotebookDisplay(console)
    # console.is_terminal is also true for a CI log with FORCE_COLOR.
    if console.file.isatty() and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class Display:
    """The display of the other ranks, which shows nothing."""

    def on_start(self, settings: JsonView, environment: JsonView, batch: int) -> None: ...
    def phase(self, name: str) -> None: ...
    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None: ...
    def on_evaluation(self, name: str, summary: Metrics, records: Sequence[Metrics]) -> None: ...
    def note(self, text: str) -> None: ...
    def on_end(self, status: str, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The summary of an evaluation, and its first records."""

    summary: Metrics
    records: Sequence[Metrics]


NO_EVALUATION = Evaluation({}, ())


class PlainDisplay(Display):
    """The display of a log: one line per batch, and a summary at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.title = ""
        self.path = Path()
        self.reward_range: Range = (0.0, 1.0)
        self.total = 0
        self.resumed = 0  # batches that were finished when the run was resumed
        self.evaluations: dict[str, Evaluation] = {}
        # The last batches. The tuple is replaced, never changed: a thread may be drawing it.
        self.rows: tuple[Metrics, ...] = ()

    def on_start(self, settings: JsonView, environment: JsonView, batch: int) -> None:
        self.title = settings["run"]["name"]
        self.path = Path(settings["run"]["output_dir"]) / self.title
        self.reward_range = settings["task"]["reward_range"]
        self.total = settings["schedule"]["batches"]
        self.resumed = batch
        self.evaluations = {}
        self.show_start()

    def show_start(self) -> None:
        self.note(f"directory   {self.path}")

    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        is_first = not self.rows
        self.add_row(metrics)
        headings = []
        texts = []
        for column in COLUMNS:
            headings.append(column.heading.rjust(column.width))
            texts.append(column.text(metrics).rjust(column.width))
        headings.append("left".rjust(8))
        texts.append(self.time_left().rjust(8))
        gap = " " * COLUMN_GAP
        if is_first:
            self.note(f"{LEGEND}\n{gap.join(headings)}")
        self.note(gap.join(texts))

    def add_row(self, metrics: Metrics) -> None:
        """Keeps the metrics of a batch, and forgets the oldest ones."""
        self.rows = (*self.rows, dict(metrics))[-MAX_ROWS:]

    def on_evaluation(self, name: str, summary: Metrics, records: Sequence[Metrics]) -> None:
        self.evaluations[name] = Evaluation(summary, records[:MAX_SAMPLES])

    def note(self, text: str) -> None:
        print_text(text, file=self.console.file, flush=True)

    def time_left(self) -> str:
        """Returns the time of the remaining batches, for example 2:41; "–" without a batch.

        The pace is the median of the recent batches. The first batch warms up, so it counts only if
        it is the only one.
        """
        paces = []
        for row in self.rows[1:] or self.rows:
            pace = finite(row.get("time/step"))
            if pace is not None:
                paces.append(pace)
        if not paces:
            return ABSENT
        remaining = self.total - self.done()
        return duration(remaining * median(paces))

    def done(self) -> int:
        """Returns the number of finished batches."""
        if not self.rows:
            return self.resumed
        return int(finite(self.rows[-1].get("step")) or 0)

    def on_end(self, status: str, detail: str) -> None:
        """Prints results before and after, completions side by side, and the next commands.

        A failed run prints nothing.
        """
        if status == "failed":
            return
        from lagrpo.runs.plots import reward_curve

        self.console.print(Text(f"\n{detail}", style="bold"), soft_wrap=True)
        set_names = [name.partition(".")[2] for name in self.evaluations]
        for set_name in dict.fromkeys(set_names):
            self.show_set(set_name)
        lines = {"run": str(self.path)}
        if self.done():
            lines["reward curve"] = str(reward_curve(self.path))
            view = f"{typed_command()} view {shlex.quote(str(self.path))}"
            lines["next"] = view
            lines["as text"] = f"{view} --text"
        for label, text in lines.items():
            # Lines are not wrapped, so that they can be copied.
            self.console.print(Text.assemble((f"  {label:<14}", "dim"), text), soft_wrap=True)

    def show_set(self, set_name: str) -> None:
        """Prints pass@1 before and after, and completions of the same prompts.

        `set_name` is "" if the run has no named evaluation sets.
        """
        suffix = f".{set_name}" if set_name else ""
        before = self.evaluations.get(f"before{suffix}", NO_EVALUATION)
        after = self.evaluations.get(f"after{suffix}", NO_EVALUATION)
        lines = []
        if set_name:
            lines.append(set_name)
        if before.summary:
            lines.append(_result_line("before", before.summary))
        if after.summary:
            lines.append(_result_line("after", after.summary))
        if after.summary.get("pass@1_change") is not None:
            lines.append(_change_line(after.summary))
        for line in lines:
            self.console.print(Text(f"  {line}"), soft_wrap=True)
        if before.records or after.records:
            summary = after.summary or before.summary
            low, high = summary.get("reward_range", self.reward_range)
            self.console.print(_side_by_side(before.records, after.records, (low, high)))


def _result_line(moment: str, summary: Metrics) -> str:
    """Returns the line with pass@1 and its interval; `moment` is "before" or "after"."""
    counts = [
        count_of(summary["prompts"], "held-out prompt"),
        f"{count_of(summary['samples'], 'sample')} of each",
    ]
    unscored = unscored_text(summary)
    if unscored:
        counts.append(unscored)
    result = formatted_interval(summary, "pass@1", ".1%")
    return f"pass@1 {moment:<7}{result}   ({', '.join(counts)})"


def _change_line(summary: Metrics) -> str:
    """Returns the line with the change of pass@1 in percentage points, and its interval."""
    change = formatted(100 * summary["pass@1_change"], "+.1f")
    low = formatted(100 * summary["pass@1_change_low"], "+.1f")
    high = formatted(100 * summary["pass@1_change_high"], "+.1f")
    interval = f"95 % interval {low} to {high}"
    return f"change        {change:>6} points   {interval}   (paired by prompt)"


@dataclass(frozen=True, slots=True)
class Phase:
    """The present activity of a run; "" after its end.

    It is replaced: a thread may be drawing it.
    """

    name: str
    started: float
    """by time.monotonic"""


class LiveDisplay(PlainDisplay):
    """The display of a terminal: a table of the last batches, a progress bar and the present phase.

    At the end it prints the summary of `PlainDisplay`.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._phase = Phase("starting", time.monotonic())
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=5)

    def show_start(self) -> None:
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        self._phase = Phase(name, time.monotonic())

    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        self.add_row(metrics)

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))

    def on_end(self, status: str, detail: str) -> None:
        self.phase("")
        self._live.stop()
        super().on_end(status, detail)

    def render(self) -> Group:
        """Returns the screen as it is now. A thread of rich calls it."""
        legend = Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(self._render_table(), legend, self._render_progress(), self._render_phase())

    def _render_table(self) -> Table:
        table = Table(
            box=None,
            padding=(0, COLUMN_GAP, 0, 0),
            title=Text(self.title, style="bold"),
            title_justify="left",
        )
        columns = _fitting_columns(self.console.width)
        for column in columns:
            table.add_column(
                column.heading,
                justify="right",
                min_width=column.width,
                no_wrap=True,
                header_style="dim",
            )
        # The display must never be taller than the terminal.
        max_rows = max(1, self.console.height - LINES_AROUND_TABLE)
        for row in self.rows[-max_rows:]:
            table.add_row(*(column.text(row) for column in columns))
        return table

    def _render_progress(self) -> Table:
        done = self.done()
        total = max(self.total, 1)
        bar_width = max(10, min(40, self.console.width - 50))
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            f"batch {done} of {self.total}",
            ProgressBar(total=total, completed=done, width=bar_width),
            f"{done / total:.0%}",
            f"{self.time_left()} left",
        )
        return progress

    def _render_phase(self) -> Table:
        """Returns the line of the present phase; an empty one after the end."""
        activity = Table.grid(padding=(0, 1))
        phase = self._phase
        if phase.name:
            name = Text(phase.name, no_wrap=True, overflow="ellipsis")
            elapsed = Text(duration(time.monotonic() - phase.started), style="dim")
            activity.add_row(self._spinner, name, elapsed)
        return activity


def _fitting_columns(width: int) -> list[Column]:
    """Returns the first columns that fit into a line of this width."""
    columns = []
    end = 0
    for column in COLUMNS:
        end += column.width
        if end > width:
            break
        columns.append(column)
        end += COLUMN_GAP
    return columns


def _side_by_side(
    before: Sequence[Metrics], after: Sequence[Metrics], reward_range: Range
) -> Table:
    """Returns a table with the first completion of each record, before and after."""
    table = Table(show_lines=True, header_style="dim", border_style="dim")
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, overflow="fold")
    for old, new in zip_longest(before, after, fillvalue={}):
        prompt = old.get("prompt") or new.get("prompt") or ""
        table.add_row(
            Text(clipped(prompt, MAX_CHARACTERS)),
            _sample(old, reward_range),
            _sample(new, reward_range),
        )
    return table


def _sample(record: Metrics, reward_range: Range) -> Text:
    """Returns the first completion of a record, with a mark that says if it is correct."""
    if not record:
        return Text(ABSENT)
    reward = record["rewards"][0]
    completion = record["completions"][0] or "(empty)"
    # Records of several rewards say what is correct.
    decisions = record.get("is_correct") or [is_correct(reward, reward_range)]
    verdict = decisions[0]
    mark, style = MARKS[verdict]
    text = clipped(completion, MAX_CHARACTERS)
    return Text.assemble((f"{mark} ", f"bold {style}"), text)
