"""What a run shows while it goes on, and at its end: an observer of the run (see training/observers.py).

On a terminal: a live table of the last batches, a progress bar and what is being done right now. Elsewhere (a file, a
pipe, a CI log): one plain line per batch under a header, narrower than 120 columns. A metric without a value is "–".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    sparkline,
)
from lagrpo.types import is_right

Metrics = Mapping[str, Any]
ROWS = 10  # batches in the live table
SHOWN = 3  # completions shown before and after


class Column(NamedTuple):
    """One column of the table: its heading, its width, and the text of a batch's metrics."""

    heading: str
    width: int
    text: Callable[[Metrics], str]


def number(key: str, form: str) -> Callable[[Metrics], str]:
    """The text of one metric, in a format of Python's mini-language."""
    return lambda metrics: formatted(metrics.get(key), form)


def lag(metrics: Metrics) -> str:
    """The measured lag of the batch's tokens: one number, or the least and the greatest."""
    low, high = (formatted(metrics.get(key), ".0f") for key in ("lag_min", "lag_max"))
    return low if low == high else f"{low}..{high}"


def clip_share(metrics: Metrics) -> str:
    """The share of tokens outside the clip range on either side, at the last update on the batch."""
    low, high = metrics.get("clip_low_share_last"), metrics.get("clip_high_share_last")
    return ABSENT if low is None and high is None else formatted((low or 0) + (high or 0), ".1%")


def gained(metrics: Metrics) -> str:
    """J(π_k) - J(α), where its estimate means something."""
    return formatted(metrics.get("lag_improvement"), "+.3f") if metrics.get("lag_reliable") else ABSENT


PLAIN_WIDTH = 119  # of the lines of a log
LEGEND = (
    "no signal: groups with all rewards equal · lag: in updates, read from the tokens\n"
    "clipped: tokens outside the clip range · sampled/s, learned/s: tokens a second\n"
    "TV: between π_k and α, of whole completions · gained: J(π_k) - J(α), where enough completions estimate it"
)
# In order of importance: a narrow terminal shows the first ones, 80 columns hold the first eight.
COLUMNS = (
    Column("batch", 6, number("batch", "d")),
    Column("reward", 7, number("reward_mean", ".3f")),
    Column("no signal", 9, number("zero_variance_share", ".0%")),
    Column("lag", 7, lag),
    Column("KL to α", 8, number("kl_alpha", ".1e")),
    Column("clipped", 7, clip_share),
    Column("sampled/s", 9, number("tokens_per_s_sampling", ",.0f")),
    Column("learned/s", 9, number("tokens_per_s_learning", ",.0f")),
    Column("seconds", 7, number("seconds_total", ".1f")),
    Column("TV", 5, number("tv_sequence", ".2f")),
    Column("gained", 7, gained),
    Column("new α", 5, lambda metrics: "yes" if metrics.get("synced") else ""),
    Column("unscored", 8, number("unscored", "d")),
    Column("tokens", 6, number("tokens_mean", ".0f")),
    Column("stage", 5, number("stage", "d")),
    Column("σ", 5, number("sigma_mean", ".2f")),
)


def columns_for(width: int) -> list[Column]:
    """The columns that fit, with two spaces between them."""
    ends = accumulate(column.width + 2 for column in COLUMNS)
    return [column for column, end in zip(COLUMNS, ends, strict=True) if end - 2 <= width]


def make_display(mode: Literal["auto", "live", "plain", "none"] = "auto", console: Console | None = None) -> Display:
    """The live display on a terminal and plain lines elsewhere, or what `mode` says."""
    console = console or Console(force_terminal=True if mode == "live" else None)
    if mode == "auto":
        # Ask the file, not the console: FORCE_COLOR makes a console take a CI log for a terminal.
        mode = "live" if console.file.isatty() and not console.is_dumb_terminal else "plain"
    return {"live": LiveDisplay, "plain": PlainDisplay, "none": Display}[mode](console)


