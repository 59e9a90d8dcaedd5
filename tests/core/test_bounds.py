import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.bounds import (
    corollary1,
    identity_bound,
    mean_reward,
    over_prompts,
    penalty,
    sampled,
    scaled,
    sigma,
    surrogate,
    theorem1,
)
from lagrpo.core.kl import tv

# Of float64, in which (1 - sigma)/sigma is multiplied and subtracted: large where sigma is small.
ROUNDING = 1e-9


def double(*values: float) -> torch.Tensor:
    return tensor(values, dtype=torch.float64)


def cases(count: int, outcomes: int, seed: int, binary: bool) -> tuple[torch.Tensor, ...]:
    """pi, pi_k, alpha uniform on the simplex, rewards uniform in [0, 1] or fair coins."""
    generator = torch.Generator().manual_seed(seed)
    # Exponential numbers divided by their sum are uniform on the simplex.
    exponential = -torch.rand(3, count, outcomes, generator=generator, dtype=torch.float64).log()
    pi, pi_k, alpha = exponential / exponential.sum(dim=-1, keepdim=True)
    r = torch.rand(count, outcomes, generator=generator, dtype=torch.float64)
    return pi, pi_k, alpha, r.round() if binary else r


def improvement(pi, pi_k, r):
    return mean_reward(pi, r) - mean_reward(pi_k, r)


# Rewards in [0, 1] have a variance of at most .25, so .75 is the largest eps_std with sigma <= 1.
@pytest.mark.parametrize("eps_std", [0.0, 1e-4, 0.75])
@pytest.mark.parametrize(("outcomes", "binary"), [(2, True), (3, True), (4, False)])
def test_no_bound_is_violated_and_the_identity_bound_dominates(eps_std, outcomes, binary):
    pi, pi_k, alpha, r = cases(5_000, outcomes, seed=outcomes, binary=binary)
    D = improvement(pi, pi_k, r)
    paper = theorem1(pi, pi_k, alpha, r, eps_std)
    sharp = theorem1(pi, pi_k, alpha, r, eps_std, constant=1.0)
    identity = identity_bound(pi, pi_k, alpha, r, eps_std)
    for bound in (paper, sharp, identity):
        assert bool((bound <= D + ROUNDING).all())
    assert bool((paper <= sharp + ROUNDING).all())
    assert bool((sharp <= identity + ROUNDING).all())
    assert bool((corollary1(pi, pi_k, r, eps_std) <= D + ROUNDING).all())


def test_theorem_1_beyond_sigma_1_is_violated_and_rejected():
    alpha = double(0.5, 0.5)
    r = double(0.0, 1.0)
    pi = double(0.0, 1.0)
    s = sigma(alpha, r, 0.9)
    L = surrogate(pi, alpha, r, 0.9)
    claimed = L - 2 * (1 - s) / s * tv(pi, alpha)
    assert float(improvement(pi, alpha, r)) == 0.5
    assert float(claimed) == pytest.approx(0.5337, abs=5e-5)  # more than D: the bound does not hold
    with pytest.raises(ValueError, match=r"sigma <= 1 .* but sigma is 1\.07"):
        corollary1(pi, alpha, r, 0.9)
    assert float(identity_bound(pi, alpha, alpha, r, 0.9)) == pytest.approx(0.5)


def test_bound_constant_1_is_attained_if_constant_2_gives_0():
    alpha = double(0.5, 0.5)
    r = double(0.0, 1.0)
    pi = double(0.4, 0.6)
    assert float(improvement(pi, alpha, r)) == pytest.approx(0.1)
    assert float(corollary1(pi, alpha, r, 0.0, constant=1.0)) == pytest.approx(0.1)
    assert float(corollary1(pi, alpha, r, 0.0)) == pytest.approx(0.0, abs=1e-12)


def test_as_published_the_bound_certifies_nothing_at_sigma_up_to_a_half():
    pi, pi_k, alpha, r = cases(100_000, 3, seed=3, binary=True)
    assert float(sigma(alpha, r, 0.0).max()) <= 0.5
    assert float(theorem1(pi, pi_k, alpha, r, 0.0).max()) <= ROUNDING
    assert float(theorem1(pi, alpha, alpha, r, 0.0).max()) <= ROUNDING


def test_penalty_equals_figure_1_of_the_paper():
    p = double(0.5, 0.1, 0.01, 0.0)
    assert_close(
        penalty((p * (1 - p)).sqrt())[:3], double(1.0, 7 / 3, 9.050378), atol=1e-6, rtol=0.0
    )
    assert float(penalty((p * (1 - p)).sqrt())[3]) == float("inf")
    assert_close(
        penalty((p * (1 - p) + 0.01).sqrt()),
        double(0.961161, 2.162278, 6.088812, 9.0),
        atol=1e-6,
        rtol=0.0,
    )


