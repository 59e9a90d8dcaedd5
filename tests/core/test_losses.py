"""Surrogates, masks, weights and regularizers, by numbers worked by hand and by their gradients."""

from math import exp, log
from typing import Any

import pytest
import torch
from each import each
from losses import gradient_of, inputs, random_inputs
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.losses import (
    asymre,
    capped_ratio,
    clipped,
    clipped_exact,
    clipped_proportional,
    exp_advantage,
    find_clipped,
    importance,
    one_side,
    opmd,
    opmd_kimi,
    opmd_pairwise,
    reinforce,
    ring,
    tapered_ratio,
    two_side,
    unclipped,
)
from lagrpo.core.ratios import length_normalized, sequence, token

LOW, HIGH = 0.2, 0.3  # asymmetric on purpose
RANGE: dict[str, Any] = {"epsilon_low": LOW, "epsilon_high": HIGH}


# Ratios


def test_ratios_at_the_three_levels_by_hand():
    completion_T = tensor([0, 1, 0])  # of two tokens and of one, interleaved on purpose
    log_ratio_T = tensor([0.5, 3.0, 2.0]).log()
    assert_close(token(log_ratio_T, completion_T), tensor([0.5, 3.0, 2.0]))
    assert_close(sequence(log_ratio_T, completion_T), tensor([1.0, 3.0, 1.0]))
    assert_close(
        length_normalized(tensor([1.0, 3.0, 4.0]).log(), completion_T), tensor([2.0, 3.0, 2.0])
    )


@each(
    ("ratio", "expected"),
    [(token, [0.5, 0.0, 0.0]), (sequence, [1.0, 0.0, 1.0]), (length_normalized, [0.5, 0.0, 0.5])],
)
def test_gradient_of_the_first_tokens_ratio_reaches_the_tokens_of_its_level(ratio, expected):
    log_ratio_T = tensor([0.5, 3.0, 2.0]).log().requires_grad_()
    ratio(log_ratio_T, tensor([0, 1, 0]))[0].backward()
    assert_close(log_ratio_T.grad, tensor(expected))


def test_ratios_beyond_20_nats_are_constant_and_count_as_clipped():
    x = inputs([-300.0, -20.5, -19.5, 19.5, 20.5, 300.0], [0.0] * 6, A=-1.0)
    assert_close(unclipped(x), -tensor([-20.0, -20.0, -19.5, 19.5, 20.0, 20.0]).exp())
    assert find_clipped(x, unclipped).tolist() == [True, True, False, False, True, True]


# Clips


@each(
    ("ratio", "center", "A", "value", "cut"),
    [
        # A >= 0: A min(r, c + HIGH)
        (1.0, 1.0, 2.0, 2.0, False),
        (1.4, 1.0, 2.0, 2.6, True),
        (0.1, 1.0, 2.0, 0.2, False),  # far below the range, but raising it is what A > 0 asks for
        (1.4, 1.5, 2.0, 2.8, False),  # the range follows pi_k
        (0.5, 0.1, 2.0, 0.8, True),
        # A < 0: A max(r, max(c - LOW, 0))
        (1.0, 1.0, -2.0, -2.0, False),
        (0.5, 1.0, -2.0, -1.6, True),
        (9.0, 1.0, -2.0, -18.0, False),  # no upper clip for A < 0
        (0.05, 0.1, -2.0, -0.1, False),  # c - LOW < 0: the lower end is 0, nothing is cut
        (2.0, 2.5, -2.0, -4.6, True),
        (1.4, 1.0, 0.0, 0.0, True),
    ],
)
def test_clip_around_pi_k_by_hand(ratio, center, A, value, cut):
    x = inputs([log(ratio)], [0.0], [log(center)], A=A)
    assert_close(clipped_exact(x, **RANGE), tensor([value]))
    assert find_clipped(x, lambda x: clipped_exact(x, **RANGE)).tolist() == [cut]
    if center == 1.0:
        assert_close(clipped(x, **RANGE), tensor([value]))


def test_proportional_range_scales_with_pi_k():
    x = inputs([log(9.0)] * 3, [0.0] * 3, tensor([1.0, 0.1, 4.0]).log(), A=[1.0, 2.0, -1.0])
    assert_close(clipped_proportional(x, **RANGE), tensor([1.3, 0.26, -9.0]))


@each(
    ("ratio", "A", "value", "cut"),
    [
        (3.0, -2.0, -6.0, False),
        (9.0, -2.0, -8.0, True),
        (0.5, -2.0, -1.6, True),
        (9.0, 2.0, 2.6, True),
    ],
)
def test_dual_clip_limits_how_hard_a_bad_token_is_pushed_down(ratio, A, value, cut):
    x = inputs(tensor([ratio]).log().requires_grad_(), [0.0], A=A)
    found = clipped(x, **RANGE, dual_clip=4.0)
    assert_close(found, tensor([value]))
    assert_close(gradient_of(found.sum(), x), tensor([0.0 if cut else ratio * A]))


