"""Runs on pre-generated (offline) completions, with dynamic sampling, and the metrics of lag."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.verify import verify_run


def trained(tmp_path: Path, model: Path, /, **sections) -> Path:
    settings = {
        "run": {"output_dir": str(tmp_path)},
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": "sample_task:load_letters"},
        "rollout": {
            "num_generations": 4,
            "max_completion_length": 8,
            "max_prompt_length": 64,
            "max_num_seqs": 32,
        },
        "schedule": {"prompts_per_batch": 4, "batches": 3},
        "loss": {"recipe": "reinforce"},
        "optimizer": {"learning_rate": 1e-2},
        "eval": {"at_start": False},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return lagrpo.train(settings).run


@pytest.fixture(scope="module")
def generated(tmp_path_factory, model) -> Path:
    """The rollouts of a run: completions with log-probs."""
    run = trained(tmp_path_factory.mktemp("first"), model, schedule={"batches": 1})
    return run / "rollouts" / "step-000001.parquet"


TEXTS = [
    {"prompt": "Say a", "completion": text, "reward": reward}
    for text, reward in (("aa", 1.0), ("b9", 0.0))
]


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A file of completions without log-probs."""
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in TEXTS), encoding="utf-8"
    )
    return str(tmp_path / "texts.jsonl")


def tokens_of(run: Path) -> set[tuple[int, ...]]:
    return {tuple(row["token_ids"]) for row in load_rollouts(run)}


def test_training_on_a_file_alone_generates_nothing(tmp_path, model, generated):
    run = trained(tmp_path, model, offline={"data": str(generated)}, loss={"recipe": "asymre"})
    new = load_rollouts(run)
    assert tokens_of(run) == tokens_of(generated.parent.parent)
    assert len(new) == 3 * 4 * 4
    assert [m["policy_version"] for m in load_metrics(run)] == [0, 1, 2]
    assert all(
        m["loss"] is not None and m["staleness/max"] is None for m in load_metrics(run)
    )  # of other versions
    assert {(r["source"], r["staleness"], r["policy_versions"][0]) for r in new} == {
        ("file", None, -1)
    }


def test_share_of_each_batch_comes_from_the_file(tmp_path, model, generated):
    run = trained(tmp_path, model, offline={"data": str(generated), "fraction": 0.5})
    for batch in (1, 2, 3):
        rows = load_rollouts(run, [batch])
        from_file, sampled = (
            [r for r in rows if r["source"] == source] for source in ("file", "sampler")
        )
        assert len(from_file) == len(sampled) == 8
        assert {tuple(r["token_ids"]) for r in from_file} <= tokens_of(generated.parent.parent)
        assert {r["policy_versions"][0] for r in sampled} == {batch - 1}


def test_offline_texts_without_log_probs_train_only_recipes_without_a_ratio(tmp_path, model, texts):
    run = trained(tmp_path, model, offline={"data": texts}, schedule={"prompts_per_batch": 1})
    metrics = load_metrics(run)
    assert metrics[-1]["policy_version"] == 2
    assert all(
        m["rollout/kl"] is None and m["staleness/max"] is None and m["grad_norm"] > 0
        for m in metrics
    )
    for recipe in ("grpo", "opmd", "unclipped"):
        # The names that the message gives: they follow from the recipes.
        needs = f"rollout_logprobs, which loss.recipe = '{recipe}' needs.*opmd_kimi.*online_dpo"
        with pytest.raises(SettingsError, match=needs):
            trained(tmp_path, model, offline={"data": texts}, loss={"recipe": recipe})


@pytest.mark.parametrize(("recipe", "is_named"), [("asymre", True), ("opd", False)])
def test_prompts_with_one_completion_each_are_named_if_rewards_are_compared(
    tmp_path, model, caplog, recipe, is_named
):
    file = tmp_path / "texts.jsonl"
    rows = [row | {"prompt": f"Say {row['completion']}"} for row in TEXTS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = trained(
        tmp_path,
        model,
        offline={"data": str(file)},
        loss={"recipe": recipe} | ({} if is_named else {"reference": str(model)}),
        schedule={"prompts_per_batch": 2, "batches": 1},
    )
    assert [row["advantage"] for row in load_rollouts(run)] == [0.0, 0.0]
    assert load_metrics(run)[0]["frac_reward_zero_std"] == 1.0
    assert ("no prompt has two completions" in caplog.text) == is_named
    assert verify_run(run, trust_run_code=True).differences == []


def test_dynamic_sampling_fills_a_batch_with_groups_that_have_a_signal(tmp_path, model):
    """Greedy sampling makes most groups flat; attempts replace them by other prompts, and stop at
    the bound."""
    schedule = {"batches": 1, "prompts_per_batch": 6}
    cold = {"temperature": 0.1, "num_generations": 3}
    filled = cold | {"dynamic_sampling_rounds": 6}
    sections = {"schedule": schedule, "run": {"seed": 2}}
    without = load_metrics(trained(tmp_path / "a", model, rollout=cold, **sections))
    run = trained(tmp_path / "b", model, rollout=filled, **sections)
    assert without[0]["frac_reward_zero_std"] > load_metrics(run)[0]["frac_reward_zero_std"]
    assert len(load_rollouts(run)) == 6 * 3
    hopeless = {"name": "sample_task:load_hopeless"}
    rollout = {"dynamic_sampling_rounds": 2}
    run = trained(tmp_path / "c", model, task=hopeless, rollout=rollout, schedule={"batches": 1})
    assert load_metrics(run)[0]["frac_reward_zero_std"] == 1


def test_dynamic_sampling_leaves_offline_groups_alone(tmp_path, model, texts):
    Path(texts).write_text(
        "".join(json.dumps(row | {"reward": 1.0}) + "\n" for row in TEXTS), encoding="utf-8"
    )
    run = trained(
        tmp_path,
        model,
        offline={"data": texts, "fraction": 0.5},
        rollout={"dynamic_sampling_rounds": 3},
    )
    assert all(sum(r["source"] == "file" for r in load_rollouts(run, [b])) == 4 for b in (1, 2, 3))


@pytest.mark.parametrize("recipe", ["grpo_masked", "red_drop"])
def test_lag_metrics_are_over_every_scored_completion(tmp_path, model, recipe):
    """Also of flat groups, which the loss leaves out, and of those that red_drop drops by their
    rewards."""
    sections = {"task": {"name": "sample_task:load_vowels"}, "loss": {"recipe": recipe}}
    run = trained(tmp_path, model, **sections, schedule={"sync_every": 9, "batches": 4})
    metrics = load_metrics(run)
    assert any(m["frac_reward_zero_std"] > 0 for m in metrics[1:])
    for line in metrics[1:]:
        rows = load_rollouts(run, [line["step"]])
        ratios = [
            [k - a for k, a in zip(r["old_logprobs"], r["rollout_logprobs"], strict=True)]
            for r in rows
        ]
        expected = sum(math.expm1(x) - x for ratios_of_row in ratios for x in ratios_of_row) / len(
            rows
        )
        assert line["rollout/seq_kl"] == pytest.approx(expected, rel=1e-5)
        assert line["rollout/seq_kl"] > 0
        assert all(sum(ratios_of_row) != 0 for ratios_of_row in ratios)
