"""A run as a whole: what it records is what was sampled and learned, however it is scheduled and
however it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from running import leftovers, tiny_settings, without_timings
from safetensors.torch import load_file
from sample_task import load
from test_trainer import assembled, generate_groups, judge_groups
from tiny import tiny_policy

import lagrpo
from lagrpo import interrupts
from lagrpo.core.rows import RECIPES
from lagrpo.errors import SettingsError
from lagrpo.lifecycle.callbacks import Callback
from lagrpo.lifecycle.run import FAILURES, train
from lagrpo.model.model import Policy, copy_policy
from lagrpo.rollout.continuous import ContinuousBatch
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.runs import Run, load_evaluations, load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records, rollout_batches
from lagrpo.settings.load import load_settings, to_toml
from lagrpo.settings.schema import Settings
from lagrpo.startup.checks import check_settings
from lagrpo.terminal.text import typed_command
from lagrpo.training.master_weights import MasterWeights
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.types import Group, JsonObject

BF16: dict[str, JsonObject] = {"model": {"dtype": "bfloat16"}}


@pytest.fixture
def settings(model, tmp_path):
    return lambda **sections: tiny_settings(model, tmp_path / "runs", **sections)


@pytest.fixture
def run(settings):
    """A run of these settings without evaluations."""
    return lambda **sections: train(settings(**{"eval": {"at_start": False}} | sections))


def weights(folder: Path | None) -> dict[str, torch.Tensor]:
    assert folder is not None
    return load_file(folder / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


# What is recorded


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Completions of a tiny policy, for tests that only read them."""
    return judge_groups(generate_groups(tiny_policy(), count=2))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_accepted_and_moves_the_policy_from_stale_completions(name, groups):
    """With two updates per batch: with one, a loss over π_k alone is rejected."""
    settings = {"loss": {"recipe": name}, "schedule": {"num_iterations": 2}}
    recipe = check_settings(load_settings(settings))
    policy = tiny_policy()
    reference = None
    if recipe.needs_pi_ref:
        reference = copy_policy(policy)
        # Another policy, as the start of the trained one teaches nothing.
        reference.weights["lm_head.weight"].mul_(1.1)
    trainer = Trainer(policy, recipe, Optimization(lr=1e-2), reference)
    for version in (1, 2):
        before = {name: weight.clone() for name, weight in policy.weights.items()}
        trainer.step(trainer.pack(assembled(recipe, groups), 999))
        assert policy.version == version
        assert not same(before, dict(policy.weights))
        assert all(bool(weight.isfinite().all()) for weight in policy.weights.values())


@pytest.mark.parametrize(
    ("kind", "v", "i", "batches"),
    [
        pytest.param("every", 1, 10, 4, id="sync every batch, ten updates each"),
        pytest.param("every", 3, 2, 8, id="sync every 3 batches, two updates each"),
        pytest.param("lagged", 2, 1, 6, id="constant lag of 2 batches"),
    ],
)
def test_staleness_of_tokens_is_the_schedules(run, kind, v, i, batches):
    v_by = "constant_lag" if kind == "lagged" else "sync_every"
    result = run(schedule={v_by: v, "num_iterations": i, "batches": batches})
    expected = lags(Schedule(kind, v), batches, batches, i)
    for row in load_rollouts(result.run):
        measured = {row["policy_version"] - version for version in row["policy_versions"]}
        assert measured == {expected[row["step"] - 1]} == {row["staleness"]}
    metrics = load_metrics(result.run)
    assert [(m["staleness/mean"], m["staleness/max"]) for m in metrics] == [
        (lag, lag) for lag in expected
    ]
    assert [m["policy_version"] for m in metrics] == [i * b for b in range(batches)]
    assert result.version == i * batches


def test_same_seed_gives_the_same_run_and_another_seed_another(run):
    first, again, other = (run(run={"seed": seed}) for seed in (3, 3, 4))
    assert load_rollouts(first.run) == load_rollouts(again.run)
    assert without_timings(load_metrics(first.run)) == without_timings(load_metrics(again.run))
    assert same(weights(first.weights), weights(again.weights))
    pairs = zip(load_rollouts(first.run), load_rollouts(other.run), strict=True)
    assert sum(a["token_ids"] != b["token_ids"] for a, b in pairs) > 12  # of 24


def test_stage_ends_with_a_new_reference(run):
    """KL(π‖π_ref) starts at 0, grows within a stage, and is 0 again at the first batch of the next
    one."""
    result = run(schedule={"batches": 6, "ref_sync_every": 3}, loss={"recipe": "grpo", "beta": 0.1})
    kl = [m["kl"] for m in load_metrics(result.run)]
    assert kl[0] == kl[3] == 0
    assert min(kl[1:3] + kl[4:]) > 1e-4


