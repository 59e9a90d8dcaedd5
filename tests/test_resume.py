"""A run resumes from any of its checkpoints as if nothing had happened; what keeps it from resuming
is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos import KINDS, leaves, merged
from running import SendSignal, tiny_settings
from tiny import save_tiny

from lagrpo import Callback, train
from lagrpo.errors import SettingsError
from lagrpo.lifecycle.checkpoint import NewCheckpoint
from lagrpo.lifecycle.resuming import ResumeState
from lagrpo.lifecycle.run import Result
from lagrpo.model.model import Policy, copy_policy
from lagrpo.resume import checkpoint_files
from lagrpo.resume.checkpoint_files import (
    SCHEMA_WITHOUT_DIGESTS,
    CheckpointError,
    digest_file,
    find_checkpoint,
)
from lagrpo.rollout.base import WeightSyncError
from lagrpo.rollout.local import LocalSampler
from lagrpo.runs import load_events
from lagrpo.runs.directory import Run, RunLockedError, locked
from lagrpo.settings.load import load_settings
from lagrpo.settings.sections import ScheduleSettings
from lagrpo.startup import build_engines
from lagrpo.terminal.display import Display
from lagrpo.training.sampling import Sampling
from lagrpo.types import JsonObject

SMALL: dict[str, JsonObject] = {
    "checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 20},
    "model": {"dtype": "bfloat16"},
    "schedule": {"num_iterations": 2, "batches": 6, "ref_sync_every": 3},
    "loss": {"recipe": "grpo"},
    "eval": {"every": 2},
}
SHORT, LONG = {"batches": 3}, {"batches": 6}


def begin_in(
    root: Path, model: Path, name: str, /, *callbacks: Callback, resume: Any = None, **sections: Any
) -> Result:
    settings = merged(tiny_settings(model, root), SMALL, sections, {"run": {"name": name}})
    return train(settings, callbacks=callbacks, resume=resume, trust_run_code=True)


@pytest.fixture
def begin(model, tmp_path):
    """Runs a tiny training of 6 batches under a name, with these settings."""
    return partial(begin_in, tmp_path, model)


@pytest.fixture(scope="module")
def whole_run(model, tmp_path_factory):
    """A run of a kind that was never stopped, with a checkpoint of each of its 6 batches. Tests
    leave it as it is."""
    root = tmp_path_factory.mktemp("whole")
    return cache(lambda kind: begin_in(root, model, kind, **KINDS.get(kind, {})).run)


@pytest.fixture(scope="module")
def undisturbed(whole_run):
    """A function of the kind of run that returns what the whole run leaves."""
    return cache(lambda kind="plain": leaves(whole_run(kind), exact=True))


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A finished run of three batches, with a checkpoint of each."""
    return begin_in(tmp_path_factory.mktemp("finished"), model, "run", schedule=SHORT).run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(finished, tmp_path / "copy")


def go_on(run: Path, /, **sections: JsonObject) -> Result:
    return train(sections, resume=run, trust_run_code=True)


def differing(run: Path, expected: JsonObject) -> list[str]:
    """Names of the outputs of a run that differ from the expected ones."""
    outputs = leaves(run, exact=True)
    return [key for key in expected if outputs.get(key) != expected[key]]


