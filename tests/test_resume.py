"""A run resumes from any of its checkpoints as if nothing had happened; what keeps it from resuming is named."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos import KINDS, leaves, merged
from running import tiny_settings
from tiny import save_tiny

from lagrpo import Callback, train
from lagrpo.errors import SettingsError
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.runs import load_events, load_metrics
from lagrpo.runs.directory import Run, RunLockedError, locked
from lagrpo.settings.toml import load_settings
from lagrpo.terminal.display import Display
from lagrpo.training import checkpoint
from lagrpo.training import run as one_run
from lagrpo.training.checkpoint import CheckpointError, CheckpointManager, find_checkpoint
from lagrpo.training.run import Result

pytestmark = pytest.mark.usefixtures("shared_templates")

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


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_run_resumes_to_the_bit(whole, undisturbed, tmp_path, kind, batch):
    assert differing(go_on(cut_to(whole(kind), batch, tmp_path)).run, undisturbed(kind)) == []


def test_killed_run_in_float32_resumes_to_the_bit(begin):
    """There the rows beside a row may change its last bits."""
    whole = begin("whole", **merged(KINDS["asking ahead"], {"model": {"dtype": "float32"}})).run
    for batch in (1, 4):
        assert differing(go_on(cut_to(whole, batch)).run, leaves(whole, exact=True)) == []


SIGNALED = [
    *(("asking ahead", phase) for phase in ("sampling", "recording", "evaluation (batch-000004)")),
    *(("dynamic sampling", "sampling"), ("dynamic sampling", "checkpoint"), ("budget", "learning")),
    *(("lagged", phase) for phase in ("weight sync", "sampling", "learning")),
]


@pytest.mark.parametrize(("kind", "phase"), SIGNALED)
def test_signal_in_any_phase_loses_nothing(begin, undisturbed, monkeypatch, kind, phase):
    class Stop(Callback):
        batch, sent = 0, False

        def look(self, name: str) -> None:
            if name == phase and self.batch >= 2 and not self.sent:
                self.sent = True
                signal.raise_signal(signal.SIGTERM)

        def on_batch(self, metrics, rollouts) -> None:
            self.batch = metrics["step"]
            self.look("recording")

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


def test_finished_run_gets_more_stages(run, undisturbed):
    assert differing(go_on(run, schedule={"stages": 2}).run, undisturbed()) == []
    assert resumed(run)[0]["changed"] == {"schedule.stages": [1, 2]}


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


def test_copy_of_a_run_resumes_where_it_is(run, finished, tmp_path):
    before = contents(finished)
    copy = shutil.copytree(run, tmp_path / "elsewhere" / "other")
    assert go_on(copy, schedule={"stages": 2}).run == copy
    assert contents(finished) == before


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


def test_last_checkpoints_are_kept(begin):
    assert checkpoints(begin("run", checkpoint={"save_total_limit": 2}).run) == [5, 6]


def test_without_kept_checkpoints_a_finished_run_has_none_and_does_not_begin_again(begin):
    run = begin("run", schedule={"stages": 1}, checkpoint={"save_total_limit": 0}).run
    assert checkpoints(run) == []
    before = contents(run)
    with pytest.raises(SettingsError, match="has no checkpoint to resume from"):
        go_on(run, schedule={"stages": 2})
    assert contents(run) == before


@pytest.mark.parametrize("name", ["state.json", "trainer.safetensors", "rollouts.parquet"])
def test_damaged_checkpoint_makes_way_for_the_one_before(begin, name):
    run = begin("run", schedule={"sync_every": 3, "stages": 1, "batches": 5}).run
    damaged = run / "checkpoints" / "step-000004" / name
    damaged.write_bytes(damaged.read_bytes()[:-2])
    killed = cut_to(run, 4)
    newest, problems = find_checkpoint(killed / "checkpoints")
    assert newest is not None
    assert newest.batch == 3
    assert len(problems) == 1
    assert differing(go_on(killed).run, leaves(run, exact=True)) == []


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


def test_half_written_files_are_removed_and_strangers_files_stay(run, capsys):
    scratch = run / "checkpoints" / ".step-000009.123-0123abcd.tmp"
    scratch.mkdir()
    (scratch / "trainer.safetensors").write_bytes(b"half")
    strays = [
        run / stray for stray in ("rollouts/step-000003 (copy).parquet", "weights/v1 copy", "checkpoints/step-99x")
    ]
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


STATE = {"loop": {"batch": 1}, "versions": {"policy": 1}}


def test_ranks_write_one_checkpoint_together(tmp_path):
    managers = [CheckpointManager(tmp_path, rank=rank, size=3) for rank in range(3)]
    managers[0].save(STATE, {"a@0:3": torch.tensor([1.0])}, {}, ())
    for rank in (1, 2):
        managers[rank].save_shard(1, {f"a@{rank}:3": torch.tensor([1.0 + rank])})
    for manager in managers:
        manager.wait()
        manager.close()
    found, problems = find_checkpoint(tmp_path)
    assert found is not None
    assert problems == []
    assert found.load_trainer()["a"].tolist() == [1.0, 2.0, 3.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_rank_that_cannot_write_raises_and_leaves_no_checkpoint(tmp_path, monkeypatch):
    def full(tensors: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    first, second = (CheckpointManager(tmp_path, rank=rank, size=2) for rank in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_tensors", full)
        second.save_shard(1, {})
        with pytest.raises(CheckpointError, match=r"rank 1 could not write .*No space left"):
            second.wait()
    first.save(STATE, {}, {}, ())
    with pytest.raises(CheckpointError, match=r"rank 1 could not write"):
        first.wait()
    assert find_checkpoint(tmp_path) == (None, [])


# What may change, and what keeps a run from resuming


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": {"learning_rate": 0.5}},
            r"optimizer\.learning_rate = 0\.5, and the run has 0\.01: a resumed run keeps",
        ),
        ({"schedule": {"batches": 2}}, r"schedule\.batches = 2, and the run has 3"),
        ({"run": {"seed": 9}}, r"run\.seed = 9, and the run has 3"),
        ({"task": {"system_prompt": "x"}}, r"task\.system_prompt = \"x\", and the run has unset"),
        ({"eval": {"num_samples": 5}}, r"eval\.num_samples = 5, and the run has 3"),
        ({"model": {"dtype": "float32"}}, "the run computes in bfloat16, and here it would in float32"),
    ],
)
def test_settings_that_differ_are_rejected_by_name(run, change, message):
    before = contents(run)
    with pytest.raises(SettingsError, match=message):
        go_on(run, **change)
    assert contents(run) == before


def test_settings_that_cannot_alter_the_past_may_change(run, undisturbed):
    change = {"run": {"display": "plain"}, "checkpoint": {"save_total_limit": 1}, "eval": {"best_metric": "reward"}}
    assert differing(go_on(run, **merged(change, {"schedule": {"stages": 2}})).run, undisturbed()) == []
    assert resumed(run)[0]["changed"]["eval.best_metric"] == [None, "reward"]
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


def test_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"run.resume = '.*nothing': there is no run in that directory"):
        go_on(tmp_path / "nothing")


def test_records_that_are_gone_are_missed(run):
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(SettingsError, match=r"metrics.jsonl has 0 batches; the checkpoint is of 3"):
        go_on(run)


def test_damaged_evaluation_is_named(run):
    (run / "evaluations" / "before.json").write_text("")
    with pytest.raises(SettingsError, match=r"before.json.*JSON"):
        go_on(run)
    (run / "evaluations" / "before.json").unlink()
    assert go_on(run, schedule={"stages": 2}).batches == 6


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
    begin_again, end = error.value.__notes__[-2:]
    assert begin_again.startswith("No checkpoint yet; to begin again: lagrpo train --resume")
    assert "No space left on device" in end


# What it costs

SLOW = 0.2


def slowed(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Each group takes SLOW seconds more."""

    def received(*args: Any) -> Any:
        if (item := receive(*args)) is not None:
            args[0].seconds += SLOW
            time.sleep(SLOW)
        return item

    return received


def test_sampling_that_a_checkpoint_waited_for_counts_for_the_next_batch(begin, monkeypatch):
    """With prefetching, the first checkpoint finishes the completions of all batches up to the next weight sync."""
    monkeypatch.setattr(Prefetcher, "_next", slowed(Prefetcher._next))
    run = begin("ahead", schedule={"sync_every": 9, "num_iterations": 1, "stages": 1}, rollout={"max_num_seqs": 8}).run
    lines = load_metrics(run)
    phases = ("generate", "reward", "train", "score", "sync")
    for line in lines:
        assert min(line[f"time/{phase}"] for phase in phases) >= 0
        assert sum(line[f"time/{phase}"] for phase in phases) <= line["time/step"]
    first, second, third = (line["time/generate"] for line in lines)
    assert first > 2 * SLOW
    assert second > 4 * SLOW  # two groups of batch 2, two of batch 3
    assert third == 0
