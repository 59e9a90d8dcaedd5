"""`lagrpo verify` on what several rewards decide: the first one says which completions are correct.

No model runs: the rows are made by hand.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sample_rewards

from lagrpo.rewards.reward import Reward, Rewards
from lagrpo.tasks import RowTask
from lagrpo.types import JsonObject, Prompt
from lagrpo.verify.record import Report
from lagrpo.verify.task_checks import check_record, score_again, to_rows

# The answer is 7, so the first completion alone is correct. Eight lower-case letters are 1.0.
RECORD: JsonObject = {
    "prompt_id": 0,
    "completions": ["7", "abcd"],
    "rewards": [1.0, 0.25],
    "reward_correct": [1.0, 0.0],
    "reward_letters": [0.0, 0.5],
    "is_correct": [True, False],
    "prompt": "3 + 4",
    "answer": "7",
    "samples": 2,
    "scored": 2,
    "correct": 1,
    "reward": 0.625,
    "pass@1": 0.5,
    "tokens": [1, 4],
}


def find_wrong_decisions(rows: list[JsonObject]) -> list[tuple[str, object]]:
    """The names and expected values of what differs."""
    rewards = Rewards(
        (
            Reward(sample_rewards.correct, name="correct"),
            Reward(sample_rewards.letters, weight=0.5, name="letters"),
        )
    )
    task = RowTask("sums", {"test": ["3 + 4"]}, lambda row: (row, "7"), rewards)
    run: Any = SimpleNamespace(report=Report("run"))
    chat: Any = SimpleNamespace(tokenize=lambda prompt: prompt)
    score_again(run, task, chat, "test", [rows], deadline=60.0)
    return [(difference.name, difference.expected) for difference in run.report.differences]


def test_recorded_decisions_agree():
    assert find_wrong_decisions(to_rows(RECORD, "after.parquet")) == []


def test_changed_decision_of_an_evaluation_is_found():
    record = RECORD | {"is_correct": [True, True]}
    assert find_wrong_decisions(to_rows(record, "after.parquet")) == [("correct", False)]


@pytest.mark.parametrize(
    ("changes", "wrong_names"),
    [
        pytest.param({}, [], id="as it was"),
        pytest.param({"scored": 2, "pass@1": 0.5}, ["scored", "pass@1"], id="counted as wrong"),
    ],
)
def test_completion_without_the_first_reward_has_no_decision(changes, wrong_names):
    record = RECORD | {"is_correct": [True, None], "scored": 1, "pass@1": 1.0} | changes
    prompt = Prompt(0, ({"role": "user", "content": "3 + 4"},), "7")
    run: Any = SimpleNamespace(report=Report("run"))
    check_record(run, prompt, 1.0, record, "after.parquet, row 0")
    assert [difference.name for difference in run.report.differences] == wrong_names


def test_changed_decision_of_a_rollout_is_found():
    rows = to_rows(RECORD, "step-000001.parquet")
    rows[0] |= {"correct": False}
    assert find_wrong_decisions(rows) == [("correct", True)]


def test_changed_rate_of_a_prompt_is_found():
    prompt = Prompt(0, ({"role": "user", "content": "3 + 4"},), "7")
    run: Any = SimpleNamespace(report=Report("run"))
    check_record(run, prompt, 1.0, RECORD, "after.parquet, row 0")
    assert run.report.differences == []
    check_record(run, prompt, 1.0, RECORD | {"pass@1": 1.0}, "after.parquet, row 0")
    (difference,) = run.report.differences
    assert (difference.name, difference.expected) == ("pass@1", 0.5)
