from math import log
from typing import Any

import pytest
import torch
from losses import loss_of
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.loss import Terms, objective_sum
from lagrpo.objective.recipes import PRESETS, resolve

HALF, QUARTER, FULL = log(0.5), log(0.25), 0.0


def batch(C: int = 7, seed: int = 0) -> tuple[torch.Tensor, dict[str, Any]]:
    """Completions of 1 to 9 tokens with random log-probs, as keyword arguments of a recipe's loss."""
    generator = torch.Generator().manual_seed(seed)
    lengths_C = torch.randint(1, 10, (C,), generator=generator)
    completion_T = torch.repeat_interleave(torch.arange(C), lengths_C)
    T = int(lengths_C.sum())
    logp_alpha_T, noise_T, noise_k_T, noise_ref_T = torch.randn(4, T, generator=generator, dtype=torch.float64)
    return lengths_C, {
        "logp_T": (logp_alpha_T + 0.3 * noise_T).requires_grad_(),
        "logp_alpha_T": logp_alpha_T,
        "logp_k_T": logp_alpha_T + 0.2 * noise_k_T,
        "logp_ref_T": logp_alpha_T + 0.4 * noise_ref_T,
        "advantage_C": torch.randn(C, generator=generator, dtype=torch.float64),
        "completion_T": completion_T,
        "group_C": (torch.arange(C) >= 3).long(),
    }


def part(batch: dict[str, Any], weight_C: torch.Tensor, completions: list[int]) -> dict[str, Any]:
    """The micro-batch of these completions, in this order, renumbered 0 .. len - 1."""
    order_T = torch.cat([(batch["completion_T"] == c).nonzero()[:, 0] for c in completions])
    flat = {name: batch[name][order_T] for name in ("logp_T", "logp_alpha_T", "logp_k_T", "logp_ref_T")}
    lengths = [int((batch["completion_T"] == c).sum()) for c in completions]
    renumbered_T = torch.repeat_interleave(torch.arange(len(completions)), tensor(lengths))
    return flat | {
        "completion_T": renumbered_T,
        "advantage_C": batch["advantage_C"][completions],
        "group_C": batch["group_C"][completions],
        "weight_C": weight_C[completions],
    }


def test_loss_and_diagnostics_by_hand():
    # one completion of two tokens (A = 2, ratios 2 and .5), one of one token (A = -1, ratio .5)
    loss, sums = loss_of(
        resolve("grpo", {"beta": 0.1}),
        logp_T=tensor([HALF, QUARTER, QUARTER]),
        logp_alpha_T=tensor([QUARTER, HALF, HALF]),
        logp_k_T=None,
        logp_ref_T=tensor([HALF, HALF, QUARTER]),  # d = 0, -ln 2, 0: k3 = 0, 2 - ln 2 - 1, 0
        advantage_C=tensor([2.0, -1.0]),
        completion_T=tensor([0, 0, 1]),
        weight_C=tensor([0.25, 0.5]),
    )
    k3 = 1 - log(2)
    # values: 2 min(2, 1.2) = 2.4, 2 * .5 = 1, -max(.5, .8) = -.8
    objective = 0.25 * (2.4 + 1.0) + 0.5 * -0.8
    assert_close(loss, tensor(-(objective - 0.1 * 0.25 * k3)))
    expected = {
        "tokens": 3.0,
        "ratio": 3.0,
        "ratio_squared": 4.5,
        "abs_log_ratio": 3 * log(2),
        "kl_alpha": (1 - log(2)) + 2 * (-0.5 + log(2)),
        "kl_ref": k3,
        "clipped_positive": 1.0,
        "clipped_negative": 1.0,
        "objective": objective,
    }
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5, 6]], [[6], [2, 0], [5, 1, 4, 3]], [[c] for c in range(7)]])
def test_neither_the_split_into_micro_batches_nor_the_order_changes_gradient_or_diagnostics(name, parts):
    recipe = resolve(name)
    if recipe.needs_whole_groups:
        parts = [[2, 0, 1], [6, 4, 3, 5]]
    lengths_C, whole = batch()
    weight_C = recipe.weights(lengths_C, tensor([False, True] + [False] * 5), max_length=9)
    loss, sums = loss_of(recipe, **whole, weight_C=weight_C)
    (gradient_T,) = torch.autograd.grad(loss, whole["logp_T"])

    results = [loss_of(recipe, **part(whole, weight_C, completions)) for completions in parts]
    (split_T,) = torch.autograd.grad(torch.stack([loss for loss, _ in results]).sum(), whole["logp_T"])
    assert_close(split_T, gradient_T, atol=1e-12, rtol=1e-12)
    for key, value in sums.items():
        added = torch.stack([part_sums[key] for _, part_sums in results]).sum()
        assert_close(added, value, check_dtype=False)


