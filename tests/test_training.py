"""A run as a whole: what it records is what was sampled and learned, however it is scheduled and however it ends."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import leftovers, tiny_settings, without_timings
from sample_task import load
from tiny import save_tiny

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.model.model import Policy
from lagrpo.rewards.pool import RewardError
from lagrpo.rollout.local import ContinuousBatch, LocalSampler
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.rollout.sync_check import WeightSyncError
from lagrpo.runs import Run, load_evaluations, load_metrics, load_rollouts
from lagrpo.runs.reading import rollout_batches
from lagrpo.settings.schema import Settings, TaskSettings
from lagrpo.settings.toml import load_settings, to_toml
from lagrpo.training.beginning import READ_OF_TASK
from lagrpo.training.callbacks import Callback
from lagrpo.training.master_weights import MasterWeights
from lagrpo.training.run import Result, train
from lagrpo.training.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def settings(model, tmp_path):
    return lambda **sections: tiny_settings(model, tmp_path / "runs", **sections)


@pytest.fixture
def run(settings):
    """A run of these settings without evaluations."""
    return lambda **sections: train(settings(**{"eval": {"at_start": False}} | sections))


def weights(result: Result) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    assert result.weights is not None
    return load_file(result.weights / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


# What is recorded


@pytest.mark.parametrize(
    ("kind", "v", "i", "batches"),
    [("every", 1, 1, 4), ("every", 10, 1, 23), ("every", 1, 10, 4), ("every", 3, 2, 11), ("lagged", 2, 1, 8)],
)
@pytest.mark.usefixtures("shared_templates")
def test_the_lag_read_from_the_tokens_is_the_schedules(run, kind, v, i, batches):
    result = run(
        schedule={"kind": kind, "sync_every": v, "num_iterations": i, "batches": batches},
        optimizer={"learning_rate": 1e-4},
    )
    expected = lags(Schedule(kind, v), 1, batches, i)
    for row in load_rollouts(result.run):
        measured = {row["policy_version"] - version for version in row["policy_versions"]}
        assert measured == {expected[row["step"] - 1]} == {row["staleness"]}
    metrics = load_metrics(result.run)
    assert [(m["staleness/mean"], m["staleness/max"]) for m in metrics] == [(lag, lag) for lag in expected]
    assert [m["policy_version"] for m in metrics] == [i * b for b in range(batches)]
    assert result.version == i * batches


@pytest.mark.usefixtures("shared_templates")
def test_prefetching_changes_no_record(run):
    prefetch, lazy = (
        run(rollout={"prefetch": a, "max_num_seqs": 8}, schedule={"sync_every": 3, "batches": 7}, model=BF16["model"])
        for a in (True, False)
    )
    assert load_rollouts(prefetch.run) == load_rollouts(lazy.run)
    assert without_timings(load_metrics(prefetch.run)) == without_timings(load_metrics(lazy.run))
    assert same(weights(prefetch), weights(lazy))


@pytest.mark.usefixtures("shared_templates")
def test_the_seed_decides_everything(run):
    first, again, other = (run(run={"seed": seed}) for seed in (3, 3, 4))
    assert load_rollouts(first.run) == load_rollouts(again.run)
    assert without_timings(load_metrics(first.run)) == without_timings(load_metrics(again.run))
    assert same(weights(first), weights(again))
    pairs = zip(load_rollouts(first.run), load_rollouts(other.run), strict=True)
    assert sum(a["token_ids"] != b["token_ids"] for a, b in pairs) > 12  # of 24


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.usefixtures("shared_templates")
def test_a_stage_ends_with_a_new_reference(run, reset):
    """KL(π‖π_ref) starts at 0, grows within a stage, and is 0 again at the first batch of the next one."""
    result = run(
        schedule={"stages": 2, "batches": 4, "reset_optimizer": reset},
        loss={"recipe": "grpo", "beta": 0.1},
    )
    kl = [m["kl"] for m in load_metrics(result.run)]
    assert kl[0] == kl[4] == 0
    assert min(kl[1:4] + kl[5:]) > 1e-4


@pytest.mark.usefixtures("shared_templates")
def test_reset_optimizer_forgets_the_moments_between_stages_and_nothing_else(run):
    kept, reset = (run(schedule={"stages": 2, "batches": 2, "reset_optimizer": r}) for r in (False, True))
    columns = ["step", "token_ids", "rollout_logprobs"]
    equal = [
        load_rollouts(kept.run, [batch], columns) == load_rollouts(reset.run, [batch], columns)
        for batch in (1, 2, 3, 4)
    ]
    assert equal == [True, True, True, False]  # batch 3 is drawn before the first update of the second stage


BF16: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16"}, "rollout": {"parity_check": False}}
STANDSTILL = "of the sampler's weights, less than 1 in 10,000"


@pytest.mark.usefixtures("shared_templates")
def test_where_the_masters_start_changes_nothing_before_the_first_update(run):
    plain, dithered = (
        run(**BF16, optimizer={"learning_rate": 1e-4, "dither_master_weights": start}) for start in (False, True)
    )
    columns = ["token_ids", "rollout_logprobs"]
    equal = [load_rollouts(plain.run, [b], columns) == load_rollouts(dithered.run, [b], columns) for b in (1, 2)]
    assert equal == [True, False]


@pytest.mark.usefixtures("shared_templates")
def test_what_an_update_and_a_weight_sync_move_is_recorded(run):
    """every(2), i = 2: weight syncs before batches 1, 2 and 4, the second one after two updates, the third after
    four."""
    result = run(
        **BF16, schedule={"sync_every": 2, "num_iterations": 2, "batches": 4}, optimizer={"learning_rate": 1e-5}
    )
    metrics = load_metrics(result.run)
    assert [m["weight_sync/performed"] for m in metrics] == [True, True, False, True]
    synced = [m["weight_sync/changed_fraction"] for m in metrics]
    assert synced[0] is None
    assert synced[1] == synced[2]
    assert all(0 < share < 1 for share in synced[1::2])


@pytest.mark.parametrize(
    ("task", "dithered", "lr", "warned"),
    [("load", False, 1e-9, True), ("load", False, 1e-2, False), ("load", True, 1e-4, False),
     ("load_even", False, 1e-9, False)],
)  # fmt: skip
@pytest.mark.usefixtures("shared_templates")
def test_a_weight_sync_that_moves_next_to_nothing_is_told_of_once(settings, capsys, task, dithered, lr, warned):
    """Unless no update had a gradient: weights without a signal stand still for a better reason."""
    changes = {
        "task": {"name": f"sample_task:{task}"},
        "optimizer": {"learning_rate": lr, "dither_master_weights": dithered},
    }
    train(settings(**BF16, **changes, run={"display": "plain"}))
    out = capsys.readouterr().out
    assert out.count(STANDSTILL) == warned
    assert ("What helps: optimizer.dither_master_weights = true, a larger optimizer.learning_rate" in out) == warned


# Library


def test_a_task_of_ones_own_and_settings_of_three_kinds(settings, tmp_path):
    mapping = settings(task={"name": "arithmetic"}, eval={"num_prompts": 4})
    path = tmp_path / "own.toml"
    path.write_text(to_toml(load_settings(mapping)))
    results = [lagrpo.train(given, task=load()) for given in (mapping, Settings.model_validate(mapping), path)]
    assert len({result.run for result in results}) == 3
    first = results[0]
    assert first.run.name.startswith("spread-grpo-v1-i1-2")
    assert (first.batches, first.version, first.interrupted) == (3, 3, None)
    assert first.weights == first.run / "weights" / "final"
    assert first.before is not None
    assert first.after is not None
    assert set(first.before) >= {"prompts", "samples", "unscored", "reward", "pass@1", "pass@1_low"}
    assert first.before["prompts"] == 4
    assert load_settings(first.run / "config.toml") == load_settings(mapping)
    assert [load_rollouts(r.run) for r in results[1:]] == [load_rollouts(first.run)] * 2


def test_what_a_run_with_a_task_of_ones_own_reads_of_the_section_is_what_it_says(settings, monkeypatch, tmp_path):
    """Also with completions of a file, whose questions get the system prompt of the settings."""
    data = tmp_path / "texts.jsonl"
    rows = [{"prompt": "a", "completion": text, "reward": reward} for text, reward in (("b", 1.0), ("c", 0.0))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read: set[str] = set()
    original = TaskSettings.__getattribute__

    def spied(self, name):
        read.update({name} & TaskSettings.model_fields.keys())
        return original(self, name)

    mapping = settings(offline={"data": str(data), "fraction": 0.5}, loss={"recipe": "reinforce"})
    given = Settings.model_validate(mapping)
    monkeypatch.setattr(TaskSettings, "__getattribute__", spied)
    result = train(given, task=load())
    monkeypatch.undo()
    assert read - {"name"} == set(READ_OF_TASK)  # the name: whether it is an environment
    first = (result.run / "config.toml").read_text().splitlines()[0]
    assert first == (
        "# The task was the caller's own object, a lagrpo.tasks.base.RowTask; of [task] only reward_range and "
        "system_prompt (of questions in offline.data) were read."
    )


def test_a_task_without_prompts_is_refused(settings):
    with pytest.raises(SettingsError, match="task 'empty' has no training prompts"):
        train(settings(task={"name": "sample_task:load_empty"}))


def test_a_task_without_test_prompts_can_be_trained_on_but_not_evaluated(run, settings):
    assert run(task={"name": "sample_task:load_untested"}).version == 3
    with pytest.raises(SettingsError, match="task 'untested' has no test prompts to evaluate on"):
        train(settings(task={"name": "sample_task:load_untested"}))


@pytest.mark.parametrize(
    ("template", "message"),
    [("{% for m in messages %}", "Unexpected end of template"), ("{{ raise_exception('no system') }}", "no system")],
)
def test_a_chat_template_that_refuses_the_prompts_is_refused_before_the_run_is_made(run, tmp_path, template, message):
    (tmp_path / "chat.jinja").write_text(template)
    with pytest.raises(SettingsError, match=f"prompt 0 .*: the chat template cannot render it: {message}"):
        run(model={"chat_template": str(tmp_path / "chat.jinja")})
    assert not (tmp_path / "runs").exists()


def test_a_prompt_that_is_too_long_is_refused(run):
    message = r"of the train split of 'spread' has \d+ tokens; rollout.max_prompt_length is 20"
    with pytest.raises(SettingsError, match=message):
        run(rollout={"max_prompt_length": 20})


def test_a_reward_of_another_signature_is_rejected(settings):
    with pytest.raises(SettingsError, match=r"a reward function takes \(completion, answer\)"):
        train(settings(), task=replace(load(), reward=lambda text, gold: 1.0))


class Log(Callback):
    """What a callback is told, in order."""

    def __init__(self, fails_at: int = 0) -> None:
        self.told: list[Any] = []
        self.fails_at = fails_at

    def on_start(self, settings, environment, batch):
        self.told.append(("start", settings["run"]["name"], environment["device"], batch))

    def on_batch(self, metrics, rollouts):
        self.told.append(("batch", metrics["step"], len(rollouts)))
        if metrics["step"] == self.fails_at:
            raise RuntimeError("the tracker is gone")

    def on_evaluation(self, name, summary, records):
        self.told.append(("evaluation", name, summary["step"], summary["prompts"], len(records)))

    def on_end(self, status, detail):
        self.told.append(("end", status, detail))


def test_callbacks_get_what_the_files_say(settings):
    log = Log()
    result = train(settings(run={"name": "seen"}, schedule={"batches": 2}), callbacks=[log])
    assert log.told == [
        ("start", "seen", "cpu", 0),
        ("evaluation", "before", 0, 2, 2),
        ("batch", 1, 8),
        ("batch", 2, 8),
        ("evaluation", "after", 2, 2, 2),
        ("end", "finished", "Finished."),
    ]
    assert [m["step"] for m in load_metrics(result.run)] == [1, 2]


@pytest.mark.parametrize("stranger", [object(), Callback])
def test_object_that_is_not_a_callback_is_rejected_before_anything_is_loaded(settings, capsys, stranger):
    with pytest.raises(TypeError, match=r"callbacks: .* inherits lagrpo.Callback"):
        train(settings(), callbacks=[stranger])
    assert "loading" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "task", "message"),
    [
        (None, None, "not None; {} are the defaults"),
        ({}, "gsm8k", "task: 'gsm8k' is not a Task: a Task has name, reward, "),
    ],
)
def test_what_is_no_settings_or_no_task_is_refused_before_anything_is_loaded(given, task, message, capsys):
    with pytest.raises(TypeError, match=re.escape(message)):
        train(given, task)
    assert "loading" not in capsys.readouterr().out


def test_callback_that_raises_ends_the_run_after_its_batch(settings, tmp_path):
    log = Log(fails_at=2)
    with pytest.raises(RuntimeError, match="the tracker is gone"):
        train(settings(), callbacks=[log])
    assert log.told[-1][:2] == ("end", "failed")
    (directory,) = (tmp_path / "runs").iterdir()
    assert (directory / "weights" / "final" / "model.safetensors").is_file()
    assert [m["step"] for m in load_metrics(directory)] == [1, 2]  # the files come first
    assert train({"run": {"resume": str(directory), "display": "none"}}).batches == 3


# Options


@pytest.mark.usefixtures("shared_templates")
def test_evaluations_along_the_way(settings):
    result = train(settings(schedule={"batches": 5}, eval={"every": 2, "temperature": 0.01, "num_samples": 5}))
    evaluations = load_evaluations(result.run)
    assert [(e["name"], e["step"], e["policy_version"]) for e in evaluations] == [
        ("before", 0, 0),
        ("batch-000002", 2, 2),
        ("batch-000004", 4, 4),
        ("after", 5, 5),
    ]
    import pyarrow.parquet as pq

    rows = pq.read_table(result.run / "evaluations" / "before.parquet").to_pylist()
    assert [len(row["completions"]) for row in rows] == [5, 5]
    assert all(len(set(row["completions"])) == 1 for row in rows)  # cold enough to be greedy
    assert all(len({tuple(r["token_ids"]) for r in load_rollouts(result.run)}) > 1 for _ in rows)  # training is not


@pytest.mark.usefixtures("shared_templates")
def test_evaluations_do_not_touch_training(run, settings):
    plain, evaluated = run(), train(settings(eval={"every": 1}))
    assert load_rollouts(plain.run) == load_rollouts(evaluated.run)


def test_no_weights_where_none_are_wanted(run):
    result = run(run={"save_weights": False})
    assert result.weights is None
    assert not (result.run / "weights").exists()


@pytest.mark.usefixtures("shared_templates")
def test_masked_batches_make_no_update(run):
    result = run(task={"name": "sample_task:load_even"}, loss={"recipe": "dapo"})
    assert [m["policy_version"] for m in load_metrics(result.run)] == [0, 0, 0]
    assert {row["excluded_reason"] for row in load_rollouts(result.run)} == {"zero_variance"}
    assert result.version == 0


@pytest.mark.parametrize("mode", ["none", "plain", "live"])
@pytest.mark.usefixtures("shared_templates")
def test_displays(settings, capfd, mode):
    train(settings(run={"display": mode}, checkpoint={"export_every": 1}))
    out, err = capfd.readouterr()
    assert err == ""
    if mode == "none":
        assert out == ""
    else:
        assert "loading " in out
        assert "largest possible lag 0 updates" in out
        assert "Finished." in out
        assert "Writing model shards" not in out


# Ends


class Press:
    """Sends a signal at the nth call of a method, before it or after."""

    def __init__(self, monkeypatch, owner, name: str, call: int, signum: int = signal.SIGINT, before: bool = True):
        self.calls, original = 0, getattr(owner, name)

        def pressed(*args, **kwargs):
            self.calls += 1
            if before and self.calls == call:
                signal.raise_signal(signum)
            result = original(*args, **kwargs)
            if not before and self.calls == call:
                signal.raise_signal(signum)
            return result

        monkeypatch.setattr(owner, name, pressed)


def check_whole(result: Result, batches: int) -> None:
    """Everything that an interrupted run left fits together."""
    from transformers import AutoModelForCausalLM

    metrics = load_metrics(result.run)
    assert result.batches == len(metrics) == batches
    assert rollout_batches(result.run) == [m["step"] for m in metrics]
    AutoModelForCausalLM.from_pretrained(str(result.weights))
    assert leftovers(result.run) == []


@pytest.mark.parametrize(
    ("signum", "owner", "name", "call", "batches", "version"),
    [
        # after the 18 of the weight-sync check, in the evaluation before batch 1
        (signal.SIGINT, ContinuousBatch, "_sample_tokens", 20, 0, 0),
        (signal.SIGTERM, LocalSampler, "sync_weights", 2, 1, 1),  # at the second batch's weight sync
        (signal.SIGINT, Trainer, "first_step", 2, 1, 1),  # in the second batch's learning
        (
            signal.SIGTERM,
            MasterWeights,
            "write_back",
            2,
            2,
            2,
        ),  # in the second update; its batch is finished
        (signal.SIGINT, Run, "record_rollouts", 2, 2, 2),  # in the middle of recording, which is finished
        (signal.SIGTERM, Run, "record", 3, 3, 3),
        (signal.SIGINT, Run, "record_evaluation", 2, 2, 2),  # in the evaluation after the second batch
    ],
)
def test_a_signal_ends_the_run_with_what_was_learned(
    settings, monkeypatch, owner, name, call, batches, version, signum
):
    Press(monkeypatch, owner, name, call, signum)
    result = train(settings(eval={"every": 2}, schedule={"batches": 4}))
    assert result.interrupted == signum
    assert result.version == version
    assert result.after is None
    check_whole(result, batches)


def test_the_weights_of_an_interrupted_run_are_those_of_its_version(run, monkeypatch):
    short = run(schedule={"batches": 2})
    Press(monkeypatch, MasterWeights, "write_back", 2)
    stopped = run(schedule={"batches": 4})
    assert stopped.version == short.version == 2
    assert same(weights(stopped), weights(short))


def test_what_an_interruption_says(settings, monkeypatch, capsys):
    Press(monkeypatch, Trainer, "first_step", 2)
    train(settings(run={"display": "plain"}))
    out = capsys.readouterr().out
    assert (
        "SIGINT: keeping the policy as it is (1 of 3 batches are finished; the policy has had 1 update); again:" in out
    )
    assert "Stopped by SIGINT: 1 of 3 batches" in out


def test_an_interruption_before_any_update_says_so(settings, monkeypatch, capsys, model):
    from safetensors.torch import load_file

    Press(monkeypatch, Trainer, "first_step", 1)
    result = train(settings(run={"display": "plain"}))
    assert "no update was made: it is the initial one" in capsys.readouterr().out
    assert same(weights(result), load_file(model / "model.safetensors"))


def test_a_second_signal_while_the_weights_are_written_ends_at_once_and_leaves_nothing_half_done(
    settings, monkeypatch, tmp_path
):
    Press(monkeypatch, Trainer, "first_step", 2)
    Press(monkeypatch, Policy, "save", 1, before=False)  # the files are there, but not yet under their name
    with pytest.raises(KeyboardInterrupt):
        train(settings())
    (directory,) = (tmp_path / "runs").iterdir()
    assert not (directory / "weights" / "final").exists()
    assert leftovers(directory) == []
    assert len(load_metrics(directory)) == 1


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Trainer, "update", FloatingPointError("the gradient is not finite")),
        (LocalSampler, "sync_weights", WeightSyncError("another version")),
        (Run, "record", OSError(28, "No space left on device")),
        (Trainer, "first_step", ZeroDivisionError("a bug")),
    ],
)
def test_an_error_keeps_what_was_learned_and_says_where(run, settings, monkeypatch, tmp_path, owner, name, error):
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == 3:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(type(error)) as raised:
        run(schedule={"batches": 4})
    (directory,) = (tmp_path / "runs").iterdir()
    note, way_on = raised.value.__notes__
    assert note.startswith(f"The run until then: {directory} (2 of 4 batches are finished; the policy has had ")
    learned = name == "record"  # π has moved on from the last batch that is recorded
    place = "No checkpoint yet; to begin again" if learned else "Go on after batch 2 with"
    assert way_on == f"{place}: lagrpo train --resume {directory}"
    assert (directory / "weights" / "final" / "model.safetensors").is_file()
    assert leftovers(directory) == []
    assert [m["step"] for m in load_metrics(directory)] == [1, 2]


def test_a_judge_that_never_answers_ends_the_run(run, tmp_path):
    with pytest.raises(
        RewardError, match=r"8 of 8 completions have no reward(.|\n)*this function never answers"
    ) as error:
        run(task={"name": "sample_task:load_impossible"})
    assert "no update was made" in error.value.__notes__[0]
    (directory,) = (tmp_path / "runs").iterdir()
    assert not (directory / "weights").exists()  # there was nothing to keep


def test_the_environment_is_recorded(run):
    result = run(schedule={"batches": 1})
    environment = json.loads((result.run / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert environment["packages"]["torch"] == torch.__version__


@pytest.mark.usefixtures("shared_templates")
def test_weights_along_the_way_are_kept_under_their_version(run, model):
    """i = 2: after batch 2 the policy is version 4, and what is kept of it is what the run then had."""
    result = run(checkpoint={"export_every": 2}, schedule={"num_iterations": 2, "batches": 3})
    assert sorted(path.name for path in (result.run / "weights").iterdir()) == ["final", "v000004"]
    shorter = run(run={"name": "shorter"}, schedule={"num_iterations": 2, "batches": 2})
    kept = replace(shorter, weights=result.run / "weights" / "v000004")
    assert same(weights(kept), weights(shorter))
    assert not same(weights(kept), weights(result))
