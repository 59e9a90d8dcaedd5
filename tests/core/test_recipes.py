"""The rows of the table, whole: what they are made of, what they read, and identities that hold for
all of them."""

import re
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from losses import gradient_of, inputs, random_inputs, with_statistics
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.inputs import LossInputs, without_gradient
from lagrpo.core.probe import OPTIONAL
from lagrpo.core.recipes import bounds_whole_completions, inert_over_pi_k, resolve
from lagrpo.core.rows import DISTILLATION_ROWS, FAMILIES, RECIPES

NO_FLAT = tensor([False] * 7)
ROWS = pytest.mark.parametrize("name", sorted(RECIPES))


PUBLISHED = """
grpo: advantage=normalized advantage.eps_std=0.0001 surrogate=clipped surrogate.epsilon_low=0.2
    surrogate.epsilon_high=0.2 beta=0.04 kl=k3 reduction=sequence_mean surrogate.ratio=token
grpo_masked: beta=0.1 reduction=sequence_mean mask_zero_variance=True
off_policy_grpo_exact: surrogate=clipped_exact beta=0.1 reduction=sequence_mean
dr_grpo: advantage=centered reduction=constant_length beta=0.0
dapo: surrogate.epsilon_low=0.2 surrogate.epsilon_high=0.28 mask_zero_variance=True
    reduction=token_mean
gspo: surrogate.ratio=length_normalized surrogate.epsilon_low=0.0003 surrogate.epsilon_high=0.0004
cispo: surrogate=reinforce surrogate.weight=capped_ratio surrogate.weight.epsilon_high=4.0
    surrogate.mask=None
grpo_tis: surrogate.denominator=pi_k correction=truncated correction.cap=2.0
grpo_icepop: correction=masked correction.floor=0.5 correction.cap=5.0
rec_ring_is: surrogate.mask=ring surrogate.weight=importance surrogate.mask.epsilon_high=0.2
    surrogate.mask.outer_high=2.0
dppo_tv: surrogate.mask=tv surrogate.mask.delta_low=0.15 surrogate.mask.delta_high=0.15
    surrogate.weight=importance advantage=normalized reduction=constant_length
dppo_kl: surrogate.mask=binary_kl surrogate.mask.delta_low=0.05 surrogate.mask.delta_high=0.05
    reduction=constant_length
prime_rl: surrogate.mask=tv surrogate.mask.delta_high=0.2 surrogate.regularizer=opmd
    surrogate.regularizer.anchor=alpha surrogate.regularizer.strength=0.001 advantage=centered
    reduction=token_mean
ipo_mask: surrogate.mask=tv_two_side surrogate.mask.delta=0.1
rollout_is: surrogate.mask=two_side surrogate.weight=importance advantage=normalized
decoupled_ppo: surrogate=clipped_proportional reduction=token_mean
a3po: surrogate=clipped_by_staleness surrogate.epsilon_low=0.2
m2po: surrogate=unclipped filters=['m2po'] filters.m2po.tau=0.04 reduction=sequence_mean
    advantage=normalized
m2po_released: surrogate.tau=0.04 surrogate.least_low=0.3 surrogate.least_high=0.5
    reduction=token_mean
sapo: surrogate.weight.temperature_positive=1.0 surrogate.weight.temperature_negative=1.05
    reduction=sequence_mean
vespo: surrogate.weight.power_positive=2.0 surrogate.weight.decay_positive=3.0
    surrogate.weight.power_negative=3.0 surrogate.weight.decay_negative=2.0 reduction=token_mean
seq_tis: surrogate.weight=capped_sequence surrogate.weight.cap=8.0 reduction=sequence_mean
opsm: filters=['opsm'] filters.opsm.denominator=alpha beta=0.0
trm: filters=['seq_max_k3'] filters.seq_max_k3.denominator=alpha
oapl: advantage=log_mean_exp advantage.strength=1.0 surrogate=opmd_kimi surrogate.anchor=alpha
    surrogate.strength=0.001
tba: surrogate=opmd_pairwise surrogate.anchor=pi_ref
grpo_top_entropy: filters.top_entropy.share=0.2
online_dpo: surrogate.anchor=pi_ref surrogate.strength=0.1
opd: advantage=zero token_advantage=reverse_kl token_advantage.student=pi surrogate=reinforce
opd_stale: token_advantage.student=alpha surrogate=unclipped reduction=token_mean
grpo_opd: token_advantage.strength=1.0 surrogate.epsilon_high=0.2 reduction=sequence_mean
iw_opd: token_advantage=reverse_kl_by_drift token_advantage.gamma=0.5 surrogate=reinforce
"""


