"""Task `math` on its real files where LAGRPO_DATA has them, else on files of the same form; its judge and time."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from lagrpo.rewards.load import REWARDS, load_function
from lagrpo.rewards.pool import RewardPool
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import RowTask, load_task
from lagrpo.types import Completion, Group, Prompt

pytest.importorskip("math_verify", reason="needs math-verify: pip install 'lagrpo[math]'")
judge = load_function(REWARDS["math"])

MADE_UP = {
    "deepscaler_part_math_train": [
        {"problem": "What is half of 1?", "answer": "\\frac{1}{2}"},
        {"problem": "Where is the vertex?", "answer": "(3, -2)"},
        {"problem": "Factor $x^2 - 1$.", "answer": "(x - 1)(x + 1)"},
        {"problem": "Which one?", "answer": None},
    ],
    "deepscaler_part_aime_train": [{"problem": "Find $\\log_z w$.", "answer": "60", "year": 1983}],
    "math500_test": [
        {"problem": "In polar form?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "a/1"}
    ],
    "aime24_test": [{"problem": "Find $xy$.", "answer": "025", "number": 2, "contest": 1}],
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    real = Path(os.environ.get("LAGRPO_DATA", "nowhere"))
    if all((real / f"{name}.jsonl").is_file() for name in MADE_UP):
        return str(real)
    for name, rows in MADE_UP.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_the_splits_are_files(data):
    default = load_task(TaskSettings(name="math", data=data), seed=0)
    named = load_task(
        TaskSettings(name="math", data=data, train_split="deepscaler_part_aime_train", test_split="aime24_test"), seed=0
    )
    assert isinstance(default, RowTask)
    assert isinstance(named, RowTask)
    assert set(default.rows["train"][0]) == {"problem", "answer"}
    assert set(default.rows["test"][0]) == {"problem", "answer", "unique_id"}
    assert set(named.rows["train"][0]) == {"problem", "answer", "year"}
    assert all(row["answer"] for row in default.rows["train"])
    assert named.prompt("train", 0).messages[0]["content"].endswith("put the final answer in \\boxed{}.")


def test_every_gold_answer_is_judged_right_against_itself(data):
    for test in ("math500_test", "aime24_test"):
        task = load_task(TaskSettings(name="math", data=data, test_split=test), seed=0)
        for index in range(task.size("test")):
            gold = task.prompt("test", index).answer
            assert judge(f"So it is $\\boxed{{ {gold} }}$.", gold) == 1.0, gold
            assert judge("So it is $\\boxed{123456789}$.", gold) == 0.0, gold


def test_without_math_verify_loading_says_what_to_install(data, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for settings in (TaskSettings(name="math", data=data), TaskSettings(name="arithmetic", reward="math")):
        with pytest.raises(ImportError, match=r"pip install 'lagrpo\[math\]'"):
            load_task(settings, seed=0)


def test_answers_that_take_for_ever_are_unscored_and_the_others_judged():
    answers = {
        "\\boxed{72}": 1.0,
        "\\boxed{9^{9^{9^{9}}}}": None,
        "\\boxed{(10^{9})!}": None,
        "the answer is 9**9**9**9": None,
        "\\boxed{71}": 0.0,
    }
    empty = torch.empty(0)
    group = Group(Prompt(0, (), "72"), tuple(Completion(empty, empty, empty, True, text) for text in answers))
    with RewardPool(judge, workers=2, deadline=2.0, max_without_reward=1.0) as pool:
        (judged,) = pool.score([group])
    assert [completion.reward for completion in judged.completions] == list(answers.values())
    reasons = {completion.outcome.reason for completion in judged.completions if completion.outcome}
    assert reasons == {"", "no reward within 2 s"}
