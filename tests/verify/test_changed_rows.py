"""`lagrpo verify` on runs with changed rollouts or weights.

It says which file, row and token differ.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from typing import NamedTuple

import pytest
from changed_runs import (
    FIRST_STEP,
    find_differences,
    rollouts_file,
    set_cell,
    train_run,
)

from lagrpo.runs import load_rollouts
from lagrpo.verify import verify_run


def test_flipped_token_is_found_at_its_row_and_position(run):
    token_ids = load_rollouts(run, [1])[3]["token_ids"]
    recorded = token_ids[2]
    flipped = 40 if recorded != 40 else 41
    set_cell(run, row=3, column="token_ids", value=[*token_ids[:2], flipped, *token_ids[3:]])

    # Later tokens of the row may differ too, as their context has changed. The first is the cause.
    first = find_differences(run, FIRST_STEP, "token_ids", recomputed=None)[0]
    assert first.where.startswith(f"{FIRST_STEP}, row 3 (prompt ")
    assert first.where.endswith(", token 2")
    assert first.recorded == flipped
    assert first.expected == recorded


@pytest.mark.parametrize(
    ("run_fixture", "change", "column"),
    [
        pytest.param("untouched_run", 1e-3, "rollout_logprobs", id="float32"),
        # Log-probs of bfloat16 weights scatter by more than .001, so only a large change is one.
        pytest.param("bfloat16_run", 0.5, "old_logprobs", id="bfloat16"),
    ],
)
def test_changed_log_prob_is_found_at_its_row_and_position(
    request, tmp_path, run_fixture, change, column
):
    run = shutil.copytree(request.getfixturevalue(run_fixture), tmp_path / "run")
    logps = load_rollouts(run, [1])[5][column]
    recorded = logps[1]
    logps[1] = recorded - change
    set_cell(run, row=5, column=column, value=logps)

    (difference,) = find_differences(run, FIRST_STEP, column, recomputed=None)
    assert difference.where.startswith(f"{FIRST_STEP}, row 5 ")
    assert difference.where.endswith(", token 1")
    assert difference.recorded == pytest.approx(recorded - change, abs=1e-6)  # a float32 column
    assert difference.expected == pytest.approx(recorded, abs=change / 2)


def test_changed_reward_contradicts_task_advantages_and_metrics(run):
    recorded = load_rollouts(run, [1])[2]["reward"]
    set_cell(run, row=2, column="reward", value=recorded + 0.25)

    (difference,) = find_differences(run, f"{FIRST_STEP}, row 2 ", "reward")
    assert difference.recorded == recorded + 0.25
    assert difference.expected == recorded
    assert find_differences(run, FIRST_STEP, "advantage")
    assert find_differences(run, "metrics.jsonl", "reward")


class Cell(NamedTuple):
    step: int
    row: int
    column: str
    value: object


@pytest.fixture
def cells() -> list[Cell]:
    """One changed cell in each of the six groups, so that none hides another."""
    return [
        Cell(step=1, row=3, column="answer", value="{"),  # not even JSON
        Cell(step=1, row=7, column="excluded_reason", value="failed"),
        Cell(step=2, row=3, column="completion", value="other"),
        Cell(step=2, row=4, column="prompt_token_ids", value=[5]),
        Cell(step=3, row=0, column="prompt_id", value=99),
        Cell(step=3, row=7, column="staleness", value=7),
    ]


def test_cells_that_do_not_fit_their_row_are_all_found(run, cells):
    for cell in cells:
        set_cell(run, cell.row, cell.column, cell.value, rollouts_file(cell.step))
    locations = [
        difference.where for difference in verify_run(run, 1, trust_run_code=True).differences
    ]
    missed = [
        cell
        for cell in cells
        if not any(
            location.startswith(f"{rollouts_file(cell.step)}, row {cell.row} ")
            for location in locations
        )
    ]
    assert missed == []


def test_wrong_index_in_a_group_is_found(run):
    """A group has the samples 0 to 3, each once."""
    set_cell(run, row=2, column="sample_index", value=9)
    (difference,) = find_differences(run, FIRST_STEP, "completions")
    assert difference.recorded == [0, 1, 9, 3]


def test_missing_rollouts_of_a_step_are_found(run):
    (run / FIRST_STEP).unlink()
    difference = find_differences(run, FIRST_STEP, "groups, and generated ones")[0]
    assert difference.recorded == "no file"


def test_changed_policy_version_contradicts_schedule_and_log_probs(run):
    """Version 1 did not exist when the first batch was sampled."""
    versions = load_rollouts(run, [1])[4]["policy_versions"]
    set_cell(run, row=4, column="policy_versions", value=[1] * len(versions))

    (difference,) = find_differences(run, f"{FIRST_STEP}, row 4 ", "policy_versions")
    assert difference.recorded == 1
    assert difference.expected == 0
    # The log-probs are compared with those of version 1's weights, in this row alone.
    wrong_logps = find_differences(run, FIRST_STEP, "rollout_logprobs", recomputed=None)
    assert {each.where.partition(" (")[0] for each in wrong_logps} == {f"{FIRST_STEP}, row 4"}


def test_swapped_weights_are_found_in_the_steps_that_they_sampled(run):
    weights = run / "weights"
    (weights / "v000001").rename(weights / "aside")
    (weights / "v000003").rename(weights / "v000001")
    (weights / "aside").rename(weights / "v000003")

    differences = verify_run(run, None, trust_run_code=True).differences
    wrong_logps = Counter(
        difference.where.partition(",")[0]
        for difference in differences
        if difference.name == "rollout_logprobs"
    )
    # Version 0 sampled the first batch, version 1 the other two.
    assert wrong_logps[rollouts_file(1)] == 0
    assert wrong_logps[rollouts_file(2)] > 10
    assert wrong_logps[rollouts_file(3)] > 10


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_run_in_bfloat16_at_another_temperature_is_found(model, tmp_path, temperature):
    """The settings say 1 afterwards. The slope of the errors is the share of the change."""
    sections = {"model": {"dtype": "bfloat16"}, "rollout": {"temperature": temperature}}
    sections["rollout"] |= {"num_generations": 8, "max_completion_length": 12}
    run = train_run(model, tmp_path, **sections)
    assert verify_run(run, None, trust_run_code=True).differences == []

    config = run / "config.toml"
    text = config.read_text(encoding="utf-8")
    changed = re.sub(rf"(?m)^temperature = {temperature}$", "temperature = 1.0", text)
    assert changed != text
    config.write_text(changed, encoding="utf-8")
    slopes = find_differences(run, "old_logprobs", "slope of errors on log-probs", recomputed=None)
    (difference,) = slopes
    assert float(difference.recorded) == pytest.approx(1 / temperature - 1, abs=0.03)