@pytest.mark.parametrize(
    "row", re.split(r"\n(?=\S)", PUBLISHED.strip()), ids=lambda row: row.split(":")[0]
)
def test_rows_have_the_published_numbers(row):
    name, _, knobs = row.partition(":")
    settings = resolve(name).settings
    expected = dict(knob.split("=") for knob in knobs.split())
    assert {knob: str(settings[knob]) for knob in expected} == expected


def test_every_row_has_a_formula_a_source_and_a_family():
    assert {name for rows in FAMILIES.values() for name in rows} == set(RECIPES)
    for name, row in RECIPES.items():
        assert row.formula, name
        assert row.source, name
        assert row.name == name
        assert name in FAMILIES[row.family]


WITH_KL = {"grpo", "grpo_masked", "off_policy_grpo", "off_policy_grpo_exact", "grpo_two_sided"}
PREFERENCES = {"online_dpo", "online_ipo"}
DISTILLATION = set(DISTILLATION_ROWS)
STEP_STATISTICS = {"m2po", "m2po_released", "bapo", "grpo_top_entropy"}
COMPARES_COMPLETIONS = {"opmd_pairwise", "tba", "gepo"} | PREFERENCES
USES_ZERO_ADVANTAGE = WITH_KL | STEP_STATISTICS | COMPARES_COMPLETIONS | DISTILLATION
USES_ZERO_ADVANTAGE |= {"asymre", "opmd", "prime_rl", "ipo_mask", "opmd_kimi", "oapl"}
OVER_PI_K = """
    off_policy_grpo_exact clipped_proportional geppo decoupled_ppo grpo_recomputed grpo_tis
    grpo_tis_sequence grpo_mis_sequence grpo_icepop opmd_pairwise
"""
WITHOUT_ALPHA = """
    reinforce stale_reinforce grpo_recomputed rloo asymre red_drop red_weight opmd_kimi
    opmd_pairwise positive_only tba online_dpo online_ipo opd
"""
READS = {
    "pi_k": (lambda row: row.needs_old_logp, set(OVER_PI_K.split())),
    "pi_ref": (
        lambda row: row.needs_pi_ref,
        WITH_KL | {"opmd_kimi", "tba"} | PREFERENCES | DISTILLATION,
    ),
    "not alpha": (lambda row: not row.needs_rollout_logp, set(WITHOUT_ALPHA.split())),
    "groups": (lambda row: row.needs_whole_groups, COMPARES_COMPLETIONS),
    "staleness": (lambda row: row.needs_staleness, {"a3po"}),
    "statistics": (lambda row: row.needs_step_statistics, STEP_STATISTICS),
    "finished": (lambda row: "finished" in row.required_inputs, {"grpo_finished"}),
    "entropy": (lambda row: "entropy" in row.required_inputs, {"grpo_top_entropy"}),
    "advantage of 0": (lambda row: not row.skips_zero_advantage, USES_ZERO_ADVANTAGE),
}


@pytest.mark.parametrize(("is_needed", "rows"), READS.values(), ids=READS)
def test_rows_read_what_their_formulas_need(is_needed, rows):
    assert {name for name in RECIPES if is_needed(resolve(name))} == rows


@ROWS
def test_rows_compute_from_what_they_declare_and_nothing_else(name):
    lengths_C, x = random_inputs()
    recipe = resolve(name)
    x = with_statistics(recipe, x)
    blind = replace(x, **dict.fromkeys(set(OPTIONAL) - recipe.required_inputs))
    weight_C = recipe.weights(lengths_C, NO_FLAT, 9)
    assert_close(recipe.loss(blind, weight_C), recipe.loss(x, weight_C))
    assert_close(recipe.collect(without_gradient(blind)), dict(x.step))


@ROWS
def test_rows_fail_without_what_they_declare(name):
    _, x = random_inputs()
    recipe = resolve(name)
    for field in recipe.required_inputs:
        with pytest.raises(ValueError, match="this objective needs"):
            recipe.loss(with_statistics(recipe, replace(x, **{field: None})), torch.ones(7))


