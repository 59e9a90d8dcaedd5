"""The trackers W&B, trackio and MLflow, offline: real runs of theirs, read back from what they left on the disk."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import tiny_settings
from tiny import save_tiny

from lagrpo import train
from lagrpo.runs import load_evaluations, load_events, load_metrics

pytestmark = [pytest.mark.trackers, pytest.mark.usefixtures("shared_templates")]
PLANTED = "planted-hf-token"


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """The packages at the end of the path, where the processes of trackers find them too; no network, a secret."""
    monkeypatch.setattr(sys, "path", [*sys.path, os.environ["LAGRPO_TRACKERS"]])
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/own.db")
    monkeypatch.setenv("HF_TOKEN", PLANTED)


@pytest.fixture
def begin(tmp_path):
    """Trains three batches with one tracker, then goes on to the fifth."""

    def begin(tracker: str) -> Path:
        own: dict[str, Any] = {"trackers": tracker, "name": "one", "checkpoint_every": 1, "tracked_completions": 4}
        own |= {"directory": str(tmp_path / "runs")}
        task = {"system_prompt": f"key {PLANTED}"}
        run = train(tiny_settings(save_tiny(tmp_path / "model"), tmp_path / "runs", run=own, task=task)).run
        train({"run": {"resume": str(run), "display": "none"}, "schedule": {"batches": 5}})
        assert [event["text"] for event in load_events(run) if "tracker" in event.get("text", "")] == []
        return run

    return begin


def rewards(run: Path) -> list[tuple[int, Any]]:
    return [(m["batch"], pytest.approx(m["reward_mean"])) for m in load_metrics(run)]


def evaluated(run: Path) -> list[tuple[int, Any]]:
    """Of each evaluation, also of the one that was the last before the run went on."""
    return [(e["batch"], pytest.approx(e["pass_at_1"])) for e in load_evaluations(run)]


def test_wandb(begin, tmp_path):
    run = begin("wandb")
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len({file.name for file in files}) == 1  # the same run, started twice
    rows, resumed, settings = [], [], {}
    for file in files:
        for record in records(file):
            if (kind := record.WhichOneof("record_type")) == "history":
                row = {
                    "/".join([item.key, *item.nested_key]).strip("/"): item.value_json for item in record.history.item
                }
                rows.append({name: json.loads(text) for name, text in row.items()})
            elif kind == "run":
                resumed.append(record.run.resume)
                assert (record.run.project, record.run.display_name) == ("lagrpo", "one")
                settings |= {update.key: json.loads(update.value_json) for update in record.run.config.update}
    assert resumed == [False, True]
    assert [(row["batch"], row["reward_mean"]) for row in rows if "reward_mean" in row] == rewards(run)
    shown = [(row["batch"], row["evaluation/pass_at_1"]) for row in rows if "evaluation/pass_at_1" in row]
    assert shown == evaluated(run)
    assert settings["sampling"]["G"] == 4
    (table, *_) = run.glob("wandb/offline-run-*/files/media/table/*.json")
    assert len(json.loads(table.read_text())["data"]) == 4
    assert PLANTED.encode() not in b"".join(path.read_bytes() for path in run.glob("wandb/**/*") if path.is_file())


def records(file: Path) -> Iterator[Any]:
    """The records of W&B's transaction log: after seven bytes, blocks of 32 KiB with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its end
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_trackio(begin, tmp_path):
    run = begin("trackio")
    with sqlite3.connect(tmp_path / "trackio" / "lagrpo.db") as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
        assert database.execute("select count(distinct run_id) from metrics").fetchone() == (1,)
        (config,) = database.execute("select config from configs").fetchone()
    assert sorted((step, row["reward_mean"]) for step, row in rows if "reward_mean" in row) == rewards(run)
    shown = sorted((step, row["evaluation/pass_at_1"]) for step, row in rows if "evaluation/pass_at_1" in row)
    assert shown == evaluated(run)
    assert [len(row["completion_texts"]["_value"]) for _, row in rows if "completion_texts" in row] == [4] * 5
    assert json.loads(config)["sampling"]["G"] == 4
    assert PLANTED not in str(rows) + str(config)


def test_mlflow(begin, tmp_path):
    run = begin("mlflow")
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient()
    experiment: Any = client.get_experiment_by_name("lagrpo")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("one", "FINISHED")
    history = defaultdict(list)
    for name in ("reward_mean", "evaluation/pass_at_1"):
        history[name] = sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, name))
    assert history["reward_mean"] == rewards(run)
    assert history["evaluation/pass_at_1"] == evaluated(run)
    assert found.data.params["sampling.G"] == "4"
    tables = client.list_artifacts(found.info.run_id, "completion_texts")
    assert len(tables) == 5
    assert PLANTED not in str(found.data.params) + str(found.data.tags)
