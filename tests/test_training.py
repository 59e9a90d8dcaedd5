"""A run as a whole: what it records is what was sampled and learned, however it is scheduled and however it ends."""

from __future__ import annotations

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
from lagrpo.rollout.local import ContinuousBatch
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.runs import Run, load_evaluations, load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records, rollout_batches
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings, to_toml
from lagrpo.training.callbacks import Callback
from lagrpo.training.master_weights import MasterWeights
from lagrpo.training.run import Result, train
from lagrpo.training.trainer import Trainer

BF16: dict[str, dict[str, Any]] = {"model": {"dtype": "bfloat16"}, "rollout": {"parity_check": False}}


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


@pytest.mark.parametrize(("kind", "v", "i", "batches"), [("every", 1, 10, 4), ("every", 3, 2, 11), ("lagged", 2, 1, 8)])
def test_lag_read_from_tokens_is_the_schedules(run, kind, v, i, batches):
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


def test_prefetching_changes_no_record(run):
    prefetch, lazy = (
        run(rollout={"prefetch": a, "max_num_seqs": 8}, schedule={"sync_every": 3, "batches": 7}, model=BF16["model"])
        for a in (True, False)
    )
    assert load_rollouts(prefetch.run) == load_rollouts(lazy.run)
    assert without_timings(load_metrics(prefetch.run)) == without_timings(load_metrics(lazy.run))
    assert same(weights(prefetch), weights(lazy))


def test_seed_decides_everything(run):
    first, again, other = (run(run={"seed": seed}) for seed in (3, 3, 4))
    assert load_rollouts(first.run) == load_rollouts(again.run)
    assert without_timings(load_metrics(first.run)) == without_timings(load_metrics(again.run))
    assert same(weights(first), weights(again))
    pairs = zip(load_rollouts(first.run), load_rollouts(other.run), strict=True)
    assert sum(a["token_ids"] != b["token_ids"] for a, b in pairs) > 12  # of 24


def test_stage_ends_with_a_new_reference(run):
    """KL(π‖π_ref) starts at 0, grows within a stage, and is 0 again at the first batch of the next one."""
    result = run(schedule={"stages": 2, "batches": 4}, loss={"recipe": "grpo", "beta": 0.1})
    kl = [m["kl"] for m in load_metrics(result.run)]
    assert kl[0] == kl[4] == 0
    assert min(kl[1:4] + kl[5:]) > 1e-4


def test_reset_optimizer_forgets_the_moments_between_stages_and_nothing_else(run):
    kept, reset = (run(schedule={"stages": 2, "batches": 2, "reset_optimizer": r}) for r in (False, True))
    columns = ["step", "token_ids", "rollout_logprobs"]
    equal = [load_rollouts(kept.run, [b], columns) == load_rollouts(reset.run, [b], columns) for b in (1, 2, 3, 4)]
    assert equal == [True, True, True, False]  # batch 3 is drawn before the first update of the second stage


def test_what_an_update_and_a_weight_sync_move_is_recorded(run):
    """every(2), i = 2: weight syncs before batches 1, 2 and 4, the second one after two updates, the third after
    four."""
    metrics = load_metrics(
        run(
            **BF16, schedule={"sync_every": 2, "num_iterations": 2, "batches": 4}, optimizer={"learning_rate": 1e-5}
        ).run
    )
    assert [m["weight_sync/performed"] for m in metrics] == [True, True, False, True]
    synced = [m["weight_sync/changed_fraction"] for m in metrics]
    assert synced[0] is None
    assert synced[1] == synced[2]
    assert all(0 < share < 1 for share in synced[1::2])


@pytest.mark.parametrize(("task", "warned"), [("load", True), ("load_even", False)])
def test_weight_sync_that_moves_next_to_nothing_is_warned_of_once(settings, capsys, task, warned):
    """Unless no update had a gradient: weights without a signal stand still for a better reason."""
    changes = {
        "task": {"name": f"sample_task:{task}"},
        "optimizer": {"learning_rate": 1e-9, "dither_master_weights": False},
    }
    train(settings(**BF16, **changes, run={"display": "plain"}))
    assert capsys.readouterr().out.count("of the sampler's weights, less than 1 in 10,000") == warned


