"""`lagrpo verify` on runs with changed metrics, events or evaluations."""

from __future__ import annotations

import json

import pytest
from changed_runs import find_differences, rewrite_metrics, rewrite_rows, train_run

from lagrpo.runs import load_events, load_metrics
from lagrpo.verify import verify_run


def test_changed_metrics_are_found_in_their_line(run):
    names = {
        "reward",
        "frac_reward_zero_std",
        "completions/clipped_ratio",
        "rollout/ess",
        "rollout/seq_kl",
        "improvement",  # null here: eight completions are too few to estimate it
    }

    def add_an_eighth(lines):
        for name in names:
            lines[1][name] = (lines[1][name] or 0.0) + 0.125

    rewrite_metrics(run, add_an_eighth)
    differences = verify_run(run, 1, trust_run_code=True).differences
    assert {difference.where for difference in differences} == {"metrics.jsonl, line 2 (step 2)"}
    assert sorted(difference.name for difference in differences) == sorted(names)
    for difference in differences:
        assert difference.recorded == pytest.approx((difference.expected or 0.0) + 0.125)


def test_small_changes_of_metrics_of_log_probs_are_found(run):
    """By a ten-millionth, which is a hundred times the rounding of float64 sums."""
    names = [name for name in load_metrics(run)[2] if name.startswith("rollout/")]
    names.remove("rollout/log_ratio_squared")  # does not follow from a formula of verify

    def change_third_line(lines):
        for name in names:
            lines[2][name] *= 1 + 1e-7
            lines[2][name] += 1e-7

    rewrite_metrics(run, change_third_line)
    differences = verify_run(run, 1, trust_run_code=True).differences
    assert sorted(difference.name for difference in differences) == sorted(names)


def test_changed_learning_rate_is_found(run):
    def add_a_hundredth(lines):
        lines[1]["learning_rate"] *= 1.01

    rewrite_metrics(run, add_a_hundredth)
    (difference,) = find_differences(run, "metrics.jsonl, line 2", "learning_rate")
    assert difference.expected == 1e-2


def test_coefficient_of_the_entropy_follows_from_recorded_entropies(model, tmp_path):
    """The target is just below log 103, which no token of the model reaches."""
    run = train_run(model, tmp_path, loss={"entropy_target": 4.6})
    coefs = [line["entropy_coef"] for line in load_metrics(run)]
    assert coefs == pytest.approx([0.0, 0.005, 0.01])
    report = verify_run(run, 1, trust_run_code=True)
    assert report.differences == []
    assert any("entropy" in reason for reason in report.skipped)

    def add_a_step(lines):
        lines[2]["entropy_coef"] += 0.005

    rewrite_metrics(run, add_a_step)
    assert find_differences(run, "metrics.jsonl, line 3", "entropy_coef")


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param({"lr_scheduler_type": "cosine", "warmup_steps": 1}, id="schedule"),
        pytest.param({"scale_lr_by_ess": 1.0}, id="effective sample size"),
        pytest.param({"scale_lr_by_kl": 1e-5}, id="divergence"),
    ],
)
def test_learning_rate_follows_from_schedule_and_sample_size(model, tmp_path, optimizer):
    """Batch 3 is stale, so its effective sample size is smaller than its number of completions."""
    run = train_run(model, tmp_path, optimizer={"learning_rate": 1e-2} | optimizer)
    assert len({line["learning_rate"] for line in load_metrics(run)}) > 1
    assert verify_run(run, 1, trust_run_code=True).differences == []

    def halve(lines):
        lines[2]["learning_rate"] = lines[2]["learning_rate"] / 2 + 1e-6

    rewrite_metrics(run, halve)
    assert find_differences(run, "metrics.jsonl, line 3", "learning_rate")


