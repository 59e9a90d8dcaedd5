"""The output of a run, on a terminal and elsewhere, while it goes on and at its end."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lagrpo.terminal.display import COLUMNS, Display, LiveDisplay, PlainDisplay, make_display
from lagrpo.terminal.text import count_reasons, typed_command
from lagrpo.types import JsonObject

METRICS = {
    "step": 12,
    "staleness/max": 9,
    "reward": 0.25,
    "frac_reward_zero_std": 0.375,
    "rollout/kl": 0.00123,
    "clip_ratio/low_mean": 0.01,
    "clip_ratio/high_mean": 0.025,
    "tokens_per_s/generate": 1340.4,
    "tokens_per_s/train": 2750.0,
    "time/step": 5.04,
}
BEFORE = {"pass@1": 0.1525, "pass@1_low": 0.12, "pass@1_high": 0.19, "prompts": 1000, "samples": 4}
CHANGE = {"pass@1_change": 0.8275, "pass@1_change_low": 0.78, "pass@1_change_high": 0.871}
AFTER = {
    "pass@1": 0.98,
    "pass@1_low": 0.96,
    "pass@1_high": 1.0,
    "prompts": 1000,
    "samples": 4,
    **CHANGE,
}


def console(width: int = 120, terminal: bool = False) -> Console:
    return Console(
        file=StringIO(), width=width, height=40, force_terminal=terminal, color_system=None
    )


def written(to: Console) -> str:
    return to.file.getvalue()  # type: ignore[attr-defined]


def started(display: Display, name: str = "run", batches: int = 120) -> Any:
    settings = {
        "run": {"output_dir": "runs", "name": name},
        "schedule": {"batches": batches},
        "task": {"reward_range": (0.0, 1.0)},
    }
    display.on_start(settings, {}, 0)
    return display


def cells(line: str) -> list[str]:
    """The texts of the columns of a plain line, and the time left."""
    ends = [sum(column.width + 2 for column in COLUMNS[: at + 1]) - 2 for at in range(len(COLUMNS))]
    return [
        *(
            line[end - column.width : end].strip()
            for end, column in zip(ends, COLUMNS, strict=True)
        ),
        line[-8:].strip(),
    ]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_the_live_display_and_everything_else_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_display(console=Console(file=Terminal())), LiveDisplay)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not isinstance(make_display(console=Console(file=StringIO())), LiveDisplay), (
        "a log with colors"
    )
    monkeypatch.setenv("TERM", "dumb")
    assert not isinstance(make_display(console=Console(file=Terminal())), LiveDisplay)


def test_plain_line_has_every_metric_under_its_heading():
    display = started(make_display(console=(to := console())), "arithmetic [v10]")
    display.on_batch(METRICS, [])
    display.note("weights [final] written")
    title, *_, header, line, note = written(to).splitlines()
    assert (title.split(), note) == (
        ["directory", "runs/arithmetic", "[v10]"],
        "weights [final] written",
    )
    assert dict(zip(cells(header), cells(line), strict=True)) == {
        "step": "12",
        "reward": "0.250",
        "no signal": "38%",
        "staleness": "9",
        "KL to α": "1.2e-03",
        "clipped": "3.5%",
        "sampled/s": "1,340",
        "learned/s": "2,750",
        "seconds": "5.0",
        "left": "9:04",
    }
    assert len(header) < 120


def test_time_left_is_the_median_pace_without_the_first_of_several_batches():
    display = started(make_display(console=(to := console())))
    for batch, seconds in enumerate([60.0, 5.0, 6.0, 40.0], start=1):
        display.on_batch(METRICS | {"step": batch, "time/step": seconds}, [])
    times_left = [cells(line)[-1] for line in written(to).splitlines()[-4:]]
    assert times_left == ["1:59:00", "9:50", "10:44", "11:36"], (
        "119 of 60 s, 118 of 5 s, 117 of 5.5 s, 116 of 6 s"
    )


@pytest.mark.parametrize("width", [60, 200])
def test_live_display_fits_the_terminal_and_shows_the_last_batches(width):
    live = started(LiveDisplay(console(width, terminal=True)))
    for batch in range(1, 61):
        live.on_batch(METRICS | {"step": batch, "time/step": 10.0}, [])
    live.phase("learning 2 of 4 [micro-batches]")
    (to := console(width)).print(live.render())
    live.on_end("failed", "")
    lines = written(to).splitlines()
    assert max(map(len, lines)) <= width
    assert [int(line.split()[0]) for line in lines if line.split()[0].isdigit()] == list(
        range(51, 61)
    )
    assert any("batch 60 of 120" in line for line in lines)
    assert any("10:00 left" in line for line in lines), "60 batches of 10 s"
    assert "learning 2 of 4 [micro" in lines[-1]


def sample(prompt: str, text: str, reward: float | None = 0.0) -> JsonObject:
    """The record of a prompt with two completions; only the first is shown."""
    return {"prompt": prompt, "completions": [text, "other"], "rewards": [reward, 1.0]}


def summary(evaluations: JsonObject, status: str = "finished", name: str = "run") -> str:
    """The text that a run without batches prints at its end."""
    display = started(PlainDisplay(to := console(80)), name)
    for key, (result, records) in evaluations.items():
        display.on_evaluation(key, result, records)
    display.on_end(status, "Finished.")
    return written(to)


ACTIVE = "\x1b]0;t\x07\x9b2J\u202e\r\b"
"""Sets the title, clears the screen, turns the direction of a line, overwrites it."""


def is_plain(text: str) -> bool:
    return not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize("terminal", [True, False], ids=["live", "plain"])
def test_display_shows_characters_of_names_and_texts_that_act_on_the_terminal(terminal):
    to = console(80)
    display = started((LiveDisplay if terminal else PlainDisplay)(to), f"run{ACTIVE}")
    display.phase(f"evaluation ({ACTIVE})")
    display.note(f"batch 1: 1 of 2 completions are unscored; the first: {ACTIVE}")
    if terminal:
        to.print(display.render())
    display.on_evaluation(f"before.{ACTIVE}", BEFORE, [sample(f"2+3={ACTIVE}", ACTIVE)])
    display.on_end("interrupted", f"Stopped {ACTIVE}")
    shown = written(to)
    assert is_plain(shown)
    assert "␛]0;t␇\\u009b2J\\u202e" in shown


def test_summary_shows_results_and_the_directory():
    name = "a-name-that-is-far-too-long-for-one-line-of-this-terminal" * 2
    old = [
        sample("2+3=", "[bold]6[/bold]\x1b[2J"),
        sample("3+3=", "nearly"),
        sample("4+4=", "", None),
        sample("5+5=", ""),
    ]
    lines = summary(
        {"before": (BEFORE, old), "after": (AFTER, [sample("2+3=", "5", 1.0)])}, name=name
    ).splitlines()
    assert (
        "  pass@1 before  15.2%   95 % interval 12.0% to 19.0%   "
        "(1,000 held-out prompts, 4 samples of each)" in lines
    )
    text = "\n".join(lines)
    for part in (
        *("✗ [bold]6[/bold]␛[2J", "✓ 5", "✗ nearly", "? (empty)"),
        *(
            "  pass@1 after   98.0%   95 % interval 96.0% to 100.0%",
            "+82.8 points   95 % interval +78.0 to +87.1",
        ),
    ):
        assert part in text
    assert "other" not in text
    assert "5+5=" not in text
    run = Path("runs") / name
    assert f"  run           {run}" in lines, "a path is never broken across lines"
    assert lines[-1] == f"  run           {run}", "no batch to view"


def test_command_has_its_path_unless_it_is_on_the_path(tmp_path, monkeypatch):
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.chdir(tmp_path)
    assert typed_command() == f"{programs / 'python'} -m lagrpo"
    script = programs / "lagrpo"
    script.touch(mode=0o755)
    assert typed_command() == "lagrpo"
    monkeypatch.setenv("PATH", "")
    assert typed_command() == "env/bin/lagrpo"


def test_completions_without_a_reward_stand_beside_pass_at_1():
    unscored = AFTER | {"prompts": 2, "samples": 4, "unscored": 3, "unscored_reason": "late"}
    lines = summary({"before": (BEFORE, []), "after": (unscored, [])}).splitlines()
    assert "not scored" not in next(line for line in lines if "pass@1 before" in line)
    assert "3 of 8 not scored: late" in next(line for line in lines if "pass@1 after" in line)


@pytest.mark.parametrize(
    ("reasons", "text"),
    [([], ""), (["a", "b", "b"], "2 × b; 1 × a")],
    ids=["none", "two"],
)
def test_reasons_are_counted_the_most_frequent_first(reasons, text):
    assert count_reasons(reasons) == text


def test_run_with_a_batch_names_the_commands_that_show_it_on_unbroken_lines(monkeypatch):
    monkeypatch.setattr("lagrpo.runs.plots.reward_curve", lambda path: path / "curve.svg")
    name = "name " * 30
    display = started(PlainDisplay(to := console(80)), name)
    display.on_batch(METRICS, [])
    display.on_end("finished", "Finished.")
    view = f"{typed_command()} view '{Path('runs') / name}'"
    lines = written(to).splitlines()
    assert lines[-2:] == [f"  next          {view}", f"  as text       {view} --text"]


def test_resumed_run_counts_the_batches_before():
    live = LiveDisplay(console(120, terminal=True))
    settings = {
        "run": {"output_dir": "runs", "name": "run"},
        "schedule": {"batches": 120},
        "task": {"reward_range": (0.0, 1.0)},
    }
    live.on_start(settings, {}, 30)
    (to := console(120)).print(live.render())
    live.on_end("failed", "")
    assert "batch 30 of 120" in written(to)


def test_call_that_resumes_a_run_is_never_broken_across_lines():
    display = started(PlainDisplay(to := console(80)))
    call = f"lagrpo.train(resume='{'long ' * 30}', data=…)"
    display.on_end("interrupted", f"Stopped by SIGINT: 1 of 9 batches. To resume: {call}")
    assert any(line.endswith(call) for line in written(to).splitlines())


def test_stopped_run_has_a_summary_and_a_failed_one_has_none():
    evaluations = {"before": (BEFORE, [sample("2+3=", "5", 1.0)])}
    assert "pass@1 before" in summary(evaluations, "interrupted")
    assert "pass@1" not in summary(evaluations, "failed")
