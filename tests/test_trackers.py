"""Trackers: TensorBoard, read back; modules that stand in for packages, and the packages; one that
raises; secrets."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from running import Section, tiny_settings

from lagrpo import train
from lagrpo.errors import SettingsError
from lagrpo.lifecycle.callbacks import TensorBoard, Trackers
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.startup.checks import check_installed
from lagrpo.types import JsonObject

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture
def begin(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a run of three batches with a tracker."""

    def begin(tracker: str, **sections: Section) -> Path:
        run_settings = {"name": "run", "report_to": tracker, "log_completions": 4}
        # Checkpoints of every batch, so that a resumed run knows what a tracker has.
        sections = {"checkpoint": {"save_every": 1}} | sections
        return train(tiny_settings(model, tmp_path, run=run_settings, **sections)).run

    return begin


def resume(run: Path) -> None:
    train({"schedule": {"batches": 5}}, resume=run, trust_run_code=True)


def events(run: Path) -> EventAccumulator:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 keeps all events; by default the accumulator keeps a sample of them.
    keep_all = {"tensors": 0, "scalars": 0}
    return EventAccumulator(str(run / "tensorboard"), size_guidance=keep_all).Reload()


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run).Scalars(tag)]


def text(run: Path, tag: str) -> dict[int, str]:
    tensors = events(run).Tensors(f"{tag}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in tensors}


def test_tensorboard_shows_metrics_evaluations_settings_and_completions_also_of_a_resumed_run(
    begin,
):
    """The batches that it makes again are there once."""
    run = begin("tensorboard", eval={"sets": [{"name": "own"}]})
    # As if it had been killed after batch 3 was tracked and before its checkpoint was written.
    (run / "checkpoints" / "step-000003").rename(run / "removed")
    events_file = run / "events.jsonl"
    events_file.write_bytes(b"".join(events_file.read_bytes().splitlines(True)[:-1]))
    resume(run)

    for name in ("reward", "num_tokens", "staleness/max"):
        expected = [(line["step"], pytest.approx(line[name])) for line in load_metrics(run)]
        assert scalars(run, name) == expected
    evaluations = [(e["step"], pytest.approx(e["reward"])) for e in load_evaluations(run)]
    assert scalars(run, "eval/own/reward") == evaluations
    assert 'name = "sample_task:load"' in text(run, "settings")[0]

    tables = {batch: table.splitlines() for batch, table in text(run, "completion_texts").items()}
    assert sorted(tables) == [1, 2, 3, 4, 5]
    for batch, (_head, _rule, *table_rows) in tables.items():
        assert len(table_rows) == 4, batch  # run.log_completions
    prompt_id = load_rollouts(run, [2])[0]["prompt_id"]
    assert tables[2][2].startswith(f"| {prompt_id} | 0 | ")


class Call(NamedTuple):
    function: str
    arguments: tuple[Any, ...]
    options: JsonObject


class Package:
    """Stands in for wandb and trackio: notes their calls, and raises at the calls it is told to.

    A fake suffices, because trackers hand over everything by calls; @pytest.mark.trackers tests
    that the packages take them.
    """

    Table = Settings = property(lambda self: self._make_object)

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Call] = []
        self.fails = fails

    def _make_object(self, **options: Any) -> dict[str, Any] | Package:
        """A table is its columns and rows; settings without options are of no interest."""
        return options or self

    def __getattr__(self, name: str) -> Callable[..., Package]:
        return partial(self._note, name)

    def _note(self, function: str, /, *arguments: Any, **options: Any) -> Package:
        self.calls.append(Call(function, arguments, options))
        if function == self.fails:
            # SystemExit is no Exception, and must not end the run either. The password must not
            # be shown.
            raise SystemExit("no answer from https://me:planted@host")
        return self

    def calls_of(self, function: str) -> list[Call]:
        return [call for call in self.calls if call.function == function]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Package]:
    """A function that puts a fake in the place of a package."""

    def install(name: str, fails: str = "") -> Package:
        package = Package(fails)
        monkeypatch.setattr("lagrpo.startup.checks.check_installed", lambda names: None)
        monkeypatch.setitem(sys.modules, name, package)
        return package

    return install


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_packages_get_metrics_evaluations_and_tables_and_resume_their_run(begin, install, tracker):
    package = install(tracker)
    resume(begin(tracker))
    logged = []
    for call in package.calls_of("log"):
        values = call.arguments[0]
        # wandb takes the batch among the values, trackio as an option.
        logged.append((values, call.options.get("step", values.get("step"))))
    assert [batch for values, batch in logged if "reward" in values] == [1, 2, 3, 4, 5]
    # Before training, after the three batches of the first run, and at the end.
    assert [batch for values, batch in logged if "eval/pass@1" in values] == [0, 3, 5]
    tables = [
        values["completion_texts"]["data"] for values, _ in logged if "completion_texts" in values
    ]
    assert [len(table) for table in tables] == [4] * 5
    assert len(package.calls_of("finish")) == 2
    begun, resumed = (call.options for call in package.calls_of("init"))
    assert begun.get("id") == resumed.get("id")
    assert begun["name"] == resumed["name"]
    assert begun["config"]["rollout"]["num_generations"] == 4


