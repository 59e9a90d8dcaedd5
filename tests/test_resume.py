"""A run goes on from any of its checkpoints as if nothing had happened; and what keeps it from going on is said."""

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

from lagrpo import Observer, train
from lagrpo.errors import SettingsError
from lagrpo.runs import load_events, load_metrics
from lagrpo.runs.checkpoints import CheckpointError, Checkpoints
from lagrpo.runs.lock import RunLockedError, locked
from lagrpo.settings.toml import load_settings
from lagrpo.training import run as training_run
from lagrpo.training.run import Result
from lagrpo.verify import VerifierError

pytestmark = pytest.mark.usefixtures("shared_templates")

SMALL: dict[str, dict[str, Any]] = {
    "run": {"checkpoint_every": 1, "checkpoint_minutes": 0, "keep_checkpoints": 20},
    "model": {"dtype": "bfloat16"},
    "schedule": {"i": 2, "stages": 2, "batches": 3},
    "objective": {"recipe": "grpo"},
    "evaluation": {"every": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def begin_in(root: Path, model: Path, name: str, /, *observers: Observer, **sections: dict[str, Any]) -> Result:
    return train(merged(tiny_settings(model, root), SMALL, sections, {"run": {"name": name}}), observers=observers)


@pytest.fixture
def begin(model, tmp_path):
    """Runs a tiny training of 6 batches under a name, with these settings."""
    return partial(begin_in, tmp_path, model)


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """What a run of a kind leaves when nobody disturbs it."""
    root = tmp_path_factory.mktemp("undisturbed")
    return cache(lambda kind="asking ahead": leaves(begin_in(root, model, kind, **KINDS[kind]).run, exact=True))


def go_on(run: Path, /, **sections: dict[str, Any]) -> Result:
    return train(merged({"run": {"resume": str(run)}}, sections))


def differing(run: Path, expected: dict[str, Any]) -> list[str]:
    """What a run leaves that differs from what another one left."""
    found = leaves(run, exact=True)
    return [key for key in expected if found.get(key) != expected[key]]


def cut_to(run: Path, batch: int) -> Path:
    """A copy of a run, as one that was killed after this batch and its checkpoint."""
    copy = run.with_name(f"{run.name}-{batch}")
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").glob("step-*"):
        if int(folder.name.partition("-")[2]) > batch:
            shutil.rmtree(folder)
    (copy / "events.jsonl").write_bytes(b"".join((copy / "events.jsonl").read_bytes().splitlines(True)[:-1]))
    return copy


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "bfloat16") for kind in KINDS), ("asking ahead", "float32")])
def test_from_every_checkpoint_it_goes_on_to_the_bit(begin, kind, dtype):
    """In bfloat16 sampler and learner agree to the bit; in float32 the rows beside a row may change its last bits."""
    whole = begin("whole", **merged(KINDS[kind], {"model": {"dtype": dtype}})).run
    for batch in (1, 4):
        assert differing(go_on(cut_to(whole, batch)).run, leaves(whole, exact=True)) == []


class Stop(Observer):
    """Sends a signal in the first phase of this name after two batches."""

    def __init__(self, phase: str) -> None:
        self.wanted, self.batches, self.sent = phase, 0, False

    def phase(self, name: str) -> None:
        if name == self.wanted and self.batches >= 2 and not self.sent:
            self.sent = True
            signal.raise_signal(signal.SIGTERM)

    def batch(self, step, metrics, rollouts) -> None:
        self.batches = step.b
        self.phase("recording")


SIGNALED = [
    *(("asking ahead", "sampling"), ("asking ahead", "recording"), ("asking ahead", "evaluation (batch-000004)")),
    *(("dynamic sampling", "sampling"), ("dynamic sampling", "checkpoint"), ("budget", "learning")),
    *(("lagged", phase) for phase in ("weight sync", "sampling", "learning")),
]


@pytest.mark.parametrize(("kind", "phase"), SIGNALED)
def test_a_signal_in_any_phase_loses_nothing(begin, undisturbed, kind, phase):
    stopped = begin("run", Stop(phase), **KINDS[kind])
    assert stopped.interrupted == signal.SIGTERM
    assert 2 <= stopped.batches < 6
    assert differing(go_on(stopped.run).run, undisturbed(kind)) == []


