"""The rows of the table, whole: what they are made of, what they read, and identities that hold for all of them."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from each import each
from losses import gradient_of, inputs, random_inputs
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.inputs import LossInputs
from lagrpo.core.recipes import RECIPES, resolve

NO_FLAT = tensor([False] * 7)
ROWS = each("name", sorted(RECIPES))


@each(
    ("name", "expected"),
    [
        ("grpo", {"advantage": "normalized", "eps_std": 1e-4, "surrogate": "clipped", "epsilon_low": 0.2,
                  "epsilon_high": 0.2, "beta": 0.04, "kl": "k3", "reduction": "sequence_mean", "ratio": "token"}),
        ("grpo_masked", {"beta": 0.1, "reduction": "sequence_mean", "mask_zero_variance": True}),
        ("off_policy_grpo_exact", {"surrogate": "clipped_exact", "beta": 0.1, "reduction": "sequence_mean"}),
        ("dr_grpo", {"advantage": "centered", "reduction": "constant_length", "beta": 0.0}),
        ("dapo", {"epsilon_low": 0.2, "epsilon_high": 0.28, "mask_zero_variance": True, "reduction": "token_mean"}),
        ("gspo", {"ratio": "length_normalized", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
        ("cispo", {"surrogate": "reinforce", "weight": "capped_ratio", "epsilon_high": 4.0, "mask": None}),
        ("grpo_tis", {"denominator": "pi_k", "correction": "truncated", "correction_cap": 2.0}),
        ("grpo_icepop", {"correction": "masked", "correction_floor": 0.5, "correction_cap": 5.0}),
        ("rec_ring_is", {"mask": "ring", "weight": "importance", "epsilon_high": 0.2, "outer_high": 2.0}),
    ],
)  # fmt: skip
def test_rows_have_the_published_numbers(name, expected):
    settings = resolve(name).settings
    assert {knob: settings[knob] for knob in expected} == expected


def test_rows_read_what_their_formulas_need():
    rows = {name: resolve(name) for name in RECIPES}
    old = {"off_policy_grpo_exact", "clipped_proportional", "geppo", "grpo_recomputed", "grpo_tis", "grpo_tis_sequence",
           "grpo_mis_sequence", "grpo_icepop", "opmd_pairwise"}  # fmt: skip
    assert {name for name, row in rows.items() if "old_logp" in row.reads} == old
    with_kl = {"grpo", "grpo_masked", "off_policy_grpo", "off_policy_grpo_exact", "grpo_two_sided"}
    assert {name for name, row in rows.items() if row.needs_pi_ref} == with_kl | {"opmd_kimi"}
    assert {name for name, row in rows.items() if row.needs_whole_groups} == {"opmd_pairwise"}
    any_data = {"reinforce", "stale_reinforce", "grpo_recomputed", "rloo", "asymre", "red_drop", "red_weight",
                "opmd_kimi", "opmd_pairwise"}  # fmt: skip
    assert {name for name, row in rows.items() if not row.needs_logp_alpha} == any_data
    loud = with_kl | {"asymre", "opmd", "opmd_kimi", "opmd_pairwise"}
    assert {name for name, row in rows.items() if not row.skips_zero_advantage} == loud


@ROWS
def test_rows_compute_from_what_they_declare_and_nothing_else(name):
    lengths_C, x = random_inputs()
    recipe = resolve(name)
    optional = {"rollout_logp", "old_logp", "ref_logp", "group"}
    blind = replace(x, **dict.fromkeys(optional - recipe.reads))
    weight_C = recipe.weights(lengths_C, NO_FLAT, 9)
    assert_close(recipe.loss(blind, weight_C)[0], recipe.loss(x, weight_C)[0])


@each(
    ("name", "overrides", "reads"),
    [
        ("off_policy_grpo", {"beta": 0.0}, {"rollout_logp"}),
        ("reinforce", {"weight": "importance"}, {"rollout_logp"}),
        ("reinforce", {"weight": "importance", "denominator": "pi_k"}, {"old_logp"}),
        ("rloo", {"correction": "truncated"}, {"rollout_logp", "old_logp"}),
        ("grpo_tis", {"correction": "none"}, {"old_logp"}),
        ("opmd", {"anchor": "pi_ref"}, {"ref_logp", "zero_advantage"}),
        (
            "stale_reinforce",
            {"beta": 0.1, "kl_importance": True},
            {"ref_logp", "rollout_logp", "zero_advantage"},
        ),
    ],
)
def test_overrides_change_what_a_recipe_reads(name, overrides, reads):
    assert resolve(name, overrides).reads == reads


def test_knob_of_a_recipe_accepts_a_user_function():
    recipe = resolve(
        "grpo",
        {"surrogate": lambda x, *, power=2.0: x.advantage * x.logp.exp() ** power, "beta": 0.0},
    )
    assert recipe.settings["power"] == 2.0
    assert_close(recipe.value(inputs([log(0.5)], A=3.0)), tensor([0.75]))


@each(
    ("name", "overrides", "problem"),
    [
        ("grop", {}, "unknown recipe 'grop'; did you mean 'grpo'"),
        (
            "grpo",
            {"epsilon_hihg": 0.3},
            "unknown setting 'epsilon_hihg'; did you mean 'epsilon_high'",
        ),
        ("grpo", {"beta": -0.1}, "beta must be at least 0"),
        ("dr_grpo", {"eps_std": 0.1}, "eps_std has no effect on recipe"),
        ("grpo", {"mask": "ring"}, "mask has no effect on recipe"),
        ("grpo", {"correction": "truncated"}, "ratio already contains"),
        ("geppo", {"denominator": "pi_k"}, "clipped_exact clips around pi_k/alpha"),
        ("opmd_pairwise", {"correction": "truncated"}, "opmd_pairwise compares the completions"),
        ("grpo_tis", {"correction_cap": 0.9}, "correction_cap must be at least 1"),
        ("grpo", {"masked_count": True}, "mask_zero_variance is off"),
        ("grpo", {"kl": "k1"}, "k1 is not a penalty"),
        ("grpo", {"kl": "k3_bias_corrected", "kl_importance": True}, "a second time"),
        ("grpo", {"dual_clip": "3"}, "dual_clip = '3': write a number"),
        ("grpo", {"ratio": 3}, r"ratio = 3: write one of \['token'"),
        ("grpo", {"dual_clip": 1.1}, "dual_clip must be at least 1 . epsilon_high"),
    ],
)
def test_contradictory_overrides_of_a_recipe_are_rejected(name, overrides, problem):
    with pytest.raises(ValueError, match=problem):
        resolve(name, overrides)


def test_loss_and_diagnostics_by_hand():
    # one completion of two tokens (A = 2, ratios 2 and .5), one of one token (A = -1, ratio .5)
    half, quarter = log(0.5), log(0.25)
    ref = [half, half, quarter]  # d = 0, -ln 2, 0: k3 = 0, 2 - ln 2 - 1, 0
    x = inputs(
        [half, quarter, quarter],
        [quarter, half, half],
        ref=ref,
        A=[2.0, -1.0],
        completion=[0, 0, 1],
    )
    loss, sums = resolve("grpo", {"beta": 0.1}).loss(x, tensor([0.25, 0.5]))
    # values: 2 min(2, 1.2) = 2.4, 2 * .5 = 1, -max(.5, .8) = -.8
    k3, objective = 1 - log(2), 0.25 * (2.4 + 1.0) + 0.5 * -0.8
    assert_close(loss, tensor(-(objective - 0.1 * 0.25 * k3)))
    expected = {
        "tokens": 3.0, "ratio": 3.0, "ratio_squared": 4.5, "abs_log_ratio": 3 * log(2),
        "kl_alpha": (1 - log(2)) + 2 * (-0.5 + log(2)), "kl_ref": k3, "clipped_positive": 1.0, "clipped_negative": 1.0,
        "objective": objective,
    }  # fmt: skip
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected)


def part(x: Any, completions: list[int]) -> LossInputs:
    """The micro-batch of these completions, in this order, renumbered."""
    order_T = torch.cat([(x.completion == c).nonzero()[:, 0] for c in completions])
    lengths = tensor([int((x.completion == c).sum()) for c in completions])
    logp, rollout, old, ref = (
        each[order_T] for each in (x.logp, x.rollout_logp, x.old_logp, x.ref_logp)
    )
    renumbered_T = torch.arange(len(completions)).repeat_interleave(lengths)
    return LossInputs(
        logp, rollout, old, ref, renumbered_T, x.advantages[completions], x.group[completions]
    )


@ROWS
@each("parts", [[[0, 1, 2], [3, 4, 5, 6]], [[6], [2, 0], [5, 1, 4, 3]]])
def test_split_into_micro_batches_and_order_change_neither_gradient_nor_diagnostics(name, parts):
    recipe = resolve(name)
    if recipe.needs_whole_groups:
        parts = [[2, 0, 1], [6, 4, 3, 5]]
    lengths_C, x = random_inputs()
    weight_C = recipe.weights(lengths_C, tensor([False, True] + [False] * 5), max_length=9)
    loss, sums = recipe.loss(x, weight_C)
    results = [recipe.loss(part(x, completions), weight_C[completions]) for completions in parts]
    split_T = gradient_of(torch.stack([loss for loss, _ in results]).sum(), x)
    assert_close(split_T, gradient_of(loss, x), atol=1e-12, rtol=1e-12)
    for key, value in sums.items():
        added = torch.stack([part_sums[key] for _, part_sums in results]).sum()
        assert_close(added, value, check_dtype=False)


def test_weight_of_zero_takes_surrogate_and_kl_of_a_completion_out():
    lengths_C, x = random_inputs()
    masked_C = tensor([False, True, False, False, True, False, False])
    recipe, kept = resolve("grpo_masked"), [0, 2, 3, 5, 6]
    loss, _ = recipe.loss(x, recipe.weights(lengths_C, masked_C, 9))
    assert torch.equal(gradient_of(loss, x) == 0, masked_C[x.completion])
    alone, _ = recipe.loss(part(x, kept), recipe.weights(lengths_C[kept], NO_FLAT[:5], 9))
    assert_close(alone, loss)  # dropping them before the forward pass is the same objective


AT_PI_EQUAL_ALPHA = {  # the coefficient of weight * grad logp at each token, if it is not A itself
    "asymre": lambda A_C, length_C: A_C + 0.1,
    "red_weight": lambda A_C, length_C: A_C * A_C.exp(),
    "unclipped": lambda A_C, length_C: A_C * length_C,  # every token has the ratio of the sequence
    "opmd_kimi": lambda A_C, length_C: 2 * 0.1 * A_C,
    "opmd_pairwise": lambda A_C, length_C: (
        2 * 0.1 * torch.cat([A_C[:3] - A_C[:3].mean(), A_C[3:] - A_C[3:].mean()])
    ),
}


@ROWS
def test_gradient_at_pi_equal_alpha_is_that_of_reinforce_unless_stated(name):
    lengths_C, x = random_inputs()
    alpha = x.rollout_logp
    x = replace(x, logp=alpha.clone().requires_grad_(), old_logp=alpha, ref_logp=alpha)
    recipe = resolve(name)
    weight_C = recipe.weights(lengths_C, NO_FLAT, 9).double()
    loss, sums = recipe.loss(x, weight_C)
    coefficient_C = AT_PI_EQUAL_ALPHA.get(name, lambda A_C, length_C: A_C)(x.advantages, lengths_C)
    assert_close(gradient_of(loss, x), -(weight_C * coefficient_C)[x.completion])
    assert (
        float(
            sums["clipped_positive"] + sums["clipped_negative"] + sums["kl_alpha"] + sums["kl_ref"]
        )
        == 0.0
    )


@ROWS
@each("gap", [-300.0, -30.0, 30.0, 300.0])
def test_gradient_is_finite_whatever_the_log_ratio(name, gap):
    _, x = random_inputs()
    for field in ("rollout_logp", "old_logp", "ref_logp"):
        x = replace(
            x,
            **{field: x.rollout_logp.index_add(0, tensor([2]), tensor([gap], dtype=torch.float64))},
        )
    x = replace(x, **{f: getattr(x, f).float() for f in ("rollout_logp", "old_logp", "ref_logp", "advantages")},
                logp=x.logp.detach().float().requires_grad_())  # fmt: skip
    loss, sums = resolve(name).loss(x, torch.ones(7))
    assert bool(gradient_of(loss, x).isfinite().all())
    assert all(bool(value.isfinite()) for value in sums.values())


# At pi = pi_k = alpha, with completions of one and two tokens: whose expected gradient is still along grad J? The first
# of three tokens ends the completion at once, the others are followed by a second: seven completions. The batch is one
# completion, so that a mean over its tokens is a mean over the completion's.

THETA = tensor(
    [0.1, -1.4, 0.8, 0.1, 1.1, -1.2, -1.7, 0.4, -0.2, 1.0, 0.3, 0.5], dtype=torch.float64
)
REWARD = tensor([0.8, 0.4, 0.3, 0.9, 1.0, 1.0, 0.8], dtype=torch.float64)
EXACT_AT_EVERY_LENGTH = {"rloo", "dr_grpo", "topr", "unclipped"}


def token_logp(theta: Tensor) -> list[Tensor]:
    first = torch.log_softmax(theta[:3], dim=0)
    second = torch.log_softmax(theta[:3] + theta[3:].view(3, 3), dim=1)
    return [first[:1]] + [torch.stack([first[i], second[i, j]]) for i in (1, 2) for j in range(3)]


def mean_reward(theta: Tensor) -> Tensor:
    return (torch.stack([logp_T.sum() for logp_T in token_logp(theta)]).exp() * REWARD).sum()


def cosine(name: str, **overrides) -> float:
    """Of the recipe's expected gradient at alpha, its reduction included, to grad J."""
    recipe, theta = resolve(name, overrides), THETA.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for logp_T, alpha_T, r in zip(token_logp(theta), token_logp(THETA), REWARD, strict=True):
        x = inputs(
            logp_T,
            alpha_T,
            alpha_T,
            alpha_T,
            A=r - mean_reward(THETA),
            completion=[0] * len(logp_T),
        )
        weight = recipe.weights(tensor([len(logp_T)]), tensor([False]), 2).double()
        total = total + alpha_T.sum().exp() * (weight * recipe.value(x)).sum()
    found, exact = (torch.autograd.grad(value, theta)[0] for value in (total, mean_reward(theta)))
    return float(found @ exact / found.norm() / exact.norm())


@each("name", sorted(set(RECIPES) - {"red_weight", "opmd_kimi", "opmd_pairwise"}))
def test_lengths_bias_only_the_gradient_of_token_means(name):
    assert (cosine(name) > 1 - 1e-12) == (name in EXACT_AT_EVERY_LENGTH), name


def test_bias_of_token_means_by_hand():
    assert cosine("grpo") == pytest.approx(0.9326, abs=5e-5)
    assert cosine("grpo", reduction="sequence_sum") == pytest.approx(1.0, abs=1e-12)
