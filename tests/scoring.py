"""Groups of texts through the reward pool, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import RewardFunction, Rewards
from lagrpo.tasks import Task
from lagrpo.types import Completion, Group, JsonView, Outcome, Prompt

QUESTION = ({"role": "user", "content": "1 + 1?"},)


def make_completion(text: str, tokens: int = 0, outcome: Outcome | None = None) -> Completion:
    some = torch.arange(tokens)
    return Completion(some, some.float(), some, finished=True, text=text, outcome=outcome)


def make_group(
    *texts: str,
    answer: object = "7",
    row: JsonView | None = None,
    key: int = 0,
    prefix: str = "",
) -> Group:
    prompt = Prompt(key, QUESTION, answer, row=row, prefix=prefix)
    return Group(prompt, tuple(map(make_completion, texts)))


def outcomes(group: Group) -> list[Outcome]:
    return [
        completion.outcome for completion in group.completions if completion.outcome is not None
    ]


def reward_of(task: Task, completion: str, answer: object) -> float:
    """The number that the only reward function of a task returns."""
    (reward,) = Rewards.from_reward(task.reward).parts
    return reward.function(completion, answer)


def score(
    rewards: RewardFunction | Rewards, groups: Sequence[Group], **options: Any
) -> list[Outcome]:
    """The outcomes of all completions."""
    with RewardPool(rewards, workers=2, max_without_reward=1.0, **options) as pool:
        return [outcome for group in pool.score(groups) for outcome in outcomes(group)]
