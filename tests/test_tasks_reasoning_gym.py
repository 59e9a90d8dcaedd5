"""Task `reasoning_gym:NAME`: puzzles by seed, and the package's own scores."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from scoring import make_group, score
from test_tasks import task_settings

from lagrpo.rewards.reward import UnscorableError
from lagrpo.tasks import load_task

pytestmark = pytest.mark.gym


def load(seed: int = 0, name: str = "chain_sum", **options: Any) -> Any:
    task_options = {"train_size": 40, "test_size": 10, "max_terms": 3} | options
    return load_task(task_settings(f"reasoning_gym:{name}", options=task_options), seed)


def test_prompts_are_a_function_of_the_seed_and_splits_share_none():
    task, again, other = load(), load(), load(seed=1)
    assert (task.size("train"), task.size("test")) == (40, 10)
    prompts = [
        task.prompt(split, n) for split in ("train", "test") for n in range(task.size(split))
    ]
    assert prompts[:40] == [again.prompt("train", n) for n in range(40)]
    assert prompts[0] != other.prompt("train", 0)
    assert len({prompt.answer["index"] for prompt in prompts}) == 50
    assert (
        prompts[0]
        .messages[0]["content"]
        .endswith("Put the final answer between <answer> and </answer>.")
    )
    assert all(json.loads(json.dumps(prompt.answer)) == prompt.answer for prompt in prompts)


def test_answer_cut_in_a_thought_that_the_prompt_opened_is_wrong():
    task = load()
    answer = task.prompt("train", 3).answer
    assert task.reward(answer["answer"], answer, prefix="<think>\n") == 0.0


def test_answers_are_scored_by_the_package_also_in_a_worker_process():
    task = load()
    answer = task.prompt("train", 3).answer
    right = answer["answer"]
    texts = [
        f"so <answer>1</answer> no, <answer> {right} </answer>",
        right,
        f"<answer>{right}1</answer>",
        "",
    ]
    scores = [
        outcome.reward
        for outcome in score(task.reward, [make_group(*texts, answer=answer)], deadline=30.0)
    ]
    assert (
        scores
        == [task.reward(text, answer) for text in texts]
        == [1.0, 1.0, len(right) / (len(right) + 1), 0.0]
    )


def test_generator_that_is_not_reproducible_leaves_completions_unscored():
    task = load()
    answer = task.prompt("train", 0).answer
    with pytest.raises(
        UnscorableError, match=r"chain_sum makes different puzzles.*PYTHONHASHSEED to 0"
    ):
        pickle.loads(pickle.dumps(task.reward))("1", answer | {"digest": 0})


def test_wrong_names_and_options_are_rejected():
    for changes, message in [
        ({"name": "chain_sun"}, "reasoning_gym has no 'chain_sun'. Did you mean 'chain_sum'"),
        (
            {"max_term": 2},
            "task.options: reasoning_gym:chain_sum rejects these options: .*max_term'",
        ),
        ({"min_terms": 9}, "rejects these options: max_terms must be >= min_terms"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(**changes)
