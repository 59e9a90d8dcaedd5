"""The thread that writes a checkpoint: what it reads, when the run waits for it, and what a kill or
an error leaves."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from warm import forks

from lagrpo.distributed.ranks import Ranks
from lagrpo.lifecycle import checkpoint, writer
from lagrpo.lifecycle.checkpoint import NewCheckpoint
from lagrpo.lifecycle.writer import CheckpointWriter
from lagrpo.resume.checkpoint_files import CheckpointError, find_checkpoint
from lagrpo.runs import files


def checkpoint_after(batch: int, numbers: Tensor, **weights: Tensor) -> NewCheckpoint:
    """A checkpoint of these numbers, which can be found again."""
    state: dict[str, Any] = {
        "loop": {
            "batch": batch,
            "alpha": 0,
            "pi_ref": 0,
            "since_sync": 0,
            "spent": 0.0,
            "prefetched": [],
            "sync": {},
        },
        "versions": {"policy": batch, "alpha": None, "pi_ref": None},
        "announced": {},
        "data": {"places": {}, "visited": {"prompts": 0, "tokens": "", "answers": ""}},
        "model": "",
    }
    return NewCheckpoint(batch, {"x": numbers}, (), {1: weights} if weights else {}, [], state)


def saved(folder: Path, batch: int) -> list[float]:
    return load_file(folder / f"step-{batch:06d}" / "trainer.safetensors")["x"].tolist()


@pytest.fixture
def write(tmp_path):
    """A writer that keeps one checkpoint, beside one after batch 1."""
    newest = CheckpointWriter(tmp_path, 1, Ranks())
    newest.begin(checkpoint_after(1, torch.zeros(2)), 0.0, in_background=False)
    newest.wait()
    return newest


@pytest.fixture
def held(monkeypatch):
    """Holds the thread before it writes, until this event is set."""
    may_write = Event()
    save = checkpoint._save_tensors

    def wait_and_save(*arguments: Any) -> None:
        assert may_write.wait(30)
        save(*arguments)

    monkeypatch.setattr(checkpoint, "_save_tensors", wait_and_save)
    return may_write


def test_thread_writes_the_numbers_that_the_run_had_when_it_went_on(write, held, tmp_path):
    numbers = torch.ones(2)
    assert write.begin(checkpoint_after(2, numbers), time.monotonic(), in_background=True)
    numbers += 1
    assert not write.has_ended()
    assert find_checkpoint(tmp_path).batch == 1  # type: ignore[union-attr]
    held.set()
    written = write.wait()
    assert written.batch == 2
    assert written.paused <= written.seconds
    assert saved(tmp_path, 2) == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert write.wait() is None


@pytest.mark.parametrize(
    ("available", "weights", "joined", "ranks", "has_room"),
    [
        pytest.param(700, 0, 0, 1, True, id="enough"),
        pytest.param(699, 0, 0, 1, False, id="short"),
        pytest.param(799, 25, 0, 1, False, id="short, with weights of another version"),
        pytest.param(800, 25, 0, 1, True, id="enough, with weights of another version"),
        pytest.param(799, 0, 25, 1, False, id="short, with joined masters"),
        pytest.param(800, 0, 25, 1, True, id="enough, with joined masters"),
        pytest.param(1399, 0, 0, 2, False, id="short for two ranks of the host"),
        pytest.param(None, 0, 0, 1, True, id="unknown"),
    ],
)
def test_copy_is_made_if_it_fits_beside_the_peak_of_the_run(
    write, monkeypatch, caplog, available, weights, joined, ranks, has_room
):
    """The copy has 400 bytes, and the run needs 300 more at its peak than it has now."""
    monkeypatch.setattr(writer, "available_memory", lambda: available)
    monkeypatch.setattr(writer, "process_peak", lambda: 1000)
    monkeypatch.setattr(writer, "process_memory", lambda: 700)
    monkeypatch.setattr(writer, "local_size", lambda: ranks)
    numbers = torch.zeros(100)
    other_weights = {"w": torch.zeros(weights)} if weights else {}
    for batch in (2, 3):
        new = checkpoint_after(batch, numbers, **other_weights)
        if joined:
            state = {**new.trainer_state, "master/w": torch.zeros(joined)}
            new = replace(new, trainer_state=state, copies={"master/w"})
        assert write.begin(new, 0.0, in_background=True) == has_room
        assert write.wait().batch == batch
    assert len(caplog.records) == int(not has_room)


def test_long_wait_for_the_thread_is_shown(write, held, monkeypatch):
    shown: list[str] = []

    def show(text: str, *numbers: int) -> None:
        shown.append(text % numbers)
        held.set()

    monkeypatch.setattr(writer, "PATIENCE", 0.0)
    monkeypatch.setattr(writer.logger, "info", show)
    write.begin(checkpoint_after(2, torch.ones(2)), 0.0, in_background=True)
    write.wait()
    assert len(shown) == 1
    assert "batch 2" in shown[0]


@pytest.mark.parametrize("name", ["_save_tensors", "digest_file", "write_state"])
def test_error_of_the_thread_is_raised_once_and_leaves_the_checkpoint_before(
    write, monkeypatch, tmp_path, name
):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, name, fail)
        write.begin(checkpoint_after(2, torch.ones(2)), 0.0, in_background=True)
        with pytest.raises(CheckpointError, match=r"step-000002 could not be written: No space"):
            write.wait()
    assert write.wait() is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    write.begin(checkpoint_after(3, torch.ones(2)), 0.0, in_background=True)
    assert write.wait().batch == 3


def test_abandoned_checkpoint_is_not_finished(write, monkeypatch, tmp_path):
    """The thread has written its files, and is about to rename their directory."""
    writes_directory = Event()
    is_abandoned = Event()
    rename = files.write_directory_atomically

    def wait_and_rename(*arguments: Any) -> Path:
        writes_directory.set()
        assert is_abandoned.wait(30)
        return rename(*arguments)

    monkeypatch.setattr(files, "write_directory_atomically", wait_and_rename)
    write.begin(checkpoint_after(2, torch.ones(2)), 0.0, in_background=True)
    assert writes_directory.wait(30)
    write.abandon()
    is_abandoned.set()
    with pytest.raises(CheckpointError):
        write.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def write_and_be_killed(folder: Path, module_name: str, name: str, after: bool) -> None:
    """Writes a second checkpoint, and is killed in the thread: before or after this call."""
    newest = CheckpointWriter(folder, 1, Ranks())
    newest.begin(checkpoint_after(1, torch.zeros(2)), 0.0, in_background=True)
    newest.wait()
    module = importlib.import_module(module_name)
    function = getattr(module, name)

    def be_killed(*arguments: Any) -> None:
        if after:
            function(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, be_killed)
    newest.begin(checkpoint_after(2, torch.ones(2)), 0.0, in_background=True)
    newest.wait()


@pytest.mark.parametrize(
    ("module", "name", "after", "newest"),
    [
        (checkpoint, "_save_tensors", False, 1),
        (checkpoint, "_save_tensors", True, 1),
        (checkpoint, "digest_file", True, 1),
        (checkpoint, "write_state", False, 1),
        (checkpoint, "write_state", True, 1),
        (files, "finish_file", True, 1),
        (files, "write_directory_atomically", True, 2),
        (writer, "prune_checkpoints", False, 2),
        (files, "remove_directory", False, 2),
    ],
)
def test_kill_in_the_thread_leaves_the_last_whole_checkpoint(tmp_path, module, name, after, newest):
    process = forks.Process(
        target=write_and_be_killed, args=(tmp_path, module.__name__, name, after)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.batch == newest
    assert saved(tmp_path, newest) == [newest - 1.0] * 2
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"step-000001", "step-000002"}
