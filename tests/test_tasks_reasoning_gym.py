"""Task `reasoning_gym:NAME`: puzzles by seed, and the package's own scores."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from lagrpo.errors import SettingsError
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import UnscorableError
from lagrpo.settings.toml import load_settings
from lagrpo.tasks import load_task
from lagrpo.training.checks import check_settings
from lagrpo.types import Completion, Group, Prompt

pytestmark = pytest.mark.gym

SUM = {"name": "reasoning_gym:chain_sum", "options": {"max_terms": 3}, "train_size": 40, "test_size": 10}


def load(seed: int = 0, **changes):
    return load_task(load_settings({"task": SUM | changes}).task, seed)


def test_prompts_are_a_function_of_the_seed_and_splits_share_none():
    task, again, other = load(), load(), load(seed=1)
    assert (task.size("train"), task.size("test")) == (40, 10)
    prompts = [task.prompt(split, n) for split in ("train", "test") for n in range(task.size(split))]
    assert prompts[:40] == [again.prompt("train", n) for n in range(40)]
    assert prompts[0] != other.prompt("train", 0)
    assert len({prompt.answer["index"] for prompt in prompts}) == 50
    assert prompts[0].messages[0]["content"].endswith("Put the final answer between <answer> and </answer>.")
    assert all(json.loads(json.dumps(prompt.answer)) == prompt.answer for prompt in prompts)


def test_answers_are_scored_by_the_package_also_in_a_worker_process():
    task = load()
    prompt = task.prompt("train", 3)
    right, none = prompt.answer["answer"], torch.zeros(0)
    texts = [f"so <answer>1</answer> no, <answer> {right} </answer>", right, f"<answer>{right}1</answer>", ""]
    completions = tuple(Completion(none, none, none, True, text) for text in texts)
    with RewardPool(task.reward, workers=1, deadline=30.0) as pool:
        (found,) = pool.score([Group(Prompt(0, (), prompt.answer), completions)])
    assert list(found.rewards) == [task.reward(text, prompt.answer) for text in texts]
    assert found.rewards == (1.0, 1.0, len(right) / (len(right) + 1), 0.0)


def test_a_generator_that_does_not_repeat_itself_scores_nothing():
    task = load()
    gold = task.prompt("train", 0).answer
    with pytest.raises(UnscorableError, match=r"chain_sum makes another puzzle.*PYTHONHASHSEED to 0"):
        pickle.loads(pickle.dumps(task.reward))("1", gold | {"digest": 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "reasoning_gym:chain_sun"}, "reasoning_gym has no 'chain_sun'. Did you mean 'chain_sum'"),
        ({"options": {"max_term": 2}}, "task.options: reasoning_gym:chain_sum rejects them: .*max_term'"),
        ({"options": {"min_terms": 9}}, "rejects them: max_terms must be >= min_terms"),
    ],
)
def test_wrong_names_and_options_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)


def test_options_of_other_tasks_are_rejected():
    with pytest.raises(SettingsError, match=r"task.digits is set, but the task 'reasoning_gym:chain_sum'"):
        check_settings(load_settings({"task": SUM | {"digits": 2}}))