def test_reset_optimizer_forgets_the_moments_between_stages_and_nothing_else(run):
    continued, reset = (
        run(schedule={"batches": 4, "ref_sync_every": 2, "reset_optimizer": r})
        for r in (False, True)
    )
    columns = ["step", "token_ids", "rollout_logprobs"]
    equal = [
        load_rollouts(continued.run, [b], columns) == load_rollouts(reset.run, [b], columns)
        for b in (1, 2, 3, 4)
    ]
    assert equal == [
        True,
        True,
        True,
        False,
    ]  # batch 3 is sampled before the first update of the second stage


def test_what_a_weight_sync_moves_is_recorded(run):
    """every(2), i = 2: weight syncs before batches 1, 2 and 4, the second one after two updates,
    the third after four."""
    schedule = {"sync_every": 2, "num_iterations": 2, "batches": 4}
    metrics = load_metrics(run(**BF16, schedule=schedule, optimizer={"learning_rate": 1e-5}).run)
    assert [m["weight_sync/performed"] for m in metrics] == [True, True, False, True]
    synced = [m["weight_sync/changed_fraction"] for m in metrics]
    assert synced[0] is None
    assert synced[1] == synced[2]
    assert all(0 < share < 1 for share in synced[1::2])


def test_evaluations_along_the_way_do_not_touch_training(run, settings):
    plain, evaluated = (
        run(schedule={"batches": 5}),
        train(settings(schedule={"batches": 5}, eval={"every": 2})),
    )
    assert load_rollouts(plain.run) == load_rollouts(evaluated.run)
    moments = [(e["name"], e["step"], e["policy_version"]) for e in load_evaluations(evaluated.run)]
    assert moments == [
        ("before", 0, 0),
        ("batch-000002", 2, 2),
        ("batch-000004", 4, 4),
        ("after", 5, 5),
    ]
    assert {
        len(row["completions"]) for row in load_evaluation_records(evaluated.run, "before")
    } == {3}


def test_exported_weights_are_those_that_the_run_then_had(run):
    """i = 2: after batch 2 the policy is version 4."""
    result = run(checkpoint={"export_every": 2}, schedule={"num_iterations": 2, "batches": 3})
    assert sorted(path.name for path in (result.run / "weights").iterdir()) == ["final", "v000004"]
    shorter = run(run={"name": "shorter"}, schedule={"num_iterations": 2, "batches": 2})
    exported = weights(result.run / "weights" / "v000004")
    assert same(exported, weights(shorter.weights))
    assert not same(exported, weights(result.weights))


# Library


def test_settings_as_object_mapping_or_file_give_the_same_run(settings, tmp_path):
    mapping = settings(task={"name": "arithmetic"}, eval={"num_prompts": 4})
    path = tmp_path / "own.toml"
    path.write_text(to_toml(load_settings(mapping)), encoding="utf-8")
    results = [
        lagrpo.train(settings_form, task=load())
        for settings_form in (mapping, Settings.model_validate(mapping), path)
    ]
    first = results[0]
    assert len({result.run for result in results}) == 3
    assert first.run.name.startswith("spread-grpo-v1-i1-2")
    assert (first.batches, first.version, first.interrupted) == (3, 3, None)
    assert first.weights == first.run / "weights" / "final"
    assert first.before is not None
    assert set(first.before) >= {"prompts", "samples", "unscored", "reward", "pass@1", "pass@1_low"}
    assert load_settings(first.run / "config.toml") == load_settings(mapping)
    assert [load_rollouts(r.run) for r in results[1:]] == [load_rollouts(first.run)] * 2


def test_tasks_and_templates_that_do_not_fit_are_rejected_before_the_run_is_made(
    settings, tmp_path
):
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no system') }}", encoding="utf-8")
    wrong: dict[str, JsonObject] = {
        "task 'empty' has no training prompts": {"task": {"name": "sample_task:load_empty"}},
        "cannot render it: no system": {"model": {"chat_template": str(tmp_path / "chat.jinja")}},
        r"has \d+ tokens; rollout.max_prompt_length is 20": {"rollout": {"max_prompt_length": 20}},
        "task 'untested' has no test prompts to evaluate on": {
            "task": {"name": "sample_task:load_untested"}
        },
    }
    for message, sections in wrong.items():
        with pytest.raises(SettingsError, match=message):
            train(settings(**sections))
    assert not (tmp_path / "runs").exists()


class Log(Callback):
    """Records the calls of a callback, in order."""

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


