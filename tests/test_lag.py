"""The lag metrics, from numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import tensor

from lagrpo.core.kl import prefers_bounded, tv_terms
from lagrpo.core.recipes import resolve
from lagrpo.training.batch import assemble, left_out, micro_batches
from lagrpo.training.lag import KEYS, divergence_metrics, lag_metrics, sequence_kl, sequence_log_ratio
from lagrpo.types import Completion, Group, Outcome, Prompt

pytestmark = pytest.mark.usefixtures("shared_templates")


def batch_of(rewards_NG, lengths=2, budget=100, recipe: Any = None):
    """Groups of completions of two tokens under α with log-prob -1 each, all in the objective unless a recipe says."""
    groups = [
        Group(
            Prompt(n, ({"role": "user", "content": "?"},), "", (5, 6)),
            tuple(
                Completion(torch.arange(3, 3 + lengths), -torch.ones(lengths), torch.zeros(lengths), True, "", scored)
                for scored in map(Outcome.scored, rewards)
            ),
        )
        for n, rewards in enumerate(rewards_NG)
    ]
    objective: Any = recipe or Centered()
    batch = assemble(groups, objective, lengths, seed=0, b=1)
    return batch, micro_batches(batch, budget)


class Centered:
    """What `assemble` asks of a recipe: centered rewards, and a weight of 1 for every completion."""

    def advantages(self, rewards_G, lengths_G, max_length, uniform_G):
        return rewards_G - rewards_G.mean()

    def weights(self, lengths_C, zero_variance_C, max_length):
        return torch.ones(len(lengths_C))


def give(rows, log_ratio_by_member):
    """π_k's log-probs such that each token of completion c has ln ρ = log_ratio_by_member[c]."""
    per_token = [torch.tensor([log_ratio_by_member[c] for c in m.members])[m.completion_T] for m in rows]
    return [m.with_logprobs(m.logp_alpha_T + ratio_T) for m, ratio_T in zip(rows, per_token, strict=True)]


