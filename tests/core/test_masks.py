"""Masks of `reinforce`, by numbers worked by hand."""

from functools import partial
from math import log
from typing import Any

import pytest
import torch
from losses import at_ratios, gradient_of, inputs
from torch import tensor
from torch.testing import assert_close

from lagrpo.core import kl
from lagrpo.core.masks import binary_kl, one_side, ring, tv, tv_two_side, two_side
from lagrpo.core.recipes import resolve

RATIOS = [0.3, 0.7, 0.9, 1.0, 1.3, 2.5, 3.5]
YES = True
NO = False


@pytest.mark.parametrize(
    ("mask", "kept_up", "kept_down"),
    [
        pytest.param(
            one_side,
            [YES, YES, YES, YES, NO, NO, NO],
            [NO, NO, YES, YES, YES, YES, YES],
            id="one_side",
        ),
        pytest.param(
            partial(one_side, epsilon_low=0.6, epsilon_high=2.0),
            [YES] * 6 + [NO],
            [NO] + [YES] * 6,
            id="one_side wide",
        ),
        pytest.param(
            two_side, [NO, NO, YES, YES, NO, NO, NO], [NO, NO, YES, YES, NO, NO, NO], id="two_side"
        ),
        pytest.param(  # outer_low = .6, outer_high = 2: at most .4, at least 3
            ring, [YES, NO, YES, YES, NO, NO, NO], [NO, NO, YES, YES, NO, NO, YES], id="ring"
        ),
        pytest.param(
            partial(ring, outer_low=0.2, outer_high=1.4),
            [YES, YES, YES, YES, NO, NO, NO],
            [NO, NO, YES, YES, NO, YES, YES],
            id="ring with other outer ends",
        ),
    ],
)
def test_masks_of_the_ratio_by_hand(mask, kept_up, kept_down):
    assert mask(at_ratios(RATIOS, 1.0)).tolist() == kept_up
    assert mask(at_ratios(RATIOS, -1.0)).tolist() == kept_down


def test_advantage_of_zero_is_kept_at_either_side_of_one_side_and_ring():
    assert one_side(at_ratios(RATIOS, 0.0)).tolist() == [YES] * 7
    assert ring(at_ratios(RATIOS, 0.0)).tolist() == [YES, NO, YES, YES, NO, NO, YES]


# Bounds on the probability: METHODS of arXiv 2602.04879


def at_probabilities(a: float, p: float, A: float):
    return inputs(tensor([log(p)]).double().requires_grad_(), tensor([log(a)]).double(), A=A)


@pytest.mark.parametrize(
    ("a", "p", "A", "change", "D"),
    [
        (0.01, 0.05, 1.0, 0.04, 0.024736),
        (0.01, 0.10, 1.0, 0.09, 0.071331),
        (0.5, 0.75, 1.0, 0.25, 0.143841),
        (0.9, 0.6, -1.0, 0.30, 0.226289),
        (0.5, 0.6, 1.0, 0.10, 0.020411),
    ],
)
def test_bounds_on_probabilities_drop_exactly_beyond_the_worked_change(a, p, A, change, D):
    x = at_probabilities(a, p, A)
    for mask, value in ((tv, change), (binary_kl, D)):
        inside = value + 1e-6
        outside = value - 1e-6
        assert mask(x, delta_low=inside, delta_high=inside).tolist() == [YES]
        assert mask(x, delta_low=outside, delta_high=outside).tolist() == [NO]
        if A > 0:  # the bound of the other side does not matter
            assert mask(x, delta_low=0.0, delta_high=inside).tolist() == [YES]
            assert mask(x, delta_low=9.0, delta_high=outside).tolist() == [NO]
        else:
            assert mask(x, delta_low=inside, delta_high=0.0).tolist() == [YES]
            assert mask(x, delta_low=outside, delta_high=9.0).tolist() == [NO]
    assert tv_two_side(x, delta=change + 1e-6).tolist() == [YES]
    assert tv_two_side(x, delta=change - 1e-6).tolist() == [NO]