def test_callback_that_raises_ends_the_run_after_its_batch(settings, tmp_path):
    log, other = Log(fails_at=2), Log()
    with pytest.raises(RuntimeError, match="the tracker is gone"):
        train(settings(), callbacks=[log, other])
    assert log.told[-1][:2] == other.told[-1][:2] == ("end", "failed")
    (directory,) = (tmp_path / "runs").iterdir()
    assert [m["step"] for m in load_metrics(directory)] == [1, 2]  # the files come first
    assert train(resume=directory, trust_run_code=True).batches == 3


# Ends


def press(
    monkeypatch, owner, name: str, call: int, signum: int = signal.SIGINT, before: bool = True
) -> None:
    """Send a signal at the nth call of a method, before it or after."""
    calls, original = [], getattr(owner, name)

    def pressed(*args, **kwargs):
        calls.append(name)
        if before and len(calls) == call:
            signal.raise_signal(signum)
        result = original(*args, **kwargs)
        if not before and len(calls) == call:
            signal.raise_signal(signum)
        return result

    monkeypatch.setattr(owner, name, pressed)


@pytest.mark.parametrize(
    ("signum", "owner", "name", "call", "batches"),
    [
        (
            signal.SIGINT,
            ContinuousBatch,
            "step",
            20,
            0,
        ),  # in the evaluation before batch 1
        (signal.SIGINT, Trainer, "step", 2, 1),  # in the second batch's learning
        (
            signal.SIGTERM,
            MasterWeights,
            "write_back",
            2,
            2,
        ),  # in the second update; its batch is finished
        (
            signal.SIGINT,
            Run,
            "record_rollouts",
            2,
            2,
        ),  # in the middle of recording, which is finished
    ],
)
def test_signal_ends_the_run_with_what_was_learned(
    settings, monkeypatch, owner, name, call, batches, signum
):
    press(monkeypatch, owner, name, call, signum)
    result = train(settings(eval={"every": 2}, schedule={"batches": 4}))
    assert (result.interrupted, result.version, result.batches, result.after) == (
        signum,
        batches,
        batches,
        None,
    )
    metrics = load_metrics(result.run)
    assert len(metrics) == batches
    assert rollout_batches(result.run) == [m["step"] for m in metrics]
    assert weights(result.weights)
    assert leftovers(result.run) == []


def test_second_ctrl_c_ends_the_run_without_partial_files(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(interrupts, "REPEATED_WITHIN", -1.0)
    press(monkeypatch, Trainer, "step", 2)
    press(
        monkeypatch, Policy, "save", 1, before=False
    )  # the files are there, but not yet under their name
    with pytest.raises(KeyboardInterrupt):
        train(settings())
    (directory,) = (tmp_path / "runs").iterdir()
    assert not (directory / "weights" / "final").exists()
    assert leftovers(directory) == []
    assert len(load_metrics(directory)) == 1


@pytest.mark.parametrize(
    ("owner", "name", "error", "way"),
    [
        pytest.param(
            Trainer,
            "update",
            FloatingPointError("the gradient is not finite"),
            "To resume after batch 2",
            id="gradient not finite",
        ),
        pytest.param(
            Run,
            "record",
            OSError(28, "No space left on device"),
            "No checkpoint yet; to start again",
            id="disk full",
        ),
        pytest.param(
            Trainer,
            "step",
            MemoryError(),
            "To resume after batch 2",
            id="out of memory",
        ),
        pytest.param(
            Trainer,
            "accumulate",
            torch.OutOfMemoryError("CUDA out of memory"),
            "To resume after batch 2",
            id="out of GPU memory",
        ),
    ],
)
def test_error_keeps_what_was_learned_and_says_where(run, tmp_path, owner, name, error, way):
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == 3:
            raise error
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(type(error)) as raised:
            run(run={"name": name}, schedule={"batches": 4})
    directory = tmp_path / "runs" / name
    assert isinstance(error, FAILURES)  # for the command, which says it without a traceback
    note, *cures, way_on = raised.value.__notes__
    advice = [line for line in cures if "lower optimizer.micro_batch_tokens" in line]
    is_out_of_memory = name in ("step", "accumulate")
    assert cures == advice
    assert len(advice) == (1 if is_out_of_memory else 0)
    assert note.startswith(f"The run so far: {directory} (2 of 4 batches finished, ")
    assert way_on == f"{way}: {typed_command()} train --resume {directory} --trust-run-code"
    assert weights(directory / "weights" / "final")
    assert leftovers(directory) == []
    assert [m["step"] for m in load_metrics(directory)] == [1, 2]