def test_the_whole_is_the_mean_it_claims_to_be():
    lengths_C, whole = batch()
    recipe = resolve("grpo", {"beta": 0.3})
    loss, _ = loss_of(recipe, **whole, weight_C=recipe.weights(lengths_C, tensor([False] * 7), max_length=9))
    rho_T = (whole["logp_T"] - whole["logp_alpha_T"]).exp()
    advantage_T = whole["advantage_C"][whole["completion_T"]]
    d_T = whole["logp_T"] - whole["logp_ref_T"]
    surrogate_T = torch.minimum(rho_T * advantage_T, rho_T.clamp(0.8, 1.2) * advantage_T)
    value_T = surrogate_T - 0.3 * ((-d_T).exp() + d_T - 1)
    means = [value_T[whole["completion_T"] == c].mean() for c in range(7)]
    assert_close(loss, -torch.stack(means).mean())


def test_a_weight_of_zero_takes_surrogate_and_kl_of_a_completion_out():
    lengths_C, whole = batch()
    masked_C = tensor([False, True, False, False, True, False, False])
    recipe = resolve("grpo_masked")
    loss, _ = loss_of(recipe, **whole, weight_C=recipe.weights(lengths_C, masked_C, max_length=9))
    (gradient_T,) = torch.autograd.grad(loss, whole["logp_T"])
    assert torch.equal(gradient_T == 0, masked_C[whole["completion_T"]])

    kept = [0, 2, 3, 5, 6]  # dropping them before the forward pass is the same objective
    weight_C = recipe.weights(lengths_C[kept], tensor([False] * 5), max_length=9)
    alone, _ = loss_of(recipe, **part(whole, torch.zeros(7).index_put((tensor(kept),), weight_C), kept))
    assert_close(alone, loss)


def test_masked_groups_counted_or_not_differ_by_the_normalizer_only():
    lengths_C, masked_C = tensor([2, 3, 5]), tensor([False, False, True])
    not_counted = resolve("dapo").weights(lengths_C, masked_C, max_length=9)
    counted = resolve("dapo", {"masked_count": True}).weights(lengths_C, masked_C, max_length=9)
    assert_close(not_counted, tensor([1 / 5, 1 / 5, 0.0]))
    assert_close(counted, tensor([1 / 10, 1 / 10, 0.0]))
    unmasked = resolve("dapo", {"mask_zero_variance": False}).weights(lengths_C, masked_C, max_length=9)
    assert_close(unmasked, tensor([1 / 10] * 3))