@pytest.mark.parametrize(
    ("order", "name"),
    [
        pytest.param([0, 2], "step and keys", id="a line is missing"),
        pytest.param([0, 1, 1, 2], "step and keys", id="a line is there twice"),
        pytest.param([], "the line of step 1", id="the file is empty"),
    ],
)
def test_lines_of_metrics_that_do_not_fit_the_steps_are_found(run, order, name):
    def reorder(lines):
        lines[:] = [lines[index] for index in order]

    rewrite_metrics(run, reorder)
    assert find_differences(run, "metrics.jsonl", name)


@pytest.mark.parametrize(
    ("resumed_after", "without_key", "wrong_lines"),
    [
        pytest.param([1], [1], [], id="more where it resumed"),
        pytest.param([1], [1, 2], [3], id="more later"),
        pytest.param([1], [2, 3], [2, 3], id="fewer where it resumed"),
        pytest.param([], [1], [2, 3], id="more without resuming"),
    ],
)
def test_lines_may_have_more_keys_only_from_where_the_run_resumed(
    run, resumed_after, without_key, wrong_lines
):
    def remove_a_key(lines):
        for number in without_key:
            del lines[number - 1]["entropy_coef"]

    rewrite_metrics(run, remove_a_key)
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        for step in resumed_after:
            file.write(json.dumps({"event": "resumed", "step": step, "ahead": 0}) + "\n")
    differences = find_differences(run, "metrics.jsonl", "step and keys")
    assert [difference.where for difference in differences] == [
        f"metrics.jsonl, line {number}" for number in wrong_lines
    ]


def test_missing_events_of_weight_syncs_are_found(run):
    (run / "events.jsonl").write_text("", encoding="utf-8")
    differences = find_differences(run, "events.jsonl", "weight_sync")
    # Weights are synced before the first batch, and then at every step that 2 divides.
    assert [difference.where for difference in differences] == [
        "events.jsonl, step 1",
        "events.jsonl, step 2",
    ]
    assert differences[1].expected == ("schedule", 1)


@pytest.mark.parametrize(
    ("sync_every", "sync_at_kl", "reason", "changed_kl"),
    [
        # Any KL is above the budget: with a KL of 0 step 5 would not sync yet.
        pytest.param(3, 1e-9, "budget", 0.0, id="budget"),
        # No KL is above the budget: with a large one step 5 would sync for it, not at the cap.
        pytest.param(2, 1e9, "cap", 1e10, id="cap"),
    ],
)
def test_changed_kl_contradicts_the_next_weight_sync(
    model, tmp_path, sync_every, sync_at_kl, reason, changed_kl
):
    schedule = {"sync_every": sync_every, "sync_at_kl": sync_at_kl, "batches": 5}
    run = train_run(model, tmp_path, schedule=schedule)
    syncs = [
        (event["step"], event["reason"])
        for event in load_events(run)
        if event["event"] == "weight_sync"
    ]
    assert syncs == [(1, "start"), (3, reason), (5, reason)]
    assert verify_run(run, 1, trust_run_code=True).differences == []

    def change_fourth_line(lines):
        lines[3]["rollout/seq_kl"] = changed_kl

    rewrite_metrics(run, change_fourth_line)
    differences = find_differences(run, "events.jsonl", "weight_sync")
    assert [difference.where for difference in differences] == ["events.jsonl, step 5"]


def test_changed_reward_of_an_evaluation_is_found_in_its_row(run):
    file = "evaluations/after.parquet"

    def change_third_sample(rows):
        rows[1]["rewards"][2] = 2.0

    rewrite_rows(run, change_third_sample, file)
    assert find_differences(run, f"{file}, row 1", "reward")


def test_changed_metrics_of_an_evaluation_are_all_found(run):
    file = run / "evaluations/before.json"
    summary = json.loads(file.read_text(encoding="utf-8"))
    names = {"policy_version", "samples", "unscored", "pass@2"}
    for name in names:
        summary[name] += 1
    file.write_text(json.dumps(summary), encoding="utf-8")

    differences = verify_run(run, 1, trust_run_code=True).differences
    in_summary = {
        difference.name
        for difference in differences
        if difference.where == "evaluations/before.json"
    }
    assert in_summary == names