def cut_to(run: Path, batch: int, root: Path | None = None) -> Path:
    """A copy of a run, as one that was killed after this batch and its checkpoint; in `root`, or
    beside the run."""
    copy = (root or run.parent) / f"{run.name}-{batch}"
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").glob("step-*"):
        if int(folder.name.partition("-")[2]) > batch:
            shutil.rmtree(folder)
    # A killed run has no event `end`, the last line.
    (copy / "events.jsonl").write_bytes(
        b"".join((copy / "events.jsonl").read_bytes().splitlines(True)[:-1])
    )
    return copy


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def contents(run: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def resumed(run: Path) -> list[JsonObject]:
    return [event for event in load_events(run) if event["event"] == "resumed"]


# To the bit


ON_POLICY: dict[str, JsonObject] = {
    "several updates, evaluations, stages": {},
    "completions in one batch": {"schedule": {"max_staleness": 0}},
    "no lag, dynamic sampling": {
        "schedule": {"constant_lag": 0},
        "rollout": {"dynamic_sampling_rounds": 1},
    },
    "adapters": {"model": {"lora_r": 2}},
    "checkpointing": {"optimizer": {"gradient_checkpointing": True}},
}


@pytest.mark.parametrize("sections", ON_POLICY.values(), ids=ON_POLICY)
def test_on_policy_run_that_samples_by_its_policy_leaves_what_one_with_a_copy_does(
    begin, monkeypatch, tmp_path, sections
):
    copies: list[Policy] = []

    def note_copy(policy: Policy) -> Policy:
        copies.append(policy)
        return copy_policy(policy)

    monkeypatch.setattr(build_engines, "copy_policy", note_copy)
    sections = merged({"schedule": {"batches": 3}}, sections)
    run = begin("one", **sections).run
    assert not copies
    monkeypatch.setattr(ScheduleSettings, "is_on_policy", False)
    expected = leaves(begin("two", **sections).run, exact=True)
    assert len(copies) == 1
    assert differing(run, expected) == []
    # Either resumes from what the other has written.
    monkeypatch.undo()
    resumed_run = cut_to(tmp_path / "two", 2, tmp_path / "resumed")
    go_on(resumed_run)
    assert differing(resumed_run, expected) == []


@pytest.mark.parametrize(("kind", "batch"), [*((kind, 4) for kind in KINDS), ("asking ahead", 1)])
def test_killed_run_resumes_bit_for_bit(whole_run, undisturbed, tmp_path, kind, batch):
    assert differing(go_on(cut_to(whole_run(kind), batch, tmp_path)).run, undisturbed(kind)) == []


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("asking ahead", "sampling"),
        ("asking ahead", "evaluation (batch-000004)"),
        ("lagged", "weight sync"),
        ("continuous", "sampling"),
        ("continuous", "learning"),
    ],
)
def test_signal_in_any_phase_loses_nothing(begin, undisturbed, monkeypatch, kind, phase):
    monkeypatch.setattr(Display, "phase", Display.phase)  # to give it back
    stopped = begin("run", SendSignal(phase, signal.SIGTERM, os.getpid, after=2), **KINDS[kind])
    assert stopped.interrupted == signal.SIGTERM
    assert 2 <= stopped.batches < 6
    assert differing(go_on(stopped.run).run, undisturbed(kind)) == []


def test_finished_run_gets_more_batches_as_if_it_had_been_longer(begin):
    one_stage = {"ref_sync_every": None}
    short, longer = (begin(str(n), schedule=one_stage | {"batches": n}).run for n in (3, 6))
    assert differing(go_on(short, schedule=LONG).run, leaves(longer, exact=True)) == []


def test_killed_run_gets_more_batches_as_if_it_had_been_longer(begin):
    """A weight sync before batch 3, so that version samples batches 3 to 5. After batch 3 the
    fourth and last batch is sampled already: the run itself will not need that version again, the
    longer one will."""
    stale = {"ref_sync_every": None, "sync_every": 3}
    short, longer = (begin(str(n), schedule=stale | {"batches": n}).run for n in (4, 5))
    extended = go_on(cut_to(short, 3), schedule={"batches": 5}).run
    assert differing(extended, leaves(longer, exact=True)) == []


