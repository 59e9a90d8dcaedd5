"""`lagrpo verify` on unchanged runs: no difference, and a note for what it cannot check."""

from __future__ import annotations

import shutil

import pytest
import sample_task
from changed_runs import FIRST_STEP, train_run
from running import tiny_settings

import lagrpo
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.verify import verify_run

ROWS = 3 * 2 * 4
"""Completions of a run: batches, prompts, completions of a prompt."""

EVALUATED = 2 * 2 * 3
"""Completions of the evaluations before and after training: two prompts with three samples each."""


def test_float32_run_agrees_with_its_replay_in_every_value(untouched_run):
    report = verify_run(untouched_run, None, trust_run_code=True)
    assert report.differences == []

    # A check that compared nothing would find no difference either.
    compared = report.compared
    rows = load_rollouts(untouched_run)
    tokens = sum(len(row["token_ids"]) for row in rows)
    assert len(rows) == ROWS
    assert tokens > 100
    assert compared["samples"] == tokens
    assert compared["rollout_logprobs"] == tokens
    assert compared["old_logprobs"] == tokens
    assert compared["advantages"] == 3 * ROWS  # excluded_reason, group_std and advantage
    assert compared["rewards"] == ROWS + EVALUATED
    assert report.undecided["samples"] == 0
    # The reason says that the tokens of evaluations are not recorded.
    assert [(*reason.split()[:3], n) for reason, n in report.skipped.items()] == [
        ("completions", "of", "evaluations,", EVALUATED)
    ]


@pytest.mark.parametrize("kernels", ["c", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_run_agrees_with_its_replay_whatever_computes(
    model, tmp_path, monkeypatch, dtype, kernels
):
    """Metrics of log-probs follow from the recorded ones, so no rounding of kernels matters."""
    monkeypatch.setenv("LAGRPO_KERNELS", kernels)
    schedule = {"num_iterations": 2}
    run = train_run(model, tmp_path, model={"dtype": dtype}, schedule=schedule)
    assert load_metrics(run)[2]["rollout/kl"] > 0  # batch 3 is stale
    assert verify_run(run, None, trust_run_code=True).differences == []


def test_bfloat16_run_agrees_with_its_replay_but_for_undecided_samples(bfloat16_run):
    """Rounding moves the edges between tokens, so a few random numbers could mean either token."""
    report = verify_run(bfloat16_run, None, trust_run_code=True)
    assert report.differences == []
    assert 0 < report.undecided["samples"] < report.compared["samples"]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            # A low temperature repeats completions, so groups have equal rewards and are replaced.
            {
                "loss": {"recipe": "red_drop"},
                "schedule": {"constant_lag": 1},
                "rollout": {"dynamic_sampling_rounds": 6, "temperature": 0.1, "num_generations": 3},
            },
            id="red_drop",
        ),
        pytest.param(
            {"loss": {"recipe": "rloo"}, "schedule": {"sync_at_kl": 0.01, "num_iterations": 2}},
            id="rloo",
        ),
        pytest.param(
            # Two stages: the reference policy changes within the run.
            {
                "loss": {"recipe": "grpo_masked"},
                "schedule": {"batches": 4, "ref_sync_every": 2},
                "rollout": {"dynamic_sampling_rounds": 2},
            },
            id="grpo_masked",
        ),
    ],
)
def test_run_with_another_recipe_and_schedule_agrees_with_its_replay(model, tmp_path, sections):
    run = train_run(model, tmp_path, **sections)
    assert verify_run(run, 12, trust_run_code=True).differences == []


def test_run_resumed_for_more_batches_agrees_with_its_replay(model, tmp_path):
    run = train_run(model, tmp_path, schedule={"constant_lag": 2})
    lagrpo.train(resume=run, settings={"schedule.batches": 7}, trust_run_code=True)
    # The lag grows from 0 at the start, and again where the run resumed.
    assert [line["staleness/max"] for line in load_metrics(run)] == [0, 1, 2, 0, 1, 2, 2]
    assert verify_run(run, 12, trust_run_code=True).differences == []


def test_offline_completions_are_skipped_with_a_note(untouched_run, model, tmp_path):
    """Half of each batch are completions of another run, with random numbers of its own."""
    offline = {"data": str(untouched_run / FIRST_STEP), "fraction": 0.5}
    run = train_run(model, tmp_path, offline=offline, loss={"recipe": "asymre"})
    report = verify_run(run, trust_run_code=True)
    assert report.differences == []
    assert report.skipped["completions, their samples and log-probs: offline data"] == ROWS // 2
    assert report.compared["samples"] > 0


def test_missing_weights_are_skipped_with_the_setting_that_keeps_them(run):
    for folder in (run / "weights").glob("v*"):
        shutil.rmtree(folder)
    report = verify_run(run, trust_run_code=True)
    assert report.differences == []
    # The initial weights are those of the model, which the run does not own.
    by_initial_policy = [row for row in load_rollouts(run) if set(row["policy_versions"]) == {0}]
    tokens = sum(len(row["token_ids"]) for row in by_initial_policy)
    assert report.compared["rollout_logprobs"] == tokens
    assert any("set checkpoint.export_every = 1" in reason for reason in report.skipped)


def test_rewards_of_a_task_object_are_checked_only_if_it_is_passed(model, tmp_path):
    """No setting names a task that was passed in Python."""
    settings = tiny_settings(model, tmp_path, run={"name": "run"})
    run = lagrpo.train(settings, task=sample_task.load()).run

    without_task = verify_run(run, 4)
    assert any("pass it to" in reason for reason in without_task.skipped)
    assert "rewards" not in without_task.compared

    with_task = verify_run(run, 4, task=sample_task.load())
    assert with_task.differences == []
    assert with_task.compared["rewards"] == ROWS + EVALUATED