@ROWS
def test_completions_of_advantage_zero_have_a_gradient_unless_the_row_skips_them(name):
    _, x = random_inputs()
    x = replace(x, advantages=x.advantages.index_fill(0, tensor([1, 4]), 0.0))
    recipe = resolve(name)
    derivative = recipe.differentiate(with_statistics(recipe, x), torch.ones(7).double())
    gradient_of_zeros = derivative.gradient_T[x.advantage == 0]
    if recipe.skips_zero_advantage:
        assert gradient_of_zeros.tolist() == [0.0] * len(gradient_of_zeros)
    # These read such completions, and push none.
    elif name not in STEP_STATISTICS | PREFERENCES | {"gepo"}:
        assert bool((gradient_of_zeros != 0).any())


@pytest.mark.parametrize(
    ("name", "overrides", "reads"),
    [
        ("off_policy_grpo", {"beta": 0.0}, {"rollout_logp"}),
        ("reinforce", {"weight": "importance"}, {"rollout_logp"}),
        ("reinforce", {"weight": "importance", "denominator": "pi_k"}, {"old_logp"}),
        ("rloo", {"correction": "truncated"}, {"rollout_logp", "old_logp"}),
        ("grpo_tis", {"correction": "none"}, {"old_logp"}),
        ("opmd", {"anchor": "pi_ref"}, {"ref_logp"}),
        ("stale_reinforce", {"beta": 0.1, "kl_importance": True}, {"ref_logp", "rollout_logp"}),
        ("reinforce", {"filters": ["finished_only"]}, {"finished"}),
        ("reinforce", {"token_advantage": "reverse_kl"}, {"ref_logp"}),
        ("opd", {"student": "alpha"}, {"ref_logp", "rollout_logp"}),
        ("opd", {"advantage": "centered", "token_advantage": "none"}, set()),
        ("reinforce", {"filters": ["top_entropy"]}, {"entropy"}),
        (
            "reinforce",
            {"filters": ["opsm"], "filters.opsm.denominator": "pi_k"},
            {"old_logp"},
        ),
        (
            "rec_one_side_is",
            {"mask.denominator": "pi_k"},
            {"old_logp", "rollout_logp"},
        ),
    ],
)
def test_overrides_change_what_a_recipe_reads(name, overrides, reads):
    assert resolve(name, overrides).required_inputs == reads


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("opd", {}, [-1.3863, 1.3863]),
        ("opd_recomputed", {}, [-2.7726, 0.6931]),
        ("opd_stale", {}, [-1.3863, 0.3466]),
        ("opd_forward", {}, [-1.5, 1.5]),
        # A - d is -.3863 and 2.3863: no token has moved out of the range the way it points.
        ("grpo_opd", {}, [-0.7726, 1.1931]),
        # A - d / 2 is .3069, so the first token, at rho = 2, is clipped.
        ("grpo_opd", {"token_advantage.strength": 0.5}, [0.0, 0.8466]),
        # Half of the completion's |d| lies before the second token: 1.5 and 1.25.
        ("iw_opd", {}, [-1.0397, 0.8664]),
    ],
    ids=["opd", "recomputed", "stale", "forward", "grpo", "grpo of half strength", "iw"],
)
def test_gradient_of_distillation_by_hand(name, overrides, expected):
    """rho is 2 and .5; pi/pi_ref is 4 and 1/4, alpha/pi_ref 2 and 1/2; both completions alike."""
    x = inputs(
        tensor([0.5, 0.25, 0.5, 0.25]).log().requires_grad_(),
        tensor([0.25, 0.5, 0.25, 0.5]).log(),
        ref=tensor([0.125, 1.0, 0.125, 1.0]).log(),
        A=1.0 if name == "grpo_opd" else 0.0,
        completion=[0, 0, 1, 1],
    )
    gradient_T = gradient_of(resolve(name, overrides).value(x).sum(), x)
    assert_close(gradient_T, tensor(expected + expected), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", DISTILLATION_ROWS)
def test_completion_of_advantage_zero_does_not_move_where_all_policies_are_the_teacher(name):
    _, x = random_inputs()
    pi = x.logp.detach()
    x = replace(x, rollout_logp=pi, ref_logp=pi, advantages=torch.zeros_like(x.advantages))
    derivative = resolve(name).differentiate(x, torch.ones(7).double())
    assert bool((derivative.gradient_T == 0).all())


def test_filters_and_statistics_read_the_advantage_of_the_token():
    """-d is positive for the first token alone, which has moved to rho = 2: m2po drops it."""
    x = inputs(
        tensor([0.5, 0.25]).log().requires_grad_(),
        tensor([0.25, 0.25]).log(),
        ref=tensor([1.0, 0.125]).log(),
        A=0.0,
        completion=[0, 0],
    )
    recipe = resolve("opd_recomputed", {"filters": ["m2po"]})
    derivative = recipe.differentiate(with_statistics(recipe, x), torch.ones(1))
    assert derivative.filtered_T.tolist() == [True, False]


def test_loss_and_its_derivative_by_hand():
    # one completion of two tokens (A = 2, ratios 2 and .5), one of one token (A = -1, ratio .5)
    half = log(0.5)
    quarter = log(0.25)
    ref = [half, half, quarter]  # d = 0, -ln 2, 0: k3 = 0, 2 - ln 2 - 1, 0
    x = inputs(
        [half, quarter, quarter],
        [quarter, half, half],
        ref=ref,
        A=[2.0, -1.0],
        completion=[0, 0, 1],
    )
    recipe = resolve("grpo", {"beta": 0.1})
    # values: 2 min(2, 1.2) = 2.4, 2 * .5 = 1, -max(.5, .8) = -.8
    k3 = 1 - log(2)
    objective = 0.25 * (2.4 + 1.0) + 0.5 * -0.8
    assert_close(recipe.loss(x, tensor([0.25, 0.5])), tensor(-(objective - 0.1 * 0.25 * k3)))
    derivative = recipe.differentiate(x, tensor([0.25, 0.5]))
    assert_close(derivative.loss, tensor(-(objective - 0.1 * 0.25 * k3)))
    # the first and the last are clipped; of k3: beta (1 - e^-d) = .1 (1 - 2)
    assert_close(derivative.gradient_T, tensor([0.0, -0.25 * (1.0 - 0.1 * (1 - 2)), 0.0]))
    assert derivative.clipped_T.tolist() == [True, False, True]
    assert derivative.filtered_T.tolist() == [False] * 3
    assert_close(derivative.kl_T, tensor([0.0, k3, 0.0]))


@ROWS
def test_derivative_is_the_gradient_of_the_loss(name):
    lengths_C, x = random_inputs()
    recipe = resolve(name)
    x = with_statistics(recipe, x)
    weight_C = recipe.weights(lengths_C, NO_FLAT, 9).double()
    loss = recipe.loss(x, weight_C)
    derivative = recipe.differentiate(x, weight_C)
    assert_close(derivative.loss, loss.detach())
    assert_close(derivative.gradient_T, gradient_of(loss, x))
    assert not derivative.loss.requires_grad
    assert not derivative.kl_T.requires_grad


def part(x: LossInputs, completions: list[int]) -> LossInputs:
    """The micro-batch of these completions, in this order, renumbered."""
    order_T = torch.cat([(x.completion == c).nonzero()[:, 0] for c in completions])
    lengths = tensor([int((x.completion == c).sum()) for c in completions])
    token_fields = ("logp", "rollout_logp", "old_logp", "ref_logp", "staleness", "entropy")
    completion_fields = ("advantages", "group", "finished")
    return LossInputs(
        **{name: getattr(x, name)[order_T] for name in token_fields},
        **{name: getattr(x, name)[completions] for name in completion_fields},
        completion=torch.arange(len(completions)).repeat_interleave(lengths),
        step=x.step,
    )


@ROWS
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2], [3, 4, 5, 6]], [[6], [2, 0], [5, 1, 4, 3]]], ids=["two", "three"]
)
def test_split_into_micro_batches_and_order_do_not_change_loss_gradient_and_diagnostics(
    name, parts
):
    recipe = resolve(name)
    if recipe.needs_whole_groups:
        parts = [[2, 0, 1], [6, 4, 3, 5]]
    lengths_C, x = random_inputs()
    x = with_statistics(recipe, x)
    weight_C = recipe.weights(lengths_C, tensor([False, True] + [False] * 5), max_length=9)
    unsplit = recipe.differentiate(x, weight_C)
    results = [recipe.differentiate(part(x, cs), weight_C[cs]) for cs in parts]
    order = torch.cat(
        [(x.completion == c).nonzero()[:, 0] for completions in parts for c in completions]
    )
    assert_close(torch.stack([result.loss for result in results]).sum(), unsplit.loss)
    for field in ("gradient_T", "kl_T"):
        split = torch.cat([getattr(result, field) for result in results])
        assert_close(split, getattr(unsplit, field)[order], atol=1e-12, rtol=1e-12)
    for field in ("clipped_T", "filtered_T"):
        split = torch.cat([getattr(result, field) for result in results])
        assert torch.equal(split, getattr(unsplit, field)[order])