def test_masked_batches_make_no_update(run):
    result = run(task={"name": "sample_task:load_even"}, loss={"recipe": "dapo"})
    assert [m["policy_version"] for m in load_metrics(result.run)] == [0, 0, 0]
    assert {row["excluded_reason"] for row in load_rollouts(result.run)} == {"zero_variance"}
    assert result.version == 0


def test_evaluations_along_the_way_do_not_touch_training(run, settings):
    given = {"every": 2, "temperature": 0.01, "num_samples": 5}
    plain, evaluated = run(schedule={"batches": 5}), train(settings(schedule={"batches": 5}, eval=given))
    assert load_rollouts(plain.run) == load_rollouts(evaluated.run)
    found = [(e["name"], e["step"], e["policy_version"]) for e in load_evaluations(evaluated.run)]
    assert found == [("before", 0, 0), ("batch-000002", 2, 2), ("batch-000004", 4, 4), ("after", 5, 5)]
    for row in load_evaluation_records(evaluated.run, "before"):
        assert len(row["completions"]) == 5
        assert len(set(row["completions"])) == 1  # cold enough to be greedy


def test_weights_along_the_way_are_kept_under_their_version(run):
    """i = 2: after batch 2 the policy is version 4, and what is kept of it is what the run then had."""
    result = run(checkpoint={"export_every": 2}, schedule={"num_iterations": 2, "batches": 3})
    assert sorted(path.name for path in (result.run / "weights").iterdir()) == ["final", "v000004"]
    shorter = run(run={"name": "shorter"}, schedule={"num_iterations": 2, "batches": 2})
    kept = replace(shorter, weights=result.run / "weights" / "v000004")
    assert same(weights(kept), weights(shorter))
    assert not same(weights(kept), weights(result))


# Library


def test_own_task_and_settings_of_three_kinds_make_the_same_run(settings, tmp_path):
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
    assert set(first.before) >= {"prompts", "samples", "unscored", "reward", "pass@1", "pass@1_low"}
    assert first.before["prompts"] == 4
    assert load_settings(first.run / "config.toml") == load_settings(mapping)
    assert [load_rollouts(r.run) for r in results[1:]] == [load_rollouts(first.run)] * 2