def test_center_of_the_clip_has_no_gradient():
    old = tensor([log(0.5)]).requires_grad_()
    value = clipped_exact(inputs(tensor([log(2.0)]).requires_grad_(), [0.0], old), **RANGE)
    assert torch.autograd.grad(value.sum(), old, allow_unused=True) == (None,)


@each("loss", [clipped, clipped_exact, clipped_proportional, unclipped, reinforce])
def test_every_surrogate_has_the_gradient_of_reinforce_at_pi_equal_alpha(loss):
    alpha = tensor([-0.3, -2.0, -1.1])
    x = inputs(alpha.clone().requires_grad_(), alpha, alpha, A=[1.5, -0.5, 0.0])
    assert_close(gradient_of(loss(x).sum(), x), x.advantages)


# REINFORCE with masks, weights and regularizers

RATIOS = [0.3, 0.7, 0.9, 1.0, 1.3, 3.5]  # far below, below, inside, at one, above, far above
YES, NO = True, False


def at(A: float, *values: float):
    return inputs(tensor(values or RATIOS).log(), torch.zeros(len(values or RATIOS)), A=A)


@each(
    ("mask", "knobs", "kept_up", "kept_down"),
    [
        (one_side, {}, [YES, YES, YES, YES, NO, NO], [NO, NO, YES, YES, YES, YES]),
        (one_side, {"epsilon_low": 0.6, "epsilon_high": 2.0}, [YES] * 5 + [NO], [NO] + [YES] * 5),
        (two_side, {}, [NO, NO, YES, YES, NO, NO], [NO, NO, YES, YES, NO, NO]),
        (ring, {}, [YES, NO, YES, YES, NO, NO], [NO, NO, YES, YES, NO, YES]),
    ],
)
def test_masks_by_hand(mask, knobs, kept_up, kept_down):
    assert mask(at(1.0), **knobs).tolist() == kept_up
    assert mask(at(-1.0), **knobs).tolist() == kept_down


def test_one_side_with_the_ratio_has_exactly_the_gradient_of_the_clip():
    _, x = random_inputs(200)
    masked = reinforce(x, mask=lambda x: one_side(x, **RANGE), weight=importance)
    assert_close(gradient_of(masked.sum(), x), gradient_of(clipped(x, **RANGE).sum(), x))
    assert_close(one_side(x, **RANGE), ~find_clipped(x, lambda x: clipped(x, **RANGE)))


def test_weights_by_hand():
    assert_close(
        exp_advantage(inputs([0.0] * 3, A=[0.0, 1.0, -1.0]), weight_temperature=0.5),
        tensor([1, exp(2), exp(-2)]),
    )
    assert_close(importance(at(1.0)), tensor(RATIOS))
    assert_close(capped_ratio(at(1.0)), tensor([0.3, 0.7, 0.9, 1.0, 1.2, 1.2]))
    assert_close(tapered_ratio(at(1.0)), torch.ones(6))
    for A in (-1.0, 0.0):
        assert_close(tapered_ratio(at(A)), tensor([0.3, 0.7, 0.9, 1.0, 1.0, 1.0]))


def test_mask_and_weight_have_no_gradient():
    x = inputs(tensor([-1.0, -2.0, -3.0]).requires_grad_(), A=[2.0, -1.0, 1.0])
    weight = (x.logp + 3).exp()
    value = reinforce(
        x, mask=lambda x: tensor([True, True, False]), weight=lambda x: (x.logp + 3).exp()
    )
    assert_close(value, tensor([-2.0, 2.0, 0.0]) * weight)
    assert_close(gradient_of(value.sum(), x), tensor([2.0, -1.0, 0.0]) * weight)


def test_regularizers_by_hand():
    x = inputs([-1.0, -3.0], [-1.5, -1.0])
    assert_close(asymre(x), tensor([0.1, 0.3]))
    assert_close(opmd(x), tensor([0.025, 0.4]))


# two completions of group 0 (of two tokens and of one) and one of group 1; log-ratios 1, -.5, -1
OF_GROUPS = inputs(
    [-1.0, -2.0, -1.0, -4.0],
    [-2.0, -2.0, -0.5, -3.0],
    A=[0.5, -0.3, 0.0],
    completion=[0, 0, 1, 2],
    group=[0, 0, 1],
)


def test_opmd_kimi_is_the_squared_residual_of_the_reward():
    # A - .2 log-ratio: .3, -.2, .2
    assert_close(opmd_kimi(OF_GROUPS, strength=0.2), -tensor([0.09 / 2, 0.09 / 2, 0.04, 0.04]))


def test_pairwise_is_the_sum_over_pairs_and_a_completion_alone_has_none():
    value_T = opmd_pairwise(OF_GROUPS, strength=0.2)
    of_the_pair = ((0.5 - 0.2) - (-0.3 + 0.1)) ** 2 / 2**2  # sum_{i<j} / G^2
    assert float(value_T[:3].sum()) / 2 == pytest.approx(
        -of_the_pair
    )  # the mean over its completions
    assert float(value_T[3]) == 0.0
