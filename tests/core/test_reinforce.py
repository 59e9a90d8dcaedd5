from math import exp

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.objectives import clipped, cut_between
from lagrpo.core.reinforce import (
    asymre,
    capped_ratio,
    exp_advantage,
    one_side,
    opmd,
    opmd_kimi,
    opmd_pairwise,
    ring,
    tapered_ratio,
    two_side,
)

# columns: far below, below, inside, at one, above, far above
RATIO_T = tensor([0.3, 0.7, 0.9, 1.0, 1.3, 3.5])
UP_T, DOWN_T = torch.ones(6), -torch.ones(6)
YES, NO = True, False


@pytest.mark.parametrize(
    ("mask", "kept_up", "kept_down"),
    [
        (lambda A_T: one_side(RATIO_T, A_T, 0.2, 0.2), [YES, YES, YES, YES, NO, NO], [NO, NO, YES, YES, YES, YES]),
        (lambda A_T: one_side(RATIO_T, A_T, 0.6, 2.0), [YES, YES, YES, YES, YES, NO], [NO, YES, YES, YES, YES, YES]),
        (lambda A_T: two_side(RATIO_T, 0.2, 0.2), [NO, NO, YES, YES, NO, NO], [NO, NO, YES, YES, NO, NO]),
        (
            lambda A_T: ring(RATIO_T, A_T, 0.2, 0.2, 0.6, 2.0),
            [YES, NO, YES, YES, NO, NO],
            [NO, NO, YES, YES, NO, YES],
        ),
    ],
)
def test_the_masks_by_hand(mask, kept_up, kept_down):
    assert mask(UP_T).tolist() == kept_up
    assert mask(DOWN_T).tolist() == kept_down


def test_one_side_keeps_what_a_clip_does_not_cut():
    generator = torch.Generator().manual_seed(0)
    ratio_T, advantage_T = torch.rand(1000, generator=generator) * 2, torch.randn(1000, generator=generator)
    cut_T = cut_between(ratio_T, torch.full((1000,), 0.8), torch.full((1000,), 1.3), advantage_T)
    assert torch.equal(one_side(ratio_T, advantage_T, 0.2, 0.3), ~cut_T)


def test_one_side_weighted_by_the_ratio_has_exactly_the_gradient_of_the_clip():
    generator = torch.Generator().manual_seed(1)
    logp_alpha_T, noise_T, advantage_T = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    logp_T = (logp_alpha_T + 0.5 * noise_T).requires_grad_()
    ratio_T = (logp_T - logp_alpha_T).exp()
    (clip_gradient,) = torch.autograd.grad(clipped(ratio_T, advantage_T, 0.2, 0.3).sum(), logp_T)
    ratio_T = ratio_T.detach()
    assert_close(one_side(ratio_T, advantage_T, 0.2, 0.3) * ratio_T * advantage_T, clip_gradient)


def test_the_weights_by_hand():
    assert_close(exp_advantage(tensor([0.0, 1.0, -1.0]), 0.5), tensor([1.0, exp(2), exp(-2)]))
    assert_close(capped_ratio(RATIO_T, 0.2), tensor([0.3, 0.7, 0.9, 1.0, 1.2, 1.2]))
    assert_close(tapered_ratio(RATIO_T, UP_T), torch.ones(6))
    assert_close(tapered_ratio(RATIO_T, DOWN_T), tensor([0.3, 0.7, 0.9, 1.0, 1.0, 1.0]))
    assert_close(tapered_ratio(RATIO_T, 0 * DOWN_T), tensor([0.3, 0.7, 0.9, 1.0, 1.0, 1.0]))


def test_the_regularizers_by_hand():
    assert_close(asymre(tensor([-1.0, -3.0]), 0.1), tensor([0.1, 0.3]))
    assert_close(opmd(tensor([-1.0, -3.0]), tensor([-1.5, -1.0]), 0.1), tensor([0.025, 0.4]))


# two completions of group 0 (of two tokens and of one) and one of group 1, of one token
COMPLETION_T, GROUP_C = tensor([0, 0, 1, 2]), tensor([0, 0, 1])
LOGP_T, ANCHOR_T = tensor([-1.0, -2.0, -1.0, -4.0]), tensor([-2.0, -2.0, -0.5, -3.0])  # log-ratios 1, -.5, -1


def test_kimi_is_the_square_of_what_the_reward_does_not_explain():
    value_T = opmd_kimi(LOGP_T, ANCHOR_T, tensor([0.5, -0.3, 0.0]), COMPLETION_T, strength=0.2)
    # A - .2 log-ratio: .3, -.2, .2
    assert_close(value_T, -tensor([0.09 / 2, 0.09 / 2, 0.04, 0.04]))


def test_pairwise_is_the_sum_over_pairs_and_a_lonely_completion_has_none():
    value_T = opmd_pairwise(LOGP_T, ANCHOR_T, tensor([0.5, -0.3, 7.0]), COMPLETION_T, GROUP_C, strength=0.2)
    a = (0.5 - 0.2, -0.3 + 0.1)
    of_the_pair = (a[0] - a[1]) ** 2 / 2**2  # sum_{i<j} / G^2
    assert float(value_T[:3].sum()) / 2 == pytest.approx(-of_the_pair)  # the mean over its completions
    assert float(value_T[3]) == 0.0


def test_pairwise_equals_its_definition_on_a_larger_group():
    generator = torch.Generator().manual_seed(2)
    rewards_C, s_C = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    value_T = opmd_pairwise(
        s_C, torch.zeros_like(s_C), rewards_C, torch.arange(6), torch.zeros(6, dtype=torch.long), strength=0.7
    )
    a_C = rewards_C - 0.7 * s_C
    pairs = sum((a_C[i] - a_C[j]) ** 2 for i in range(6) for j in range(i + 1, 6)) / 36
    assert_close(-value_T.mean(), torch.as_tensor(pairs))
    shifted = opmd_pairwise(
        s_C, torch.zeros_like(s_C), rewards_C - 5, torch.arange(6), torch.zeros(6, dtype=torch.long), strength=0.7
    )
    assert_close(shifted, value_T)


def test_bad_arguments_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"outer_low must be at least 0\.2, but is 0\.1"):
        ring(RATIO_T, UP_T, 0.2, 0.2, 0.1, 2.0)
    with pytest.raises(ValueError, match="temperature must be greater than 0"):
        exp_advantage(UP_T, 0.0)
    with pytest.raises(ValueError, match="epsilon_high must be at least 0"):
        capped_ratio(RATIO_T, -1.0)
    with pytest.raises(ValueError, match="one shape"):
        one_side(RATIO_T, UP_T[:2], 0.2, 0.2)
    with pytest.raises(ValueError, match="strength must be greater than 0"):
        opmd_kimi(LOGP_T, ANCHOR_T, torch.zeros(3), COMPLETION_T, strength=0.0)