@pytest.mark.parametrize(
    ("step", "has_checkpoint", "remains"),
    [(2, True, True), (3, True, True), (3, False, False)],
    ids=["of a kept batch", "of a discarded batch", "of a run that begins again"],
)
def test_best_weights_stay_unless_the_run_begins_again(tmp_path, step, has_checkpoint, remains):
    """The run resumes after batch 2."""
    run = Run(tmp_path / "run")
    (run.path / "weights").mkdir(parents=True)
    (run.path / "config.toml").touch()
    run.record_best(lambda folder: None, found={"best": "pass@1", "value": 1.0, "step": step})
    point: Any = SimpleNamespace(
        batch=2, state={"versions": {"policy": 2}, "loop": {"prefetched": []}}
    )
    checkpoint = point if has_checkpoint else None
    state = ResumeState(run=run, checkpoint=checkpoint, changed={}, environment={})
    state.cut_back({}, [], git=None)
    assert (run.path / "weights" / "best").is_dir() == remains


def test_run_killed_before_its_first_checkpoint_starts_again(whole_run, undisturbed, tmp_path):
    killed = cut_to(whole_run("plain"), 0, tmp_path)
    # A run whose events name a checkpoint that is gone would be rejected.
    lines = (killed / "events.jsonl").read_text(encoding="utf-8").splitlines(True)
    (killed / "events.jsonl").write_text(
        "".join(line for line in lines if '"checkpoint"' not in line), encoding="utf-8"
    )
    assert differing(go_on(killed).run, undisturbed()) == []


def test_resume_auto_begins_a_run_or_resumes_it(begin, tmp_path):
    (tmp_path / "run").mkdir()
    (
        tmp_path / "run" / ".config.toml.12-0123abcd.tmp"
    ).touch()  # a run that was killed while it was made
    first = begin("run", resume="auto", schedule=SHORT)
    assert resumed(first.run) == [*first.run.glob("*.tmp")] == []
    again = begin("run", resume="auto", schedule=SHORT)
    assert (again.batches, len(resumed(again.run))) == (3, 1)


def test_error_between_updates_keeps_the_last_batch(begin, undisturbed, monkeypatch, tmp_path):
    class Break(Callback):
        def on_batch(self, metrics, rollouts) -> None:
            if metrics["step"] == 4:
                monkeypatch.setattr(Sampling, "take", lambda *arguments: 1 / 0)

    with pytest.raises(ZeroDivisionError) as error:
        begin("run", Break(), checkpoint={"save_every": 0})
    monkeypatch.undo()
    run = tmp_path / "run"
    call = f"lagrpo.train(resume={str(run)!r}, callbacks=…, trust_run_code=True)"
    assert error.value.__notes__[-1] == f"To resume after batch 4: {call}"
    assert differing(go_on(run).run, undisturbed()) == []


# In a thread


class WriteAfterBatch(Callback):
    """Lets the thread write the first checkpoint only after the second batch."""

    def __init__(self) -> None:
        self.has_more = Event()
        self.overlaps: list[bool] = []
        self.write = NewCheckpoint.write

    def on_batch(self, metrics, rollouts) -> None:
        if metrics["step"] == 2:
            self.has_more.set()

    def write_later(self, checkpoint: NewCheckpoint, *arguments: Any) -> None:
        if not self.overlaps:
            self.overlaps.append(self.has_more.wait(60))
        self.write(checkpoint, *arguments)


@pytest.mark.parametrize("kind", ["asking ahead", "continuous"])
def test_run_resumes_bit_for_bit_from_a_checkpoint_of_an_earlier_batch(
    begin, undisturbed, monkeypatch, tmp_path, kind
):
    """The checkpoint after batch 1 is written while the run makes batch 2."""
    callback = WriteAfterBatch()
    monkeypatch.setattr(NewCheckpoint, "write", lambda *all: callback.write_later(*all))
    run = begin("run", callback, **KINDS[kind]).run
    assert callback.overlaps == [True]
    assert differing(run, undisturbed(kind)) == []
    events = [event for event in load_events(run) if event["event"] == "checkpoint"]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert differing(go_on(cut_to(run, 1, tmp_path / "killed")).run, undisturbed(kind)) == []