AT_PI_EQUAL_ALPHA = {  # the coefficient of weight * grad logp at each token, where it is not A itself
    "asymre": lambda A_C, length_C: A_C + 0.1,
    "red_weight": lambda A_C, length_C: A_C * A_C.exp(),
    "unclipped": lambda A_C, length_C: A_C * length_C,  # every token carries the ratio of the sequence
    "opmd_kimi": lambda A_C, length_C: 2 * 0.1 * A_C,
    "opmd_pairwise": lambda A_C, length_C: 2 * 0.1 * torch.cat([A_C[:3] - A_C[:3].mean(), A_C[3:] - A_C[3:].mean()]),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_at_pi_equal_alpha_every_preset_starts_as_reinforce_or_as_stated(name):
    lengths_C, whole = batch()
    recipe = resolve(name)
    whole |= {"logp_T": whole["logp_alpha_T"].clone().requires_grad_(), "logp_k_T": whole["logp_alpha_T"]}
    whole |= {"logp_ref_T": whole["logp_alpha_T"]}  # k3 has no gradient at d = 0
    weight_C = recipe.weights(lengths_C, tensor([False] * 7), max_length=9)
    loss, sums = loss_of(recipe, **whole, weight_C=weight_C)
    (gradient_T,) = torch.autograd.grad(loss, whole["logp_T"])
    coefficient_C = AT_PI_EQUAL_ALPHA.get(name, lambda A_C, length_C: A_C)(whole["advantage_C"], lengths_C)
    assert_close(gradient_T, -(weight_C * coefficient_C)[whole["completion_T"]])
    assert float(sums["clipped_positive"] + sums["clipped_negative"] + sums["kl_alpha"] + sums["kl_ref"]) == 0.0


def test_the_exact_clip_follows_pi_k():
    _, whole = batch()
    given = part(whole, torch.ones(7), [0, 1, 2, 3, 4, 5, 6])
    recipe = resolve("off_policy_grpo_exact", {"beta": 0.0})
    loss, _ = loss_of(recipe, **given)
    advantage_T = given["advantage_C"][given["completion_T"]]
    r, c = ((given[key] - given["logp_alpha_T"]).exp() for key in ("logp_T", "logp_k_T"))
    value_T = torch.minimum(r * advantage_T, r.clamp((c - 0.2).clamp(min=0), c + 0.2) * advantage_T)
    assert_close(loss, -value_T.sum())
    with_alpha = loss_of(recipe, **(given | {"logp_k_T": given["logp_alpha_T"]}))[0]
    assert_close(with_alpha, loss_of(resolve("off_policy_grpo", {"beta": 0.0}), **given)[0])


def test_log_probs_that_are_missing_or_misaligned_are_refused(unchecked):
    _, whole = batch()
    weight_C = torch.ones(7, dtype=torch.float64)
    whole |= {"logp_k_T": None}
    with pytest.raises(ValueError, match="this objective needs logp_k: the log-probs of the policy at the start"):
        loss_of(resolve("off_policy_grpo_exact"), **whole, weight_C=weight_C)
    with pytest.raises(ValueError, match="one shape"):
        loss_of(resolve("grpo"), **(whole | {"logp_ref_T": whole["logp_ref_T"][1:]}), weight_C=weight_C)
    whole |= {"logp_ref_T": None}
    with pytest.raises(ValueError, match="this objective needs logp_ref"):
        loss_of(resolve("grpo"), **whole, weight_C=weight_C)
    with pytest.raises(ValueError, match=r"one shape: advantages \(7,\), weight_C \(6,\)"):
        loss_of(resolve("grpo"), **whole, weight_C=weight_C[:6])


def test_any_functions_make_an_objective():
    """The loss knows nothing of recipes: here a user's own surrogate, sg(rho)^2 A logp."""
    _, whole = batch()
    logp_T, logp_alpha_T = whole["logp_T"], whole["logp_alpha_T"]
    loss, _ = objective_sum(
        Terms(logp_T, logp_alpha_T, None, None, whole["completion_T"], whole["advantage_C"]),
        torch.ones(7, dtype=torch.float64),
        value=lambda terms: (terms.logp - terms.alpha).detach().exp().square() * terms.advantage * terms.logp,
        cut=lambda terms: torch.zeros_like(terms.logp, dtype=torch.bool),
    )
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    squared_T = (2 * (logp_T - logp_alpha_T)).exp()
    assert_close(gradient_T, -(squared_T * whole["advantage_C"][whole["completion_T"]]).detach())