def test_a_finished_run_gets_more_batches_as_if_it_had_been_longer(begin):
    once = {"stages": 1}
    longer = go_on(begin("short", schedule=once | {"batches": 3}).run, schedule={"batches": 6})
    whole = begin("long", schedule=once | {"batches": 6})
    assert differing(longer.run, leaves(whole.run, exact=True)) == []
    assert (longer.run / "evaluations" / "batch-000003.json").exists()


def test_a_finished_run_gets_more_stages(begin):
    longer = go_on(begin("short", schedule={"stages": 1}).run, schedule={"stages": 2})
    assert differing(longer.run, leaves(begin("long").run, exact=True)) == []


def test_without_a_checkpoint_it_begins_again(begin):
    whole = begin("whole").run
    killed = cut_to(whole, 0)
    assert differing(go_on(killed).run, leaves(whole, exact=True)) == []


def test_auto_begins_a_run_or_goes_on_with_it(begin):
    first = begin("run", run={"resume": "auto"}, schedule={"stages": 1})
    assert "resumed" not in {event["event"] for event in load_events(first.run)}
    again = begin("run", run={"resume": "auto"}, schedule={"stages": 1})
    assert again.batches == 3
    assert [event["event"] for event in load_events(again.run)].count("resumed") == 1


@pytest.mark.parametrize("name", ["state.json", "learner.safetensors", "waiting.parquet"])
def test_a_checkpoint_that_lacks_something_makes_way_for_the_one_before(begin, name):
    run = begin("run", schedule={"v": 3, "stages": 1, "batches": 5}).run
    damaged = run / "checkpoints" / "step-000004" / name
    damaged.write_bytes(damaged.read_bytes()[:-2])
    newest, complaints = Checkpoints(cut_to(run, 4)).newest()
    assert newest is not None
    assert newest.batch == 3
    assert name in complaints[0] or "no whole checkpoint" in complaints[0]


def test_what_was_half_written_is_removed_and_named(begin, capsys):
    run = begin("run", schedule={"stages": 1}).run
    scratch = run / "checkpoints" / ".step-000009.123-0123abcd.tmp"
    scratch.mkdir()
    (scratch / "learner.safetensors").write_bytes(b"half")
    go_on(run, schedule={"stages": 2}, run={"display": "plain"})
    assert "ignored, as it was only half written: checkpoints/step-000009" in capsys.readouterr().out
    assert not scratch.exists()


def test_settings_that_differ_are_refused_by_name(begin):
    run = begin("run", schedule={"stages": 1}).run
    with pytest.raises(SettingsError, match=r"optimizer.lr = 0.5, and the run has 0.01.*--run.allow optimizer.lr"):
        go_on(run, optimizer={"lr": 0.5})
    with pytest.raises(SettingsError, match=r"schedule.batches = 2, and the run has 3"):
        go_on(run, schedule={"batches": 2})
    with pytest.raises(SettingsError, match=r"run.allow: optimiser.lr is no setting"):
        go_on(run, run={"allow": ["optimiser.lr"]})


def test_a_setting_that_is_allowed_changes_and_is_recorded(begin):
    run = begin("run", schedule={"stages": 1}).run
    done = go_on(run, optimizer={"lr": 0.5}, run={"allow": ["optimizer.lr"]}, schedule={"stages": 2})
    (resumed,) = [event for event in load_events(done.run) if event["event"] == "resumed"]
    assert resumed["changed"] == {"optimizer.lr": [0.01, 0.5], "schedule.stages": [1, 2]}
    assert [m["lr"] for m in load_metrics(done.run)] == [0.01] * 3 + [0.5] * 3
    assert load_settings(done.run / "config.toml").optimizer.lr == 0.5


def test_with_a_learning_rate_that_ends_more_batches_are_refused(begin):
    run = begin("run", schedule={"stages": 1}, optimizer={"schedule": "linear"}).run
    with pytest.raises(SettingsError, match=r"schedule.batches = 5, and the run has 3"):
        go_on(run, schedule={"batches": 5})


def test_another_machine_is_named(begin):
    run = begin("run", schedule={"stages": 1}).run
    file = run / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"cpu": "another one"}))
    go_on(run)
    (resumed,) = [event for event in load_events(run) if event["event"] == "resumed"]
    assert list(resumed["moved"]) == ["cpu"]


def test_another_model_is_refused(begin, tmp_path):
    run = begin("run", schedule={"stages": 1}).run
    other = save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(SettingsError, match="not the model that the run began with"):
        go_on(run, model={"path": str(other)}, run={"allow": ["model.path"]})


