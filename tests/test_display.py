"""What a run shows while it goes on, on a terminal and elsewhere, and at its end."""

from __future__ import annotations

import math
import os
import pty
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lagrpo.terminal.display import (
    PLAIN_WIDTH,
    Display,
    LiveDisplay,
    PlainDisplay,
    columns_for,
    make_display,
    time_left,
)

METRICS = {
    "stage": 2, "batch": 12, "version": 12, "lag_min": 0, "lag_max": 9, "lag_mean": 4.5, "reward_mean": 0.25,
    "reward_std": 0.4, "zero_variance_share": 0.375, "unscored": 3, "failed": 0, "completions": 128,
    "tokens_mean": 9.4, "finished_share": 1.0, "kl_alpha": 0.00123, "clip_low_share_last": 0.01,
    "clip_high_share_last": 0.025, "lag_improvement": 0.1, "lag_reliable": 1,
    "tokens_per_s_sampling": 1340.4, "tokens_per_s_learning": 2750.0, "seconds_total": 5.04, "synced": 1,
}  # fmt: skip


def console(width: int = 120, terminal: bool = False) -> Console:
    return Console(file=StringIO(), width=width, height=40, force_terminal=terminal, color_system=None)


def written(to: Console) -> str:
    return to.file.getvalue()  # type: ignore[attr-defined]


def rendered(display: LiveDisplay, width: int) -> str:
    to = console(width)
    to.print(display._render())
    return written(to)


def settings(name: str = "run", batches: int = 120) -> dict[str, Any]:
    return {
        "run": {"directory": "runs", "name": name},
        "schedule": {"stages": 1, "batches": batches},
        "task": {"reward_range": (0.0, 1.0)},
    }


@contextmanager
def started(display: Display, name: str = "run", batches: int = 120) -> Iterator[Any]:
    display.start(settings(name, batches), {})
    try:
        yield display
    finally:
        display.end("failed", "")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_live_display_and_everything_else_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(console=Console(file=Terminal())), LiveDisplay)
    assert isinstance(make_display(console=console()), PlainDisplay)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_display(console=Console(file=StringIO())), PlainDisplay), "a log with colors"
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(console=Console(file=Terminal())), PlainDisplay)


def test_the_settings_may_ask_for_another_display():
    assert isinstance(make_display("live", console=console()), LiveDisplay)
    assert isinstance(make_display("plain", console=Console(file=Terminal())), PlainDisplay)
    to = console()
    with started(make_display("none", console=to)) as display:
        display.phase("sampling")
        display.batch(None, METRICS, [])
        display.evaluation("before", 0, BEFORE, [])
        display.note("nothing")
    display.end("finished", "Finished.")
    assert written(to) == ""


def test_plain_lines_have_every_metric_under_its_heading():
    to = console()
    with started(make_display(console=to), "arithmetic [v10]") as display:
        display.phase("sampling")
        display.batch(None, METRICS, [])
        display.note("weights [final] written")
    title, *_, left, header, line, note = written(to).splitlines()
    assert left == "about 9:04 left at the pace of the first batch", "108 batches of 5.04 s"
    assert title == "arithmetic [v10]: 120 batches"
    assert note == "weights [final] written"
    shown = [column.heading for column in columns_for(PLAIN_WIDTH)]
    cells = dict(zip(shown, _cells(line), strict=True))
    assert shown == _cells(header)
    assert cells == {
        "batch": "12", "reward": "0.250", "no signal": "38%", "lag": "0..9", "KL to α": "1.2e-03", "clipped": "3.5%",
        "sampled/s": "1,340", "learned/s": "2,750", "seconds": "5.0", "TV": "–", "gained": "+0.100", "new α": "yes",
        "unscored": "3",
    }  # fmt: skip


def _cells(line: str) -> list[str]:
    columns = columns_for(PLAIN_WIDTH)
    ends = [sum(column.width + 2 for column in columns[: at + 1]) - 2 for at in range(len(columns))]
    return [line[end - column.width : end].strip() for end, column in zip(ends, columns, strict=True)]


