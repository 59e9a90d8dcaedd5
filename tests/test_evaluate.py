"""pass@k of a policy, by hand: what is drawn and judged is given, the numbers are worked out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lagrpo.evaluate import evaluate, interval, label
from lagrpo.sampling.base import Request
from lagrpo.types import Completion, Group, Outcome, Prompt

REWARDS: dict[int, list[float | None]] = {
    4: [1.0, 0.0, 0.0, 0.0],  # pass@1 1/4, pass@2 1 - C(3,2)/C(4,2) = 1/2, pass@4 1
    9: [0.0, None, 0.0, None],  # two scored: pass@1 0, pass@2 0, no pass@4
}


class Given:
    """A sampler and a verifier of given rewards by prompt; None is a completion that cannot be judged. Groups end in
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

    def judge(self, groups: Iterable[Group]) -> Iterator[Group]:
        for group in groups:
            outcomes = [
                Outcome.rejected("no") if r is None else Outcome.scored(r) for r in self.rewards[group.prompt.key]
            ]
            judged = zip(group.completions, outcomes, strict=True)
            yield replace(group, completions=tuple(replace(c, outcome=o) for c, o in judged))

    def _completion(self, n: int) -> Completion:
        tokens = torch.arange(n + 1)
        return Completion(tokens, torch.zeros(n + 1), torch.zeros(n + 1, dtype=torch.long), n % 2 == 0, f"text {n}")


def evaluated(rewards: dict[int, list[float | None]], seed: int = 0) -> Any:
    given: Any = Given(rewards)
    return evaluate(given, given, given.requests(), len(next(iter(rewards.values()))), seed)


def test_the_numbers_by_hand():
    summary = evaluated(REWARDS).summary
    assert (summary["prompts"], summary["samples"], summary["unscored"]) == (2, 4, 2)
    assert summary["pass_at_1"] == (1 / 4 + 0) / 2
    assert summary["pass_at_2"] == (1 / 2 + 0) / 2
    assert summary["pass_at_4"] == 1.0
    assert summary["reward_mean"] == (1 / 4 + 0) / 2
    assert "pass_at_8" not in summary


def test_the_greatest_k_is_the_number_of_samples():
    """Of 6: 1, 2, 4 and 6; with 2 of 6 right pass@6 is 1, pass@4 is 1 - C(4,4)/C(6,4) = 14/15."""
    summary = evaluated({1: [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]}).summary
    assert [name for name in summary if name.startswith("pass") and name[-1].isdigit()] == [
        *("pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"),
    ]
    assert summary["pass_at_6"] == 1
    assert summary["pass_at_4"] == pytest.approx(14 / 15)


def test_every_figure_has_an_interval_around_it_that_the_seed_decides():
    rewards: dict[int, list[float | None]] = {k: [float(k % 3 == 0), float(k % 2 == 0)] for k in range(30)}
    summary = evaluated(rewards).summary
    for name in ("reward_mean", "pass_at_1", "pass_at_2"):
        assert 0 < summary[f"{name}_low"] < summary[name] < summary[f"{name}_high"] < 1
    assert evaluated(rewards).summary == summary
    assert evaluated(rewards, seed=1).summary["pass_at_1_low"] != summary["pass_at_1_low"] or (
        evaluated(rewards, seed=1).summary["pass_at_1_high"] != summary["pass_at_1_high"]
    )


def test_rewards_that_are_not_0_or_1():
    """Right is a reward of at least 1; the mean reward is over what was scored."""
    summary = evaluated({1: [0.5, 2.0, 1.0], 2: [-1.0, None, 0.25]}).summary
    assert summary["pass_at_1"] == pytest.approx((2 / 3 + 0) / 2)
    assert summary["reward_mean"] == pytest.approx((3.5 / 3 - 0.75 / 2) / 2)


def test_a_prompt_without_any_score_does_not_count():
    summary = evaluated({1: [None, None], 2: [1.0, 0.0]}).summary
    assert (summary["pass_at_1"], summary["unscored"], summary["prompts"]) == (0.5, 2, 2)
    nothing = evaluated({1: [None, None]}).summary
    assert nothing == {"prompts": 1, "samples": 2, "unscored": 2}


def test_the_records_are_in_the_order_of_the_prompts():
    records = evaluated(REWARDS).records
    assert [r["prompt_key"] for r in records] == [4, 9]
    first, second = records
    assert first["prompt"] == "4?"
    assert first["gold"] == "4"
    assert (first["samples"], first["scored"], first["right"], first["pass_at_1"]) == (4, 4, 1, 0.25)
    assert (second["samples"], second["scored"], second["right"], second["reward_mean"]) == (4, 2, 0, 0.0)
    assert second["rewards"] == [0.0, None, 0.0, None]
    assert first["tokens_mean"] == (1 + 2 + 3 + 4) / 4
    assert first["finished_share"] == 0.5
    assert first["completions"] == ["text 0", "text 1", "text 2", "text 3"]


def test_nothing_to_evaluate_on_is_an_error():
    given: Any = Given({})
    with pytest.raises(ValueError, match="no test prompts"):
        evaluate(given, given, [], 4, 0)


def test_a_figure_in_words():
    summary = {"pass_at_1": 0.123, "pass_at_1_low": 0.1, "pass_at_1_high": 1.0, "reward_mean": -0.5}
    assert interval(summary, "pass_at_1") == "pass@1       12.3%   95 % interval 10.0% to 100.0%"
    assert label("some/dir/model") == "model"
    assert interval(summary, "reward_mean") == "reward mean -0.500   95 % interval – to –"
