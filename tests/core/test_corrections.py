"""Weights pi_k/alpha for a rollout engine whose arithmetic differs, by hand and by what they amount
to."""

from dataclasses import replace
from math import inf

import pytest
import torch
from losses import inputs, random_inputs
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.corrections import masked, truncated
from lagrpo.core.recipes import resolve

LEVELS = ["token", "sequence", "length_normalized"]
RANGES = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def test_truncated_and_masked_by_hand():
    ratio = [0.1, 0.5, 1.0, 2.0, 2.1]
    x = inputs(
        [0.0] * 5, torch.zeros(5, dtype=torch.float64), tensor(ratio, dtype=torch.float64).log()
    )

    def weights(correction, floor, cap):
        return pytest.approx(correction(x, floor=floor, cap=cap).tolist())

    assert weights(truncated, 0.0, 2.0) == [0.1, 0.5, 1.0, 2.0, 2.0]
    assert weights(truncated, 0.5, 1.5) == [0.5, 0.5, 1.0, 1.5, 1.5]
    assert weights(masked, 0.4, 2.05) == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert weights(truncated, 0.0, inf) == ratio
    assert weights(masked, 0.0, inf) == ratio


# two completions, of two tokens and of one. pi_k/alpha: 4, .5 (of the completion 2) and .25;
# pi/pi_k: 1.5, 1, .5
ALPHA, PI_K, PI = (tensor(p).log() for p in ([0.1, 0.8, 0.8], [0.4, 0.4, 0.2], [0.6, 0.4, 0.1]))
SURROGATE_T = tensor([1.2, 1.0, -1.6])  # min(1.5, 1.2), 1, -2 max(.5, .8)


@pytest.mark.parametrize(
    ("name", "changes", "weight", "cut"),
    [
        ("grpo_recomputed", {}, [1.0, 1.0, 1.0], [True, False, True]),
        ("grpo_tis", {}, [2.0, 0.5, 0.25], [True, False, True]),
        (
            "grpo_tis",
            {"cap": 10.0, "floor": 0.4},
            [4.0, 0.5, 0.4],
            [True, False, True],
        ),
        ("grpo_tis_sequence", {"cap": 1.5}, [1.5, 1.5, 0.25], [True, False, True]),
        (
            "grpo_tis_sequence",
            {"level": "length_normalized"},
            [2**0.5, 2**0.5, 0.25],
            [True, False, True],
        ),
        ("grpo_mis_sequence", {"cap": 2.1}, [2.0, 2.0, 0.25], [True, False, True]),
        ("grpo_mis_sequence", {"cap": 1.9}, [0.0, 0.0, 0.25], [True, True, True]),
        ("grpo_icepop", {}, [4.0, 0.5, 0.0], [True, False, True]),
        ("grpo_icepop", {"floor": 0.6}, [4.0, 0.0, 0.0], [True, True, True]),
    ],
)
def test_recipes_with_a_correction_by_hand(name, changes, weight, cut):
    """The clip is of pi/pi_k, whatever alpha; the weight multiplies what it leaves; what it drops
    counts as clipped."""
    if name == "grpo_icepop" and not changes:
        changes = {"floor": 0.45}  # .5 itself is at the end of its range
    recipe = resolve(name, changes)
    x = inputs(PI.clone().requires_grad_(), ALPHA, PI_K, A=[1.0, -2.0], completion=[0, 0, 1])
    derivative = recipe.differentiate(x, torch.ones(2))
    assert_close(derivative.loss, -(tensor(weight) * SURROGATE_T).sum())
    expected = torch.where(tensor(cut), torch.zeros(3), -tensor(weight) * tensor([1.5, 1.0, -1.0]))
    assert_close(derivative.gradient_T, expected)
    assert derivative.clipped_T.tolist() == cut


def of_every_token(name, changes, x):
    """The loss and its derivative with a weight of 1 for every completion."""
    return resolve(name, changes).differentiate(x, torch.ones_like(x.advantages))


@pytest.mark.parametrize("level", LEVELS)
def test_untruncated_weights_give_the_clip_whose_range_is_proportional(level):
    """min(rho A, clip(rho, c (1 - low), c (1 + high)) A) = c f_eps(rho / c, 1, A) with c =
    pi_k/alpha."""
    _, x = random_inputs(200)
    levels = {"ratio": level, "level": level, "cap": inf}
    expected = of_every_token("clipped_proportional", RANGES | {"ratio": level}, x)
    computed = of_every_token("grpo_tis", RANGES | levels, x)
    assert_close(computed.loss, expected.loss)
    assert_close(computed.gradient_T, expected.gradient_T)
    assert torch.equal(computed.clipped_T, expected.clipped_T)
    for sign in (1, -1):
        assert int((computed.clipped_T & (sign * x.advantage > 0)).sum()) > 10


def test_exact_clip_is_untruncated_with_a_range_that_shrinks_as_the_weight_grows():
    """f_eps(rho, c, A) = c f_{eps/c}(pi/pi_k, 1, A), token by token."""
    _, x = random_inputs()
    c = (x.old_logp - x.rollout_logp).exp()
    r = (x.logp - x.old_logp).exp()
    A = x.advantage
    clipped_T = torch.minimum(r * A, r.clamp(1 - 0.2 / c, 1 + 0.2 / c) * A)
    computed = of_every_token("off_policy_grpo_exact", {"beta": 0.0}, x)
    assert_close(computed.loss, -(c * clipped_T).sum().detach())


@pytest.mark.parametrize("correction", ["truncated", "masked"])
@pytest.mark.parametrize("level", LEVELS)
def test_without_mismatch_a_correction_changes_nothing(correction, level):
    _, x = random_inputs()
    x = replace(x, old_logp=x.rollout_logp)
    changes = RANGES | {"correction": correction, "level": level}
    computed = of_every_token("grpo_tis", changes, x)
    for name, knobs in (("grpo_recomputed", RANGES), ("grpo", RANGES | {"beta": 0.0})):
        other = of_every_token(name, knobs, x)
        assert torch.equal(computed.loss, other.loss)
        assert torch.equal(computed.gradient_T, other.gradient_T)


@pytest.mark.parametrize("level", LEVELS)
def test_reinforce_may_have_a_weight_which_has_no_gradient(level):
    _, x = random_inputs()
    x.old_logp.requires_grad_()
    recipe = resolve("reinforce", {"correction": "truncated", "level": level, "cap": inf})
    loss = recipe.loss(x, torch.ones_like(x.advantages))
    gradient_T, through_T = torch.autograd.grad(loss, (x.logp, x.old_logp), allow_unused=True)
    assert through_T is None
    d_T = (x.old_logp - x.rollout_logp).detach()
    sums_C = torch.stack([d_T[x.completion == c].sum() for c in range(7)])
    log_w_T = {"token": d_T, "sequence": sums_C[x.completion]}
    log_w_T["length_normalized"] = (sums_C / x.completion.bincount())[x.completion]
    assert_close(gradient_T, -(log_w_T[level].exp() * x.advantage))


def test_correction_leaves_the_kl_term_alone():
    x = inputs(
        [-1.0, -2.0], [-1.5, -1.0], [-1.1, -2.1], [-1.2, -1.2], A=0.0
    )  # no advantage: only the KL is left
    losses = [
        resolve(name, {"beta": 0.04}).loss(x, torch.ones(2))
        for name in ("grpo_tis", "grpo_recomputed")
    ]
    assert float(losses[0]) == float(losses[1]) > 0