def test_disk_that_is_full_for_the_thread_ends_the_run_which_resumes_from_the_checkpoint_before(
    begin, undisturbed, monkeypatch, tmp_path
):
    write = NewCheckpoint.write

    def fail_later(checkpoint: NewCheckpoint, *arguments: Any) -> None:
        if checkpoint.batch > 1:
            raise CheckpointError("the checkpoint could not be written: the disk is full")
        write(checkpoint, *arguments)

    monkeypatch.setattr(NewCheckpoint, "write", fail_later)
    with pytest.raises(CheckpointError, match="full") as error:
        begin("run", **KINDS["asking ahead"])
    monkeypatch.undo()
    run = tmp_path / "run"
    assert "To resume after batch 1:" in error.value.__notes__[-1]
    assert not any("disk is full" in note for note in error.value.__notes__)
    assert checkpoints(run) == [1]
    assert differing(go_on(run).run, undisturbed("asking ahead")) == []


# What is on disk


def test_last_checkpoints_are_kept_and_a_finished_run_without_one_does_not_restart(begin):
    assert checkpoints(begin("two", checkpoint={"save_total_limit": 2}, schedule=SHORT).run) == [
        2,
        3,
    ]
    run = begin("none", schedule=SHORT, checkpoint={"save_total_limit": 0}).run
    assert checkpoints(run) == []
    before = contents(run)
    with pytest.raises(SettingsError, match="lost its checkpoints"):
        go_on(run, schedule=LONG)
    assert contents(run) == before


def test_checkpoint_that_cannot_be_read_is_named_and_the_one_before_is_used_without_it(run):
    file = run / "checkpoints" / "step-000003" / "trainer.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(SettingsError, match=r"step-000003/trainer.safetensors cannot be read"):
        go_on(run, schedule=LONG)
    shutil.rmtree(file.parent)
    assert go_on(run, schedule=LONG).batches == 6
    state = run / "checkpoints" / "step-000006" / "state.json"
    state.write_text(
        state.read_text(encoding="utf-8").replace(checkpoint_files.SCHEMA, "lagrpo.checkpoint/0"),
        encoding="utf-8",
    )
    with pytest.raises(SettingsError, match=r"has the format lagrpo.checkpoint/0"):
        go_on(run)


# What may change, and what keeps a run from resuming


def test_settings_that_could_alter_the_past_are_rejected_by_name(run):
    before = contents(run)
    wrong: dict[str, JsonObject] = {
        r"optimizer\.learning_rate = 0\.5, but the run has 0\.01": {
            "optimizer": {"learning_rate": 0.5}
        },
        r"schedule\.batches = 2, but the run has 3": {"schedule": {"batches": 2}},
        r"task\.system_prompt = \"x\", but the run has null": {"task": {"system_prompt": "x"}},
    }
    for message, change in wrong.items():
        with pytest.raises(SettingsError, match=message):
            go_on(run, **change)
    assert contents(run) == before


def test_settings_that_cannot_alter_the_past_may_change(run, undisturbed):
    change = {
        "checkpoint": {"save_total_limit": 1},
        "eval": {"best_metric": "reward"},
        "schedule": LONG,
    }
    assert differing(go_on(run, **change).run, undisturbed()) == []
    assert resumed(run)[0]["changed"]["eval.best_metric"] == [None, "reward"]
    assert load_settings(run / "config.toml").checkpoint.save_total_limit == 1
    assert (run / "weights" / "best").is_dir()


def test_more_batches_with_a_learning_rate_that_depends_on_their_number_are_rejected(begin):
    run = begin("run", schedule=SHORT, optimizer={"lr_scheduler_type": "linear"}).run
    with pytest.raises(SettingsError, match=r"schedule\.batches = 5, but the run has 3"):
        go_on(run, schedule={"batches": 5})


