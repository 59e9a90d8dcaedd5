"""A run resumes from any of its checkpoints as if nothing had happened; what keeps it from resuming is named."""

from __future__ import annotations

import json
import shutil
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from chaos import KINDS, leaves, merged
from running import tiny_settings
from tiny import save_tiny

from lagrpo import Callback, train
from lagrpo.errors import SettingsError
from lagrpo.runs import load_events
from lagrpo.runs.directory import Run, RunLockedError, locked
from lagrpo.settings.toml import load_settings
from lagrpo.terminal.display import Display
from lagrpo.training import checkpoint
from lagrpo.training import run as one_run
from lagrpo.training.checkpoint import CheckpointError, find_checkpoint
from lagrpo.training.run import Result

SMALL: dict[str, dict[str, Any]] = {
    "checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 20},
    "model": {"dtype": "bfloat16"},
    "schedule": {"num_iterations": 2, "stages": 2, "batches": 3},
    "loss": {"recipe": "grpo"},
    "eval": {"every": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def begin_in(root: Path, model: Path, name: str, /, *callbacks: Callback, **sections: dict[str, Any]) -> Result:
    return train(merged(tiny_settings(model, root), SMALL, sections, {"run": {"name": name}}), callbacks=callbacks)


@pytest.fixture
def begin(model, tmp_path):
    """Runs a tiny training of 6 batches under a name, with these settings."""
    return partial(begin_in, tmp_path, model)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run of a kind that was never stopped, with a checkpoint of each of its 6 batches. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("whole")
    return cache(lambda kind: begin_in(root, model, kind, **KINDS.get(kind, {})).run)


@pytest.fixture(scope="module")
def undisturbed(whole):
    """What it leaves."""
    return cache(lambda kind="plain": leaves(whole(kind), exact=True))


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A finished run of three batches, with a checkpoint of each."""
    return begin_in(tmp_path_factory.mktemp("finished"), model, "run", schedule={"stages": 1}).run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / "copy")


def go_on(run: Path, /, **sections: dict[str, Any]) -> Result:
    return train(merged({"run": {"resume": str(run)}}, sections))


def differing(run: Path, expected: dict[str, Any]) -> list[str]:
    """What a run leaves that differs from what another one left."""
    found = leaves(run, exact=True)
    return [key for key in expected if found.get(key) != expected[key]]


def cut_to(run: Path, batch: int, root: Path | None = None) -> Path:
    """A copy of a run, as one that was killed after this batch and its checkpoint; in `root`, or beside the run."""
    copy = (root or run.parent) / f"{run.name}-{batch}"
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").glob("step-*"):
        if int(folder.name.partition("-")[2]) > batch:
            shutil.rmtree(folder)
    (copy / "events.jsonl").write_bytes(b"".join((copy / "events.jsonl").read_bytes().splitlines(True)[:-1]))
    return copy


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and not path.name.startswith(".lock")}


def resumed(run: Path) -> list[dict[str, Any]]:
    return [event for event in load_events(run) if event["event"] == "resumed"]


# To the bit


@pytest.mark.parametrize(("kind", "batch"), [*((kind, 4) for kind in KINDS), ("asking ahead", 1), ("lagged", 1)])
def test_killed_run_resumes_to_the_bit(whole, undisturbed, tmp_path, kind, batch):
    assert differing(go_on(cut_to(whole(kind), batch, tmp_path)).run, undisturbed(kind)) == []


def test_killed_run_in_float32_resumes_to_the_bit(begin):
    """There the rows beside a row may change its last bits."""
    whole = begin("whole", **merged(KINDS["asking ahead"], {"model": {"dtype": "float32"}})).run
    assert differing(go_on(cut_to(whole, 4)).run, leaves(whole, exact=True)) == []


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("asking ahead", "sampling"), ("asking ahead", "evaluation (batch-000004)"), ("dynamic sampling", "checkpoint"),
     ("budget", "learning"), ("lagged", "weight sync")],
)  # fmt: skip
def test_signal_in_any_phase_loses_nothing(begin, undisturbed, monkeypatch, kind, phase):
    class Stop(Callback):
        batch, sent = 0, False

        def look(self, name: str) -> None:
            if name == phase and self.batch >= 2 and not self.sent:
                self.sent = True
                signal.raise_signal(signal.SIGTERM)

        def on_batch(self, metrics, rollouts) -> None:
            self.batch = metrics["step"]

    stop = Stop()
    monkeypatch.setattr(Display, "phase", lambda display, name: stop.look(name))
    stopped = begin("run", stop, **KINDS[kind])
    assert stopped.interrupted == signal.SIGTERM
    assert 2 <= stopped.batches < 6
    assert differing(go_on(stopped.run).run, undisturbed(kind)) == []


def test_finished_run_gets_more_batches_as_if_it_had_been_longer(begin):
    short = begin("short", schedule={"stages": 1, "batches": 3}).run
    whole = begin("long", schedule={"stages": 1, "batches": 6}).run
    assert differing(go_on(short, schedule={"batches": 6}).run, leaves(whole, exact=True)) == []
    assert (short / "evaluations" / "batch-000003.json").exists()


def test_run_killed_before_its_first_checkpoint_begins_again(whole, undisturbed, tmp_path):
    killed = cut_to(whole("plain"), 0, tmp_path)
    lines = (killed / "events.jsonl").read_text().splitlines(True)
    (killed / "events.jsonl").write_text("".join(line for line in lines if '"checkpoint"' not in line))
    assert differing(go_on(killed).run, undisturbed()) == []


def test_resume_auto_begins_a_run_or_resumes_it(begin, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.12-0123abcd.tmp").touch()  # a run that was killed while it was made
    first = begin("run", run={"resume": "auto"}, schedule={"stages": 1})
    assert not resumed(first.run)
    again = begin("run", run={"resume": "auto"}, schedule={"stages": 1})
    assert (again.batches, len(resumed(again.run))) == (3, 1)


def test_error_between_updates_keeps_the_last_batch(begin, undisturbed, monkeypatch):
    class Break(Callback):
        def on_batch(self, metrics, rollouts) -> None:
            if metrics["step"] == 4:
                monkeypatch.setattr(one_run.TrainerComponents, "read_offline", lambda *given: 1 / 0)

    with pytest.raises(ZeroDivisionError) as error:
        begin("run", Break(), checkpoint={"save_every": 0})
    assert "Go on after batch 4 with: lagrpo train --resume" in error.value.__notes__[-1]
    monkeypatch.undo()
    assert differing(go_on(Path(error.value.__notes__[-1].rpartition(" ")[2])).run, undisturbed()) == []


# What is on disk


def test_last_checkpoints_are_kept_and_without_any_a_finished_run_does_not_begin_again(begin):
    assert checkpoints(begin("two", checkpoint={"save_total_limit": 2}, schedule={"stages": 1}).run) == [2, 3]
    run = begin("none", schedule={"stages": 1}, checkpoint={"save_total_limit": 0}).run
    assert checkpoints(run) == []
    before = contents(run)
    with pytest.raises(SettingsError, match="has no checkpoint to resume from"):
        go_on(run, schedule={"stages": 2})
    assert contents(run) == before


def test_damaged_checkpoint_makes_way_for_the_one_before(begin):
    run = begin("run", schedule={"sync_every": 3, "stages": 1, "batches": 5}).run
    expected = leaves(run, exact=True)
    for name in ("state.json", "trainer.safetensors", "rollouts.parquet"):
        killed = cut_to(run, 4)
        damaged = killed / "checkpoints" / "step-000004" / name
        damaged.write_bytes(damaged.read_bytes()[:-2])
        newest, problems = find_checkpoint(killed / "checkpoints")
        assert newest is not None
        assert (newest.batch, len(problems)) == (3, 1)
        if name == "rollouts.parquet":
            assert differing(go_on(killed).run, expected) == []
        shutil.rmtree(killed)


def test_unreadable_checkpoints_do_not_make_a_run_begin_again(run):
    for state in (run / "checkpoints").glob("*/state.json"):
        state.write_text(state.read_text().replace("lagrpo.checkpoint/2", "lagrpo.checkpoint/3"))
    before = contents(run)
    with pytest.raises(SettingsError, match=r"(?s)in lagrpo.checkpoint/3.*has no checkpoint to resume from"):
        go_on(run, schedule={"stages": 2})
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(SettingsError, match="has no checkpoint to resume from"):
        go_on(run, schedule={"stages": 2})
    assert {path: text for path, text in before.items() if path.exists()} == contents(run)


def test_half_written_files_are_removed_and_files_of_others_stay(run, capsys):
    scratch = run / "checkpoints" / ".step-000009.123-0123abcd.tmp"
    scratch.mkdir()
    (scratch / "trainer.safetensors").write_bytes(b"half")
    strays = [run / stray for stray in ("rollouts/step-000003 (copy).parquet", "weights/v1 copy")]
    for stray in strays:
        stray.write_text("mine")
    go_on(run, schedule={"stages": 2}, run={"display": "plain"})
    assert "ignored, as it was only half written: checkpoints/step-000009" in capsys.readouterr().out
    assert not scratch.exists()
    assert {stray.read_text() for stray in strays} == {"mine"}


def test_full_disk_ends_the_run_and_the_checkpoint_before_is_whole(begin, undisturbed, monkeypatch):
    original, calls = checkpoint.save_file, []

    def full(tensors, path, **more):
        calls.append(path)
        if len(calls) > 2 and Path(path).name == "trainer.safetensors":
            Path(path).write_bytes(b"as much as there was room for")
            raise OSError(28, "No space left on device")
        return original(tensors, path, **more)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"step-000003 could not be written: .*No space left") as error:
        begin("run")
    monkeypatch.undo()
    run = Path(next(iter(error.value.__notes__)).split(": ")[1].partition(" (")[0])
    assert checkpoints(run) == [1, 2]
    assert differing(go_on(run).run, undisturbed()) == []


# What may change, and what keeps a run from resuming


def test_settings_that_could_alter_the_past_are_rejected_by_name(run):
    before = contents(run)
    wrong: dict[str, dict[str, Any]] = {
        r"optimizer\.learning_rate = 0\.5, and the run has 0\.01": {"optimizer": {"learning_rate": 0.5}},
        r"schedule\.batches = 2, and the run has 3": {"schedule": {"batches": 2}},
        r"task\.system_prompt = \"x\", and the run has unset": {"task": {"system_prompt": "x"}},
        "the run computes in bfloat16, and here it would in float32": {"model": {"dtype": "float32"}},
    }
    for message, change in wrong.items():
        with pytest.raises(SettingsError, match=message):
            go_on(run, **change)
    assert contents(run) == before


def test_settings_that_cannot_alter_the_past_may_change(run, undisturbed):
    change = {"run": {"display": "plain"}, "checkpoint": {"save_total_limit": 1}, "eval": {"best_metric": "reward"}}
    assert differing(go_on(run, **merged(change, {"schedule": {"stages": 2}})).run, undisturbed()) == []
    assert resumed(run)[0]["changed"]["eval.best_metric"] == [None, "reward"]
    assert resumed(run)[0]["changed"]["schedule.stages"] == [1, 2]
    assert load_settings(run / "config.toml").checkpoint.save_total_limit == 1
    assert (run / "weights" / "best").is_dir()


def test_more_batches_with_a_learning_rate_that_depends_on_their_number_are_rejected(begin):
    run = begin("run", schedule={"stages": 1}, optimizer={"lr_scheduler_type": "linear"}).run
    with pytest.raises(SettingsError, match=r"schedule\.batches = 5, and the run has 3"):
        go_on(run, schedule={"batches": 5})


def test_resume_on_another_machine_is_noted(run, capsys):
    file = run / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"cpu": "another one"}))
    go_on(run, run={"display": "plain"})
    assert list(resumed(run)[0]["moved"]) == ["cpu"]
    assert "no longer bit-identical" in capsys.readouterr().out


def test_another_model_in_the_same_place_is_rejected(begin, tmp_path):
    path = save_tiny(tmp_path / "model")
    run = begin("run", schedule={"stages": 1}, model={"path": str(path)}).run
    shutil.rmtree(path)
    save_tiny(path, seed=1)
    before = contents(run)
    with pytest.raises(SettingsError, match="not the model that the run began with") as error:
        go_on(run)
    assert error.value.__notes__ == [f"The run is as it was: {run}"]
    assert contents(run) == before


def test_data_that_has_changed_is_rejected(begin, tmp_path):
    file, columns = tmp_path / "sums.jsonl", {"prompt_column": "question", "answer_column": "answer"}
    rows = [json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}) for n in range(8)]
    file.write_text("\n".join(rows) + "\n")
    task = {"name": "custom", "data": str(file), "reward": "exact", **columns}
    run = begin("run", schedule={"stages": 1, "batches": 1}, task=task, eval={"at_start": False}).run
    file.write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(SettingsError, match="the data has changed since the run began"):
        go_on(run)


def test_second_process_is_rejected_while_one_writes(run):
    with locked(run), pytest.raises(RunLockedError, match=r"another process is writing into .*: process \d+ on"):
        go_on(run)
    assert go_on(run).batches == 3  # the lock is free again


def test_run_with_missing_or_damaged_files_is_rejected_by_name(run, tmp_path):
    with pytest.raises(SettingsError, match=r"run.resume = '.*nothing': there is no run in that directory"):
        go_on(tmp_path / "nothing")
    evaluation = run / "evaluations" / "before.json"
    evaluation.write_text("")
    with pytest.raises(SettingsError, match=r"before.json.*JSON"):
        go_on(run)
    evaluation.unlink()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(SettingsError, match=r"metrics.jsonl has 0 batches; the checkpoint is of 3"):
        go_on(run)


def test_run_that_could_not_be_restored_stays_as_it_was(run, monkeypatch):
    before = contents(run)
    monkeypatch.setattr(one_run, "restore_checkpoint", lambda *parts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go_on(run, schedule={"stages": 2})
    monkeypatch.undo()
    assert contents(run) == before
    assert go_on(run, schedule={"stages": 2}).batches == 6


def test_first_error_is_raised_if_the_disk_does_not_take_the_end_of_the_run(begin, monkeypatch):
    record = Run.record_event

    def full(self: Run, event: str, batch: int, **facts: Any) -> None:
        if event == "end":
            raise OSError(28, "No space left on device", "events.jsonl")
        record(self, event, batch, **facts)

    monkeypatch.setattr(Run, "record_event", full)
    monkeypatch.setattr(one_run.Training, "learn", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        begin("run", schedule={"stages": 1})
    assert error.value.__notes__[-1].startswith("No checkpoint yet; to begin again: lagrpo train --resume")
