"""Several rewards of completions that talk to an environment or call tools."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from sample_rewards import Everything, is_five, letters, never, with_trl, with_verl
from test_talking_runs import model as talking_model
from test_talking_runs import settings

import lagrpo
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import Reward, Rewards
from lagrpo.runs import load_rollouts
from lagrpo.types import Completion, Group, Outcome, OutcomeKind, Prompt
from lagrpo.verify import verify_run

model = talking_model  # the fixture

PROMPT = Prompt(0, ({"role": "user", "content": "?"},), "5")


def completion(outcome: Outcome | None, *turns: str) -> Completion:
    tokens = torch.arange(3)
    return Completion(
        tokens, torch.zeros(3), tokens * 0, True, "".join(turns), outcome, turns=turns
    )


CUT = Outcome(OutcomeKind.SCORED, 0.0, "cut after 8 turns")
ANSWERED = Outcome(OutcomeKind.ANSWERED, reason="cut after 6 sampled tokens")


def test_answers_with_tools_are_scored_by_every_signature_with_all_arguments():
    """Tools leave the answer to the rewards; an episode without an answer has 0 as its first."""
    functions = {
        "trl": with_trl,
        "function": is_five,
        "keywords": Everything(),
        "asynchronous": Everything().wait,
        "verl": partial(with_verl, "source"),
        "prefix": lambda completion, prefix: float(prefix == "<later>"),
    }
    parts = [
        Reward(function, name=name, weight=0.5, is_of_environment=name == "trl")
        for name, function in functions.items()
    ]
    prompt = replace(PROMPT, row={"n": 2}, prefix="<first>")
    episodes = (completion(ANSWERED, "call", "5", "5"), completion(CUT, "5", "", "5"))
    group = Group(prompt, tuple(replace(episode, prefix="<later>") for episode in episodes))
    with RewardPool(Rewards(tuple(parts))) as pool:
        (scored,) = pool.score([group])
    answered, cut = (c.outcome for c in scored.completions)
    assert answered is not None
    assert cut is not None
    assert dict(answered.parts) == dict.fromkeys(functions, 1.0)
    assert dict(cut.parts) == dict.fromkeys(functions, 1.0) | {"trl": 0.0}
    assert (answered.reward, cut.reward) == (3.0, 2.5)
    assert (answered.reason, cut.reason) == (ANSWERED.reason, CUT.reason)


def test_function_without_a_name_scores_answers_and_no_other_episode():
    def maybe_five(completion: str) -> float | None:
        return None if completion == "none" else float(completion == "5")

    rewards = Rewards((Reward(maybe_five, is_of_environment=True),))
    outcomes = [ANSWERED, ANSWERED, CUT, None, ANSWERED]
    answers = ["5", "6", "5", "5", "none"]
    group = Group(PROMPT, tuple(map(completion, outcomes, answers)))
    with RewardPool(rewards) as pool:
        (scored,) = pool.score([group])
    assert [c.reward for c in scored.completions] == [1.0, 0.0, 0.0, 1.0, None]


def test_reward_of_the_environment_is_a_part_of_the_sum():
    """.5 from the environment, and 2 x 1 if the last turn is 5. Failed completions stay so."""
    rewards = Rewards(
        (
            Reward(never, weight=1.0, name="task", is_of_environment=True),
            Reward(is_five, weight=2.0, name="five"),
        )
    )
    by_environment = Outcome(OutcomeKind.SCORED, 0.5, "after 2 turns")
    failed = Outcome.failed("the server died")
    group = Group(
        PROMPT,
        (
            completion(by_environment, "6", "no", "5"),
            completion(by_environment, "5", "no", "6"),
            completion(failed, "5"),
        ),
    )
    with RewardPool(rewards, max_without_reward=1.0) as pool:
        (scored,) = pool.score([group])
        (again,) = pool.score([scored])
    outcomes = [c.outcome for c in scored.completions]
    assert [outcome and outcome.reward for outcome in outcomes] == [2.5, 0.5, None]
    assert outcomes[0] is not None
    assert dict(outcomes[0].parts) == {"task": 0.5, "five": 1.0}
    assert outcomes[0].reason == "after 2 turns"
    assert outcomes[2] is failed
    assert again == scored, "what has all rewards keeps them"


def test_reward_of_the_environment_alone_gets_its_weight():
    rewards = Rewards((Reward(never, weight=0.5, name="task", is_of_environment=True),))
    group = Group(PROMPT, (completion(Outcome.scored(0.5), "5"),))
    with RewardPool(rewards) as pool:
        ((one,),) = [scored.completions for scored in pool.score([group])]
    assert one.outcome is not None
    assert one.outcome.reward == 0.25


def test_run_with_an_environment_and_a_second_reward_is_verified(model, tmp_path):
    task = {
        "name": "talkers:load",
        "rewards": [
            "task",
            {"name": "letters", "reward": "sample_rewards:letters", "weight": 0.5},
        ],
    }
    result = lagrpo.train(settings(model, tmp_path, task=task, schedule={"batches": 2}))
    rows = load_rollouts(result.run)
    assert rows
    for row in rows:
        assert row["reward_letters"] == letters(row["messages"][-1], "")
        expected = row["reward_task"] + 0.5 * row["reward_letters"]
        assert row["reward"] == pytest.approx(expected)
    report = verify_run(result.run, trust_run_code=True)
    assert report.differences == []
    assert report.compared["episodes"] > 0


def test_run_with_tools_and_a_weighted_reward_of_each_group_is_verified(model, tmp_path):
    """TRL's signature ranks the answers of a group."""
    task = {
        "name": "sample_task:load",
        "tools": ["talkers:add"],
        "rewards": [
            {"name": "rank", "reward": "sample_rewards:ranked", "weight": 0.5},
            "sample_rewards:letters",
        ],
    }
    result = lagrpo.train(
        settings(
            model,
            tmp_path,
            task=task,
            rollout={"max_prompt_length": 700},
            schedule={"batches": 1},
        )
    )
    rows = load_rollouts(result.run)
    assert len({row["reward_rank"] for row in rows}) > 1
    for row in rows:
        assert row["reward"] == 0.5 * row["reward_rank"] + row["reward_letters"]
    report = verify_run(result.run, trust_run_code=True)
    assert report.differences == []
    assert report.compared["rewards"] > 0
