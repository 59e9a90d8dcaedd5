"""What a run shows while it trains, and at its end. It has the methods of a callback (training/callbacks.py).

On a terminal: a table of the last batches, a progress bar and what is being done right now. Elsewhere (a file, a pipe,
a CI log): one line per batch under a header. A metric without a value is "–".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lagrpo.errors import visible
from lagrpo.terminal.text import (
    ABSENT,
    MARKS,
    clipped,
    count_of,
    duration,
    finite,
    formatted,
    formatted_interval,
    unscored_text,
)
from lagrpo.types import is_correct

Metrics = Mapping[str, Any]
ROWS = 10  # batches in the live table
SHOWN = 3  # completions shown before and after


LEGEND = (
    "no signal: groups whose rewards are all equal · staleness: max, in updates\n"
    "clipped: tokens outside the clip range · sampled/s, learned/s: tokens per second"
)


class Column(NamedTuple):
    """One column of the table: its heading, its width, the metrics whose sum it shows, and their format."""

    heading: str
    width: int
    keys: Sequence[str]
    form: str

    def text(self, metrics: Metrics) -> str:
        """What a batch has in this column."""
        values = [value for key in self.keys if (value := finite(metrics.get(key))) is not None]
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
    """The live display on a terminal and plain lines elsewhere."""
    console = console or Console()
    live = (
        console.file.isatty() and not console.is_dumb_terminal
    )  # FORCE_COLOR makes a CI log a terminal for rich
    return LiveDisplay(console) if live else PlainDisplay(console)


class Display:
    """Shows nothing, on the other ranks."""

    def on_start(
        self, settings: Mapping[str, Any], environment: Mapping[str, Any], batch: int
    ) -> None: ...
    def phase(self, name: str) -> None: ...
    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None: ...
    def on_evaluation(self, name: str, summary: Metrics, records: Sequence[Metrics]) -> None: ...
    def note(self, text: str) -> None: ...
    def on_end(self, status: str, detail: str) -> None: ...


class PlainDisplay(Display):
    """One line per batch, and a summary at the end."""

    title, total = "", 0
    resumed = 0  # batches that were finished when the run was resumed
    rows: tuple[
        Metrics, ...
    ] = ()  # the last batches; replaced, never changed in place: a thread may be drawing them

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_start(
        self, settings: Mapping[str, Any], environment: Mapping[str, Any], batch: int
    ) -> None:
        run, schedule = settings["run"], settings["schedule"]
        self.title, self.total, self.resumed = run["name"], schedule["batches"], batch
        self.path, self.range = (
            Path(run["output_dir"]) / run["name"],
            settings["task"]["reward_range"],
        )
        self.evaluations: dict[str, tuple[Metrics, Sequence[Metrics]]] = {}
        self.show_start()

    def show_start(self) -> None:
        self.note(f"directory   {self.path}")

    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        if not self.rows:
            heading = "  ".join(
                [*(column.heading.rjust(column.width) for column in COLUMNS), "    left"]
            )
            self.note(f"{LEGEND}\n{heading}")
        self.rows = (*self.rows, dict(metrics))[-ROWS:]
        texts = [column.text(metrics).rjust(column.width) for column in COLUMNS]
        self.note("  ".join([*texts, self.time_left().rjust(8)]))

    def on_evaluation(self, name: str, summary: Metrics, records: Sequence[Metrics]) -> None:
        self.evaluations[name] = summary, records[:SHOWN]

    def note(self, text: str) -> None:
        print(visible(text), file=self.console.file, flush=True)

    def time_left(self) -> str:
        """The time that the remaining batches will take, for example 2:41, at the median pace of the recent ones. The
        first batch warms up, so it counts only if it is the only one."""
        paces = [
            pace
            for row in self.rows[1:] or self.rows
            if (pace := finite(row.get("time/step"))) is not None
        ]
        return duration((self.total - self.done()) * median(paces)) if paces else ABSENT

    def done(self) -> int:
        """How many batches are finished."""
        return int(finite(self.rows[-1].get("step")) or 0) if self.rows else self.resumed

    def on_end(self, status: str, detail: str) -> None:
        """Unless the run failed, print pass@1 before and after, completions side by side, and the next commands."""
        if status == "failed":
            return
        from lagrpo.runs.plots import reward_curve

        self.console.print(Text(f"\n{detail}", style="bold"), soft_wrap=True)
        for of_set in dict.fromkeys(name.partition(".")[2] for name in self.evaluations):
            self.show_set(of_set)
        lines = {"run": self.path} | (
            {"reward curve": reward_curve(self.path)} if self.done() else {}
        )
        lines |= {"next": f"lagrpo view {self.path}", "as text": f"lagrpo view {self.path} --text"}
        for name, what in lines.items():  # not wrapped: it is there to be copied
            self.console.print(Text.assemble((f"  {name:<14}", "dim"), str(what)), soft_wrap=True)

    def show_set(self, of_set: str) -> None:
        """pass@1 before and after, and completions of the same prompts, for one evaluation set or the only one."""
        moments = {
            moment: f"{moment}.{of_set}" if of_set else moment for moment in ("before", "after")
        }
        made = {moment: self.evaluations.get(name, ({}, ())) for moment, name in moments.items()}
        lines = [of_set] if of_set else []
        for moment, (found, _) in made.items():
            if found:
                prompts = count_of(found["prompts"], "held-out prompt")
                samples = f"{count_of(found['samples'], 'sample')} of each"
                counts = ", ".join(filter(None, [prompts, samples, unscored_text(found)]))
                result = formatted_interval(found, "pass@1", ".1%")
                lines.append(f"pass@1 {moment:<7}{result}   ({counts})")
        (before, old), (after, new) = made.values()
        if after.get("pass@1_change") is not None:
            value, low, high = (
                formatted(100 * after[f"pass@1_change{end}"], "+.1f")
                for end in ("", "_low", "_high")
            )
            which = "(paired by prompt)"
            lines.append(
                f"change        {value:>6} points   95 % interval {low} to {high}   {which}"
            )
        for line in lines:
            self.console.print(Text(f"  {line}"), soft_wrap=True)
        if old or new:
            self.console.print(
                _side_by_side(old, new, tuple((after or before).get("reward_range", self.range)))
            )


class LiveDisplay(PlainDisplay):
    """A table of the last batches, a progress bar and the present phase; the same summary."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._phase, self._spinner = ("starting", time.monotonic()), Spinner("dots")
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=5)

    def show_start(self) -> None:
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        self._phase = (name, time.monotonic())

    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        self.rows = (*self.rows, dict(metrics))[-ROWS:]

    def note(self, text: str) -> None:
        self.console.print(Text(visible(text), style="dim"))

    def on_end(self, status: str, detail: str) -> None:
        self._phase = ("", time.monotonic())
        self._live.stop()
        super().on_end(status, detail)

    def render(self) -> Group:
        """What is on the screen right now."""
        table = Table(
            box=None,
            padding=(0, 2, 0, 0),
            title=Text(self.title, style="bold"),
            title_justify="left",
        )
        done, width = self.done(), self.console.width
        ends = accumulate(column.width + 2 for column in COLUMNS)  # two spaces between them
        columns = [column for column, end in zip(COLUMNS, ends, strict=True) if end - 2 <= width]
        for column in columns:
            table.add_column(
                column.heading,
                justify="right",
                min_width=column.width,
                no_wrap=True,
                header_style="dim",
            )
        for row in self.rows[-max(1, self.console.height - 7) :]:  # never taller than the terminal
            table.add_row(*(column.text(row) for column in columns))
        progress, activity = Table.grid(padding=(0, 1)), Table.grid(padding=(0, 1))
        bar = ProgressBar(
            total=max(self.total, 1), completed=done, width=max(10, min(40, width - 50))
        )
        percent = f"{done / max(self.total, 1):.0%}"
        progress.add_row(f"batch {done} of {self.total}", bar, percent, f"{self.time_left()} left")
        if name := self._phase[0]:
            elapsed = Text(duration(time.monotonic() - self._phase[1]), style="dim")
            activity.add_row(
                self._spinner, Text(visible(name), no_wrap=True, overflow="ellipsis"), elapsed
            )
        return Group(
            table, Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis"), progress, activity
        )


def _side_by_side(before: Sequence[Metrics], after: Sequence[Metrics], scale: Any) -> Table:
    """The first completion of each of these records, whose rewards lie in the range `scale`."""
    table = Table(show_lines=True, header_style="dim", border_style="dim")
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, overflow="fold")
    for old, new in zip_longest(before, after, fillvalue={}):
        prompt = old.get("prompt") or new.get("prompt") or ""
        table.add_row(Text(clipped(visible(prompt), 300)), _sample(old, scale), _sample(new, scale))
    return table


def _sample(record: Metrics, scale: Any) -> Text:
    if not record:
        return Text(ABSENT)
    reward, text, decided = (
        record["rewards"][0],
        record["completions"][0],
        record.get("is_correct", [None])[0],
    )
    mark, style = MARKS[None if reward is None else is_correct(reward, scale, decided)]
    return Text.assemble((f"{mark} ", f"bold {style}"), clipped(visible(text or "(empty)"), 300))