@pytest.mark.parametrize(
    ("a", "p", "A", "tv_keeps", "kl_keeps"),
    [
        (0.01, 0.05, 1.0, YES, YES),  # rho = 5, which a clip would cut
        (0.01, 0.10, 1.0, YES, NO),
        (0.5, 0.75, 1.0, NO, NO),  # rho = 1.5
        (0.9, 0.6, -1.0, NO, NO),
        (0.5, 0.6, 1.0, YES, YES),
        (0.5, 0.75, -1.0, YES, YES),  # back towards alpha: whatever the change
        (0.9, 0.6, 1.0, YES, YES),
        (0.5, 0.9, 0.0, YES, YES),
    ],
)
def test_dppo_keeps_tokens_by_the_change_that_the_advantage_pushes_to(a, p, A, tv_keeps, kl_keeps):
    x = at_probabilities(a, p, A)
    for name, keeps in (("dppo_tv", tv_keeps), ("dppo_kl", kl_keeps)):
        gradient_T = gradient_of(resolve(name).value(x).sum(), x)
        assert_close(gradient_T, tensor([p / a * A if keeps else 0.0]).double())


def test_binary_kl_is_finite_at_probabilities_of_zero_and_one():
    logp = tensor([0.0, -400.0, -1.0, -1.0]).double()
    alpha = tensor([-1.0, -1.0, 0.0, -400.0]).double()
    for A, expected in ((1.0, [NO, YES, YES, NO]), (-1.0, [YES, NO, NO, YES])):
        assert binary_kl(inputs(logp, alpha, A=A)).tolist() == expected


def test_changes_of_the_sampled_token_are_lower_bounds_of_the_tokens_divergence():
    """|pi - alpha| <= TV(pi, alpha) and D <= KL(alpha || pi), with equality for two symbols."""
    generator = torch.Generator().manual_seed(0)
    for symbols in (2, 5):
        p, a = torch.randn(2, 2000, symbols, generator=generator).double().softmax(dim=-1)
        total_variation = kl.tv(p, a)
        divergence = kl.kl(a, p)
        for symbol in range(symbols):
            logp = p[:, symbol].log()
            alpha = a[:, symbol].log()
            up = inputs(logp, alpha, A=1.0)
            down = inputs(logp, alpha, A=-1.0)
            for mask, largest in ((tv, total_variation), (binary_kl, divergence)):
                slack = 1e-4  # beyond what the 1e-8 in the logarithm of D changes
                for x in (up, down):
                    within: dict[str, Any] = {
                        "delta_low": largest + slack,
                        "delta_high": largest + slack,
                    }
                    assert bool(mask(x, **within).all())
                if symbols == 2:
                    below: dict[str, Any] = {
                        "delta_low": largest - slack,
                        "delta_high": largest - slack,
                    }
                    is_kept = mask(up, **below) & mask(down, **below)
                    assert not bool(is_kept[largest > 2 * slack].any())


@pytest.mark.parametrize("name", ["prime_rl", "ipo_mask"])
def test_prime_rl_keeps_the_squared_log_ratio_of_tokens_that_its_mask_drops(name):
    x = at_probabilities(0.3, 0.6, 1.0)  # a change of .3 > .2
    gradient_T = gradient_of(resolve(name).value(x).sum(), x)
    assert_close(gradient_T, tensor([-2e-3 * log(2)]).double())


def test_dppo_compares_with_the_policy_that_sampled_not_with_pi_k():
    for name in ("dppo_tv", "dppo_kl", "prime_rl", "ipo_mask"):
        assert resolve(name).required_inputs == {"rollout_logp"}, name


# The same by other names


def test_rollout_is_of_glm_5_is_rec_two_side_with_normalized_advantages():
    x = at_ratios(RATIOS, 1.5)
    derivative = resolve("rollout_is").differentiate(x, torch.ones(7))
    same = resolve("rec_two_side_is").differentiate(x, torch.ones(7))
    assert_close(derivative.gradient_T, same.gradient_T)
    assert resolve("rollout_is").settings["advantage"] == "normalized"
    assert resolve("rec_two_side_is").settings["advantage"] == "centered"


def test_rollout_is_is_icepop_at_its_first_update():
    """If pi_k = pi, the clip of pi/pi_k does nothing; the weight is pi/alpha inside the range."""
    x = at_ratios(RATIOS, -0.5)
    icepop = resolve("grpo_icepop", {"correction.floor": 0.8, "correction.cap": 1.2})
    y = inputs(x.logp, x.rollout_logp, x.logp.detach(), A=-0.5)
    assert_close(
        gradient_of(icepop.value(y).sum(), y), gradient_of(resolve("rollout_is").value(x).sum(), x)
    )
