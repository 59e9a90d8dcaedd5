"""pass@k of a policy, by hand: what is generated and judged is given, the numbers are worked out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lagrpo.core.estimators import clustered_interval
from lagrpo.rollout.base import Request
from lagrpo.training.evaluation import compare, evaluate, few_prompts, interval
from lagrpo.types import Completion, Group, Outcome, Prompt

pytestmark = pytest.mark.usefixtures("shared_templates")

REWARDS: dict[int, list[float | None]] = {
    4: [1.0, 0.0, 0.0, 0.0],  # pass@1 1/4, pass@2 1 - C(3,2)/C(4,2) = 1/2, pass@4 1
    9: [0.0, None, 0.0, None],  # two scored: pass@1 0, pass@2 0, no pass@4
}


class Given:
    """A sampler and a reward pool of given rewards by prompt; None is a completion that cannot be scored. Groups end in
    the opposite order."""

    def __init__(self, rewards: dict[int, list[float | None]]) -> None:
        self.rewards = rewards

    def requests(self) -> list[Request]:
        return [Request(0, 0, Prompt(k, ({"role": "user", "content": f"{k}?"},), str(k))) for k in self.rewards]

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        for request in reversed(requests):
            completions = [self._completion(n) for n in range(len(self.rewards[request.prompt.key]))]
            assert len(completions) == G
            yield request, Group(request.prompt, tuple(completions))

    def score(self, groups: Iterable[Group]) -> Iterator[Group]:
        for group in groups:
            outcomes = [
                Outcome.unscored("no") if r is None else Outcome.scored(r) for r in self.rewards[group.prompt.key]
            ]
            judged = zip(group.completions, outcomes, strict=True)
            yield replace(group, completions=tuple(replace(c, outcome=o) for c, o in judged))

    def _completion(self, n: int) -> Completion:
        tokens = torch.arange(n + 1)
        return Completion(tokens, torch.zeros(n + 1), torch.zeros(n + 1, dtype=torch.long), n % 2 == 0, f"text {n}")


def evaluated(
    rewards: dict[int, list[float | None]], seed: int = 0, reward_range: tuple[float, float] = (0.0, 1.0)
) -> Any:
    given: Any = Given(rewards)
    return evaluate(given, given, given.requests(), len(next(iter(rewards.values()))), seed, reward_range)


def test_the_numbers_by_hand():
    summary = evaluated(REWARDS).summary
    assert (summary["prompts"], summary["samples"], summary["unscored"]) == (2, 4, 2)
    assert summary["pass@1"] == (1 / 4 + 0) / 2
    assert summary["pass@2"] == (1 / 2 + 0) / 2
    assert summary["pass@4"] == 1.0
    assert summary["reward"] == (1 / 4 + 0) / 2
    assert "pass@8" not in summary


def test_the_greatest_k_is_the_number_of_samples():
    """Of 6: 1, 2, 4 and 6; with 2 of 6 right pass@6 is 1, pass@4 is 1 - C(4,4)/C(6,4) = 14/15."""
    summary = evaluated({1: [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]}).summary
    assert [name for name in summary if name.startswith("pass") and name[-1].isdigit()] == [
        *("pass@1", "pass@2", "pass@4", "pass@6"),
    ]
    assert summary["pass@6"] == 1
    assert summary["pass@4"] == pytest.approx(14 / 15)


def test_every_metric_has_an_interval_around_it():
    rewards: dict[int, list[float | None]] = {k: [float(k % 3 == 0), float(k % 2 == 0)] for k in range(30)}
    summary = evaluated(rewards).summary
    for name in ("reward", "pass@1", "pass@2"):
        assert 0 < summary[f"{name}_low"] < summary[name] < summary[f"{name}_high"] < 1
    values_N = torch.tensor([sum(given) / 2 for given in rewards.values()], dtype=torch.float64)  # type: ignore[arg-type]
    assert (summary["pass@1_low"], summary["pass@1_high"]) == clustered_interval(values_N, 2.0)


def test_an_interval_of_all_right_does_not_claim_that_all_prompts_are():
    summary = evaluated({k: [1.0, 1.0] for k in range(20)}).summary
    assert summary["pass@1"] == summary["pass@1_high"] == 1
    assert summary["pass@1_low"] < 0.85


def test_right_is_the_greatest_reward_of_the_range():
    rewards: dict[int, list[float | None]] = {1: [1.0, 10.0], 2: [5.0, 0.0]}
    of_ten = evaluated(rewards, reward_range=(0.0, 10.0))
    assert of_ten.summary["pass@1"] == 1 / 4
    assert [r["correct"] for r in of_ten.records] == [1, 0]
    assert 0 < of_ten.summary["reward_low"] < 4 < of_ten.summary["reward_high"] < 10
    assert evaluated({1: [-1.0, 0.0]}, reward_range=(-1.0, 0.0)).summary["pass@1"] == 1 / 2


def test_rewards_outside_their_range():
    """The mean reward is over what was scored, and its interval a bootstrap, that the seed decides."""
    rewards: dict[int, list[float | None]] = {1: [0.5, 2.0, 1.0], 2: [-1.0, None, 0.25], 3: [0.0, 0.0, 0.0]}
    summary = evaluated(rewards).summary
    assert summary["pass@1"] == pytest.approx((2 / 3 + 0) / 3)
    assert summary["reward"] == pytest.approx((3.5 / 3 - 0.75 / 2) / 3)
    assert evaluated(rewards).summary == summary


def test_before_and_after_are_compared_prompt_by_prompt():
    """Prompt 3 has no score before, and takes no part."""
    before = evaluated({1: [0.0, 0.0], 2: [1.0, 0.0], 3: [None, None]})
    after = evaluated({1: [1.0, 0.0], 2: [1.0, 1.0], 3: [0.0, 0.0]})
    found = compare(before, after)
    assert found["pass@1_change"] == (1 / 2 + 1 / 2) / 2
    assert found["pass@2_change"] == (1 + 0) / 2
    assert found["pass@1_change_low"] == pytest.approx(1 / 2, abs=1e-6)  # both rose alike: only rounding is left
    assert found["pass@1_change_high"] == pytest.approx(1 / 2, abs=1e-6)


def test_few_prompts_are_warned_of():
    assert "only 20 test prompts" in (few_prompts(20) or "")
    assert few_prompts(50) is None


def test_a_prompt_without_any_score_does_not_count():
    summary = evaluated({1: [None, None], 2: [1.0, 0.0]}).summary
    assert (summary["pass@1"], summary["unscored"], summary["prompts"]) == (0.5, 2, 2)
    nothing = evaluated({1: [None, None]}).summary
    assert nothing == {"prompts": 1, "samples": 2, "unscored": 2}


def test_the_records_are_in_the_order_of_the_prompts():
    records = evaluated(REWARDS).records
    assert [r["prompt_id"] for r in records] == [4, 9]
    first, second = records
    assert first["prompt"] == "4?"
    assert first["answer"] == "4"
    assert (first["samples"], first["scored"], first["correct"], first["pass@1"]) == (4, 4, 1, 0.25)
    assert (second["samples"], second["scored"], second["correct"], second["reward"]) == (4, 2, 0, 0.0)
    assert second["rewards"] == [0.0, None, 0.0, None]
    assert first["mean_length"] == (1 + 2 + 3 + 4) / 4
    assert first["clipped_ratio"] == 0.5
    assert first["completions"] == ["text 0", "text 1", "text 2", "text 3"]


def test_nothing_to_evaluate_on_is_an_error():
    given: Any = Given({})
    with pytest.raises(ValueError, match="no test prompts"):
        evaluate(given, given, [], 4, 0, (0.0, 1.0))


def test_a_metric_in_words():
    summary = {"pass@1": 0.123, "pass@1_low": 0.1, "pass@1_high": 1.0, "reward": -0.5}
    assert interval(summary, "pass@1") == "pass@1       12.3%   95 % interval 10.0% to 100.0%"
    assert interval(summary, "reward") == "reward      -0.500   95 % interval – to –"