def test_weight_of_zero_takes_surrogate_and_kl_of_a_completion_out():
    lengths_C, x = random_inputs()
    masked_C = tensor([False, True, False, False, True, False, False])
    recipe = resolve("grpo_masked")
    completions_kept = [0, 2, 3, 5, 6]
    loss = recipe.loss(x, recipe.weights(lengths_C, masked_C, 9))
    assert torch.equal(gradient_of(loss, x) == 0, masked_C[x.completion])
    alone = recipe.loss(
        part(x, completions_kept), recipe.weights(lengths_C[completions_kept], NO_FLAT[:5], 9)
    )
    assert_close(alone, loss)  # dropping them before the forward pass is the same objective


# At lag 0


def of_tokens(function):
    """The coefficient of weight * grad logp at each token, from the advantages and lengths of
    completions."""
    return lambda x, lengths_C: function(x.advantages, lengths_C)[x.completion]


def of_group_mean(A_C: Tensor) -> Tensor:
    return torch.cat([A_C[:3] - A_C[:3].mean(), A_C[3:] - A_C[3:].mean()])


def of_pairs(A_C: Tensor) -> Tensor:
    """G for the best completion of a group and -G for the worst, 0 for the others: a mean over the
    completions is then one over groups."""
    signs = torch.zeros(7, dtype=torch.float64)
    for first, last in ((0, 3), (3, 7)):
        signs[first + int(A_C[first:last].argmax())] = last - first
        signs[first + int(A_C[first:last].argmin())] = first - last
    return signs


