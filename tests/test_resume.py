"""A run goes on from any of its checkpoints as if nothing had happened; and what keeps it from going on is said."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from chaos import KINDS, leaves, merged
from running import tiny_settings
from tiny import save_tiny

from lagrpo import Observer, train
from lagrpo.errors import SettingsError
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs import load_events, load_metrics
from lagrpo.runs.checkpoints import CheckpointError, Checkpoints
from lagrpo.runs.directory import Run, RunLockedError, locked
from lagrpo.runs.state import Loop
from lagrpo.settings.toml import load_settings
from lagrpo.training import resume as training_resume
from lagrpo.training import run as one_run
from lagrpo.training import run as training_run
from lagrpo.training.run import Result

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
def whole(model, tmp_path_factory):
    """A run of a kind that nobody disturbed, with a checkpoint of each of its 6 batches. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("whole")
    return cache(lambda kind: begin_in(root, model, kind, **KINDS.get(kind, {})).run)


@pytest.fixture(scope="module")
def undisturbed(whole):
    """What it leaves."""
    return cache(lambda kind="plain": leaves(whole(kind), exact=True))


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run of three batches that came to its end, with a checkpoint of each."""
    return begin_in(tmp_path_factory.mktemp("finished"), model, "run", schedule={"stages": 1}).run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / "copy")


def go_on(run: Path, /, **sections: dict[str, Any]) -> Result:
    return train(merged({"run": {"resume": str(run)}}, sections))


def count_differing(run: Path, expected: dict[str, Any]) -> list[str]:
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


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_from_its_checkpoints_it_goes_on_to_the_bit(whole, undisturbed, tmp_path, kind, batch):
    assert count_differing(go_on(cut_to(whole(kind), batch, tmp_path)).run, undisturbed(kind)) == []


def test_from_its_checkpoints_it_goes_on_to_the_bit_in_float32(begin):
    """There the rows beside a row may change its last bits."""
    whole = begin("whole", **merged(KINDS["asking ahead"], {"model": {"dtype": "float32"}})).run
    for batch in (1, 4):
        assert count_differing(go_on(cut_to(whole, batch)).run, leaves(whole, exact=True)) == []


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
    assert count_differing(go_on(stopped.run).run, undisturbed(kind)) == []


def test_a_finished_run_gets_more_batches_as_if_it_had_been_longer(begin):
    once = {"stages": 1}
    longer = go_on(begin("short", schedule=once | {"batches": 3}).run, schedule={"batches": 6})
    whole = begin("long", schedule=once | {"batches": 6})
    assert count_differing(longer.run, leaves(whole.run, exact=True)) == []
    assert (longer.run / "evaluations" / "batch-000003.json").exists()


def test_a_finished_run_gets_more_stages(run, undisturbed):
    assert count_differing(go_on(run, schedule={"stages": 2}).run, undisturbed()) == []


def before_its_first_checkpoint(run: Path, root: Path) -> Path:
    """A copy of a run, as one that was killed before it had a checkpoint."""
    copy = cut_to(run, 0, root)
    shutil.rmtree(copy / "weights" / "final")
    lines = (copy / "events.jsonl").read_text().splitlines(True)
    (copy / "events.jsonl").write_text("".join(line for line in lines if '"checkpoint"' not in line))
    return copy


def test_without_a_checkpoint_it_begins_again(whole, undisturbed, tmp_path):
    killed = before_its_first_checkpoint(whole("plain"), tmp_path)
    assert count_differing(go_on(killed).run, undisturbed()) == []


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


def test_what_was_half_written_is_removed_and_named(run, capsys):
    scratch = run / "checkpoints" / ".step-000009.123-0123abcd.tmp"
    scratch.mkdir()
    (scratch / "learner.safetensors").write_bytes(b"half")
    go_on(run, schedule={"stages": 2}, run={"display": "plain"})
    assert "ignored, as it was only half written: checkpoints/step-000009" in capsys.readouterr().out
    assert not scratch.exists()


def test_settings_that_differ_are_refused_by_name(run):
    with pytest.raises(SettingsError, match=r"optimizer.lr = 0.5, and the run has 0.01.*--run.allow optimizer.lr"):
        go_on(run, optimizer={"lr": 0.5})
    with pytest.raises(SettingsError, match=r"schedule.batches = 2, and the run has 3"):
        go_on(run, schedule={"batches": 2})
    with pytest.raises(SettingsError, match=r"run.allow: optimiser.lr is no setting"):
        go_on(run, run={"allow": ["optimiser.lr"]})


def test_a_setting_that_is_allowed_changes_and_is_recorded(run):
    done = go_on(run, optimizer={"lr": 0.5}, run={"allow": ["optimizer.lr"]}, schedule={"stages": 2})
    (resumed,) = [event for event in load_events(done.run) if event["event"] == "resumed"]
    assert resumed["changed"] == {"optimizer.lr": [0.01, 0.5], "schedule.stages": [1, 2]}
    assert [m["lr"] for m in load_metrics(done.run)] == [0.01] * 3 + [0.5] * 3
    assert load_settings(done.run / "config.toml").optimizer.lr == 0.5


def test_with_a_learning_rate_that_ends_more_batches_are_refused(begin):
    run = begin("run", schedule={"stages": 1}, optimizer={"schedule": "linear"}).run
    with pytest.raises(SettingsError, match=r"schedule.batches = 5, and the run has 3"):
        go_on(run, schedule={"batches": 5})


def test_another_machine_is_named(run):
    file = run / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"cpu": "another one"}))
    go_on(run)
    (resumed,) = [event for event in load_events(run) if event["event"] == "resumed"]
    assert list(resumed["moved"]) == ["cpu"]


def test_another_model_is_refused(run, tmp_path):
    other = save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(SettingsError, match="not the model that the run began with"):
        go_on(run, model={"path": str(other)}, run={"allow": ["model.path"]})


def test_a_finished_run_without_a_checkpoint_does_not_begin_again(begin):
    run = begin("run", schedule={"stages": 1}, run={"keep_optimizer": False}).run
    assert list((run / "checkpoints").glob("step-*")) == []
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SettingsError, match="is finished, and kept no checkpoint"):
        go_on(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_second_process_is_refused_while_one_writes(run):
    with locked(run), pytest.raises(RunLockedError, match=r"another process is writing into .*: process \d+ on"):
        go_on(run)
    assert go_on(run).batches == 3  # the lock is free again


def test_records_that_are_gone_are_missed(run):
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(SettingsError, match=r"metrics.jsonl is not as it was when the checkpoint was made"):
        go_on(run)


def test_the_last_checkpoints_stay_and_the_best(begin):
    run = begin("run", run={"keep_checkpoints": 1, "checkpoint_every": 1}, evaluation={"every": 1}).run
    values = {e.name: json.loads(e.read_bytes()) for e in (run / "evaluations").glob("batch-*.json")}
    best = max(sorted(values), key=lambda name: values[name]["pass_at_1"])
    kept = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert kept == sorted({values[best]["batch"], 6})


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_one_before_is_whole(begin, undisturbed, monkeypatch):
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
    assert "step-000003'" in str(error.value)
    assert "\n".join([str(error.value), *error.value.__notes__]).count("--resume") == 1
    run = Path(next(iter(error.value.__notes__)).split(": ")[1].partition(" (")[0])
    assert Checkpoints(run).newest()[0].batch == 2  # type: ignore[union-attr]
    assert count_differing(go_on(run).run, undisturbed()) == []


def test_an_error_between_updates_keeps_the_last_batch(begin, undisturbed, monkeypatch):
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
    assert count_differing(go_on(run).run, undisturbed()) == []


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


def test_an_error_while_a_run_is_restored_leaves_its_weights(run, monkeypatch):
    before = (run / "weights" / "final" / "model.safetensors").read_bytes()
    monkeypatch.setattr(one_run, "restore", lambda *parts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go_on(run, schedule={"stages": 2})
    monkeypatch.undo()
    assert (run / "weights" / "final" / "model.safetensors").read_bytes() == before
    assert go_on(run, schedule={"stages": 2}).batches == 6


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"run.resume = '.*nothing': there is no run in that directory"):
        go_on(tmp_path / "nothing")


def test_checkpoints_that_cannot_be_read_do_not_make_a_run_begin_again(run):
    for state in (run / "checkpoints").glob("*/state.json"):
        state.write_text(state.read_text().replace("lagrpo.checkpoint/1", "lagrpo.checkpoint/2"))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(SettingsError, match=r"(?s)in lagrpo.checkpoint/2.*No checkpoint of .* can be read"):
        go_on(run, schedule={"stages": 2})
    assert (run / "metrics.jsonl").read_bytes() == before


def test_what_was_allowed_once_is_not_allowed_for_ever(run):
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


def test_what_is_refused_leaves_the_records_as_they_were(run, tmp_path):
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
def test_what_cannot_change_is_refused_whatever_is_allowed(run, change, message):
    with pytest.raises(SettingsError, match=message):
        go_on(run, **change)


def test_damaged_records_are_named(run):
    (run / "evaluations" / "before.json").write_text("")
    with pytest.raises(SettingsError, match=r"before.json: this is not JSON.*To go on without this evaluation"):
        go_on(run)
    (run / "config.toml").write_text("")
    with pytest.raises(SettingsError, match=r"config.toml is empty"):
        go_on(run)


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and not path.name.startswith(".lock")}


def refused(run: Path, monkeypatch: pytest.MonkeyPatch, /, **sections: dict[str, Any]) -> str:
    """Why the run does not go on. Nothing of it may have changed, and no model may have been loaded."""
    before = contents(run)
    with monkeypatch.context() as patched:
        patched.setattr(training_run.Parts, "build", lambda *parts: pytest.fail("a model was loaded"))
        with pytest.raises(SettingsError) as error:
            go_on(run, **sections)
    assert contents(run) == before
    return str(error.value)


def edit_state(run: Path, change: Callable[[dict[str, Any]], Any], batch: int = 3) -> None:
    file = run / "checkpoints" / f"step-{batch:06d}" / "state.json"
    state = json.loads(file.read_bytes())
    change(state)
    file.write_text(json.dumps(state))


def resumptions(run: Path) -> list[dict[str, Any]]:
    return [event for event in load_events(run) if event["event"] == "resumed"]


def test_only_the_records_of_the_run_are_ever_cut(run, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("a year of work")
    edit_state(run, lambda state: state["lengths"].update({str(precious): 0}))
    assert Checkpoints(run).newest()[0].batch == 2  # type: ignore[union-attr]
    assert go_on(run).batches == 3
    assert precious.read_text() == "a year of work"


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a batch that is text": lambda s: s.update(batch="three"),
    "the batch of another checkpoint": lambda s: s.update(batch=2, loop={**s["loop"], "batch": 2}),
    "another batch in its loop": lambda s: s["loop"].update(batch=2),
    "a length below nothing": lambda s: s["lengths"].update({"metrics.jsonl": -1}),
    "a field that the loop does not have": lambda s: s["loop"].update(stage=1),
    "a parity check without its items": lambda s: s.update(parity={"before": None, "likeliest": 0.0}),
    "a number for the parity check": lambda s: s.update(parity=7),
    "a batch that is no number": lambda s: s.update(announced={"soon": [0]}),
    "a number for the warnings": lambda s: s.update(warnings=3),
    "a best evaluation that is text": lambda s: s.update(best="x"),
    "no file of the learner": lambda s: s.update(files={}),
    "a file that is not its own": lambda s: s["files"].update({"../../metrics.jsonl": 1}),
    "a version without weights": lambda s: s["versions"].update(alpha=99),
    **{f"no {key}": lambda s, key=key: s.pop(key) for key in ("batch", "lengths", "loop", "versions", "model", "data")},
}


@pytest.mark.parametrize("damage", STATES)
def test_a_state_that_no_checkpoint_has_makes_way_for_the_one_before(run, damage):
    edit_state(run, STATES[damage])
    newest, complaints = Checkpoints(run).newest()
    assert newest is not None
    assert (newest.batch, len(complaints)) == (2, 1)
    assert "\n" not in complaints[0]


@pytest.mark.parametrize("text", ["[]", "", "[" * 100_000, '{"schema": 1' + "0" * 5000 + "}"])
def test_a_state_that_is_no_object_makes_way_too(run, text):
    (run / "checkpoints" / "step-000003" / "state.json").write_text(text)
    assert Checkpoints(run).newest()[0].batch == 2  # type: ignore[union-attr]


def test_the_state_of_a_checkpoint_has_the_fields_of_the_loop():
    assert [*Loop.__annotations__] == [field.name for field in fields(LoopState)]


def damage_metrics(run: Path) -> None:
    text = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(text[:40] + b"\x01" + text[41:])


def without_counts(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"completions"', '"completiens"'))


RECORDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a damaged byte in metrics": (damage_metrics, r"metrics.jsonl, line 1: this is not JSON"),
    "metrics without what is counted": (without_counts, r"line 1: completions is None, not a number"),
    "an environment that is a list": (
        lambda r: (r / "environment.json").write_text("[]"),
        r"environment.json is damaged",
    ),
    "an evaluation that is a list": (lambda r: (r / "evaluations" / "x.json").write_text("[]"), r"x.json: this is a l"),
    "an evaluation without a name": (
        lambda r: (r / "evaluations" / "x.json").write_text('{"batch": 1}'),
        r"is not the summary",
    ),
    "an evaluation of another name": (
        lambda r: (r / "evaluations" / "x.json").write_text('{"batch": 1, "name": "../../y"}'),
        r"x.json is not the summary",
    ),
    "an evaluation of a batch that is text": (
        lambda r: (r / "evaluations" / "x.json").write_text('{"batch": "1", "name": "x"}'),
        r"x.json is not the summary",
    ),
    "a damaged table of an evaluation": (
        lambda r: (r / "evaluations" / "before.parquet").write_text("x"),
        r"before.parquet is damaged .* remove it and its .json",
    ),
}


@pytest.mark.parametrize("damage", RECORDS)
def test_damaged_records_are_refused_before_anything_is_loaded_or_cut(run, monkeypatch, damage):
    spoil, message = RECORDS[damage]
    spoil(run)
    said = refused(run, monkeypatch, schedule={"stages": 2})
    assert "\n" not in said
    with pytest.raises(SettingsError, match=message):
        go_on(run)


def test_names_that_no_run_gives_are_left_alone(run):
    strays = ["rollouts/step-000003 (copy).parquet", "rollouts/step-abc.parquet", "weights/v1 copy"]
    strays += ["checkpoints/weights/v000001 copy.safetensors", "checkpoints/step-000099"]
    for stray in strays:
        (run / stray).parent.mkdir(exist_ok=True)
        (run / stray).write_text("mine")
    assert go_on(run, schedule={"stages": 2}).batches == 6
    assert {(run / stray).read_text() for stray in strays} == {"mine"}


@pytest.mark.parametrize("status", ["interrupted", "killed"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(run, begin, monkeypatch, status):
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "weights")
    lines = (run / "events.jsonl").read_text().replace('"finished"', '"interrupted"').splitlines(True)
    (run / "events.jsonl").write_text("".join(lines if status == "interrupted" else lines[:-1]))
    assert "had checkpoints, and" in refused(run, monkeypatch)
    with pytest.raises(SettingsError, match=r"had checkpoints, and .* start a new run$"):
        begin(run.name, run={"resume": "auto"}, schedule={"stages": 1})


def test_a_finished_run_that_keeps_no_checkpoint_says_that_it_is_finished_before_it_removes_them(begin, monkeypatch):
    said, prune = [], Checkpoints.prune

    def look(self: Checkpoints, keep: Any) -> None:
        if not keep:
            said.extend(event.get("status") for event in load_events(self.run))
        prune(self, keep)

    monkeypatch.setattr(Checkpoints, "prune", look)
    run = begin("run", schedule={"stages": 1}, run={"keep_optimizer": False}).run
    assert said[-1] == "finished"
    assert list((run / "checkpoints").glob("step-*")) == []


def test_a_run_that_was_killed_between_its_weights_and_its_last_event_does_not_begin_again(begin, monkeypatch):
    none = {"checkpoint_every": 0, "keep_optimizer": False}
    run = begin("run", schedule={"stages": 1}, run=none, evaluation={"every": 0}).run
    lines = (run / "events.jsonl").read_text().splitlines(True)
    assert not any('"checkpoint"' in line for line in lines)
    (run / "events.jsonl").write_text("".join(lines[:-1]))
    assert "is finished, and kept no checkpoint" in refused(run, monkeypatch)


def changed_and_killed(run: Path) -> Path:
    """A copy of a run, as one that got another learning rate after batch 3 and was killed before a checkpoint."""
    return cut_to(go_on(run, optimizer={"lr": 0.5}, run={"allow": ["optimizer.lr"]}, schedule={"stages": 2}).run, 3)


def test_a_change_is_on_record_where_the_run_dies_before_its_next_checkpoint(run):
    killed = changed_and_killed(run)
    changed = {"optimizer.lr": [0.01, 0.5], "schedule.stages": [1, 2]}
    for _ in range(2):
        assert [e["changed"] for e in resumptions(go_on(killed).run)] == [changed]
        killed = cut_to(killed, 3)


def test_a_change_that_nobody_allowed_is_refused_where_config_toml_has_it(run, monkeypatch):
    config = run / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.5"))
    assert "optimizer.lr = 0.5, and the run has 0.01" in refused(run, monkeypatch)


def test_a_change_is_recorded_before_it_is_in_config_toml(run, monkeypatch):
    def die(self: Run, settings_toml: str) -> None:
        raise OSError("killed")

    monkeypatch.setattr(Run, "write_config", die)
    with pytest.raises(OSError, match="killed") as error:
        go_on(run, optimizer={"lr": 0.5}, run={"allow": ["optimizer.lr"]}, schedule={"stages": 2})
    monkeypatch.undo()
    assert "as it was" not in str(error.value.__notes__)
    assert [e["changed"]["optimizer.lr"] for e in resumptions(run)] == [[0.01, 0.5]]
    assert go_on(run).batches == 3


def test_a_checkpoint_of_an_earlier_version_goes_on_by_config_toml(run, monkeypatch):
    for batch in (1, 2, 3):
        edit_state(run, lambda state: (state.pop("settings"), state.pop("run")), batch)
    environment = json.loads((run / "environment.json").read_bytes())
    (run / "environment.json").write_text(json.dumps({k: v for k, v in environment.items() if k != "id"}))
    assert "optimizer.lr = 0.5, and the run has 0.01" in refused(run, monkeypatch, optimizer={"lr": 0.5})
    assert go_on(run, schedule={"stages": 2}).batches == 6
    assert go_on(run).batches == 6


def test_checkpoints_of_another_run_are_none_of_this_one(run, begin, monkeypatch):
    other = begin("other", schedule={"stages": 1, "i": 1}).run
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    assert "step-000003 is a checkpoint of another run" in refused(run, monkeypatch)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_records_are_never_cut_in_the_middle_of_a_line(run, monkeypatch, name):
    edit_state(run, lambda state: state["lengths"].update({name: state["lengths"][name] - 3}))
    assert f"{name} is not as it was when the checkpoint was made" in refused(run, monkeypatch)


def test_a_checkpoint_that_does_not_belong_to_the_last_line_of_metrics_is_refused(run, monkeypatch):
    two = sum(map(len, (run / "metrics.jsonl").read_bytes().splitlines(True)[:2]))
    edit_state(run, lambda state: state["lengths"].update({"metrics.jsonl": two}))
    assert "metrics.jsonl does not have one line for each batch until 3" in refused(run, monkeypatch)


def test_a_failure_while_records_are_cut_does_not_say_that_nothing_has_changed(run, monkeypatch):
    def die(path: Path) -> list[Path]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(training_resume, "remove_leftovers", die)
    with pytest.raises(OSError, match="the disk is gone") as error:
        go_on(run, schedule={"stages": 2})
    monkeypatch.undo()
    assert "as it was" not in str(error.value.__notes__)
    assert "Go on after batch 3 with" in error.value.__notes__[-1]
    assert go_on(run, schedule={"stages": 2}).batches == 6


def test_the_first_error_is_told_where_the_disk_does_not_take_the_end_of_the_run(begin, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device", "events.jsonl")

    monkeypatch.setattr(one_run.RunFiles, "end", full)
    monkeypatch.setattr(one_run.Training, "learn", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        begin("run", schedule={"stages": 1})
    begin_again, end = error.value.__notes__[-2:]
    assert begin_again.startswith("No checkpoint yet; to begin again: lagrpo train --resume")
    assert end == "Recording the end also failed: [Errno 28] No space left on device: 'events.jsonl'"


def test_a_run_that_begins_again_says_where_it_does(finished, tmp_path):
    killed = before_its_first_checkpoint(finished, tmp_path)
    file = killed / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"dtype": "float32", "id": "another"}))
    go_on(killed)
    environment = json.loads(file.read_bytes())
    assert environment["dtype"] == "bfloat16"
    assert environment["id"] != "another"


def test_an_environment_that_is_gone_is_written_again(run):
    before = json.loads((run / "environment.json").read_bytes())
    (run / "environment.json").unlink()
    go_on(run)
    after = json.loads((run / "environment.json").read_bytes())
    assert (after["id"], after["dtype"]) == (before["id"], before["dtype"])
    assert go_on(run, schedule={"stages": 2}).batches == 6


def outside(run: Path, name: str) -> Path:
    """Moves a directory of the run to a place of its own, and leaves a link to it; returns the place."""
    place = run.parent / "elsewhere"
    shutil.move(run / name, place)
    (run / name).symlink_to(place)
    return place


@pytest.mark.parametrize("name", ["weights/final", "checkpoints/step-000001"])
def test_a_link_inside_a_run_is_removed_and_not_what_it_points_to(run, name):
    place = outside(run, name)
    before = contents(place)
    assert go_on(run, schedule={"stages": 2}, run={"keep_checkpoints": 1, "checkpoint_every": 1}).batches == 6
    assert before == contents(place)
    assert not (run / name).is_symlink()


def test_a_link_under_a_temporary_name_is_removed_alone(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (run / ".x.12-0123abcd.tmp").symlink_to(tmp_path / "mine")
    go_on(run)
    assert not (run / ".x.12-0123abcd.tmp").is_symlink()
    assert (tmp_path / "mine" / "file").read_text() == "mine"


def test_what_a_checkpoint_waited_for_counts_as_sampling_of_the_next_batch(begin, monkeypatch):
    """With prefetching, the first checkpoint finishes the completions of all batches up to the next weight sync."""
    monkeypatch.setattr(Prefetcher, "_next", slowed(Prefetcher._next))
    run = begin("ahead", schedule={"v": 9, "i": 1, "stages": 1}, sampling={"max_num_seqs": 8}).run
    lines = load_metrics(run)
    phases = ("sampling", "judging", "learning", "scoring", "sync")
    for line in lines:
        assert min(line[f"seconds_{phase}"] for phase in phases) >= 0
        assert sum(line[f"seconds_{phase}"] for phase in phases) <= line["seconds_total"]
    first, second, third = (line["seconds_sampling"] for line in lines)
    assert first > 2 * SLOW
    assert second > 4 * SLOW  # two groups of batch 2, two of batch 3
    assert third == 0
    assert sum(line["tokens_per_s_sampling"] * line["seconds_sampling"] for line in lines[:2]) == pytest.approx(
        sum(line["tokens_sampled"] for line in lines)
    )


SLOW = 0.2


def slowed(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Each group takes SLOW seconds more."""

    def received(*args: Any) -> Any:
        if (item := receive(*args)) is not None:
            args[0]._seconds += SLOW
            time.sleep(SLOW)
        return item

    return received
