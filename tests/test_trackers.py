"""Trackers: TensorBoard, read back; modules that stand in for packages, and the packages; one that
raises; secrets."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import tiny_settings

from lagrpo import train
from lagrpo.errors import SettingsError
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.training.callbacks import Trackers, check_installed


@pytest.fixture
def begin(model, tmp_path):
    def begin(tracker: str, **sections: dict[str, Any]) -> Path:
        own = {"name": "run", "report_to": tracker, "log_completions": 4}
        sections = {"checkpoint": {"save_every": 1}} | sections
        return train(tiny_settings(model, tmp_path, run=own, **sections)).run

    return begin


def resume(run: Path) -> None:
    train({"schedule": {"batches": 5}}, resume=run)


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(
        str(run / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}
    ).Reload()


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
    (run / "checkpoints" / "step-000003").rename(run / "removed")
    (run / "events.jsonl").write_bytes(
        b"".join((run / "events.jsonl").read_bytes().splitlines(True)[:-1])
    )
    resume(run)
    for name in ("reward", "num_tokens", "staleness/max"):
        assert scalars(run, name) == [
            (m["step"], pytest.approx(m[name])) for m in load_metrics(run)
        ]
    assert scalars(run, "eval/own/reward") == [
        (e["step"], pytest.approx(e["reward"])) for e in load_evaluations(run)
    ]
    assert 'name = "sample_task:load"' in text(run, "settings")[0]
    tables = {batch: table.splitlines() for batch, table in text(run, "completion_texts").items()}
    assert {batch: len(lines) for batch, lines in tables.items()} == dict.fromkeys(
        range(1, 6), 2 + 4
    )
    assert tables[2][2].startswith(f"| {load_rollouts(run, [2])[0]['prompt_id']} | 0 | ")


class Package:
    """Stands in for wandb and trackio: notes their calls, and raises at the calls it is told to."""

    Table = Settings = property(lambda self: self._any)

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails = fails

    def _any(self, **options: Any) -> Any:
        return options or self

    def __getattr__(self, name: str) -> Any:
        return partial(self._note, name)

    def _note(self, called: str, /, *arguments: Any, **options: Any) -> Any:
        self.calls.append((called, arguments, options))
        if called == self.fails:
            raise SystemExit("no answer from https://me:planted@host")
        return self

    def named(self, name: str) -> list[Any]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def install(monkeypatch):
    def install(name: str, fails: str = "") -> Package:
        monkeypatch.setattr("lagrpo.training.checks.check_installed", lambda names: None)
        monkeypatch.setitem(sys.modules, name, package := Package(fails))
        return package

    return install


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_packages_get_metrics_evaluations_and_tables_and_resume_their_run(begin, install, tracker):
    package = install(tracker)
    resume(begin(tracker))
    logged = [
        (args[0], options.get("step", args[0].get("step")))
        for args, options in package.named("log")
    ]
    assert [batch for values, batch in logged if "reward" in values] == [1, 2, 3, 4, 5]
    assert [batch for values, batch in logged if "eval/pass@1" in values] == [0, 3, 5]
    tables = [
        values["completion_texts"]["data"] for values, _ in logged if "completion_texts" in values
    ]
    assert [len(table) for table in tables] == [4] * 5
    assert len(package.named("finish")) == 2
    first, second = (options for _, options in package.named("init"))
    assert (first.get("id"), first["name"]) == (second.get("id"), second["name"])
    assert first["config"]["rollout"]["num_generations"] == 4


@pytest.mark.trackers
@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_packages_take_a_run_and_its_resume(begin, tmp_path, monkeypatch, caplog, tracker):
    monkeypatch.setattr(sys, "path", [*sys.path, os.environ["LAGRPO_TRACKERS"]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    resume(run := begin(tracker))
    assert not [message for message in caplog.messages if "tracker" in message]
    if tracker == "wandb":
        assert len({file.name for file in run.glob("wandb/offline-run-*/*.wandb")}) == 1
        return
    query = "select step, run_id from metrics where instr(metrics, 'staleness/max') order by step"
    with sqlite3.connect("lagrpo.db") as database:
        steps, ids = zip(*database.execute(query), strict=True)
    assert (steps, len(set(ids))) == ((1, 2, 3, 4, 5), 1)


@pytest.mark.parametrize("fails", ["init", "log"])
def test_package_that_raises_is_disabled_with_one_warning(begin, install, caplog, fails):
    package = install("wandb", fails)
    run = begin("wandb")
    assert len(load_metrics(run)) == 3
    assert len(package.named(fails)) == 1
    (warning,) = [message for message in caplog.messages if "tracker" in message]
    assert "wandb is disabled" in warning
    assert "SystemExit: no answer from https://***@host" in warning


def test_no_secret_reaches_a_tracker(install, tmp_path):
    package, trackers = install("trackio"), Trackers(["trackio"], 8)
    settings: dict[str, Any] = {
        "run": {"output_dir": str(tmp_path), "name": "run"},
        "paths": [Path("key=planted"), 3],
    }
    settings["task"] = {"data": "https://me:planted@host/?token=planted"}
    trackers.on_start(settings, {"id": "0", "command": "train --key planted"}, 0)
    trackers.on_batch(
        {"step": 1, "loss": None}, [{"completion": "a key=planted", "reason": "token=planted"}]
    )
    assert package.named("init")[0][1]["config"]["paths"] == ["key=***", 3]
    assert "a key=***" in str(package.named("log")[-1])
    assert "planted" not in str(package.calls)


def test_missing_package_is_rejected(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"run.report_to names wandb, which is not installed"):
        check_installed(["wandb"])
