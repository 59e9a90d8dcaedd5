"""What a run shows while it goes on, and at its end.

On a terminal: a live table of the last batches, a progress bar and what is being done right now. Elsewhere (a file, a
pipe, a CI log): one plain line per batch under a header, narrower than 120 columns. Both are observers of the run (see
training/observers.py) and get the metrics that are recorded in metrics.jsonl; a metric that is missing, None or NaN is
shown as "–".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lagrpo.errors import visible
from lagrpo.terminal.columns import LEGEND, PLAIN_WIDTH, Metrics, columns_for
from lagrpo.terminal.text import ABSENT, clipped, duration, finite, formatted, sparkline
from lagrpo.types import is_right

ROWS = 10  # batches in the live table
SHOWN = 3  # completions shown before and after


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
        self._evaluations: dict[str, Evaluated] = {}
        self._begun = False

    def batch(self, step: Any, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        self._begun = True

    def evaluation(self, name: str, batch: int, summary: Metrics, records: Sequence[Metrics]) -> None:
        self._evaluations[name] = Evaluated(summary, first_samples(records, self._range))

    def end(self, status: str, detail: str) -> None:
        if status == "failed":
            return
        from lagrpo.runs.plots import reward_curve

        before, after = (self._evaluations.get(name) for name in ("before", "after"))
        curve = reward_curve(self._path) if self._begun else None
        print_summary(before, after, self._path, curve, detail, self.console)


class PlainDisplay(_Shown):
    """One line per batch. The header stands above the first of them."""

    def start(self, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        super().start(settings, environment)
        self.note(f"{self.title}: {self.total} batches\n{LEGEND}")

    def batch(self, step: Any, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        columns = columns_for(PLAIN_WIDTH)
        if not self._begun:
            self._print("  ".join(column.heading.rjust(column.width) for column in columns))
        super().batch(step, metrics, rollouts)
        self._print("  ".join(column.text(metrics).rjust(column.width) for column in columns))

    def note(self, text: str) -> None:
        self._print(visible(text))

    def _print(self, line: str) -> None:
        self.console.file.write(line.rstrip() + "\n")
        self.console.file.flush()


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
        done = int(self._rows[-1].get("batch") or 0) if self._rows else 0
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


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation as the summary shows it."""

    summary: Metrics
    """pass_at_1 and its `_low` and `_high`; if known also prompts, samples and the paired pass_at_1_change."""
    samples: Sequence[Metrics]
    """Each has `prompt`, `text` and `right` (None where it was not scored)."""


def first_samples(records: Sequence[Metrics], reward_range: tuple[float, float]) -> list[dict[str, Any]]:
    """The first completions of the first prompts of an evaluation, for people."""
    firsts = [(record["prompt"], record["completions"][0], record["rewards"][0]) for record in records[:SHOWN]]
    return [
        {"prompt": prompt, "text": text, "right": None if reward is None else is_right(reward, reward_range)}
        for prompt, text, reward in firsts
    ]


def print_summary(
    before: Evaluated | None,
    after: Evaluated | None,
    run_dir: Path,
    curve: Path | None,
    headline: str,
    console: Console,
) -> None:
    """What is printed at the end of a run: pass@1 before and after with their intervals, some completions before and
    after side by side (of the same prompts in the same order), where the run and its reward curve lie, and the command
    to try next. None stands for what is not there."""
    console.print(Text(f"\n{headline}", style="bold"))
    for name, evaluation in (("before", before), ("after", after)):
        if evaluation is not None:
            console.print(Text(f"  pass@1 {name:<7}{_interval(evaluation.summary)}"), soft_wrap=True)
    if after is not None and after.summary.get("pass_at_1_change") is not None:
        console.print(Text(f"  change        {_change(after.summary)}"), soft_wrap=True)
    samples = [evaluation.samples if evaluation is not None else [] for evaluation in (before, after)]
    if any(samples):
        console.print(_samples(*samples))
    for name, what in (("run", run_dir), ("reward curve", curve), ("next", f"lagrpo show {run_dir}")):
        if what is not None:
            # Never wrapped at the edge of the terminal: it is there to be copied.
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
