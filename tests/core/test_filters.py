"""Filters, by numbers worked by hand: what they drop, and what that does to an objective."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from losses import at_ratios, gradient_of, inputs, random_inputs, with_statistics
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.filters import carm, finished_only, opsm, seq_max_k3, top_entropy
from lagrpo.core.inputs import concatenate, without_gradient
from lagrpo.core.recipes import resolve

FILTERS = ["opsm", "seq_max_k3", "carm", "finished_only", "top_entropy", "clip_cov", "m2po"]


# OPSM (arXiv 2512.02556)


@pytest.mark.parametrize(
    ("A", "delta", "stays"),
    [
        (-1.0, 0.166667, True),
        (-1.0, 0.166666, False),
        (-1.0, 1e-4, False),
        (0.0, 1e-4, True),
        (1.0, 1e-4, True),
    ],
)
def test_opsm_drops_failures_whose_mean_log_ratio_exceeds_delta(A, delta, stays):
    """log alpha/pi = (.2, .4, -.1), mean .1666…"""
    log_ratio_T = tensor([-0.2, -0.4, 0.1], dtype=torch.float64)
    x = inputs(log_ratio_T, torch.zeros(3).double(), A=[A], completion=[0, 0, 0])
    assert opsm(x, delta=delta).tolist() == [stays] * 3


def test_opsm_keeps_failures_that_the_policy_likes_better_than_before():
    assert opsm(at_ratios([5.0], A=-1.0), delta=0.0).tolist() == [True]


# The trust-region mask (arXiv 2512.23075)


@pytest.mark.parametrize(("delta", "stays"), [(0.306853, True), (0.306852, False)])
def test_seq_max_k3_takes_the_largest_token_of_a_completion(delta, stays):
    """rho - log rho - 1 = .30685… at rho = 2, less at the other tokens, whatever the sign of A."""
    log_ratio_T = tensor([0.0, log(2.0), log(0.9), 0.0], dtype=torch.float64)
    x = inputs(log_ratio_T, torch.zeros(4).double(), A=[-1.0, 1.0], completion=[0, 0, 0, 1])
    assert seq_max_k3(x, delta=delta).tolist() == [stays] * 3 + [True]


def test_seq_max_k3_is_the_same_for_tokens_that_have_become_rarer():
    for ratio in (0.5, 2.0):
        value = ratio - log(ratio) - 1
        assert seq_max_k3(at_ratios([ratio]), delta=value + 1e-9).tolist() == [True]
        assert seq_max_k3(at_ratios([ratio]), delta=value - 1e-9).tolist() == [False]


# CARM (arXiv 2610.02039)


@pytest.mark.parametrize(("delta", "stays"), [(0.3001, True), (0.2999, False)])
@pytest.mark.parametrize("A", [-1.0, 1.0])
def test_carm_bounds_the_mean_distance_of_log_ratios_which_do_not_cancel(A, delta, stays):
    """log rho = (.3, -.3): the mean is 0, that of its size .3."""
    log_ratio_T = tensor([0.3, -0.3, 0.0], dtype=torch.float64)
    x = inputs(log_ratio_T, torch.zeros(3).double(), A=[A, A], completion=[0, 0, 1])
    assert carm(x, delta=delta).tolist() == [stays, stays, True]


# Completions that were cut


def test_finished_only_drops_completions_that_were_cut_at_their_limit():
    x = inputs([-1.0] * 4, completion=[0, 0, 1, 2], finished=tensor([False, True, False]))
    assert finished_only(x).tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="which completions have finished"):
        finished_only(inputs([-1.0]))


# The tokens with the highest entropy (arXiv 2506.01939)


@pytest.mark.parametrize(
    ("share", "kept_tokens"),
    [
        (0.2, [3, 5]),  # the quantile .8 of six is the fifth: .9
        (0.3, [3, 5]),  # .7, between .5 and .9
        (0.5, [2, 3, 5]),  # .4, between .3 and .5
        (1.0, [0, 1, 2, 3, 4, 5]),
        (0.0, [5]),  # the quantile 1 is the largest, which is kept
    ],
)
def test_top_entropy_keeps_the_share_with_the_highest_entropy(share, kept_tokens):
    entropy = tensor([0.1, 0.2, 0.5, 0.9, 0.3, 1.4], dtype=torch.float64)
    recipe = resolve("grpo_top_entropy", {"share": share})
    x = with_statistics(recipe, at_ratios([1.0] * 6, entropy=entropy))
    assert recipe.kept(x).nonzero().flatten().tolist() == kept_tokens


@pytest.mark.parametrize("share", [0.2, 0.37, 0.8])
def test_top_entropy_has_the_quantile_of_torch(share):
    _, x = random_inputs(50)
    recipe = resolve("grpo_top_entropy", {"share": share})
    threshold = with_statistics(recipe, x).step["top_entropy"]
    assert_close(threshold, torch.quantile(x.entropy, 1 - share))


def test_top_entropy_without_entropies_is_rejected():
    with pytest.raises(ValueError, match="needs the entropy"):
        top_entropy(inputs([-1.0]))


# M2PO (arXiv 2510.01161)

LOG_RATIOS = [0.1, 0.2, -0.3, 0.6, 0.05, -0.05]
A = [1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def test_m2po_drops_the_largest_outward_tokens_until_their_mean_is_small():
    """Outward: the first four, squares .01, .04, .09, .36, mean .125. Without .36 and .09 the mean
    is .025 <= .04."""
    recipe = resolve("m2po")
    x = with_statistics(recipe, at_ratios([exp(d) for d in LOG_RATIOS], A))
    assert recipe.kept(x).tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert float(recipe.value(x).detach().mean()) == pytest.approx(0.371089, abs=5e-7)


@pytest.mark.parametrize(
    ("tau", "expected"),
    [
        (0.126, [1, 1, 1, 1, 1, 1]),
        (0.124, [1, 1, 1, 0, 1, 1]),  # (.01 + .04 + .09) / 3 = .0467
        (0.046, [1, 1, 0, 0, 1, 1]),
        (0.024, [1, 0, 0, 0, 1, 1]),
        (0.009, [0, 0, 0, 0, 1, 1]),
    ],
)
def test_m2po_keeps_tokens_that_are_not_outward_whatever_tau(tau, expected):
    recipe = resolve("m2po", {"tau": tau})
    x = with_statistics(recipe, at_ratios([exp(d) for d in LOG_RATIOS], A))
    assert recipe.kept(x).tolist() == expected


# Clip-Cov (arXiv 2505.22617)

# Five tokens of two completions: the mean of log pi is -1.2, that of A .4.
LOGP = (-0.2, -1.2, -2.2, -0.7, -1.7)
CLIP_COV_A = (1.0, -0.5)
COVARIANCES = (0.6, 0.0, -0.6, -0.45, 0.45)
"""(1.0, 0, -1.0) · .6 and (.5, -.5) · -.9."""


def of_two_completions(A: tuple[float, float] = CLIP_COV_A):
    logp_T = tensor(LOGP, dtype=torch.float64)
    return inputs(logp_T, logp_T, A=[*A], completion=[0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, [1, 1, 1, 1, 1]),
        (2e-4, [0, 1, 1, 1, 1]),  # at least one
        (0.39, [0, 1, 1, 1, 1]),  # 1.95 of 5 tokens
        (0.41, [0, 1, 1, 1, 0]),
        (0.61, [0, 1, 1, 1, 0]),  # the third has no covariance above 0
        (1.0, [0, 1, 1, 1, 0]),
    ],
)
def test_clip_cov_drops_the_share_with_the_highest_covariance(share, expected):
    recipe = resolve("dr_grpo", {"filters": ["clip_cov"], "share": share})
    x = with_statistics(recipe, of_two_completions())
    mean_logp, mean_advantage = x.step["clip_cov"][:2].tolist()
    assert (mean_logp, mean_advantage) == pytest.approx((-1.2, 0.4))
    covariance_T = (x.logp.detach() - mean_logp) * (x.advantage - mean_advantage)
    assert covariance_T.tolist() == pytest.approx(COVARIANCES)
    assert recipe.kept(x).tolist() == expected


def test_clip_cov_drops_nothing_if_all_advantages_are_equal():
    recipe = resolve("dr_grpo", {"filters": ["clip_cov"], "share": 1.0})
    x = with_statistics(recipe, of_two_completions(A=(0.5, 0.5)))
    assert recipe.kept(x).tolist() == [1] * 5


def test_m2po_without_outward_tokens_drops_nothing():
    recipe = resolve("m2po")
    x = with_statistics(recipe, at_ratios([0.1, 9.0, 1.0, 5.0], A=[1.0, -1.0, 1.0, 0.0]))
    assert recipe.kept(x).tolist() == [1.0] * 4


def test_m2po_keeps_the_mean_below_tau_though_values_are_equal():
    """Completions of the same text have the same log-ratios: of two tokens at the border none may
    stay."""
    recipe = resolve("m2po")
    log_ratios = (0.1, 0.25, 0.25)  # squares .01, .0625, .0625: means .036 of two, .045 of three
    x = with_statistics(recipe, at_ratios([exp(d) for d in log_ratios]))
    kept_T = recipe.kept(x).bool()
    assert x.rollout_logp is not None
    squares = (x.logp - x.rollout_logp).detach().square()
    assert float(squares[kept_T].mean()) <= 0.04
    assert kept_T.tolist() == [True, False, False]


# What a filter does to an objective


def test_m2po_divides_by_all_tokens_not_by_those_that_stay():
    recipe = resolve("m2po")
    x = with_statistics(recipe, at_ratios([exp(d) for d in LOG_RATIOS], A))
    weight_C = recipe.weights(torch.ones(6).long(), torch.zeros(6).bool(), 8).double()
    assert recipe.loss(x, weight_C).item() == pytest.approx(-0.371089, abs=5e-7)


@pytest.mark.parametrize("keep", FILTERS)
def test_filter_multiplies_any_surrogate_and_has_no_gradient_of_its_own(keep):
    _, x = random_inputs()
    for name in ("dr_grpo", "rec_ring_nois", "sapo", "opmd"):
        recipe = resolve(name, {"filters": [keep]})
        plain = resolve(name)
        y = with_statistics(recipe, x)
        kept_T = recipe.kept(y)
        assert set(kept_T.tolist()) <= {0.0, 1.0}
        assert_close(recipe.value(y), kept_T * plain.value(x))
        gradient_T = gradient_of(recipe.value(y).sum(), y)
        assert_close(gradient_T, kept_T * gradient_of(plain.value(x).sum(), x))


def test_filtered_tokens_keep_their_kl_term():
    _, x = random_inputs()
    recipe = resolve("grpo", {"filters": ["finished_only"]})
    without = resolve("grpo")
    weight_C = torch.ones(7).double()
    filtered = recipe.differentiate(x, weight_C)
    plain = without.differentiate(x, weight_C)
    dropped = filtered.filtered_T
    assert dropped.tolist() == (~x.finished[x.completion]).tolist()
    assert_close(filtered.gradient_T[~dropped], plain.gradient_T[~dropped])
    assert bool((filtered.gradient_T[dropped] != 0).all())
    beta_kl = gradient_of(0.04 * without.penalty(x).sum(), x)
    assert_close(filtered.gradient_T[dropped], beta_kl[dropped])


def test_two_filters_drop_what_either_drops():
    _, x = random_inputs()
    names = ["seq_max_k3", "finished_only"]
    both = resolve("dr_grpo", {"filters": names, "filters.seq_max_k3.delta": 0.1})
    first = resolve("dr_grpo", {"filters": names[:1], "delta": 0.1})
    second = resolve("dr_grpo", {"filters": names[1:]})
    assert_close(both.kept(x), first.kept(x) * second.kept(x))
    counts = [float(recipe.kept(x).sum()) for recipe in (both, first, second)]
    assert 0 < counts[0] < min(counts[1:])


def test_differentiate_tells_filtered_tokens_from_clipped_ones():
    """Four completions of one token: inside, clipped, filtered, and both."""
    x = at_ratios([1.0, 3.0, 1.0, 3.0], finished=tensor([True, True, False, False]))
    derivative = resolve("grpo_finished").differentiate(x, torch.ones(4))
    assert derivative.filtered_T.tolist() == [False, False, True, True]
    assert derivative.clipped_T.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("m2po", {"tau": 0.02}),
        ("m2po_released", {"tau": 0.02, "least_low": 0.0, "least_high": 0.0}),
        ("grpo_top_entropy", {}),
        ("grpo", {"filters": ["clip_cov"]}),
    ],
    ids=["m2po", "m2po_released", "top_entropy", "clip_cov"],
)
def test_statistics_of_a_step_are_those_of_all_its_micro_batches_together(name, knobs):
    recipe = resolve(name, knobs)
    _, one = random_inputs(5, seed=1)
    _, other = random_inputs(7, seed=2)
    # Three times the log-ratios and entropies, so that the two parts have different statistics.
    farther = 3 * other.logp - 2 * other.rollout_logp
    other = replace(other, logp=farther, entropy=3 * other.entropy)
    parts = [without_gradient(one), without_gradient(other)]
    together = recipe.collect(concatenate(parts))
    assert_close(together, recipe.collect(concatenate(parts[::-1])))
    alone = recipe.collect(parts[0])
    key = next(iter(together))
    assert not torch.equal(together[key], alone[key])


def test_concatenated_micro_batches_are_the_completions_of_both():
    _, one = random_inputs(5, seed=1)
    _, other = random_inputs(7, seed=2)
    both = concatenate([one, other])
    assert both.completion.tolist() == [
        *one.completion.tolist(),
        *(5 + c for c in other.completion.tolist()),
    ]
    assert_close(both.advantage, torch.cat([one.advantage, other.advantage]))
    assert concatenate([one, replace(other, entropy=None)]).entropy is None