def test_a_finished_run_without_a_checkpoint_does_not_begin_again(begin):
    run = begin("run", schedule={"stages": 1}, run={"keep_optimizer": False}).run
    assert list((run / "checkpoints").glob("step-*")) == []
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SettingsError, match="is finished and kept no checkpoint"):
        go_on(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_second_process_is_refused_while_one_writes(begin):
    run = begin("run", schedule={"stages": 1}).run
    with locked(run), pytest.raises(RunLockedError, match=r"another process is writing into .*: process \d+ on"):
        go_on(run)
    assert go_on(run).batches == 3  # the lock is free again


def test_records_that_are_gone_are_missed(begin):
    run = begin("run", schedule={"stages": 1}).run
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(SettingsError, match=r"metrics.jsonl has 0 bytes, but the checkpoint was made after \d+"):
        go_on(run)


def test_the_last_checkpoints_stay_and_the_best(begin):
    run = begin("run", run={"keep_checkpoints": 1, "checkpoint_every": 1}, evaluation={"every": 1}).run
    values = {e.name: json.loads(e.read_bytes()) for e in (run / "evaluations").glob("batch-*.json")}
    best = max(sorted(values), key=lambda name: values[name]["pass_at_1"])
    kept = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert kept == sorted({values[best]["batch"], 6})


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_one_before_is_whole(begin, monkeypatch):
    import safetensors.torch

    original, calls = safetensors.torch.save_file, []

    def full(tensors, path, **more):
        calls.append(path)
        if len(calls) > 2 and Path(path).name == "learner.safetensors":
            Path(path).write_bytes(b"as much as there was room for")
            raise OSError(28, "No space left on device")
        return original(tensors, path, **more)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(CheckpointError, match=r"batch 3 could not be written .* The one of batch 2 is whole") as error:
        begin("run")
    monkeypatch.undo()
    run = Path(next(iter(error.value.__notes__)).split(": ")[1].partition(" (")[0])
    assert Checkpoints(run).newest()[0].batch == 2  # type: ignore[union-attr]
    assert differing(go_on(run).run, leaves(begin("whole").run, exact=True)) == []


def test_an_error_between_updates_keeps_the_last_batch(begin, monkeypatch):
    def fail(*arguments, **more):
        raise FloatingPointError("the gradient is not finite")

    class Break(Observer):
        def batch(self, step, metrics, rollouts) -> None:
            if step.b == 4:
                monkeypatch.setattr(training_run.Parts, "read_offline", fail)

    with pytest.raises(FloatingPointError) as error:
        begin("run", Break(), run={"checkpoint_every": 0})
    assert "Go on after batch 4 with: lagrpo train --resume" in error.value.__notes__[-1]
    monkeypatch.undo()
    run = Path(error.value.__notes__[-1].rpartition(" ")[2])
    assert differing(go_on(run).run, leaves(begin("whole").run, exact=True)) == []


def test_data_that_has_changed_is_refused(begin, tmp_path):
    file, columns = tmp_path / "sums.jsonl", {"prompt_column": "question", "answer_column": "answer"}
    rows = [json.dumps({"question": f"{n}+1?", "answer": str(n + 1)}) for n in range(8)]
    file.write_text("\n".join(rows) + "\n")
    task = {"name": "custom", "data": str(file), "reward": "exact", **columns}
    run = begin("run", schedule={"stages": 1, "batches": 1}, task=task, evaluation={"before_and_after": False}).run
    file.write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(SettingsError, match=r"the data has changed since the run began.*--run.allow task.data"):
        go_on(run)
    assert go_on(run, run={"allow": ["task.data"]}, schedule={"batches": 2}).batches == 2


def test_an_error_while_a_run_is_restored_leaves_its_weights(begin, monkeypatch):
    run = begin("run", schedule={"stages": 1}).run
    before = (run / "weights" / "final" / "model.safetensors").read_bytes()
    monkeypatch.setattr(training_run, "restore", lambda *parts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go_on(run, schedule={"stages": 2})
    monkeypatch.undo()
    assert (run / "weights" / "final" / "model.safetensors").read_bytes() == before
    assert go_on(run, schedule={"stages": 2}).batches == 6


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"run.resume = '.*nothing': there is no run in that directory"):
        go_on(tmp_path / "nothing")


def test_a_run_that_scores_too_few_completions_stops_after_ten_batches_and_goes_on_when_more_is_allowed(begin):
    few = {"max_without_reward": 1.0, "max_without_reward_run": 0.1}
    long = {"stages": 1, "batches": 12}
    with pytest.raises(VerifierError, match=r"batches so far have no reward.*max_without_reward_run") as error:
        begin("run", schedule=long, task={"name": "sample_task:load_sometimes"}, verifier=few)
    run = Path(error.value.__notes__[-1].rpartition(" ")[2])
    assert len(load_metrics(run)) == 10
    with pytest.raises(VerifierError, match="11 batches"):  # what was counted before counts
        go_on(run)
    assert go_on(run, verifier={"max_without_reward_run": 0.9}).batches == 12


def test_checkpoints_that_cannot_be_read_do_not_make_a_run_begin_again(begin):
    run = begin("run", schedule={"stages": 1}).run
    for state in (run / "checkpoints").glob("*/state.json"):
        state.write_text(state.read_text().replace("lagrpo.checkpoint/1", "lagrpo.checkpoint/2"))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SettingsError, match=r"(?s)in lagrpo.checkpoint/2.*No checkpoint of the run can be read"):
        go_on(run, schedule={"stages": 2})
    assert (run / "metrics.jsonl").read_bytes() == before