def test_equation_4_is_a_bound_on_the_mean_and_not_above_the_mean_of_theorem_1():
    pi, pi_k, alpha, r = cases(4_000, 3, seed=5, binary=False)
    for start in range(0, 4_000, 40):  # 100 sets of 40 prompts
        prompts = [x[start : start + 40] for x in (pi, pi_k, alpha, r)]
        mean_D = improvement(prompts[0], prompts[1], prompts[3]).mean()
        for constant in (1.0, 2.0):
            bound = over_prompts(*prompts, eps_std=0.01, constant=constant)
            assert (
                float(bound)
                <= float(theorem1(*prompts, eps_std=0.01, constant=constant).mean()) + ROUNDING
            )
            assert float(bound) <= float(mean_D) + ROUNDING
    one = [x[:1] for x in (pi, pi_k, alpha, r)]
    assert_close(over_prompts(*one, eps_std=0.01), theorem1(*one, eps_std=0.01)[0])


def test_without_variance_theorem_1_says_minus_infinity_and_the_identity_claims_nothing():
    alpha = double(1.0, 0.0)
    pi = double(0.5, 0.5)
    r = double(1.0, 0.0)
    assert float(corollary1(pi, alpha, r, 0.0)) == float("-inf")
    assert float(corollary1(alpha, alpha, r, 0.0)) == 0.0
    assert float(identity_bound(pi, alpha, alpha, r, 0.0)) == float("-inf")


def drawn(prompts: int, G: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Groups of G outcomes of alpha = (.5, .3, .2), with pi = (.3, .3, .4), pi_k = (.45, .3, .25),
    r = (0, .5, 1)."""
    alpha = double(0.5, 0.3, 0.2)
    pi = double(0.3, 0.3, 0.4)
    pi_k = double(0.45, 0.3, 0.25)
    r = double(0.0, 0.5, 1.0)
    generator = torch.Generator().manual_seed(seed)
    y = torch.multinomial(alpha, prompts * G, replacement=True, generator=generator).view(
        prompts, G
    )
    return r[y], (pi / alpha).log()[y], (pi_k / alpha).log()[y]


@pytest.mark.parametrize("G", [2, 4, 16])
def test_gain_and_distances_from_samples_are_unbiased_at_every_group_size(G):
    estimates = sampled(*drawn(60_000, G, seed=G), eps_std=0.25)
    # J(pi) - J(alpha) = .55 - .35 = .2, TV(pi, alpha) = .2, TV(pi_k, alpha) = .05
    for values, exact in ((estimates.gain, 0.2), (estimates.tv, 0.2), (estimates.tv_k, 0.05)):
        # Four standard errors: one correct estimate in 16,000 lies outside, and the seed is fixed.
        error = 4 * float(values.std()) / 60_000**0.5
        assert float(values.mean()) == pytest.approx(exact, abs=error)
    assert_close(estimates.identity_bound, estimates.gain - estimates.tv_k)
    assert float(estimates.sigma.max()) <= 1.0


def test_theorem_1_from_samples_by_hand():
    """Rewards 1 and 0: variance 1/4, so sigma^2 = .25 + .11 = .36, and A = ±.5 / .6."""
    estimates = sampled(
        double(1.0, 0.0), double(1.5, 0.5).log(), double(1.2, 0.8).log(), eps_std=0.11
    )
    assert float(estimates.surrogate) == pytest.approx((1.5 - 0.5) / 2 * 0.5 / 0.6)
    assert float(estimates.tv) == pytest.approx(0.25)
    assert float(estimates.tv_k) == pytest.approx(0.1)
    # 5/12 - 2 · (.4/.6 · .25 + .1)
    assert float(estimates.theorem1) == pytest.approx(5 / 12 - 2 * (1 / 6 + 1 / 10))


@pytest.mark.parametrize("binary", [False, True])
def test_theorem_1_from_samples_is_exact_for_a_group_with_each_outcome_once(binary):
    """alpha is uniform over four outcomes, so the group has exactly its distribution."""
    pi, pi_k, _, r = cases(1_000, 4, seed=6, binary=binary)
    alpha = torch.full_like(pi, 1 / 4)
    estimates = sampled(r, (pi / alpha).log(), (pi_k / alpha).log(), eps_std=0.01)
    assert_close(estimates.theorem1, theorem1(pi, pi_k, alpha, r, eps_std=0.01))


def test_rewards_outside_0_to_1_and_groups_of_one_are_rejected():
    pi = double(0.5, 0.5)
    alpha = double(0.4, 0.6)
    r = double(0.0, 2.0)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        theorem1(pi, alpha, alpha, r, 0.0)
    assert_close(scaled(r, 0.0, 2.0), double(0.0, 1.0))
    with pytest.raises(ValueError, match="at least two completions"):
        sampled(torch.ones(3, 1), torch.zeros(3, 1), torch.zeros(3, 1), 0.1)