def of_high_entropy(x: LossInputs, lengths_C: Tensor) -> Tensor:
    assert x.entropy is not None
    return x.advantage * (x.entropy >= x.entropy.quantile(0.8))


def of_group_expectation(x: LossInputs, lengths_C: Tensor) -> Tensor:
    """w A, w = q sum(q) / sum(q^2); 0 where w is beyond [.8, 1.2] on the side that A points to."""
    logp = x.logp.detach()
    q_C = torch.stack([logp[x.completion == c].mean() for c in range(7)]).exp()
    parts = [q_C[:3], q_C[3:]]
    w_C = torch.cat([q * q.sum() / q.square().sum() for q in parts])
    is_cut_C = ((x.advantages > 0) & (w_C > 1.2)) | ((x.advantages < 0) & (w_C < 0.8))
    return (w_C * x.advantages * ~is_cut_C)[x.completion]


AT_PI_EQUAL_ALPHA = {  # if it is not A itself
    "asymre": of_tokens(lambda A_C, length_C: A_C + 0.1),
    "red_weight": of_tokens(lambda A_C, length_C: A_C * A_C.exp()),
    "unclipped": of_tokens(
        lambda A_C, length_C: A_C * length_C
    ),  # every token has the ratio of the sequence
    "opmd_kimi": of_tokens(lambda A_C, length_C: 2 * 0.1 * A_C),
    "oapl": of_tokens(lambda A_C, length_C: 2 * 1e-3 * A_C),
    "opmd_pairwise": of_tokens(lambda A_C, length_C: 2 * 0.1 * of_group_mean(A_C)),
    "tba": of_tokens(lambda A_C, length_C: 2 * 0.05 * of_group_mean(A_C)),
    "online_dpo": of_tokens(lambda A_C, length_C: 0.1 / 2 * of_pairs(A_C)),
    "online_ipo": of_tokens(lambda A_C, length_C: 2 / (2 * 0.1) * of_pairs(A_C)),
    "gepo": of_group_expectation,
    "grpo_top_entropy": of_high_entropy,
    "grpo_finished": lambda x, lengths_C: x.advantage * x.finished[x.completion],
}