def test_every_plain_line_is_narrower_than_120_columns():
    to = console()
    with started(make_display(console=to)) as display:
        large = {"batch": 999_999, "reward_mean": -99.999, "kl_alpha": -1.2e-10, "unscored": 99_999, "lag_max": 9999}
        rates = {"tokens_per_s_sampling": 999_999.0, "tokens_per_s_learning": 999_999.0, "seconds_total": 86_400.0}
        display.batch(None, METRICS | large | rates, [])
    assert max(map(len, written(to).splitlines())) < 120


def test_a_gain_is_shown_only_where_it_means_something():
    column = next(column for column in columns_for(PLAIN_WIDTH) if column.heading == "gained")
    assert column.text(METRICS) == "+0.100"
    assert column.text(METRICS | {"lag_improvement": 55.13, "lag_reliable": 0}) == "–"


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "absent"])
@pytest.mark.parametrize("key", sorted(METRICS))
def test_any_metric_may_be_missing_on_either_display(key, missing):
    metrics = {name: value for name, value in METRICS.items() if name != key}
    if missing != "absent":
        metrics[key] = missing
    to = console()
    with started(PlainDisplay(to)) as plain, started(LiveDisplay(console(terminal=True))) as live:
        for display in (plain, live):
            display.batch(None, metrics, [])
            display.batch(None, {}, [])
    assert "–" in rendered(live, 100)
    assert set(_cells(written(to).splitlines()[-1])) == {"–", ""}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_the_live_display_fits_the_terminal(width):
    with started(LiveDisplay(console(width, terminal=True))) as live:
        for batch in range(1, 15):
            live.batch(None, METRICS | {"batch": batch}, [])
        live.phase("sampling 128 completions of [8] prompts")
        text = rendered(live, width)
    assert max(map(len, text.splitlines())) <= width
    assert "batch 14 of 120" in text


def test_a_usual_terminal_shows_what_the_run_is_judged_by():
    shown = {column.heading for column in columns_for(80)}
    assert shown >= {"batch", "reward", "no signal", "lag", "KL to α", "clipped", "sampled/s", "learned/s"}


def test_the_live_table_holds_the_last_ten_batches_with_the_phase_and_the_time_left():
    with started(LiveDisplay(console(100, terminal=True))) as live:
        for batch in range(1, 61):
            live.batch(None, METRICS | {"batch": batch, "seconds_total": 10.0}, [])
        live.phase("learning 2 of 4 [micro-batches]")
        lines = rendered(live, 100).splitlines()
    assert [int(line.split()[0]) for line in lines if line.split()[0].isdigit()] == list(range(51, 61))
    assert any("50%" in line and "10:00 left" in line for line in lines), "60 batches of 10 s"
    assert "learning 2 of 4 [micro-batches]" in lines[-1]


def test_time_left_is_unknown_before_the_first_batch():
    assert time_left([], 10) == "–"
    assert time_left([{"seconds_total": 2.0}, {}, {"seconds_total": 4.0}], 10) == "0:30"


LOOP = """
import time
from lagrpo.terminal.display import make_display
display = make_display()
run, schedule = {"directory": "runs", "name": "run"}, {"stages": 1, "batches": 100}
display.start({"run": run, "schedule": schedule, "task": {"reward_range": (0, 1)}}, {})
try:
    for batch in range(1, 101):
        display.phase("sampling")
        time.sleep(0.05)
        display.batch(None, {"batch": batch, "reward_mean": batch / 100}, [])
finally:
    display.end("failed", "")
"""


