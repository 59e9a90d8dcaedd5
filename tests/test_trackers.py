"""Trackers: they get what the files of a run say, once, and cannot stop or slow the run, whatever they do."""

from __future__ import annotations

import doctest
import importlib.util
import json
import math
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from made_runs import make_run
from running import children, tiny_settings, without_timings
from test_cli import lagrpo
from tiny import save_tiny

from lagrpo import train
from lagrpo.errors import SettingsError
from lagrpo.runs import load_events, load_metrics, load_rollouts
from lagrpo.settings.schema import RunSettings
from lagrpo.settings.toml import load_settings
from lagrpo.trackers import TRACKERS, check_installed, following, observer, serving, standing
from lagrpo.trackers.serving import Session
from lagrpo.trackers.standing import Standing
from lagrpo.trackers.tracker import About

pytestmark = pytest.mark.usefixtures("shared_templates")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def begin(model, tmp_path, monkeypatch):
    """Runs a tiny training with a tracker of faulty_trackers, with these settings."""

    def begin(tracker: str, /, **sections: dict[str, Any]):
        monkeypatch.setitem(TRACKERS, "wandb", f"faulty_trackers:{tracker}")
        monkeypatch.setattr("lagrpo.trackers.check_installed", lambda names: None)
        monkeypatch.setattr("lagrpo.training.checks.check_installed", lambda names: None)
        own = {"run": {"trackers": ["wandb"], "name": "run"} | sections.pop("run", {}), **sections}
        return train(tiny_settings(model, tmp_path, **own))

    return begin


def notes(run: Path, *kinds: str) -> list[list[Any]]:
    lines = [json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()]
    return [line for line in lines if line[0] in (kinds or (line[0],))]


def warnings(run: Path) -> list[str]:
    return [event["text"] for event in load_events(run) if event["event"] == "warning" and "tracker" in event["text"]]


# What they get


def test_a_tracker_gets_what_the_files_say_in_order(begin):
    result = begin("Notes", run={"tracked_completions": 3}, evaluation={"every": 2})
    told = notes(result.run)
    assert [line[:2] for line in told] == [
        ["open", None],
        ["evaluation", 0],
        *[["batch", 1], ["completions", 1], ["batch", 2], ["completions", 2]],
        ["evaluation", 2],
        *[["batch", 3], ["completions", 3]],
        ["evaluation", 3],
        ["close", "finished"],
    ]
    metrics = [line[2] for line in told if line[0] == "batch"]
    assert metrics == [{k: v for k, v in m.items() if v is not None} for m in load_metrics(result.run)]
    rows = load_rollouts(result.run, [2])
    shown = next(line[2] for line in told if line[:2] == ["completions", 2])
    assert [row["text"] for row in shown] == [rows[n]["text"] for n in (0, 2, 5)]
    assert [row["reward"] for row in shown] == [rows[n]["reward"] for n in (0, 2, 5)]
    before = json.loads((result.run / "evaluations" / "before.json").read_text())
    assert next(line[2] for line in told if line[0] == "evaluation")["evaluation/pass_at_1"] == before["pass_at_1"]
    assert children() == set()


def test_a_run_without_trackers_starts_no_process_and_its_numbers_are_the_same(begin):
    tracked = begin("Notes", run={"name": "tracked"})
    alone = begin("Notes", run={"name": "alone", "trackers": []})
    assert not (alone.run / "notes.jsonl").exists()
    assert not (alone.run / "trackers").exists()
    assert without_timings(load_metrics(alone.run)) == without_timings(load_metrics(tracked.run))


def test_no_completions_where_none_are_wanted(begin):
    assert notes(begin("Notes", run={"tracked_completions": 0}).run, "completions") == []


# Going on


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker_without_double_points(begin):
    run = begin("Notes", run={"checkpoint_every": 1}).run
    shutil.rmtree(run / "checkpoints" / "step-000003")
    (run / "events.jsonl").write_bytes(b"".join((run / "events.jsonl").read_bytes().splitlines(True)[:-1]))
    train({"run": {"resume": str(run), "display": "none"}, "schedule": {"batches": 5}})
    assert [line[1] for line in notes(run, "open")] == [None, "first"]
    assert [line[1] for line in notes(run, "batch")] == [1, 2, 3, 4, 5]  # the third was made twice
    assert [line[1] for line in notes(run, "evaluation")] == [0, 3, 5]


