"""The effect of a finite group of binary rewards on gradient and surrogate, by enumeration."""

from math import comb, sqrt

import pytest
import torch
from theory.success import group_weight
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.advantages import AdvantageInputs, one_group
from lagrpo.core.recipes import resolve

THETA = tensor([0.3, -0.8, 0.9, 0.1], dtype=torch.float64)
RIGHT = tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
P = (0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99)


def success(theta: Tensor) -> Tensor:
    """The probability of a right answer under a softmax over four answers, two of them right."""
    return (torch.softmax(theta, dim=0) * RIGHT).sum()


def every_row(rewards_NG: Tensor) -> AdvantageInputs:
    """A batch whose groups are the rows."""
    N, G = rewards_NG.shape
    return AdvantageInputs(rewards_NG.flatten(), torch.arange(N).repeat_interleave(G))


def expected_gradient(advantage, G: int) -> Tensor:
    """E of mean_i A_i grad log pi(y_i) over all 4^G groups sampled by pi itself."""
    groups = torch.cartesian_prod(*[torch.arange(4)] * G).view(-1, G)
    weight = torch.softmax(THETA, dim=0)[groups].prod(dim=1)
    theta = THETA.clone().requires_grad_()
    rewards, which = torch.unique(
        RIGHT[groups], dim=0, return_inverse=True
    )  # 2^G different ones among the 4^G
    A = advantage(every_row(rewards)).view_as(rewards)[which]
    value = (weight[:, None] * A * torch.log_softmax(theta, dim=0)[groups]).sum() / G
    return torch.autograd.grad(value, theta)[0]


@pytest.mark.parametrize("G", [2, 3, 5])
@pytest.mark.parametrize("eps_std", [0.0, 1e-4, 0.3])
def test_the_gradient_of_a_normalized_group_is_w_times_that_of_the_success_probability(G, eps_std):
    theta = THETA.clone().requires_grad_()
    p = success(theta)
    (grad_p,) = torch.autograd.grad(p, theta)
    gradient_p = expected_gradient(resolve("grpo", {"eps_std": eps_std}).advantage, G)
    assert_close(gradient_p, group_weight(p.item(), G, eps_std) * grad_p)
    centered = expected_gradient(
        resolve("dr_grpo").advantage, G
    )  # and without normalization, as it has always been
    assert_close(centered, (1 - 1 / G) * grad_p)
    trl_gradient_p = expected_gradient(
        resolve("grpo", {"advantage": "normalized_unbiased", "std_offset": 0.0}).advantage, G
    )
    assert_close(trl_gradient_p, sqrt((G - 1) / G) * group_weight(p.item(), G) * grad_p)


@pytest.mark.parametrize("G", [2, 3, 4, 16, 64, 1000])
def test_the_two_bounds_of_w_and_its_limits(G):
    for p in P:
        spread = sqrt(p * (1 - p))
        assert group_weight(p, G) <= min(sqrt(G - 1), sqrt((G - 1) / G) / spread) * (1 + 1e-12)
        for eps_std in (1e-4, 0.01, 0.3):
            ceiling = (G - 1) / sqrt(G - 1 + eps_std * G**2)
            assert group_weight(p, G, eps_std) <= min(ceiling, group_weight(p, G)) * (1 + 1e-12)
        assert group_weight(p, G) == pytest.approx(group_weight(1 - p, G))
    assert group_weight(1e-9, G) == pytest.approx(sqrt(G - 1), rel=1e-5)
    assert group_weight(0.3, 100_000) == pytest.approx(1 / sqrt(0.21), rel=1e-4)


@pytest.mark.parametrize(("G", "share"), [(2, 0.40), (8, 0.84), (16, 0.94), (64, 0.99)])
def test_what_the_recipe_unclipped_estimates_is_w_times_the_gain_and_not_the_surrogate(G, share):
    """From p = .2 under alpha to .3 under pi: E of the mean of rho A over the group, against
    L_alpha = .1/.4."""
    normalized = resolve("unclipped", {"eps_std": 0.0}).advantage
    leave_one_out = resolve("unclipped", {"advantage": "leave_one_out"}).advantage
    expected = 0.0
    unbiased = 0.0
    for k in range(G + 1):
        rewards_G = (torch.arange(G) < k).double()
        rho_G = torch.where(rewards_G > 0, 0.3 / 0.2, 0.7 / 0.8)
        chance = comb(G, k) * 0.2**k * 0.8 ** (G - k)
        group = one_group(rewards_G)
        expected += chance * float((rho_G * normalized(group)).mean())
        unbiased += chance * float((rho_G * leave_one_out(group)).mean())
    assert resolve("unclipped").settings["advantage"] == "normalized"
    assert expected == pytest.approx(group_weight(0.2, G) * 0.1)
    assert expected / (0.1 / 0.4) == pytest.approx(share, abs=0.005)
    assert unbiased == pytest.approx(0.1)  # s L_alpha = J(pi) - J(alpha)
