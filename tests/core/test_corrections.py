from math import inf, log

import pytest
import torch
from losses import loss_of
from test_loss import batch
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.corrections import corrected, masked, truncated
from lagrpo.core.loss import Terms
from lagrpo.objective.recipes import resolve

RATIO_T = tensor([0.1, 0.5, 1.0, 2.0, 2.1])


def test_truncated_and_masked_by_hand():
    assert_close(truncated(RATIO_T, 0.0, 2.0), tensor([0.1, 0.5, 1.0, 2.0, 2.0]))
    assert_close(truncated(RATIO_T, 0.5, 1.5), tensor([0.5, 0.5, 1.0, 1.5, 1.5]))
    assert_close(masked(RATIO_T, 0.5, 2.0), tensor([0.0, 0.5, 1.0, 2.0, 0.0]))  # the ends are inside
    assert_close(masked(RATIO_T, 0.0, 1.5), tensor([0.1, 0.5, 1.0, 0.0, 0.0]))
    for correction in (truncated, masked):
        assert torch.equal(correction(RATIO_T, 0.0, inf), RATIO_T)
        assert torch.equal(
            correction(tensor([0.99, 1.0, 1.01]), 1.0, 1.0) > 0,
            tensor([correction is truncated, True, correction is truncated]),
        )


def test_a_ratio_that_overflows_is_truncated_or_dropped():
    overflown_T = tensor([1000.0]).exp()
    assert truncated(overflown_T, 0.0, 2.0).tolist() == [2.0]
    assert masked(overflown_T, 0.0, 2.0).tolist() == [0.0]


def test_a_weight_carries_no_gradient():
    logp_T = tensor([0.2, -0.3]).requires_grad_()
    for weight in (truncated(logp_T.exp(), 0.0, 2.0), masked(logp_T.exp(), 0.0, 2.0)):
        assert not weight.requires_grad
    (gradient,) = torch.autograd.grad(corrected(3 * logp_T, logp_T.exp()).sum(), logp_T)
    assert_close(gradient, 3 * logp_T.detach().exp())


def test_bad_bounds_and_shapes_are_refused(unchecked):
    for correction in (truncated, masked):
        with pytest.raises(ValueError, match=r"cap must be at least 1, but is 0\.9"):
            correction(RATIO_T, 0.0, 0.9)
        with pytest.raises(ValueError, match="floor must be at least 0, but is nan"):
            correction(RATIO_T, float("nan"), 2.0)
        with pytest.raises(ValueError, match=r"floor must be at most 1, but is 1\.1"):
            correction(RATIO_T, 1.1, 2.0)
    with pytest.raises(ValueError, match="one shape"):
        corrected(RATIO_T, RATIO_T[:1])


# two completions, of two tokens and of one. pi_k/alpha: 4, .5 (of the completion 2) and .25; pi/pi_k: 1.5, 1, .5
ALPHA_T = tensor([log(0.1), log(0.8), log(0.8)])
PI_K_T = tensor([log(0.4), log(0.4), log(0.2)])
PI_T = tensor([log(0.6), log(0.4), log(0.1)])
COMPLETION_T, ADVANTAGE_C = tensor([0, 0, 1]), tensor([1.0, -2.0])
SURROGATE_T = tensor([1.2, 1.0, -1.6])  # min(1.5, 1.2), 1, -2 max(.5, .8)


@pytest.mark.parametrize(
    ("name", "changes", "weight", "cut"),
    [
        ("grpo_recomputed", {}, [1.0, 1.0, 1.0], [True, False, True]),
        ("grpo_tis", {}, [2.0, 0.5, 0.25], [True, False, True]),
        ("grpo_tis", {"correction_cap": 10.0, "correction_floor": 0.4}, [4.0, 0.5, 0.4], [True, False, True]),
        ("grpo_tis_sequence", {}, [2.0, 2.0, 0.25], [True, False, True]),
        ("grpo_tis_sequence", {"correction_cap": 1.5}, [1.5, 1.5, 0.25], [True, False, True]),
        ("grpo_tis_sequence", {"correction_level": "length_normalized"}, [2**0.5, 2**0.5, 0.25], [True, False, True]),
        ("grpo_mis_sequence", {}, [2.0, 2.0, 0.25], [True, False, True]),
        ("grpo_mis_sequence", {"correction_cap": 1.9}, [0.0, 0.0, 0.25], [True, True, True]),
        ("grpo_icepop", {}, [4.0, 0.5, 0.0], [True, False, True]),
        ("grpo_icepop", {"correction_floor": 0.6}, [4.0, 0.0, 0.0], [True, True, True]),
    ],
)
def test_the_recipes_by_hand(name, changes, weight, cut):
    """The clip is of pi/pi_k, whatever alpha; the weight multiplies what it leaves, and what is dropped is cut too."""
    recipe = resolve(name, {"epsilon_low": 0.2, "epsilon_high": 0.2} | changes)
    weight_C = torch.ones(2)
    logp_T = PI_T.clone().requires_grad_()
    loss, sums = recipe.loss(Terms(logp_T, ALPHA_T, PI_K_T, None, COMPLETION_T, ADVANTAGE_C), weight_C)
    assert_close(loss, -(tensor(weight) * SURROGATE_T).sum())
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    assert_close(gradient_T, torch.where(tensor(cut), torch.zeros(3), -tensor(weight) * tensor([1.5, 1.0, -1.0])))
    clipped = (int(sums["clipped_positive"]), int(sums["clipped_negative"]))
    assert clipped == (sum(cut[:2]), int(cut[2]))