@ROWS
def test_gradient_at_pi_equal_alpha_is_that_of_reinforce_unless_stated(name):
    lengths_C, x = random_inputs()
    alpha = x.rollout_logp
    assert alpha is not None
    x = replace(x, logp=alpha.clone().requires_grad_(), old_logp=alpha, ref_logp=alpha)
    recipe = resolve(name)
    x = with_statistics(recipe, x)
    weight_C = recipe.weights(lengths_C, NO_FLAT, 9).double()
    derivative = recipe.differentiate(x, weight_C)
    coefficient = AT_PI_EQUAL_ALPHA.get(name, lambda x, lengths_C: x.advantage)
    coefficient_T = coefficient(x, lengths_C)
    assert_close(derivative.gradient_T, -weight_C[x.completion] * coefficient_T)
    assert torch.equal(derivative.clipped_T, coefficient_T == 0)
    assert float(derivative.kl_T.abs().sum()) == 0.0


# Far away


@ROWS
def test_loss_and_gradient_are_finite_whatever_the_log_ratio(name):
    _, x = random_inputs()
    x = replace(x, advantages=x.advantages.float(), entropy=x.entropy.float())
    recipe = resolve(name)
    for gap in (-300.0, -30.0, 30.0, 300.0):
        moved: dict[str, Any] = {"logp": x.logp.detach().float().requires_grad_()}
        for field in ("rollout_logp", "old_logp", "ref_logp"):
            shift = tensor([gap], dtype=torch.float64)
            moved[field] = getattr(x, field).index_add(0, tensor([2]), shift).float()
        derivative = recipe.differentiate(
            with_statistics(recipe, replace(x, **moved)), torch.ones(7)
        )
        results = (derivative.gradient_T, derivative.loss, derivative.kl_T)
        assert all(bool(result.isfinite().all()) for result in results), gap


# What never acts with one update per batch, and what is a bound on length


@pytest.mark.parametrize(
    ("name", "overrides", "inert"),
    [
        ("grpo", {}, []),
        ("grpo_recomputed", {}, ["surrogate"]),
        ("grpo", {"denominator": "pi_k", "beta": 0.0}, ["surrogate"]),
        ("gspo", {"denominator": "pi_k"}, ["surrogate"]),
        ("grpo", {"denominator": "pi_k", "ratio": "sequence", "beta": 0.0}, ["surrogate"]),
        ("off_policy_grpo_exact", {}, []),  # it reads alpha, too
        ("decoupled_ppo", {}, []),
        ("opmd_pairwise", {}, []),  # its anchor is no bound
        ("dppo_tv", {"mask.denominator": "pi_k"}, ["surrogate.mask"]),
        ("dppo_kl", {"mask.denominator": "pi_k"}, ["surrogate.mask"]),
        ("ipo_mask", {"mask.denominator": "pi_k"}, ["surrogate.mask"]),
        ("rec_ring_nois", {"mask.denominator": "pi_k"}, ["surrogate.mask"]),
        (
            "rec_one_side_is",
            {"mask.denominator": "pi_k", "weight.denominator": "pi_k"},
            ["surrogate.mask", "surrogate.weight"],
        ),
        ("rec_one_side_is", {"mask.denominator": "pi_k"}, ["surrogate.mask"]),
        ("sapo", {"denominator": "pi_k"}, ["surrogate.weight"]),
        ("vespo", {"denominator": "pi_k"}, ["surrogate.weight"]),
        ("seq_tis", {"denominator": "pi_k"}, ["surrogate.weight"]),
        ("cispo", {"denominator": "pi_k"}, ["surrogate.weight"]),
        ("opsm", {"filters.opsm.denominator": "pi_k"}, ["filters.opsm"]),
        ("trm", {"filters.seq_max_k3.denominator": "pi_k"}, ["filters.seq_max_k3"]),
        ("red_weight", {}, []),
        ("grpo_finished", {}, []),
    ],
)
def test_pieces_that_compare_pi_with_pi_k_alone_are_inert_while_they_are_equal(
    name, overrides, inert
):
    assert inert_over_pi_k(resolve(name, overrides)) == inert


@pytest.mark.parametrize(
    ("name", "overrides", "paths"),
    [
        ("grpo", {}, []),
        ("grpo", {"surrogate.ratio": "sequence"}, ["surrogate"]),
        ("gspo", {}, []),  # of the mean over tokens
        ("rec_two_side_nois", {"mask.ratio": "sequence"}, ["surrogate.mask"]),
        ("topr", {}, ["surrogate.weight"]),
        ("topr_token", {}, []),
        ("seq_tis", {}, ["surrogate.weight"]),
        ("vespo", {}, ["surrogate.weight"]),
        ("trm", {}, ["filters.seq_max_k3"]),
        ("opsm", {}, []),
        ("grpo_tis_sequence", {}, ["correction"]),
        ("grpo_tis", {}, []),
        ("unclipped", {}, []),  # no bound
        ("reinforce", {"weight": "importance", "weight.ratio": "sequence"}, []),
        ("grpo", {"kl": "k3_bias_corrected", "kl.ratio": "sequence"}, []),
    ],
)
def test_bounds_on_the_ratio_of_whole_completions_are_named(name, overrides, paths):
    assert bounds_whole_completions(resolve(name, overrides)) == paths