def test_a_tracker_that_comes_later_gets_what_was_before(begin):
    run = begin("Notes", run={"trackers": []}).run
    train({"run": {"resume": str(run), "display": "none", "trackers": ["wandb"]}, "schedule": {"batches": 4}})
    assert [line[1] for line in notes(run, "batch")] == [1, 2, 3, 4]
    assert [line[1] for line in notes(run, "evaluation")] == [0, 3, 4]


def test_a_copy_of_a_run_is_another_one_there(begin, tmp_path):
    run = begin("Notes").run
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "notes.jsonl").unlink()
    train({"run": {"resume": str(copy), "display": "none"}, "schedule": {"batches": 4}})
    assert [line[1] for line in notes(copy, "open", "batch")] == [None, 1, 2, 3, 4]


def test_a_run_that_failed_says_so(begin, tmp_path):
    with pytest.raises(Exception, match="have no reward"):
        begin("Notes", task={"name": "sample_task:load_impossible"}, evaluation={"before_and_after": False})
    (run,) = (path.parent for path in tmp_path.glob("*/notes.jsonl"))
    assert notes(run, "close") == [["close", "failed"]]


# What they do wrong


def test_a_point_that_is_not_taken_is_tried_again_then_left_out_and_said(begin, monkeypatch, caplog):
    run = begin("Raises", schedule={"batches": 4}).run
    assert [line[1] for line in notes(run, "batch")] == [1, 3, 4]
    assert any("tracker wandb: it would not take 1 point" in text for text in caplog.messages)
    said = [*warnings(run), *caplog.messages]
    assert any("ConnectionError: no answer from https://***@host" in text for text in said)
    assert "planted" not in str(said)


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_run(begin, caplog):
    run = begin("Closed").run
    said = [*warnings(run), *caplog.messages]
    assert any("tracker wandb: PermissionError: no API key; the run goes on without it" in text for text in said)
    assert len(load_metrics(run)) == 3


def test_a_tracker_whose_process_dies_does_not_stop_the_run(begin, caplog):
    run = begin("Exits").run
    said = [*warnings(run), *caplog.messages]
    assert any("tracker wandb: its process ended itself with exit code 3; the run goes on" in text for text in said)
    assert len(load_metrics(run)) == 3


def test_a_tracker_that_hangs_is_waited_for_at_the_end_alone_and_not_for_ever(begin, monkeypatch, caplog):
    monkeypatch.setattr(observer, "CLOSING", 1.0)
    started = time.monotonic()
    result = begin("Hangs")
    assert time.monotonic() - started < 20
    assert (len(load_metrics(result.run)), result.interrupted) == (3, None)
    assert any("tracker wandb: not done within 1 s: it has the batches until 0" in text for text in caplog.messages)
    assert children() == set()


def test_a_slow_tracker_gets_the_rest_at_the_end(begin, monkeypatch):
    run = begin("Slow", schedule={"batches": 5}).run
    assert [line[1] for line in notes(run, "batch")] == [1, 2, 3, 4, 5]


def test_a_tracker_that_stays_behind_is_warned_of_once(monkeypatch):
    said: list[str] = []
    trackers = observer.Trackers(["wandb"], 0)
    link: Any = SimpleNamespace(name="wandb", over=False, batch=2, since=time.monotonic() - 100, read=lambda: iter(()))
    trackers.links, trackers._warn = [link], said.append
    for b in (10, 17, 18, 30):
        trackers.batch(SimpleNamespace(b=b), {}, ())
    assert said == ["tracker wandb: it has taken nothing for 100 s and lacks 16 batches; the run does not wait"]


