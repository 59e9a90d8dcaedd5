"""Surrogates and regularizers, by numbers worked by hand and by their gradients."""

from math import exp, inf, log
from typing import Any, TypedDict

import pytest
import torch
from losses import at_ratios, gradient_of, inputs, random_inputs, with_statistics
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.advantages import one_group
from lagrpo.core.inputs import LossInputs, pi_ref
from lagrpo.core.losses import (
    asymre,
    clipped,
    clipped_by_staleness,
    clipped_exact,
    clipped_proportional,
    gepo,
    gmpo,
    online_dpo,
    online_ipo,
    opmd,
    opmd_kimi,
    opmd_pairwise,
    reinforce,
    unclipped,
)
from lagrpo.core.masks import one_side
from lagrpo.core.ratios import length_normalized, sequence, token
from lagrpo.core.recipes import resolve
from lagrpo.core.weights import importance


class Epsilons(TypedDict):
    """The ends of a clip range."""

    epsilon_low: float
    epsilon_high: float


# asymmetric on purpose
LOW = 0.2
HIGH = 0.3
RANGE: Epsilons = {"epsilon_low": LOW, "epsilon_high": HIGH}


def double(values) -> Tensor:
    return tensor(values, dtype=torch.float64)


def is_cut(x: LossInputs, surrogate) -> list[bool]:
    """True for the tokens at which the surrogate has no gradient."""
    x = LossInputs(**{**fields_of(x), "logp": x.logp.detach().requires_grad_()})
    return (gradient_of(surrogate(x).sum(), x) == 0).tolist()


def fields_of(x: LossInputs) -> dict[str, Any]:
    return {name: getattr(x, name) for name in LossInputs.__dataclass_fields__}


# Inputs


@pytest.mark.parametrize(
    "field", ["rollout_logp", "old_logp", "ref_logp", "completion", "staleness", "entropy"]
)
def test_numbers_of_tokens_that_are_not_aligned_are_rejected(field):
    _, x = random_inputs()
    for wrong in (getattr(x, field)[:-1], getattr(x, field)[None]):
        with pytest.raises(ValueError, match=f"flat and aligned: .*{field}"):
            LossInputs(**{**fields_of(x), field: wrong})


# Ratios


def test_ratios_at_the_three_levels_by_hand():
    completion_T = tensor([0, 1, 0])  # of two tokens and of one, interleaved on purpose
    log_ratio_T = tensor([0.5, 3.0, 2.0]).log()
    assert_close(token(log_ratio_T, completion_T), tensor([0.5, 3.0, 2.0]))
    assert_close(sequence(log_ratio_T, completion_T), tensor([1.0, 3.0, 1.0]))
    assert_close(
        length_normalized(tensor([1.0, 3.0, 4.0]).log(), completion_T), tensor([2.0, 3.0, 2.0])
    )


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(token, [0.5, 0.0, 0.0]), (sequence, [1.0, 0.0, 1.0]), (length_normalized, [0.5, 0.0, 0.5])],
    ids=["token", "sequence", "length_normalized"],
)
def test_gradient_of_the_first_tokens_ratio_reaches_the_tokens_of_its_level(ratio, expected):
    log_ratio_T = tensor([0.5, 3.0, 2.0]).log().requires_grad_()
    ratio(log_ratio_T, tensor([0, 1, 0]))[0].backward()
    assert_close(log_ratio_T.grad, tensor(expected))


def test_length_normalized_ratio_limits_the_mean_and_not_the_sum():
    """Four tokens of 10 nats: 40 nats in all, and a ratio of e^10."""
    log_ratio_T = torch.full((4,), 10.0, requires_grad=True)
    ratio_T = length_normalized(log_ratio_T, torch.zeros(4, dtype=torch.int64))
    assert_close(ratio_T, torch.full((4,), 10.0).exp())
    ratio_T[0].backward()
    assert_close(log_ratio_T.grad, torch.full((4,), 10.0).exp() / 4)


def test_ratios_beyond_20_nats_are_constant_and_have_no_gradient():
    x = inputs([-300.0, -20.5, -19.5, 19.5, 20.5, 300.0], [0.0] * 6, A=-1.0)
    assert_close(unclipped(x), -tensor([-20.0, -20.0, -19.5, 19.5, 20.0, 20.0]).exp())
    assert is_cut(x, unclipped) == [True, True, False, False, True, True]


# Clips