def test_ctrl_c_gives_the_terminal_back():
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="40")
        os.execv(sys.executable, [sys.executable, "-c", LOOP])
    shown = b""
    deadline = time.monotonic() + 60
    while not re.search(rb"batch [1-9]\d* of 100", shown) and time.monotonic() < deadline:
        shown += os.read(terminal, 65536)
    os.kill(process, signal.SIGINT)
    while chunk := _read(terminal):
        shown += chunk
    _, status = os.waitpid(process, 0)
    hide, give_back = b"\x1b[?25l", b"\x1b[?25h"
    assert shown.count(hide) == 1, "the cursor is hidden once, not at every frame"
    assert shown.index(hide) < shown.index(give_back) < shown.index(b"KeyboardInterrupt")
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


BEFORE = {"pass_at_1": 0.1525, "pass_at_1_low": 0.12, "pass_at_1_high": 0.19, "prompts": 1000, "samples": 4}
CHANGE = {"pass_at_1_change": 0.8275, "pass_at_1_change_low": 0.78, "pass_at_1_change_high": 0.871}
AFTER = {"pass_at_1": 0.98, "pass_at_1_low": 0.96, "pass_at_1_high": 1.0, **CHANGE}


def sample(prompt: str, text: str, reward: float | None = 0.0) -> dict[str, Any]:
    """The record of a prompt with two completions, of which the first is shown."""
    return {"prompt": prompt, "completions": [text, "other"], "rewards": [reward, 1.0]}


def summary(to: Console, evaluations: dict[str, Any], status: str = "finished", name: str = "run") -> str:
    """What the end of a run without batches prints."""
    display = PlainDisplay(to)
    display.start(settings(name), {})
    for key, (found, records) in evaluations.items():
        display.evaluation(key, 0, found, records)
    display.end(status, "Finished.")
    return written(to)


def test_the_summary_says_what_came_out_and_where_it_lies():
    name = "a-name-that-is-far-too-long-for-one-line-of-this-terminal" * 2
    old = [sample("2+3=", "[bold]6[/bold]\x1b[2J"), sample("3+3=", "nearly")]
    new = [sample("2+3=", "5", 1.0)]
    text = summary(console(80), {"before": (BEFORE, old), "after": (AFTER, new)}, name=name)
    interval = "  pass@1 before  15.2%   95 % interval 12.0% to 19.0%   (1,000 held-out prompts, 4 samples of each)"
    assert interval in text.splitlines()
    assert "  pass@1 after   98.0%   95 % interval 96.0% to 100.0%" in text.splitlines()
    assert "✗ [bold]6[/bold]␛[2J" in text
    assert "✓ 5" in text
    assert "✗ nearly" in text
    assert "  change         +82.8 points   95 % interval +78.0 to +87.1" in text
    run = Path("runs") / name
    assert f"  run           {run}" in text.splitlines(), "a path is never broken across lines"
    assert f"  next          lagrpo show {run}" in text.splitlines()
    assert text.splitlines()[-1] == f"  in a browser  lagrpo view {run}"


def test_the_summary_of_a_run_that_was_stopped_before_its_end():
    text = summary(console(80), {"before": (BEFORE, [sample("2+3=", "")])}, "interrupted")
    assert "Finished." in text
    assert "(empty)" in text
    assert "pass@1 after" not in text
    assert "reward curve" not in text


def test_the_samples_are_the_first_completions_of_the_first_prompts():
    rewards = enumerate([1.0, 0.5, None, 1.0])
    text = summary(console(), {"before": (BEFORE, [sample(f"{n}+1=", f"text {n}", reward) for n, reward in rewards])})
    assert all(mark in text for mark in ("✓ text 0", "✗ text 1", "? text 2"))
    assert "other" not in text
    assert "3+1=" not in text


@pytest.mark.parametrize(("status", "shown"), [("interrupted", True), ("failed", False)])
def test_a_run_that_failed_has_no_summary(status, shown):
    text = summary(console(), {"before": (BEFORE, [sample("2+3=", "5", 1.0)])}, status)
    assert ("pass@1 before" in text) == ("Finished." in text) == ("✓ 5" in text) == shown
