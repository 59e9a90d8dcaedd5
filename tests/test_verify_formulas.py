"""The formulas of `lagrpo verify`: by hand, and against the functions that the trainer uses."""

from __future__ import annotations

import random
from math import e, log

import pytest
import torch

from lagrpo.core import advantages, estimators, kl
from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.choices import CHOICES
from lagrpo.core.objective import Recipe
from lagrpo.core.pieces import piece
from lagrpo.settings.sections import OptimizerSettings
from lagrpo.training.optimizer import Optimization
from lagrpo.verify import formulas
from lagrpo.verify.formulas import ScoredGroup, compute_advantages
from lagrpo.verify.metric_checks import estimate_improvement

MAX_LENGTH = 40


def group_of(*rewards: float) -> ScoredGroup:
    uniforms = [(index + 0.5) / len(rewards) for index in range(len(rewards))]
    return ScoredGroup(
        rewards_G=torch.tensor(rewards, dtype=torch.float64),
        lengths=[1] * len(rewards),
        uniform_G=torch.tensor(uniforms, dtype=torch.float64),
    )


def random_groups(generator: random.Random) -> list[ScoredGroup]:
    """Groups of 1 to 8 completions.

    Many rewards are equal, or equal to the mean but for rounding.
    """
    groups = []
    for _ in range(generator.randint(1, 5)):
        G = generator.choice([1, 2, 3, 4, 8])
        values = generator.choice([[0.0, 1.0], [0.1, 0.2, 0.3, -0.3], [0.1], [-1.7, 0.4, 2.3]])
        rewards = [generator.choice(values) for _ in range(G)]
        group = ScoredGroup(
            rewards_G=torch.tensor(rewards, dtype=torch.float64),
            lengths=[generator.randint(1, MAX_LENGTH) for _ in range(G)],
            uniform_G=torch.tensor([generator.random() for _ in range(G)], dtype=torch.float64),
        )
        groups.append(group)
    return groups


def as_inputs(groups: list[ScoredGroup]) -> AdvantageInputs:
    sizes = torch.tensor([len(group.rewards_G) for group in groups])
    return AdvantageInputs(
        rewards=torch.cat([group.rewards_G for group in groups]),
        group=torch.arange(len(groups)).repeat_interleave(sizes),
        lengths=torch.tensor([length for group in groups for length in group.lengths]),
        uniform=torch.cat([group.uniform_G for group in groups]),
    )


@pytest.mark.parametrize("overlong_buffer", [0, 16])
@pytest.mark.parametrize("function", CHOICES["advantage"], ids=lambda function: function.__name__)
def test_every_advantage_has_a_second_formula_with_the_same_values(function, overlong_buffer):
    recipe = Recipe(advantage=piece(function), overlong_buffer=overlong_buffer)
    assert recipe.advantage.name in formulas.GROUP_FORMULAS | formulas.BATCH_FORMULAS
    generator = random.Random(0)
    for _ in range(100):
        groups = random_groups(generator)
        expected_C = recipe.advantages(as_inputs(groups), MAX_LENGTH)
        replayed_C = torch.cat(compute_advantages(recipe, groups, MAX_LENGTH))
        torch.testing.assert_close(replayed_C, expected_C, rtol=1e-9, atol=1e-9)


def test_advantage_of_the_user_is_called_with_the_whole_batch():
    def rewards_by_token(x):
        return x.rewards / x.lengths.sum()

    recipe = Recipe(advantage=piece(rewards_by_token))
    first, second = compute_advantages(recipe, [group_of(1.0, 2.0), group_of(6.0)], MAX_LENGTH)
    assert first.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert second.tolist() == [2.0]


def test_grpo_by_hand():
    """Mean 1/4, squared distances 9/16, 1/16, 1/16, 1/16, so s0^2 = 3/16."""
    advantage_G = formulas.normalized(group_of(1.0, 0.0, 0.0, 0.0), eps_std=1 / 16)
    assert advantage_G.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_red_drop_keeps_one_of_each_by_hand():
    advantage_G = formulas.red_drop(group_of(1.0, *[0.0] * 7))
    assert advantage_G.tolist() == [0.5, 0, 0, 0, 0, 0, 0, -0.5]


def test_overlong_penalty_by_hand():
    """10 tokens, of which the last 4 are the buffer: 8 tokens cost 1/2."""
    group = ScoredGroup(torch.ones(4).double(), [6, 8, 10, 12], torch.zeros(4).double())
    recipe = Recipe(advantage=piece(advantages.centered), overlong_buffer=4)
    (advantage_G,) = compute_advantages(recipe, [group], max_length=10)
    assert advantage_G.tolist() == [0.625, 0.125, -0.375, -0.375]


def test_kl_and_sample_size_by_hand():
    log_ratio = torch.tensor([0.0, 1.0, log(3.0)], dtype=torch.float64)
    assert formulas.kl_terms(log_ratio).tolist() == pytest.approx([0.0, e - 2, 2 - log(3)])
    # Weights 1 and 3: 4^2 / (1 + 9).
    assert formulas.effective_sample_size(log_ratio[[0, 2]]) == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("ratios", "tv"),
    [
        pytest.param([0.5, 1.5], (0.5 + 0.5) / 2 / 2, id="unbounded"),
        # ESS = 4.25^2 / (16 + 1/16) = 1.12 of 2 is too small.
        pytest.param([0.25, 4.0], 0.75 / 2, id="bounded"),
    ],
)
def test_total_variation_by_hand(ratios, tv):
    log_ratio_C = torch.tensor(ratios, dtype=torch.float64).log()
    assert formulas.total_variation(log_ratio_C) == pytest.approx(tv)


def test_improvement_by_hand():
    """rho = 2 and 1/2, rewards 1 and 0 of the range 0 to 1: (1 · 1 + (-1/2) · (-1)) / 2."""
    members = []
    for ratio, reward in ((2.0, 1.0), (0.5, 0.0)):
        row = {"loss_mask": [True], "reward": reward}
        row |= {"old_logprobs": [log(ratio)], "rollout_logprobs": [0.0]}
        members.append(row)
    assert estimate_improvement([members], (0.0, 1.0)) == pytest.approx(0.75)


def test_formulas_of_samples_agree_with_those_of_core():
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 5.0):
        log_ratio_C = scale * torch.randn(50, dtype=torch.float64, generator=generator)
        bounded = kl.prefers_bounded(log_ratio_C)
        expected = float(kl.sampled_tv(log_ratio_C, bounded=bounded))
        assert formulas.total_variation(log_ratio_C) == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_learning_rate_agrees_with_the_trainer(kind, warmup):
    """Six updates. The warm-up may end at the last one, or never."""
    settings = OptimizerSettings.model_validate(
        {"learning_rate": 0.5, "lr_scheduler_type": kind, "warmup_steps": warmup}
    )
    optimization = Optimization(lr=0.5, schedule=kind, warmup=warmup, updates=6)
    for update in range(6):
        rate = formulas.learning_rate(settings, update, 6)
        assert rate == pytest.approx(optimization.rate(update), abs=1e-15)


def test_learning_rate_by_hand():
    settings = OptimizerSettings.model_validate(
        {"learning_rate": 8.0, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    )
    rates = [formulas.learning_rate(settings, update, 4) for update in range(4)]
    assert rates == pytest.approx([4.0, 8.0, 6.0, 2.0])


def test_pass_at_k_agrees_with_core_for_all_counts():
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                expected = estimators.pass_at_k(n, c, k)
                assert formulas.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)