@pytest.mark.parametrize("budget", [100, 4])
def test_sequence_metrics_by_hand(budget):
    """Two tokens with ln ρ = ln 1.5 / 2 and -ln 2 / 2: sequence ratios 1.5 and 0.5."""
    batch, rows = batch_of([[1.0, 0.0]], budget=budget)
    rows = give(rows, {0: math.log(1.5) / 2, 1: -math.log(2) / 2})
    torch.testing.assert_close(
        sequence_log_ratio(batch, rows).exp(), torch.tensor([1.5, 0.5]).double(), atol=1e-6, rtol=0
    )
    metrics = lag_metrics(batch, rows, eps_std=0.0)
    assert metrics["tv_sequence"] == pytest.approx((0.5 + 0.5) / 2 / 2, abs=1e-6)
    assert metrics["chi2_sequence"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["lag_ess"] == pytest.approx(4 / 2.5, abs=1e-6)
    per_token = [2 * (math.sqrt(1.5) - 1 - math.log(1.5) / 2), 2 * (math.sqrt(0.5) - 1 + math.log(2) / 2)]
    assert metrics["kl_sequence"] == pytest.approx(sum(per_token) / 2, abs=1e-6)
    assert metrics["pinsker"] == pytest.approx(math.sqrt(sum(per_token) / 4), abs=1e-6)
    assert metrics["lag_reliable"] == 0
    # J(pi_k) - J(alpha): r = (1, 0), mean of the others (0, 1), so (1.5 * 1 - 0.5 * 1) / 2 = .5
    assert metrics["lag_improvement"] == pytest.approx(0.5, abs=1e-6)
    # A = (1, -1), L = (1.5 - .5) / 2 = .5, sigma = .5, TV = .25: .5 - 2 * (1 - .5)/.5 * .25 = 0
    assert metrics["lag_theorem1"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["lag_identity"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["sigma_mean"] == pytest.approx(0.5)
    assert [metrics[f"sigma_bin_{n}"] for n in range(10)] == [0] * 9 + [1]


def test_without_lag_everything_is_zero():
    batch, rows = batch_of([[1.0, 0.0], [1.0, 1.0]])
    metrics = lag_metrics(batch, give(rows, dict.fromkeys(range(4), 0.0)), eps_std=1e-4)
    for name in ("kl_sequence", "pinsker", "tv_sequence", "tv_sequence_high", "chi2_sequence", "lag_improvement"):
        assert metrics[name] == 0
    assert metrics["lag_ess"] == 4
    assert [metrics[f"sigma_bin_{n}"] for n in range(10)] == [1] + [0] * 8 + [1]


@pytest.mark.parametrize("advantage", [("grpo", {"beta": 0.0}), ("red_drop", {})])
def test_metrics_have_the_true_values_though_the_loss_leaves_completions_out(advantage):
    """A coin that is right with .2 under α and .3 under π_k, in 1,500 groups of 4: J(π_k) - J(α) = .1, TV = .1, and
    KL(α‖π_k) = .2 ln(.2/.3) + .8 ln(.8/.7) = .0257. Over what the loss computes alone none of them comes out."""
    rewards_NG = (torch.rand(1_500, 4, generator=torch.Generator().manual_seed(1)) < 0.2).double()
    recipe = resolve(*advantage)
    batch, _ = batch_of(rewards_NG.tolist(), lengths=1, recipe=recipe)
    log_ratio = {c: math.log(1.5) if r else math.log(7 / 8) for c, r in enumerate(rewards_NG.flatten())}
    rows = micro_batches(batch, 10_000, skip_zero_advantage=recipe.skips_zero_advantage)
    both = give([*rows, *left_out(batch, rows, 10_000)], log_ratio)
    metrics = lag_metrics(batch, both, eps_std=1e-4)
    truth = {"lag_improvement": 0.1, "tv_sequence": 0.1, "kl_sequence": 0.02568}
    assert {name: metrics[name] for name in truth} == pytest.approx(truth, abs=0.006)
    assert metrics["lag_identity"] == pytest.approx(metrics["lag_improvement"], abs=1e-12)
    low, high = metrics["tv_sequence_low"], metrics["tv_sequence_high"]
    assert low is not None
    assert high is not None
    assert low < 0.1 < high
    of_the_loss = lag_metrics(batch, give(rows, log_ratio), eps_std=1e-4)
    assert of_the_loss["kl_sequence"] is None


def test_the_step_has_its_own_sides():
    """α = π_k, π twice as likely to give the right one: J(π) - J(π_k) estimated at (2·1 - 0·1)/2 - (1 - 1)/2 = 1."""
    batch, rows = batch_of([[1.0, 0.0]])
    rows = give(rows, {0: 0.0, 1: 0.0})
    assert rows[0].logp_alpha_T is not None
    after = [rows[0].logp_alpha_T + torch.tensor([math.log(2) / 2, -50.0])[rows[0].completion_T]]
    metrics = lag_metrics(batch, rows, 0.0, after_T=after)
    assert metrics["step_improvement"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["step_identity"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["step_theorem1"] == pytest.approx(1 - 2 * 0.5, abs=1e-6)  # L = (2 - 0) / 2, TV = .5
    assert metrics["lag_improvement"] == 0


def test_rewards_outside_their_range_have_no_bounds_and_a_stated_range_scales_them():
    batch, rows = batch_of([[10.0, 0.0]])
    rows = give(rows, {0: math.log(1.5) / 2, 1: -math.log(2) / 2})
    assert lag_metrics(batch, rows, 0.0)["lag_improvement"] is None
    assert lag_metrics(batch, rows, 0.0, (0.0, 10.0))["lag_improvement"] == pytest.approx(0.5, abs=1e-6)


def test_groups_of_equal_rewards_count_in_the_improvement_and_in_the_divergences():
    """One mixed group with .5 (as above) and one flat group: the mean gain is .25, and TV that of all four."""
    batch, rows = batch_of([[1.0, 0.0], [1.0, 1.0]])
    computed = micro_batches(batch, 100, skip_zero_advantage=True)
    both = give([*computed, *left_out(batch, computed, 100)], {0: math.log(1.5) / 2, 1: -math.log(2) / 2, 2: 0.1, 3: 0})
    metrics = lag_metrics(batch, both, 0.0)
    assert metrics["lag_improvement"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["tv_sequence"] == pytest.approx((0.5 + 0.5 + math.expm1(0.2)) / 2 / 4, abs=1e-6)
    assert sorted(c for micro in both for c in micro.members) == sorted(c for micro in rows for c in micro.members)


def test_completions_whose_alpha_is_unknown_have_no_metrics():
    batch, rows = batch_of([[1.0, 0.0]])
    rows = give(rows, {0: math.nan, 1: math.nan})
    metrics = lag_metrics(batch, rows, 0.0)
    assert metrics["tv_sequence"] is None
    assert set(metrics) == set(KEYS)
    assert sequence_kl(batch, rows).isnan().all()


def drifted(s, trials=100, completions=128):
    """Log-ratios of completions whose log π_k - log α is normal under α with standard deviation s: a Gaussian π_k one
    unit of s away, so TV = 2 Φ(s/2) - 1."""
    z = torch.randn(trials, completions, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return s * z - s * s / 2, math.erf(s / math.sqrt(8))


@pytest.mark.parametrize("s", [0.05, 0.66, 1.6, 2.5])
def test_the_interval_of_tv_covers_at_any_effective_sample_size(s):
    """From 128 completions of 128 in effect down to 7, 100 batches each."""
    log_ratios, truth = drifted(s)
    found = [divergence_metrics(log_ratio, log_ratio.exp() - 1 - log_ratio) for log_ratio in log_ratios]
    tv, low, high = (tensor([f[f"tv_sequence{end}"] for f in found]) for end in ("", "_low", "_high"))
    assert 0.89 <= float(((low <= truth) & (truth <= high)).double().mean()) <= 0.99
    assert float(tv.mean()) == pytest.approx(truth, abs=0.002 + 4 * float(tv.std()) / 10)  # .002: of the choice
    assert float(high.max()) <= 1 or s < 2


def test_the_estimate_of_tv_is_chosen_by_the_effective_sample_size():
    """|ρ - 1|/2 has less spread at small lag, max(0, 1 - ρ) where few completions are left, by a factor of 10."""
    spreads = {}
    for s in (0.2, 2.5):
        log_ratios, _ = drifted(s)
        spreads[s] = [float(tv_terms(log_ratios, bounded).mean(dim=1).std()) for bounded in (False, True)]
        chosen = {prefers_bounded(log_ratio) for log_ratio in log_ratios}
        assert chosen == {s == 2.5}
    assert spreads[0.2][0] < 0.7 * spreads[0.2][1]
    assert spreads[2.5][1] < 0.1 * spreads[2.5][0]


@pytest.mark.parametrize("rewards", [[[1.0, 0.0]], [[1.0, 0.0]] * 60])
def test_a_step_beyond_what_is_possible_is_no_reliable_one(rewards):
    """π gives one right completion 110 times the probability that α did: an improvement of 55 where 1 is the most."""
    batch, rows = batch_of(rewards)
    rows = give(rows, dict.fromkeys(range(2 * len(rewards)), 0.0))
    after = []
    for micro in rows:
        assert micro.logp_alpha_T is not None
        first = torch.tensor([c % 2 == 0 for c in micro.members])[micro.completion_T]
        after.append(micro.logp_alpha_T + torch.where(first, math.log(111) / 2, 0.0))
    metrics = lag_metrics(batch, rows, 0.0, after_T=after)
    assert metrics["step_improvement"] == pytest.approx(55, abs=1e-3)
    assert metrics["step_ess"] == pytest.approx(len(rewards) * 112**2 / (111**2 + 1), rel=1e-5)
    assert metrics["step_reliable"] == 0
    assert metrics["lag_reliable"] == (2 * len(rewards) >= 25)