class Display:
    """Shows nothing."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None: ...
    def phase(self, name: str) -> None: ...
    def batch(self, step: Any, metrics: Metrics, rollouts: Sequence[Metrics]) -> None: ...
    def evaluation(self, name: str, batch: int, summary: Metrics, records: Sequence[Metrics]) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, status: str, detail: str) -> None: ...


class _Shown(Display):
    """What both displays have: the title, the number of batches, and the summary at the end."""

    title = ""
    total = 0

    def start(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        run, schedule = settings["run"], settings["schedule"]
        self.title, self.total = run["name"], schedule["stages"] * schedule["batches"]
        self._path = Path(run["directory"]) / run["name"]
        self._range = settings["task"]["reward_range"]
        self._evaluations: dict[str, tuple[Metrics, Sequence[Metrics]]] = {}
        self._begun = False

    def batch(self, step: Any, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        self._begun = True

    def evaluation(self, name: str, batch: int, summary: Metrics, records: Sequence[Metrics]) -> None:
        self._evaluations[name] = summary, records[:SHOWN]

    def end(self, status: str, detail: str) -> None:
        """Print pass@1 before and after with their intervals, completions of the same prompts before and after side by
        side, where the run and its reward curve lie, and the commands to try next; nothing of a run that failed."""
        if status == "failed":
            return
        from lagrpo.runs.plots import reward_curve

        curve = reward_curve(self._path) if self._begun else None
        self.console.print(Text(f"\n{detail}", style="bold"))
        for of_set in dict.fromkeys(name.partition(".")[2] for name in self._evaluations):
            self._show_set(of_set)
        places = (("run", self._path), ("reward curve", curve))
        commands = (("next", f"lagrpo show {self._path}"), ("in a browser", f"lagrpo view {self._path}"))
        for name, what in (*places, *commands):
            if what is not None:
                # Never wrapped at the edge of the terminal: it is there to be copied.
                self.console.print(Text.assemble((f"  {name:<14}", "dim"), str(what)), soft_wrap=True)

    def _show_set(self, of_set: str) -> None:
        """Before and after of one set of prompts, or of the only one."""
        names = [f"{moment}.{of_set}" if of_set else moment for moment in ("before", "after")]
        before, after = (self._evaluations.get(name, ({}, ())) for name in names)
        if not (before[0] or after[0]):
            return
        if of_set:
            self.console.print(Text(f"  {of_set}", style="bold"))
        said = [(moment, e) for moment, (e, _) in (("before", before), ("after", after)) if e]
        lines = [f"pass@1 {moment:<7}{_pass_at_1(e)}" for moment, e in said]
        if after[0].get("pass_at_1_change") is not None:
            lines.append(f"change        {_change(after[0])}")
        for line in lines:
            self.console.print(Text(f"  {line}"), soft_wrap=True)
        if before[1] or after[1]:
            scale = tuple((after[0] or before[0]).get("reward_range", self._range))
            self.console.print(self._samples(before[1], after[1], scale))

    def _samples(self, before: Sequence[Metrics], after: Sequence[Metrics], scale: Any) -> Table:
        """The first completion of each of these records, whose rewards lie in the range `scale`."""
        table = Table(show_lines=True, header_style="dim", border_style="dim")
        for heading in ("prompt", "before", "after"):
            table.add_column(heading, overflow="fold")
        for old, new in zip_longest(before, after, fillvalue={}):
            prompt = old.get("prompt") or new.get("prompt") or ""
            table.add_row(Text(clipped(visible(prompt), 300)), self._sample(old, scale), self._sample(new, scale))
        return table

    def _sample(self, record: Metrics, scale: Any) -> Text:
        if not record:
            return Text(ABSENT)
        reward, text, decided = record["rewards"][0], record["completions"][0], record.get("is_right", [None])[0]
        mark, style = MARKS[None if reward is None else is_right(reward, scale, decided)]
        return Text.assemble((f"{mark} ", f"bold {style}"), clipped(visible(text or "(empty)"), 300))


class PlainDisplay(_Shown):
    """One line per batch. The header stands above the first of them."""

    def start(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        super().start(settings, environment)
        self.note(f"{self.title}: {self.total} batches\n{LEGEND}")

    def batch(self, step: Any, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        columns = columns_for(PLAIN_WIDTH)
        if not self._begun:
            if (left := self.total - int(finite(metrics.get("batch")) or 0)) > 0:
                self._print(f"about {time_left([metrics], left)} left at the pace of the first batch")
            self._print("  ".join(column.heading.rjust(column.width) for column in columns))
        super().batch(step, metrics, rollouts)
        self._print("  ".join(column.text(metrics).rjust(column.width) for column in columns))

    def note(self, text: str) -> None:
        self._print(visible(text))

    def _print(self, line: str) -> None:
        print(line.rstrip(), file=self.console.file, flush=True)


class LiveDisplay(_Shown):
    """A table of the last batches, the reward so far as a line of blocks, a progress bar and the present phase."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # Replaced, never changed in place: the thread that redraws reads them at any moment.
        self._rows: tuple[Metrics, ...] = ()
        self._rewards: tuple[float, ...] = ()
        self._phase: tuple[str, float] = ("starting", time.monotonic())
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=5)

    def start(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        super().start(settings, environment)
        self._live.start(refresh=True)

    def end(self, status: str, detail: str) -> None:
        self._phase = ("", time.monotonic())
        self._live.stop()
        super().end(status, detail)

    def phase(self, name: str) -> None:
        self._phase = (name, time.monotonic())

    def batch(self, step: Any, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        super().batch(step, metrics, rollouts)
        self._rows = (*self._rows, dict(metrics))[-ROWS:]
        if (reward := finite(metrics.get("reward_mean"))) is not None:
            self._rewards = (*self._rewards, reward)

    def note(self, text: str) -> None:
        self.console.print(Text(visible(text), style="dim"))

    def _render(self) -> Group:
        legend = Text(LEGEND, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(self._table(), legend, self._progress(), self._activity())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), title=Text(self.title, style="bold"), title_justify="left")
        chosen = columns_for(self.console.width)
        for column in chosen:
            table.add_column(column.heading, justify="right", min_width=column.width, no_wrap=True, header_style="dim")
        for row in self._rows[-max(1, self.console.height - 7) :]:  # never taller than the terminal
            table.add_row(*(column.text(row) for column in chosen))
        return table

    def _progress(self) -> Table:
        done = int(finite(self._rows[-1].get("batch")) or 0) if self._rows else 0
        grid = Table.grid(padding=(0, 1))
        left = time_left(self._rows, self.total - done)
        bar = ProgressBar(total=max(self.total, 1), completed=done, width=max(10, min(40, self.console.width - 50)))
        grid.add_row(f"batch {done} of {self.total}", bar, f"{done / max(self.total, 1):.0%}", f"{left} left")
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


def _pass_at_1(summary: Metrics) -> str:
    counts = [count_of(summary[key], one) + rest for key, one, rest in COUNTS if summary.get(key) is not None]
    return formatted_interval(summary, "pass_at_1", ".1%") + (f"   ({', '.join(counts)})" if counts else "")


def _change(after: Metrics) -> str:
    value, low, high = (formatted(100 * after[f"pass_at_1_change{end}"], "+.1f") for end in ("", "_low", "_high"))
    return f"{value:>6} points   95 % interval {low} to {high}   (paired by prompt; intervals: for all such prompts)"


COUNTS = (("prompts", "held-out prompt", ""), ("samples", "sample", " of each"))