def test_resume_with_another_model_at_model_path_is_rejected(begin, tmp_path):
    path = save_tiny(tmp_path / "model")
    run = begin("run", schedule=SHORT, model={"path": str(path)}).run
    shutil.rmtree(path)
    save_tiny(path, seed=1)
    before = contents(run)
    with pytest.raises(SettingsError, match="not the model that the run started with") as error:
        go_on(run)
    assert error.value.__notes__ == [f"The run is unchanged: {run}"]
    assert contents(run) == before


def test_resume_with_an_edited_config_of_the_model_is_rejected(begin, tmp_path):
    path = save_tiny(tmp_path / "model")
    run = begin("run", schedule=SHORT, model={"path": str(path)}).run
    before = contents(run)
    config = (path / "config.json").read_text(encoding="utf-8")
    changed = json.loads(config) | {"rms_norm_eps": 0.5}
    (path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"config\.json: rms_norm_eps was 1e-06, now 0\.5"):
        go_on(run, schedule=LONG)
    assert contents(run) == before
    (path / "config.json").write_text(json.dumps(json.loads(config)), encoding="utf-8")
    assert go_on(run, schedule=LONG).batches == 6


def test_engine_that_has_other_weights_than_those_it_was_given_stops_the_resumed_run(
    whole_run, tmp_path, monkeypatch
):
    """The check after every weight sync is made when the checkpoint's weights go into the engine,
    too. The engine will sample the next batch with them."""
    killed = cut_to(whole_run("dynamic sampling"), 4, tmp_path)
    sync_weights = LocalSampler.sync_weights
    syncs: list[int] = []

    def lose_the_first(sampler: LocalSampler, weights: Any, version: int) -> Any:
        syncs.append(version)
        if len(syncs) > 1:
            return sync_weights(sampler, weights, version)
        changed = {name: weight * 1.5 for name, weight in weights.items()}
        return sync_weights(sampler, changed, version)

    monkeypatch.setattr(LocalSampler, "sync_weights", lose_the_first)
    with pytest.raises(WeightSyncError, match=r"stale weights|diverged"):
        go_on(killed)
    assert len(syncs) == 1


def test_second_process_is_rejected_while_one_writes(run):
    with (
        locked(run),
        pytest.raises(RunLockedError, match=r"another process is writing to .*: process \d+ on"),
    ):
        go_on(run)
    assert go_on(run).batches == 3  # the lock is free again


CHECKPOINT_FILES = {
    "state": "state.json",
    "trainer": "trainer.safetensors",
    "alpha": "weights-v000006.safetensors",
    "rollouts": "rollouts.parquet",
}