def test_tasks_and_templates_that_do_not_fit_are_rejected_before_the_run_is_made(settings, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no system') }}")
    wrong: dict[str, dict[str, Any]] = {
        "task 'empty' has no training prompts": {"task": {"name": "sample_task:load_empty"}},
        "cannot render it: no system": {"model": {"chat_template": str(tmp_path / "chat.jinja")}},
        r"has \d+ tokens; rollout.max_prompt_length is 20": {"rollout": {"max_prompt_length": 20}},
        "task 'untested' has no test prompts to evaluate on": {"task": {"name": "sample_task:load_untested"}},
    }
    for message, sections in wrong.items():
        with pytest.raises(SettingsError, match=message):
            train(settings(**sections))
    with pytest.raises(SettingsError, match=r"a reward function takes \(completion, answer\)"):
        train(settings(), task=replace(load(), reward=lambda text, gold: 1.0))
    assert not (tmp_path / "runs").exists()


def test_task_without_test_prompts_can_be_trained_on(run):
    assert run(task={"name": "sample_task:load_untested"}).version == 3


def test_arguments_of_another_type_are_rejected_before_anything_is_loaded(settings, capsys):
    strangers: list[Any] = [object(), Callback]
    for stranger in strangers:
        with pytest.raises(TypeError, match=r"callbacks: .* inherits lagrpo.Callback"):
            train(settings(), callbacks=[stranger])
    with pytest.raises(TypeError, match="task: 'gsm8k' is not a Task"):
        train({}, "gsm8k")  # type: ignore[arg-type]
    assert "loading" not in capsys.readouterr().out


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
    train(settings(run={"name": "seen"}, schedule={"batches": 2}), callbacks=[log])
    assert log.told == [
        ("start", "seen", "cpu", 0),
        ("evaluation", "before", 0, 2, 2),
        ("batch", 1, 8),
        ("batch", 2, 8),
        ("evaluation", "after", 2, 2, 2),
        ("end", "finished", "Finished."),
    ]


def test_what_is_no_task_is_rejected_before_anything_is_loaded(capsys):
    with pytest.raises(TypeError, match=r"task: 'gsm8k' is not a Task: a Task has name, reward, "):
        train({}, "gsm8k")  # type: ignore[arg-type]
    assert "loading" not in capsys.readouterr().out


def test_callback_that_raises_ends_the_run_after_its_batch(settings, tmp_path):
    log, other = Log(fails_at=2), Log()
    with pytest.raises(RuntimeError, match="the tracker is gone"):
        train(settings(), callbacks=[log, other])
    assert log.told[-1][:2] == other.told[-1][:2] == ("end", "failed")
    (directory,) = (tmp_path / "runs").iterdir()
    assert (directory / "weights" / "final" / "model.safetensors").is_file()
    assert [m["step"] for m in load_metrics(directory)] == [1, 2]  # the files come first
    assert train({"run": {"resume": str(directory), "display": "none"}}).batches == 3


def test_displays(settings, capfd):
    for mode in ("none", "plain", "live"):
        train(settings(run={"display": mode}))
        out, err = capfd.readouterr()
        assert err == ""
        if mode == "none":
            assert out == ""
        else:
            assert "largest possible lag 0 updates" in out
            assert "Finished." in out


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


@pytest.mark.parametrize(
    ("signum", "owner", "name", "call", "batches"),
    [
        (signal.SIGINT, ContinuousBatch, "_sample_tokens", 20, 0),  # in the evaluation before batch 1
        (signal.SIGINT, Trainer, "step", 2, 1),  # in the second batch's learning
        (signal.SIGTERM, MasterWeights, "write_back", 2, 2),  # in the second update; its batch is finished
        (signal.SIGINT, Run, "record_rollouts", 2, 2),  # in the middle of recording, which is finished
        (signal.SIGINT, Run, "record_evaluation", 2, 2),  # in the evaluation after the second batch
    ],
)
def test_signal_ends_the_run_with_what_was_learned(settings, monkeypatch, owner, name, call, batches, signum):
    from transformers import AutoModelForCausalLM

    Press(monkeypatch, owner, name, call, signum)
    result = train(settings(eval={"every": 2}, schedule={"batches": 4}))
    assert (result.interrupted, result.version, result.batches, result.after) == (signum, batches, batches, None)
    metrics = load_metrics(result.run)
    assert len(metrics) == batches
    assert rollout_batches(result.run) == [m["step"] for m in metrics]
    AutoModelForCausalLM.from_pretrained(str(result.weights))
    assert leftovers(result.run) == []


def test_weights_of_an_interrupted_run_are_those_of_its_version(run, monkeypatch):
    short = run(schedule={"batches": 2})
    Press(monkeypatch, MasterWeights, "write_back", 2)
    stopped = run(schedule={"batches": 4})
    assert stopped.version == short.version == 2
    assert same(weights(stopped), weights(short))


def test_interruption_before_any_update_keeps_the_initial_policy(settings, monkeypatch, capsys, model):
    from safetensors.torch import load_file

    Press(monkeypatch, Trainer, "step", 1)
    result = train(settings(run={"display": "plain"}))
    out = capsys.readouterr().out
    assert "no update was made: it is the initial one" in out
    assert "Stopped by SIGINT: 0 of 3 batches" in out
    assert same(weights(result), load_file(model / "model.safetensors"))


def test_second_signal_ends_at_once_and_leaves_nothing_half_done(settings, monkeypatch, tmp_path):
    Press(monkeypatch, Trainer, "step", 2)
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
        (Run, "record", OSError(28, "No space left on device")),
    ],
)
def test_error_keeps_what_was_learned_and_says_where(run, monkeypatch, tmp_path, owner, name, error):
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


def test_rewards_that_never_come_end_the_run(run, tmp_path):
    match = r"8 of 8 completions have no reward(.|\n)*this function never answers"
    with pytest.raises(RewardError, match=match) as error:
        run(task={"name": "sample_task:load_impossible"})
    assert "no update was made" in error.value.__notes__[0]
    (directory,) = (tmp_path / "runs").iterdir()
    assert not (directory / "weights").exists()  # there was nothing to keep