@pytest.mark.trackers
@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_packages_take_a_run_and_its_resume(begin, tmp_path, monkeypatch, caplog, tracker):
    monkeypatch.setattr(sys, "path", [*sys.path, os.environ["LAGRPO_TRACKERS"]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    run = begin(tracker)
    resume(run)
    assert not [message for message in caplog.messages if "tracker" in message]
    if tracker == "wandb":
        assert len({file.name for file in run.glob("wandb/offline-run-*/*.wandb")}) == 1
        return
    query = "select step, run_id from metrics where instr(metrics, 'staleness/max') order by step"
    with sqlite3.connect("lagrpo.db") as database:
        steps, ids = zip(*database.execute(query), strict=True)
    assert steps == (1, 2, 3, 4, 5)
    assert len(set(ids)) == 1


@pytest.mark.parametrize("fails", ["init", "log"])
def test_package_that_raises_is_disabled_with_one_warning(begin, install, caplog, fails):
    package = install("wandb", fails)
    run = begin("wandb")
    assert len(load_metrics(run)) == 3  # training goes on
    assert len(package.calls_of(fails)) == 1
    (warning,) = [message for message in caplog.messages if "tracker" in message]
    assert "wandb is disabled" in warning
    assert "SystemExit: no answer from https://***@host" in warning


def test_no_secret_reaches_a_tracker(install, tmp_path):
    package = install("trackio")
    trackers = Trackers(["trackio"], 8)
    settings: dict[str, Any] = {
        "run": {"output_dir": str(tmp_path), "name": "run"},
        "paths": [Path("key=planted"), 3],
    }
    settings["task"] = {"data": "https://me:planted@host/?token=planted"}
    trackers.on_start(settings, {"id": "0", "command": "train --key planted"}, 0)
    trackers.on_batch(
        {"step": 1, "loss": None}, [{"completion": "a key=planted", "reason": "token=planted"}]
    )
    assert package.calls_of("init")[0].options["config"]["paths"] == ["key=***", 3]
    assert "a key=***" in str(package.calls_of("log")[-1])
    assert "planted" not in str(package.calls)


def test_settings_in_tensorboard_have_no_secret(tmp_path):
    config = 'kept = "seen"\n[task.options]\napi_key = "planted"\ndeep = [{auth = ["planted"]}]\n'
    (tmp_path / "config.toml").write_text(config, encoding="utf-8")
    TensorBoard(tmp_path, "0", {}, 0).finish("finished")
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"seen" in file.read_bytes()
    assert b"planted" not in file.read_bytes()


def test_missing_package_is_rejected(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="wandb"):
        check_installed(["wandb"])