def cut(file: str) -> Any:
    """Cuts a file of the newest checkpoint in half."""

    def damage(newest: Path) -> None:
        content = (newest / file).read_bytes()
        (newest / file).write_bytes(content[: len(content) // 2])

    return damage


def flip(file: str) -> Any:
    """Flips a bit in the middle of a file of the newest checkpoint."""

    def damage(newest: Path) -> None:
        content = bytearray((newest / file).read_bytes())
        content[len(content) // 2] ^= 1
        (newest / file).write_bytes(content)

    return damage


DEEP = "[" * 100_000


def change_state(name: str, value: object) -> Callable[[Path], None]:
    """Sets an entry of state.json, such as loop.batch; ... removes it.

    The state becomes one without digests, which would show every change.
    """

    def change(newest: Path) -> None:
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        state["schema"] = SCHEMA_WITHOUT_DIGESTS
        del state["digest"], state["files"]
        *sections, key = name.split(".")
        table = state
        for section in sections:
            table = table[section]
        table[key] = value
        if value is ...:
            del table[key]
        (newest / "state.json").write_text(json.dumps(state), encoding="utf-8")

    return change


def write_state(text: str) -> Callable[[Path], object]:
    return lambda newest: (newest / "state.json").write_text(text, encoding="utf-8")


ODD_STATES = {
    "deep": write_state(DEEP),
    "list": write_state("[]"),
    "empty": write_state("{}"),
    "no batch": change_state("loop.batch", ...),
    "batch is text": change_state("loop.batch", "4"),
    "unknown key of the loop": change_state("loop.later", 1),
    "NaN": change_state("loop.spent", float("nan")),
    "list for an object": change_state("data.visited", []),
    "object for a list": change_state("loop.prefetched", {}),
    "version is text": change_state("versions.policy", "3"),
    "batch without a number": change_state("announced", {"five": [6]}),
    "no model": change_state("model", ...),
}


@pytest.mark.parametrize("change", ODD_STATES.values(), ids=ODD_STATES)
def test_state_with_odd_keys_or_values_is_rejected_by_its_file(whole_run, tmp_path, change):
    newest = cut_to(whole_run("asking ahead"), 4, tmp_path) / "checkpoints" / "step-000004"
    change(newest)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        find_checkpoint(newest.parent)


def test_state_with_keys_of_a_later_version_is_read(whole_run, tmp_path):
    newest = cut_to(whole_run("asking ahead"), 4, tmp_path) / "checkpoints" / "step-000004"
    change_state("later", 1)(newest)
    newest_checkpoint = find_checkpoint(newest.parent)
    assert newest_checkpoint is not None
    assert newest_checkpoint.batch == 4


def swap(file: str) -> Any:
    """Puts a file of another checkpoint into the newest one."""
    return lambda newest: shutil.copy(newest.parent / "step-000001" / file, newest / file)


def remove(file: str) -> Any:
    return lambda newest: (newest / file).unlink()


def rewrite_rollouts(change: Any) -> Any:
    """Writes the table of rollouts of the newest checkpoint again, changed."""

    def damage(newest: Path) -> None:
        file = newest / "rollouts.parquet"
        pq.write_table(change(pq.read_table(file)), file)

    return damage


def rename_version(newest: Path) -> None:
    """Changes a digit, so that the state is still whole JSON."""
    text = (newest / "state.json").read_text(encoding="utf-8")
    assert text.count('"policy": 8') == 1
    changed = text.replace('"policy": 8', '"policy": 9')
    (newest / "state.json").write_text(changed, encoding="utf-8")


LOSE_ROLLOUTS = {
    "no rollouts": remove("rollouts.parquet"),
    "empty rollouts": rewrite_rollouts(lambda table: table.slice(0, 0)),
    "rollouts without a group": rewrite_rollouts(lambda table: table.slice(4)),
    "rollouts without a row": rewrite_rollouts(lambda table: table.slice(1)),
    "row of rollouts twice": rewrite_rollouts(
        lambda table: pa.concat_tables([table, table.slice(0, 1)])
    ),
    "rollouts without tokens": rewrite_rollouts(lambda table: table.drop_columns(["token_ids"])),
}
DAMAGE = {
    **{f"cut {name}": (cut(file), file) for name, file in CHECKPOINT_FILES.items()},
    **{f"flipped {name}": (flip(file), file) for name, file in CHECKPOINT_FILES.items()},
    **{f"no {name}": (remove(file), file) for name, file in CHECKPOINT_FILES.items()},
    **{name: (damage, "rollouts.parquet") for name, damage in LOSE_ROLLOUTS.items()},
    "another version in state": (rename_version, "state.json"),
    "state of another checkpoint": (swap("state.json"), r"step-000004/[^/]+"),
    "trainer of another checkpoint": (swap("trainer.safetensors"), "trainer.safetensors"),
}


@pytest.mark.parametrize(("damage", "file"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_rejected_by_its_file(whole_run, tmp_path, damage, file):
    """With v = 3 and two updates per batch, α after batch 4 is version 6, and batch 5 is sampled
    already."""
    newest = cut_to(whole_run("asking ahead"), 4, tmp_path) / "checkpoints" / "step-000004"
    damage(newest)
    with pytest.raises((ValueError, CheckpointError), match=f"{file} cannot be read") as error:
        find_checkpoint(newest.parent)
    assert f"remove {newest}" in str(error.value)


def test_only_checkpoint_that_is_damaged_is_not_to_be_removed(whole_run, tmp_path):
    run = cut_to(whole_run("plain"), 1, tmp_path)
    flip("trainer.safetensors")(run / "checkpoints" / "step-000001")
    with pytest.raises(SettingsError, match="only checkpoint"):
        go_on(run)


def test_file_that_a_checkpoint_does_not_name_is_not_read(whole_run, tmp_path):
    run = cut_to(whole_run("plain"), 2, tmp_path)
    newest = run / "checkpoints" / "step-000002"
    shutil.copy(newest / "trainer.safetensors", newest / "trainer-00002-of-00002.safetensors")
    found = find_checkpoint(newest.parent)
    assert found is not None
    assert found.trainer_files() == [newest / "trainer.safetensors"]


def test_digests_of_all_files_of_a_checkpoint_are_in_its_state(whole_run):
    folder = whole_run("asking ahead") / "checkpoints" / "step-000004"
    state = json.loads((folder / "state.json").read_bytes())
    assert state["files"] == {
        path.name: digest_file(path) for path in folder.iterdir() if path.name != "state.json"
    }


def as_written_before_digests(run: Path) -> Path:
    """Turns the checkpoints of a run into ones of an older version. Returns the newest one."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    for folder in folders:
        state = json.loads((folder / "state.json").read_bytes())
        for key in ("files", "digest", "model_files"):
            del state[key]
        state["schema"] = checkpoint_files.SCHEMA_WITHOUT_DIGESTS
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return folders[-1]


def test_checkpoint_without_digests_resumes_bit_for_bit(whole_run, undisturbed, tmp_path):
    run = cut_to(whole_run("asking ahead"), 4, tmp_path)
    as_written_before_digests(run)
    assert differing(go_on(run).run, undisturbed("asking ahead")) == []


@pytest.mark.parametrize("damage", LOSE_ROLLOUTS.values(), ids=LOSE_ROLLOUTS)
def test_lost_rollouts_without_digests_are_found_by_the_version_that_sampled_them(
    whole_run, tmp_path, damage
):
    """With a lag of 2, no later batch needs the versions that sampled batches 5 and 6, so they are
    not in the checkpoint."""
    run = cut_to(whole_run("lagged"), 4, tmp_path)
    damage(as_written_before_digests(run))
    with pytest.raises(CheckpointError, match=r"rollouts\.parquet cannot be read"):
        go_on(run)


DAMAGED_RECORDS = {
    "metrics": ("metrics.jsonl", b'{"step": 1\n', "metrics.jsonl, line 1"),
    "metrics without a step": ("metrics.jsonl", b'{"reward": 1}\n', "metrics.jsonl, line 1"),
    "events": ("events.jsonl", b"[]\n", "events.jsonl, line 1"),
    "environment": ("environment.json", b"[1]", "environment.json is damaged"),
    "deep metrics": ("metrics.jsonl", DEEP.encode() + b"\n", "metrics.jsonl, line 1"),
    "deep environment": ("environment.json", DEEP.encode(), "environment.json is damaged"),
}


@pytest.mark.parametrize(
    ("file", "content", "message"), DAMAGED_RECORDS.values(), ids=DAMAGED_RECORDS
)
def test_damaged_record_is_rejected_with_its_place(run, file, content, message):
    (run / file).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        go_on(run)


def test_run_with_missing_or_damaged_files_is_rejected_by_name(run, tmp_path):
    with pytest.raises(SettingsError, match=r"--resume: .*nothing' is not a run"):
        go_on(tmp_path / "nothing")
    evaluation = run / "evaluations" / "before.json"
    evaluation.write_text("", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"before.json.*JSON"):
        go_on(run)