RANGES = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0}
LEVELS = ["token", "sequence", "length_normalized"]


def of_every_token(recipe, whole):
    """Loss, gradient and diagnostics with a weight of 1 for every completion."""
    loss, sums = loss_of(recipe, **whole, weight_C=torch.ones_like(whole["advantage_C"]))
    return loss, torch.autograd.grad(loss, whole["logp_T"])[0], sums


@pytest.mark.parametrize("level", LEVELS)
def test_without_truncation_it_is_the_clip_whose_range_is_proportional(level):
    """min(rho A, clip(rho, c (1 - low), c (1 + high)) A) = c f_eps(pi/pi_k, 1, A) with c = pi_k/alpha, rho = pi/alpha:
    in value, gradient and cut, at every level of the ratio."""
    _, whole = batch(C=200)
    levels = {"ratio": level, "correction_level": level}
    one = resolve("clipped_proportional", RANGES | {"ratio": level})
    other = resolve("grpo_tis", RANGES | levels | {"correction_cap": inf})
    (loss, gradient_T, sums), (same, same_T, same_sums) = of_every_token(one, whole), of_every_token(other, whole)
    assert_close(same, loss)
    assert_close(same_T, gradient_T)
    assert {k: float(v) for k, v in same_sums.items()} == pytest.approx({k: float(v) for k, v in sums.items()})
    assert min(float(sums["clipped_positive"]), float(sums["clipped_negative"])) > 10
    capped = resolve("grpo_tis", RANGES | levels | {"correction_cap": 1.1})
    assert not torch.allclose(of_every_token(capped, whole)[1], gradient_T)


def test_the_exact_clip_is_untruncated_too_with_a_range_that_shrinks_as_the_weight_grows():
    """f_eps(rho, c, A) = c f_{eps/c}(pi/pi_k, 1, A), token by token."""
    _, whole = batch()
    c_T = (whole["logp_k_T"] - whole["logp_alpha_T"]).exp()
    exact, _, _ = of_every_token(resolve("off_policy_grpo_exact", {"beta": 0.0}), whole)
    r_T, A_T = (whole["logp_T"] - whole["logp_k_T"]).exp(), whole["advantage_C"][whole["completion_T"]]
    clipped_T = torch.minimum(r_T * A_T, r_T.clamp(1 - 0.2 / c_T, 1 + 0.2 / c_T) * A_T)
    assert_close(exact, -(c_T * clipped_T).sum())


@pytest.mark.parametrize("correction", ["truncated", "masked"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_sampler_of_the_same_arithmetic_needs_no_correction(correction, level):
    """At alpha = pi_k every corrected recipe is the plain surrogate, which is that over alpha."""
    _, whole = batch()
    whole["logp_k_T"] = whole["logp_alpha_T"]
    changes = RANGES | {"correction": correction, "correction_level": level}
    results = [of_every_token(resolve("grpo_tis", changes), whole)]
    results += [of_every_token(resolve(name, RANGES), whole) for name in ("grpo_recomputed", "grpo")]
    for loss, gradient_T, sums in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient_T, results[0][1])
        assert all(torch.equal(sums[name], value) for name, value in results[0][2].items())


@pytest.mark.parametrize("correction", ["truncated", "masked"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_gradient_flows_through_the_weight_and_reinforce_may_carry_it_too(correction, level):
    """w A logp: the loss depends on pi_k through w alone, and has no gradient there."""
    _, whole = batch()
    whole["logp_k_T"].requires_grad_()
    recipe = resolve("reinforce", {"correction": correction, "correction_level": level, "correction_cap": inf})
    assert recipe.needs == {"logp_alpha", "logp_k"}
    loss, _ = loss_of(recipe, **whole, weight_C=torch.ones(7, dtype=torch.float64))
    gradient_T, through_T = torch.autograd.grad(loss, (whole["logp_T"], whole["logp_k_T"]), allow_unused=True)
    assert through_T is None
    d_T, index_T = (whole["logp_k_T"] - whole["logp_alpha_T"]).detach(), whole["completion_T"]
    sums_C = torch.stack([d_T[index_T == c].sum() for c in range(7)])
    log_w_T = {"token": d_T, "sequence": sums_C[index_T], "length_normalized": (sums_C / index_T.bincount())[index_T]}
    assert_close(gradient_T, -(log_w_T[level].exp() * whole["advantage_C"][index_T]))