def test_what_was_allowed_once_is_not_allowed_for_ever(begin):
    run = begin("run", schedule={"stages": 1}).run
    go_on(run, optimizer={"lr": 0.5}, run={"allow": ["optimizer.lr"]})
    kept = load_settings(run / "config.toml").run
    assert (kept.resume, kept.allow) == (None, ())
    with pytest.raises(SettingsError, match=r"optimizer\.lr = 0\.1, and the run has 0\.5"):
        go_on(run, optimizer={"lr": 0.1})


def test_a_copy_of_a_run_goes_on_where_it_is(begin, tmp_path, monkeypatch):
    run = begin("run", schedule={"stages": 1}, run={"display": "plain"}).run
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(run, copy)
    before = (run / "reward.png").read_bytes()
    assert go_on(copy, schedule={"stages": 2}).run == copy
    assert (run / "reward.png").read_bytes() == before
    assert (copy / "reward.png").read_bytes() != before


def test_auto_begins_where_only_a_directory_was_made(begin, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.12-0123abcd.tmp").touch()
    assert begin("run", run={"resume": "auto"}, schedule={"stages": 1}).batches == 3


def test_what_is_refused_leaves_the_records_as_they_were(begin, tmp_path):
    run = begin("run", schedule={"stages": 1}).run
    files = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    other = save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(SettingsError) as error:
        go_on(run, run={"allow": ["model.path"]}, **{"model": {"path": str(other)}})
    assert error.value.__notes__ == [f"The run is as it was: {run}"]
    assert files == {name: (run / name).read_bytes() for name in files}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": {"seed": 9, "allow": ["run.seed"]}}, "run.seed cannot change"),
        ({"model": {"dtype": "float32"}}, "the run computes in bfloat16, and here it would in float32"),
        ({"run": {"name": "another"}}, "run.name = 'another': a resumed run keeps its directory"),
        ({"schedule": {"batches": 1}, "run": {"allow": ["schedule.batches"]}}, "has 3 batches, more than the 1 it is"),
    ],
)
def test_what_cannot_change_is_refused_whatever_is_allowed(begin, change, message):
    run = begin("run", schedule={"stages": 1}).run
    with pytest.raises(SettingsError, match=message):
        go_on(run, **change)


def test_damaged_records_are_named(begin):
    run = begin("run", schedule={"stages": 1}).run
    (run / "evaluations" / "before.json").write_text("")
    with pytest.raises(SettingsError, match=r"before.json is damaged"):
        go_on(run)
    (run / "config.toml").write_text("")
    with pytest.raises(SettingsError, match=r"config.toml is empty"):
        go_on(run)


def test_a_signal_while_a_run_is_restored_leaves_it_as_it_was(begin):
    run = begin("run", schedule={"stages": 1}).run
    before = {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and not path.name.startswith(".lock")
    }

    class Press(Observer):
        def phase(self, name: str) -> None:
            if name == "restoring the checkpoint":
                signal.raise_signal(signal.SIGTERM)

    settings = load_settings(None, {"run": {"resume": str(run)}, "schedule": {"stages": 2}})
    stopped = train(settings, observers=[Press()])
    assert (stopped.interrupted, stopped.weights) == (signal.SIGTERM, None)
    assert before == {path: path.read_bytes() for path in before}
    assert go_on(run, schedule={"stages": 2}).batches == 6