class Line:
    """The connection of a session whose run is not over."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.said: list[dict[str, Any]] = []

    def poll(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False

    def send_bytes(self, said: bytes) -> None:
        self.said.append(json.loads(said))


def test_points_are_tried_again_with_pauses_and_once_while_nothing_arrives():
    line: Any = Line()
    session, sent = Session(line), []

    def send(fails: int) -> None:
        sent.append(fails)
        if len(sent) <= fails:
            raise OSError("no network")

    point = partial(following.Point, 1, lambda: None)
    session.deliver(point(lambda: send(2)))
    assert (len(sent), line.pauses, session.lost) == (3, [1.0, 5.0], 0)
    sent.clear()
    session.deliver(point(lambda: send(99)))
    session.deliver(point(lambda: send(99)))
    assert (len(sent), session.lost) == (6, 2)
    sent.clear()
    session.deliver(point(lambda: send(0)))
    assert session.takes_points
    assert {"lost": 2} in line.said


# Standing


def test_the_standing_is_written_before_a_point_is_sent(tmp_path):
    """A process that is killed between the two loses a point and doubles none."""
    run = make_run(tmp_path)
    run.record({"batch": 1, "loss": math.nan})
    own = Standing(run.path / "trackers" / "x.json", "made")
    own.opened("there")

    class Killed:
        def numbers(self, batch: int, values: Any) -> None:
            raise KeyboardInterrupt

    tracker: Any = Killed()
    (point,) = following.Follower(run.path, tracker, own, 0).missing()
    point.begin()
    with pytest.raises(KeyboardInterrupt):
        point.send()
    assert list(following.Follower(run.path, tracker, Standing.read(run.path, "x"), 0).missing()) == []


def test_a_torn_line_waits_until_it_is_whole(tmp_path):
    run = make_run(tmp_path)
    follower = following.Follower(run.path, SimpleNamespace(), Standing(tmp_path / "x.json", "made"), 0)  # type: ignore
    run.metrics.write_text('{"batch": 1}\n{"bat')
    assert [point.batch for point in follower.missing()] == [1]
    with run.metrics.open("a") as file:
        file.write('ch": 2}\n')
    assert [point.batch for point in follower.missing()] == [2]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"run": "made", "id": 3, "batch": 1, "evaluations": []}'])
def test_a_damaged_standing_is_named(tmp_path, text):
    file = tmp_path / "trackers" / "wandb.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ValueError, match=r"trackers/wandb\.json is damaged .*remove it, and all is sent anew"):
        Standing.read(tmp_path, "wandb")


@pytest.mark.parametrize("module", [following, standing])
def test_the_examples(module):
    assert doctest.testmod(module).failed == 0


# Settings


def test_the_setting_names_every_tracker():
    (kinds,) = {get_args(RunSettings.model_fields["trackers"].annotation)[0]}
    assert set(get_args(kinds)) == set(TRACKERS)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("wandbb", "Input should be 'tensorboard', 'wandb', 'trackio' or 'mlflow'"),
        (["wandb", "wandb"], "trackers: the same one is there twice"),
    ],
)
def test_names_that_are_none_are_refused(given, error):
    with pytest.raises(SettingsError, match=error):
        load_settings({"run": {"trackers": given}})


def test_one_name_needs_no_list():
    assert load_settings({"run": {"trackers": "mlflow"}}).run.trackers == ("mlflow",)


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    code, out, err = lagrpo("train", "--run.trackers", "wandb", "--run.directory", tmp_path / "runs")
    assert (code, out) == (2, "")
    assert err == "lagrpo: run.trackers names wandb, which is not installed: pip install 'lagrpo[wandb]'\n"


def test_a_directory_of_that_name_is_not_taken_for_the_package(monkeypatch, tmp_path):
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match="no_such_tracker, which is not installed"):
        check_installed(["no_such_tracker"])


# Secrets


def test_no_secret_reaches_a_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-hf-token")
    settings = {"task": {"data": "https://me:planted@host/?token=planted"}, "paths": [Path("planted-hf-token"), 3]}
    about = About.of(tmp_path, settings, {"command": "train --key planted"})
    assert "planted" not in str(about)
    assert about.settings["paths"] == ["***", 3]
    run = make_run(tmp_path)
    from made_runs import row

    run.record_rollouts(1, [row("key planted-hf-token", reason="for planted-hf-token")])
    run.record({"batch": 1})
    got: list[Any] = []
    tracker: Any = SimpleNamespace(numbers=lambda *all: None, completions=lambda batch, rows: got.extend(rows))
    for point in following.Follower(run.path, tracker, Standing(tmp_path / "x.json", "made"), 8).missing():
        point.send()
    assert (got[0]["text"], got[0]["reason"]) == ("key ***", "for ***")


def test_what_a_package_prints_goes_to_a_log_without_secrets_and_not_without_end(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-key")
    monkeypatch.setattr(serving, "LONGEST_LOG", 30)
    file = (tmp_path / "log").open("w")
    log = serving.Log(file)
    print("half a", end="", file=log)
    print(" line: planted-key", file=log)
    for _ in range(10):
        print("x" * 20, file=log)
    assert (tmp_path / "log").read_text() == "half a line: ***\n" + "x" * 20 + "\n"