@pytest.mark.parametrize(
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
    assert is_cut(x, lambda x: clipped_exact(x, **RANGE)) == [cut]
    if center == 1.0:
        assert_close(clipped(x, **RANGE), tensor([value]))


def test_proportional_range_scales_with_pi_k():
    x = inputs([log(9.0)] * 3, [0.0] * 3, tensor([1.0, 0.1, 4.0]).log(), A=[1.0, 2.0, -1.0])
    assert_close(clipped_proportional(x, **RANGE), tensor([1.3, 0.26, -9.0]))


@pytest.mark.parametrize(
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
    value_T = clipped(x, **RANGE, dual_clip=4.0)
    assert_close(value_T, tensor([value]))
    assert_close(gradient_of(value_T.sum(), x), tensor([0.0 if cut else ratio * A]))


def test_center_of_the_clip_has_no_gradient():
    old = tensor([log(0.5)]).requires_grad_()
    value = clipped_exact(inputs(tensor([log(2.0)]).requires_grad_(), [0.0], old), **RANGE)
    assert torch.autograd.grad(value.sum(), old, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    "loss", [clipped, clipped_exact, clipped_proportional, unclipped, reinforce]
)
def test_every_surrogate_has_the_gradient_of_reinforce_at_pi_equal_alpha(loss):
    alpha = tensor([-0.3, -2.0, -1.1])
    x = inputs(alpha.clone().requires_grad_(), alpha, alpha, A=[1.5, -0.5, 0.0])
    assert_close(gradient_of(loss(x).sum(), x), x.advantages)


# Decoupled PPO (arXiv 2505.24298) and A-3PO (arXiv 2512.06547)


def decoupled(x: LossInputs, log_middle_T: Tensor) -> Tensor:
    """(m/alpha) min(q A, clip(q, .8, 1.2) A), q = pi/m, for a policy m between alpha and pi."""
    assert x.rollout_logp is not None
    q = (x.logp - log_middle_T).exp()
    A = x.advantage
    return (log_middle_T - x.rollout_logp).exp() * torch.minimum(q * A, q.clamp(0.8, 1.2) * A)


def test_decoupled_ppo_is_the_clip_whose_range_is_proportional():
    _, x = random_inputs(500)
    expected = decoupled(x, x.old_logp)
    assert_close(resolve("decoupled_ppo").value(x), expected)
    assert_close(
        gradient_of(resolve("decoupled_ppo").value(x).sum(), x), gradient_of(expected.sum(), x)
    )


def test_decoupled_ppo_at_the_first_update_is_plain_importance_weighting():
    _, x = random_inputs(200)
    x = LossInputs(**{**fields_of(x), "old_logp": x.logp.detach()})
    gradient_T = gradient_of(resolve("decoupled_ppo").value(x).sum(), x)
    assert_close(gradient_T, gradient_of(unclipped(x).sum(), x))


@pytest.mark.parametrize(
    ("staleness", "low", "high"),
    [
        (0, 0.8, 1.2),
        (1, 0.8, 1.2),
        (2, 0.64, 1.44),
        (4, 0.4096, 2.0736),
        (8, 0.16777216, 4.29981696),
        (16, 0.0281475, 18.4884259),
    ],
)
def test_a3po_widens_the_clip_to_the_power_of_the_staleness(staleness, low, high):
    # Just outside and just inside both ends: 1 % is far more than rounding, far less than the
    # range.
    ratios = [0.99 * low, 1.01 * low, 0.99 * high, 1.01 * high]
    for A, cut in ((-1.0, [True, False, False, False]), (1.0, [False, False, False, True])):
        x = at_ratios(ratios, A=A, staleness=tensor([staleness] * 4))
        assert is_cut(x, clipped_by_staleness) == cut
    at_the_end = clipped_by_staleness(at_ratios([2 * high], staleness=tensor([staleness])))
    assert_close(at_the_end, double([high]), rtol=1e-6, atol=0.0)


def test_a3po_has_the_gradient_of_a_clip_around_a_policy_between_pi_and_alpha():
    """log m = log alpha + ((d - 1)/d) (log pi - log alpha), without a gradient, for tokens of
    staleness d >= 1."""
    _, x = random_inputs(500)
    d = x.staleness.clamp(min=1).double()
    log_ratio_T = 3 * (x.logp - x.rollout_logp)  # so that wide ranges cut too
    logp = (x.rollout_logp + log_ratio_T).detach().requires_grad_()
    x = LossInputs(**{**fields_of(x), "logp": logp})
    assert x.staleness is not None
    middle = (x.rollout_logp + (d - 1) / d * (logp - x.rollout_logp)).detach()
    gradient_T = gradient_of(clipped_by_staleness(x).sum(), x)
    assert_close(gradient_T, gradient_of(decoupled(x, middle).sum(), x))
    assert bool((gradient_T == 0).any())
    assert bool((gradient_T[x.staleness >= 3] == 0).any())


def test_a3po_without_staleness_is_rejected():
    with pytest.raises(ValueError, match="needs staleness: completions of a file have none"):
        clipped_by_staleness(at_ratios([1.0]))


# The released code of M2PO (arXiv 2510.01161)

M2PO_RATIOS = [exp(d) for d in (0.1, 0.2, -0.3, 0.6, 0.05, -0.05)]
M2PO_A = [1.0, 1.0, -1.0, 1.0, -1.0, 1.0]  # the first four are outward: squares .01, .04, .09, .36


@pytest.mark.parametrize(
    ("knobs", "low", "high"),
    [
        ({}, 0.3, 0.5),
        ({"least_low": 0.0, "least_high": 0.0}, 0.181269, 0.221403),  # t = .2
        ({"least_low": 0.2, "least_high": 0.1}, 0.2, 0.221403),
        ({"tau": 0.126}, 1.0, inf),  # the mean is .125 already
        ({"tau": 0.001, "least_low": 0.0, "least_high": 0.0}, 0.0, 0.0),  # even .01 is too much
    ],
    ids=["floors", "no floors", "one floor", "wide enough", "nothing is small enough"],
)
def test_released_m2po_has_the_worked_range(knobs, low, high):
    recipe = resolve("m2po_released", {f"surrogate.{name}": v for name, v in knobs.items()})
    x = with_statistics(recipe, at_ratios(M2PO_RATIOS, M2PO_A))
    assert x.step["clipped_m2po_released"].tolist() == pytest.approx([low, high], abs=5e-7)


def test_released_m2po_cuts_the_token_with_the_largest_ratio_alone():
    recipe = resolve("m2po_released")
    x = with_statistics(recipe, at_ratios(M2PO_RATIOS, M2PO_A))
    assert is_cut(x, recipe.value) == [False, False, False, True, False, False]
    assert_close(recipe.value(x)[3], tensor(1.5).double())


def test_released_m2po_without_an_outward_token_clips_nothing():
    recipe = resolve("m2po_released")
    x = with_statistics(recipe, at_ratios([0.2, 5.0], A=[1.0, -1.0]))
    assert is_cut(x, recipe.value) == [False, False]


# BAPO (arXiv 2510.18927)


@pytest.mark.parametrize(
    ("ratios", "A", "low", "high"),
    [
        pytest.param([2.0, 0.5], [1.0, -1.0], 0.6, 1.2, id="1.2 against .6"),
        # Neither a low end of .9 nor a high one below 1.5 is enough against 1.49.
        pytest.param([2.0, 1.49], [1.0, -1.0], 0.9, 1.5, id="1.2 against 1.49"),
        pytest.param([2.0, 0.5, 1.3], [1.0, -1.0, -1.0], 0.9, 3.0, id="2 against 2.2"),
        pytest.param([0.5], [-1.0], 0.9, 3.0, id="no gain"),
        pytest.param([2.0], [1.0], 0.6, 1.2, id="no loss"),
    ],
)
def test_bapo_widens_its_range_until_gains_weigh_as_much_as_losses(ratios, A, low, high):
    recipe = resolve("bapo")
    x = with_statistics(recipe, at_ratios(ratios, A))
    assert x.step["clipped_bapo"].tolist() == pytest.approx([low, high], abs=1e-6)


def test_bapo_cuts_beyond_the_ends_of_its_range_and_beyond_the_dual_clip():
    recipe = resolve("bapo")
    # Gains: 1.2 + 3 * 1; losses: 4 + .6.
    x = with_statistics(recipe, at_ratios([2.0, 1.0, 0.5, 4.0], [1.0, 4.0, -1.0, -1.0]))
    assert x.step["clipped_bapo"].tolist() == pytest.approx([0.6, 1.2])
    assert is_cut(x, recipe.value) == [True, False, True, True]
    assert_close(recipe.value(x), tensor([1.2, 4.0, -0.6, -3.0]).double())


# GMPO (arXiv 2507.20673) and GEPO (arXiv 2508.17850)


@pytest.mark.parametrize(
    ("log_ratios", "A", "mean", "cut"),
    [
        pytest.param((0.6, -0.1), 1.0, 0.15, [True, False], id="up beyond the range"),
        pytest.param((0.6, -0.1), -1.0, 0.25, [False, False], id="pulled back"),
        pytest.param((-0.6, 0.1), -1.0, -0.15, [True, False], id="down beyond the range"),
    ],
)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(log_ratios, A, mean, cut):
    log_ratio_T = tensor(log_ratios, dtype=torch.float64).requires_grad_()
    x = inputs(log_ratio_T, torch.zeros(2).double(), A=[A], completion=[0, 0])
    assert_close(gmpo(x), tensor([A * exp(mean)] * 2).double())
    # Both tokens have half of the gradient of both values.
    expected = [0.0 if is_token_cut else A * exp(mean) for is_token_cut in cut]
    assert_close(gradient_of(gmpo(x).sum(), x), tensor(expected).double())


def test_gepo_compares_with_the_expectation_of_the_group():
    """q = (.5, .25): sum q^2 / sum q = 5/12; p = (.4, .3): w = (.96, .72). The third completion is
    a group of its own, with tokens of .64 and .25 under pi, .5 under alpha: w = .4 / .5."""
    p = tensor([0.4, 0.3, 0.64, 0.25], dtype=torch.float64)
    q = tensor([0.5, 0.25, 0.5, 0.5], dtype=torch.float64)
    x = inputs(
        p.log().requires_grad_(),
        q.log(),
        A=[1.0, -1.0, 2.0],
        completion=[0, 1, 2, 2],
        group=[3, 3, 8],
    )
    assert_close(gepo(x), double([0.96, -0.8, 1.6, 1.6]))
    assert_close(gradient_of(gepo(x).sum(), x), double([0.96, 0.0, 1.6, 1.6]))


# REINFORCE with masks, weights and regularizers


def test_one_side_with_the_ratio_has_exactly_the_gradient_of_the_clip():
    _, x = random_inputs(200)
    masked = reinforce(x, mask=lambda x: one_side(x, **RANGE), weight=importance)
    assert_close(gradient_of(masked.sum(), x), gradient_of(clipped(x, **RANGE).sum(), x))
    cut = is_cut(x, lambda x: clipped(x, **RANGE))
    assert (~one_side(x, **RANGE)).tolist() == cut


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


# Regressions: two completions of group 0 (of two tokens and of one) and one of group 1; log-ratios
# 1, -.5, -1

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
    expected = ((0.5 - 0.2) - (-0.3 + 0.1)) ** 2 / 2**2  # sum_{i<j} / G^2
    assert float(value_T[:3].sum()) / 2 == pytest.approx(-expected)  # the mean over its completions
    assert float(value_T[3]) == 0.0


def test_oapl_has_no_gradient_at_the_worked_optimum_whoever_sampled():
    """alpha = (.3, .6, .1), r = (0, .8, 1), b1 = b2 = 1: V = .645611, pi* = alpha e^r / Z with J =
    .702664."""
    alpha = double([0.3, 0.6, 0.1])
    r = double([0.0, 0.8, 1.0])
    optimum = double([0.157303, 0.700167, 0.142531])
    V = (alpha * r.exp()).sum().log()
    assert float(V) == pytest.approx(0.645611, abs=5e-7)
    assert float((optimum * r).sum()) == pytest.approx(0.702664, abs=1e-6)
    recipe = resolve("oapl", {"surrogate.strength": 1.0})
    samples = tensor([0, 1, 2, 1, 1])  # not in proportion to any policy
    x = inputs(optimum.log()[samples].requires_grad_(), alpha.log()[samples], A=0.0)
    x = LossInputs(**{**fields_of(x), "advantages": (r - V)[samples]})
    value_T = recipe.value(x)
    assert float(value_T.detach().abs().max()) < 1e-10
    assert float(gradient_of(value_T.sum(), x).abs().max()) < 1e-5


def test_oapl_at_pi_equal_alpha_is_reinforce_with_a_higher_baseline():
    """The gradient of the loss is -2 b2 (r - V) grad log pi, b2 = 1e-3, V = log mean e^r."""
    recipe = resolve("oapl")
    alpha = double([-1.0, -2.0, -0.5, -1.5])
    r = double([1.0, 0.0, 0.0, 0.0])
    A = recipe.advantages(one_group(r), max_length=8)
    x = inputs(alpha.clone().requires_grad_(), alpha, A=A.tolist())
    loss = recipe.loss(x, torch.full((4,), 0.25))
    expected = -2e-3 * (r - 0.357374) / 4
    assert_close(gradient_of(loss, x), expected, atol=1e-9, rtol=0.0)


def test_tba_at_pi_equal_alpha_is_dr_grpo_with_the_kl_in_the_advantage():
    """The gradient is 2 tau times that of (a - mean a) log pi(y), a = r - tau log pi(y)/pi_ref(y):
    VarGrad."""
    _, x = random_inputs()
    tau = 0.05
    kl_C = torch.stack([(x.logp - x.ref_logp)[x.completion == c].sum() for c in range(7)]).detach()
    a_C = x.advantages - tau * kl_C
    centered_C = torch.cat([a_C[:3] - a_C[:3].mean(), a_C[3:] - a_C[3:].mean()])
    lengths_C = x.completion.bincount()
    weight_C = resolve("tba").weights(lengths_C, torch.zeros(7).bool(), 9).double()
    loss = resolve("tba").loss(x, weight_C)
    assert_close(gradient_of(loss, x), -(2 * tau * centered_C / 7)[x.completion])


# Preferences. Group 0: completions of two tokens, one, one and one; group 1: a tie. h = log-ratio
# of the best less that of the worst.

PAIRS = inputs(
    [-1.0, -1.0, -2.0, -1.5, -0.5, -1.0, -1.0],
    ref=[-1.25, -1.25, -1.5, -1.0, -0.5, -3.0, -1.0],
    A=[0.75, -0.5, 0.75, -1.0, 0.0, 0.0],
    completion=[0, 0, 1, 2, 3, 4, 5],
    group=[0, 0, 0, 0, 1, 1],
)
MARGIN = 0.5 - 0.0  # completion 0 (the first of the best) and completion 3


@pytest.mark.parametrize(
    ("loss", "value_of_pair"),
    [
        (online_dpo, log(1 / (1 + exp(-0.3 * MARGIN)))),
        (online_ipo, -((MARGIN - 1 / 0.6) ** 2)),
    ],
    ids=["dpo", "ipo"],
)
def test_preference_compares_the_first_best_with_the_first_worst_of_a_group(loss, value_of_pair):
    """Each of the two has G/2 = 2 of it, over its tokens, so the mean over the group's completions
    is the pair's."""
    value_T = loss(PAIRS, strength=0.3)
    assert_close(value_T, value_of_pair * tensor([1.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0]))
    assert float(value_T[:5].sum()) / 4 == pytest.approx(value_of_pair)


@pytest.mark.parametrize("loss", [online_dpo, online_ipo])
def test_preference_pushes_the_best_up_and_the_worst_down_alone(loss):
    x = LossInputs(**{**fields_of(PAIRS), "logp": PAIRS.logp.clone().requires_grad_()})
    signs = gradient_of(loss(x, strength=0.3).sum(), x).sign().tolist()
    assert signs == [1.0, 1.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def test_preference_does_not_depend_on_the_groups_beside_it():
    """All groups of a call have indexes; those of another micro-batch begin elsewhere."""
    x = LossInputs(**{**fields_of(PAIRS), "group": tensor([5, 5, 5, 5, 2, 2])})
    assert_close(online_dpo(x), online_dpo(PAIRS))


@pytest.mark.parametrize("loss", [opmd_pairwise, online_dpo, online_ipo])
def test_numbers_of_groups_may_be_larger_than_the_number_of_completions(loss):
    """A micro-batch holds the last groups of a large batch."""
    x = LossInputs(**{**fields_of(PAIRS), "group": tensor([98, 98, 98, 98, 99, 99])})
    assert_close(loss(x, anchor=pi_ref), loss(PAIRS, anchor=pi_ref))


def test_online_ipo_is_at_its_optimum_where_the_margin_is_half_of_one_over_tau():
    x = inputs(tensor([-1.0, -3.5]).requires_grad_(), ref=[-2.0, -2.0], A=[1.0, -1.0])  # h = 2.5
    assert_close(online_ipo(x, strength=0.2), torch.zeros(2))
    assert_close(gradient_of(online_ipo(x, strength=0.2).sum(), x), torch.zeros(2))


@pytest.mark.parametrize("name", ["prime_rl", "ipo_mask"])
def test_token_that_the_mask_cuts_is_clipped_though_the_regularizer_moves_it(name):
    """Probabilities .3 -> .6 (cut, for both signs of A), and .3 -> .32."""
    x = inputs(tensor([0.6, 0.32]).log(), rollout=tensor([0.3, 0.3]).log(), A=[1.0, 1.0])
    derivative = resolve(name).differentiate(x, torch.ones(2))
    assert derivative.clipped_T.tolist() == [True, False]
    assert derivative.gradient_T[0] > 0  # the regularizer pulls back toward the sampler


def test_reinforce_with_a_regularizer_and_no_mask_clips_nothing():
    _, x = random_inputs()
    assert not resolve("opmd").differentiate(x, torch.ones(7)).clipped_T.any()