def test_fixed_bound_on_the_ratio_of_a_completion_is_a_filter_by_length():
    """Log-ratios of tokens of .031 nats, normal: a bound of 2 keeps nearly all completions of 100
    tokens, and a fifth of those of 6332."""
    generator = torch.Generator().manual_seed(0)
    share_kept = {}
    for length in (100, 6332):
        log_ratio_T = 0.031 * torch.randn(400 * length, generator=generator, dtype=torch.float64)
        completion_T = torch.arange(400).repeat_interleave(length)
        x = inputs(log_ratio_T, torch.zeros_like(log_ratio_T), completion=completion_T)
        recipe = resolve(
            "rec_two_side_nois", {"mask.ratio": "sequence", "epsilon_low": 0.5, "epsilon_high": 1.0}
        )
        share_kept[length] = float((recipe.value(x) != 0).double().mean())
    assert share_kept[100] > 0.95
    assert share_kept[6332] == pytest.approx(0.22, abs=0.05)


# At pi = pi_k = alpha, with completions of one and two tokens: whose expected gradient is still
# along grad J? The first of three tokens ends the completion at once, the others are followed by a
# second: seven completions. The batch is one completion, so that a mean over its tokens is a mean
# over the completion's.

THETA = tensor(
    [0.1, -1.4, 0.8, 0.1, 1.1, -1.2, -1.7, 0.4, -0.2, 1.0, 0.3, 0.5], dtype=torch.float64
)
REWARD = tensor([0.8, 0.4, 0.3, 0.9, 1.0, 1.0, 0.8], dtype=torch.float64)
EXACT_AT_EVERY_LENGTH = {
    *("rloo", "dr_grpo", "topr", "topr_token", "dppo_tv", "dppo_kl", "unclipped", "oapl"),
}


def token_logp(theta: Tensor) -> list[Tensor]:
    first = torch.log_softmax(theta[:3], dim=0)
    second = torch.log_softmax(theta[:3] + theta[3:].view(3, 3), dim=1)
    return [first[:1]] + [torch.stack([first[i], second[i, j]]) for i in (1, 2) for j in range(3)]


def mean_reward(theta: Tensor) -> Tensor:
    return (torch.stack([logp_T.sum() for logp_T in token_logp(theta)]).exp() * REWARD).sum()


def cosine(name: str, **overrides) -> float:
    """Cosine between grad J and the recipe's expected gradient at alpha, its reduction included."""
    recipe = resolve(name, overrides)
    theta = THETA.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for logp_T, alpha_T, r in zip(token_logp(theta), token_logp(THETA), REWARD, strict=True):
        x = inputs(
            logp_T,
            alpha_T,
            alpha_T,
            alpha_T,
            A=r - mean_reward(THETA),
            completion=[0] * len(logp_T),
            staleness=torch.zeros(len(logp_T)),
            entropy=torch.ones(len(logp_T)),
            finished=tensor([True]),
        )
        x = with_statistics(recipe, x)
        weight = recipe.weights(tensor([len(logp_T)]), tensor([False]), 2).double()
        total = total + alpha_T.sum().exp() * (weight * recipe.value(x)).sum()
    gradient, exact = (
        torch.autograd.grad(value, theta)[0] for value in (total, mean_reward(theta))
    )
    return float(gradient @ exact / gradient.norm() / exact.norm())


@pytest.mark.parametrize(
    "name", sorted(set(RECIPES) - {"red_weight", "opmd_kimi"} - COMPARES_COMPLETIONS)
)
def test_lengths_bias_only_the_gradient_of_token_means(name):
    assert (cosine(name) > 1 - 1e-12) == (name in EXACT_AT_EVERY_LENGTH), name


def test_bias_of_token_means_by_hand():
    assert cosine("grpo") == pytest.approx(0.9326, abs=5e-5)
    assert cosine("grpo", reduction="sequence_sum") == pytest.approx(1.0, abs=1e-12)
