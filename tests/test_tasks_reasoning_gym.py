"""Task `reasoning_gym:NAME`: puzzles by seed, and the package's own scores."""

from __future__ import annotations

import json
import pickle

import pytest

from lagrpo.errors import SettingsError
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import UnscorableError
from lagrpo.settings.arguments import parse
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings, to_toml, validate
from lagrpo.tasks import load_task
from lagrpo.training.checks import check_settings
from lagrpo.types import Completion, Group, Prompt

pytestmark = pytest.mark.gym

SUM = {"name": "reasoning_gym:chain_sum", "options": {"max_terms": 3}, "train_size": 40, "test_size": 10}


def load(seed: int = 0, **changes):
    return load_task(load_settings({"task": SUM | changes}).task, seed)


def test_prompts_are_a_function_of_the_seed_and_splits_have_no_seed_in_common():
    task, again, other = load(), load(), load(seed=1)
    assert (task.size("train"), task.size("test")) == (40, 10)
    prompts = [task.prompt(split, n) for split in ("train", "test") for n in range(task.size(split))]
    assert prompts[:40] == [again.prompt("train", n) for n in range(40)]
    assert prompts[0] != other.prompt("train", 0)
    assert len({prompt.answer["index"] for prompt in prompts}) == 50
    assert prompts[0].messages[0]["content"].endswith("Put the final answer between <answer> and </answer>.")
    assert all(json.loads(json.dumps(prompt.answer)) == prompt.answer for prompt in prompts)


def test_answers_are_scored_by_the_package_with_partial_rewards():
    task = load()
    gold = task.prompt("train", 3).answer
    right = gold["answer"]
    texts = [f"so <answer>1</answer> no, <answer> {right} </answer>", right, f"<answer>{right}1</answer>", ""]
    assert [task.reward(text, gold) for text in texts] == [1.0, 1.0, len(right) / (len(right) + 1), 0.0]
    partly = load(name="reasoning_gym:letter_jumble", options={})
    gold = partly.prompt("train", 0).answer
    words = gold["answer"].split()
    assert 0.01 < partly.reward(" ".join([*words[:-1], "x" * len(words[-1])]), gold) < 1.0


def test_the_judge_goes_to_a_worker_process_and_scores_there():
    task = load()
    prompt = task.prompt("test", 0)
    import torch

    none = torch.zeros(0)
    completions = [Completion(none, none, none, True, text) for text in (prompt.answer["answer"], "no")]
    with RewardPool(task.reward, workers=1, deadline=30.0) as pool:
        (found,) = pool.score([Group(Prompt(0, (), prompt.answer), tuple(completions))])
    assert found.rewards == (1.0, 0.0)


def test_a_generator_that_does_not_repeat_itself_scores_nothing():
    task = load()
    gold = task.prompt("train", 0).answer
    with pytest.raises(UnscorableError, match=r"chain_sum makes another puzzle.*PYTHONHASHSEED to 0"):
        pickle.loads(pickle.dumps(task.reward))("1", gold | {"digest": 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "reasoning_gym:chain_sun"}, "reasoning_gym has no 'chain_sun'. Did you mean 'chain_sum'"),
        (
            {"options": {"max_term": 2}},
            "task.options.max_term: reasoning_gym:chain_sum takes .*max_terms",
        ),
        ({"options": {"seed": 2}}, "task.options.seed: reasoning_gym:chain_sum takes"),
        ({"options": {"min_terms": 9}}, "rejects them: max_terms must be >= min_terms"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_nearest(changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)


def test_options_of_other_tasks_are_refused_and_those_of_a_table_travel_through_toml():
    with pytest.raises(SettingsError, match=r"task.digits is set, but the task 'reasoning_gym:chain_sum'"):
        check_settings(load_settings({"task": SUM | {"digits": 2}}))
    with pytest.raises(SettingsError, match="'arithmetic' does not take it: reasoning_gym do"):
        check_settings(load_settings({"task": {"options": {"a": 1}}}))
    given = parse(Settings, ["--task.options.min_terms", "2", "--task.options.allow_negation=true"])
    settings = validate(Settings, {"task": SUM}, given.overrides, "x")
    assert settings.task.options == {"max_terms": 3, "min_terms": 2, "allow_negation": True}  # type: ignore[attr-defined]
    import tomllib

    assert load_settings(tomllib.loads(to_toml(settings))) == settings
