"""Runs on pre-generated (offline) completions, on a divergence budget, and with dynamic sampling."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from tiny import save_tiny

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_events, load_metrics, load_rollouts
from lagrpo.settings.toml import load_settings

pytestmark = pytest.mark.usefixtures("shared_templates")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def trained(tmp_path: Path, model: Path, /, **sections) -> Path:
    settings = {
        "run": {"output_dir": str(tmp_path), "display": "none", "save_weights": False},
        "model": {"path": str(model), "dtype": "float32", "threads": 1},
        "task": {"name": "sample_task:load_letters"},
        "rollout": {"num_generations": 4, "max_completion_length": 8, "max_prompt_length": 64, "max_num_seqs": 32},
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


def test_training_on_a_file_alone_generates_nothing(tmp_path, model, generated):
    run = trained(tmp_path, model, offline={"data": str(generated)}, loss={"recipe": "asymre"})
    old, new = load_rollouts(generated.parent.parent), load_rollouts(run)
    assert {tuple(r["token_ids"]) for r in new} == {tuple(r["token_ids"]) for r in old}
    assert len(new) == 3 * 4 * 4
    assert [m["policy_version"] for m in load_metrics(run)] == [0, 1, 2]
    assert all(
        m["loss"] is not None and m["staleness/max"] is None for m in load_metrics(run)
    )  # of no version of this run
    assert {(r["source"], r["staleness"], r["policy_versions"][0]) for r in new} == {("file", None, -1)}


def test_a_share_of_each_batch_comes_from_the_file(tmp_path, model, generated):
    run = trained(tmp_path, model, offline={"data": str(generated), "fraction": 0.5})
    old = {tuple(r["token_ids"]) for r in load_rollouts(generated.parent.parent)}
    for batch in (1, 2, 3):
        rows = load_rollouts(run, [batch])
        assert len(rows) == 16
        given, fresh = ([r for r in rows if r["source"] == source] for source in ("file", "sampler"))
        assert len(given) == len(fresh) == 8
        assert {tuple(r["token_ids"]) for r in given} <= old
        assert {r["policy_versions"][0] for r in fresh} == {batch - 1}


TEXTS = [{"prompt": "Say a", "completion": text, "reward": reward} for text, reward in (("aa", 1.0), ("b9", 0.0))]


def test_texts_without_log_probs_train_a_method_that_never_reads_them(tmp_path, model):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    run = trained(tmp_path, model, offline={"data": str(data)}, schedule={"prompts_per_batch": 1})
    metrics = load_metrics(run)
    assert metrics[-1]["policy_version"] == 2
    assert all(m["rollout/kl"] is None and m["staleness/max"] is None and m["grad_norm"] > 0 for m in metrics)


@pytest.mark.parametrize("recipe", ["grpo", "rec_one_side_nois", "opmd", "cispo", "unclipped"])
def test_methods_that_read_alpha_refuse_texts_without_log_probs(tmp_path, model, recipe):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    with pytest.raises(SettingsError, match=f"rollout_logprobs.*recipe '{recipe}' reads that"):
        trained(tmp_path, model, offline={"data": str(data)}, loss={"recipe": recipe})


def test_training_on_the_directory_of_a_run(tmp_path, model, generated, capsys):
    """And on a list, given as a list; the run says what it reads."""
    old = generated.parent.parent
    run = trained(tmp_path, model, offline={"data": str(old)}, run={"display": "plain"})
    assert {tuple(r["token_ids"]) for r in load_rollouts(run)} == {tuple(r["token_ids"]) for r in load_rollouts(old)}
    said = "16 completions of 4 groups in 1 file"
    assert f"offline     {said}" in capsys.readouterr().out
    assert json.loads((run / "environment.json").read_text())["offline"] == said
    assert load_settings(run / "config.toml").offline.data == (str(old),)
    again = trained(tmp_path / "again", model, offline={"data": [str(generated), str(old)]})
    assert [r["token_ids"] for r in load_rollouts(again)] == [r["token_ids"] for r in load_rollouts(run)]


def test_a_prompt_of_a_file_that_is_too_long_is_refused(tmp_path, model):
    data = tmp_path / "texts.jsonl"
    rows = (row | {"prompt": "x" * length} for row, length in zip(TEXTS, (3, 60), strict=True))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = r"offline\.data: .*texts\.jsonl, line 2: its prompt has 77 tokens; rollout\.max_prompt_length is 64"
    with pytest.raises(SettingsError, match=message):
        trained(tmp_path, model, offline={"data": str(data)})


def test_a_file_that_is_not_there_or_too_long_is_refused(tmp_path, model, generated):
    with pytest.raises(SettingsError, match=r"offline\.data: .*no such file"):
        trained(tmp_path, model, offline={"data": "nowhere.jsonl"})
    with pytest.raises(SettingsError, match=r"offline\.data = \(\): .*at least 1 item"):
        trained(tmp_path, model, offline={"data": ()})
    with pytest.raises(SettingsError, match=r"rollout\.max_completion_length is 2"):
        trained(tmp_path, model, offline={"data": str(generated)}, rollout={"max_completion_length": 2})


def reasons_of(run: Path) -> dict[int, str]:
    """Why the sampler got new weights, by the batch before which it did."""
    return {e["step"]: e["reason"] for e in load_events(run) if e["event"] == "weight_sync"}


def test_a_budget_syncs_when_the_divergence_passes_it(tmp_path, model):
    schedule = {"kind": "budget", "delta": 0.05, "sync_every": 5, "batches": 12}
    run = trained(tmp_path, model, schedule=schedule, optimizer={"learning_rate": 3e-3})
    metrics, reasons = load_metrics(run), reasons_of(run)
    assert "budget" in reasons.values()
    since = 0
    for before, now in pairwise(metrics):
        since = 1 if before["weight_sync/performed"] else since + 1
        expected = "budget" if before["rollout/seq_kl"] > 0.05 else "cap" if since >= 5 else ""
        assert reasons.get(now["step"], "") == expected
        assert (now["staleness/max"] == 0) == bool(expected)


def test_a_budget_that_is_never_spent_is_its_cap(tmp_path, model):
    schedule = {"kind": "budget", "delta": 1e9, "sync_every": 2, "batches": 5}
    run = trained(tmp_path / "a", model, schedule=schedule)
    assert reasons_of(run) == {1: "start", 3: "cap", 5: "cap"}
    assert [m["weight_sync/performed"] for m in load_metrics(run)] == [1, 0, 1, 0, 1]


def test_dynamic_sampling_fills_a_batch_with_groups_that_have_a_signal(tmp_path, model):
    """Greedy sampling makes most groups flat; attempts replace them by further prompts, and stop at the bound."""
    cold = {"temperature": 0.1, "num_generations": 3}
    without = load_metrics(
        trained(tmp_path / "a", model, rollout=cold, schedule={"batches": 1, "prompts_per_batch": 6})
    )
    run = trained(
        tmp_path / "b",
        model,
        rollout=cold | {"dynamic_sampling_rounds": 6},
        schedule={"batches": 1, "prompts_per_batch": 6},
    )
    assert without[0]["frac_reward_zero_std"] > load_metrics(run)[0]["frac_reward_zero_std"]
    assert len(load_rollouts(run)) == 6 * 3


def test_dynamic_sampling_is_bounded(tmp_path, model):
    task = {"name": "sample_task:load_hopeless"}
    run = trained(tmp_path, model, task=task, rollout={"dynamic_sampling_rounds": 2}, schedule={"batches": 1})
    assert load_metrics(run)[0]["frac_reward_zero_std"] == 1


@pytest.mark.parametrize("recipe", ["unclipped", "grpo_masked", "red_drop"])
def test_lag_metrics_are_over_every_scored_completion(tmp_path, model, recipe):
    """Also of flat groups, which the loss leaves out, and of those that red_drop drops by their rewards."""
    run = trained(tmp_path, model, task={"name": "sample_task:load_vowels"}, loss={"recipe": recipe},
                  schedule={"sync_every": 9, "batches": 4})  # fmt: skip
    metrics = load_metrics(run)
    assert any(m["frac_reward_zero_std"] > 0 for m in metrics[1:])
    for line in metrics[1:]:
        rows = load_rollouts(run, [line["step"]])
        ratios = [[k - a for k, a in zip(r["old_logprobs"], r["rollout_logprobs"], strict=True)] for r in rows]
        expected = sum(math.expm1(x) - x for of_row in ratios for x in of_row) / len(rows)
        assert line["rollout/seq_kl"] == pytest.approx(expected, rel=1e-5)
        assert line["rollout/seq_kl"] > 0
        assert all(sum(of_row) != 0 for of_row in ratios)


def test_a_budget_is_spent_by_groups_without_a_signal(tmp_path, model):
    """The second update moves the policy; from then on every group is flat, and the divergence stays what it is."""
    schedule = {"kind": "budget", "delta": 1e-4, "sync_every": 50, "batches": 4}
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    run = trained(tmp_path, model, task={"name": "sample_task:load_hopeless"}, schedule=schedule,
                  offline={"data": str(data), "fraction": 0.25})  # fmt: skip
    metrics = load_metrics(run)
    assert metrics[1]["rollout/seq_kl"] > 1e-4  # of 12 completions that are all wrong
    assert bool(metrics[2]["weight_sync/performed"])


def test_metrics_that_would_be_of_a_subset_are_null_where_they_are_not_paid_for(tmp_path, model):
    run = trained(tmp_path, model, run={"score_lag": False}, task={"name": "sample_task:load_vowels"},
                  loss={"recipe": "grpo_masked"}, schedule={"sync_every": 9})  # fmt: skip
    for line in load_metrics(run):
        assert line["rollout/seq_kl"] is line["improvement"] is line["rollout/seq_tv"] is None
    with pytest.raises(SettingsError, match=r"run\.score_lag.*budget"):
        trained(tmp_path, model, run={"score_lag": False}, schedule={"kind": "budget", "delta": 1.0, "sync_every": 9})


def test_a_budget_is_spent_by_the_fresh_completions_of_a_mixed_batch(tmp_path, model):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    schedule = {"kind": "budget", "delta": 0.01, "sync_every": 9, "batches": 6}
    run = trained(tmp_path, model, offline={"data": str(data), "fraction": 0.25}, schedule=schedule)
    metrics = load_metrics(run)
    assert all(m["rollout/seq_kl"] is not None and m["rollout/kl"] is not None for m in metrics)
    assert "budget" in reasons_of(run).values()


def test_dynamic_sampling_leaves_offline_groups_alone(tmp_path, model):
    data = tmp_path / "flat.jsonl"
    data.write_text("".join(json.dumps(row | {"reward": 1.0}) + "\n" for row in TEXTS))
    run = trained(tmp_path, model, offline={"data": str(data), "fraction": 0.5}, rollout={"dynamic_sampling_rounds": 3})
    assert all(sum(r["source"] == "file" for r in load_rollouts(run, [b])) == 4 for b in (1, 2, 3))


@pytest.mark.parametrize("recipe", ["red_drop", "reinforce"])
def test_prefetching_leaves_the_same_records(tmp_path, model, recipe):
    """Also where the advantage is random: groups stand in the order of the batch, whichever ended first."""
    runs = []
    for prefetch in (True, False):
        sampling = {"prefetch": prefetch, "max_num_seqs": 8}
        run = trained(tmp_path / str(prefetch), model, rollout=sampling, schedule={"sync_every": 4, "batches": 5},
                      loss={"recipe": recipe}, model={"dtype": "bfloat16"})  # fmt: skip
        runs.append(load_rollouts(run))
    for one, other in zip(*runs, strict=True):
        assert (one["prompt_id"], one["token_ids"], one["step"]) == (
            other["prompt_id"], other["token_ids"], other["step"])  # fmt: skip
        assert one["advantage"] == pytest.approx(other["advantage"], abs=1e-6)
