"""Weights of `reinforce`, by numbers worked by hand."""

from functools import partial
from math import exp, inf, log

import pytest
import torch
from losses import at_ratios, gradient_of, inputs, random_inputs
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.recipes import resolve
from lagrpo.core.weights import (
    asymmetric_cap,
    capped_ratio,
    capped_sequence,
    exp_advantage,
    importance,
    sapo,
    tapered_ratio,
    vespo,
)

RATIOS = [0.3, 0.9, 1.0, 1.3, 3.5]


@pytest.mark.parametrize(
    ("weight", "up", "down"),
    [
        pytest.param(importance, RATIOS, RATIOS, id="importance"),
        pytest.param(
            capped_ratio, [0.3, 0.9, 1.0, 1.2, 1.2], [0.3, 0.9, 1.0, 1.2, 1.2], id="capped_ratio"
        ),
        pytest.param(
            partial(capped_sequence, cap=1.25),
            [0.3, 0.9, 1.0, 1.25, 1.25],
            [0.3, 0.9, 1.0, 1.25, 1.25],
            id="capped_sequence",
        ),
        pytest.param(tapered_ratio, [1.0] * 5, [0.3, 0.9, 1.0, 1.0, 1.0], id="tapered_ratio"),
        pytest.param(
            partial(tapered_ratio, cap=2.0), [1.0] * 5, [0.3, 0.9, 1.0, 1.3, 2.0], id="taper at 2"
        ),
        pytest.param(asymmetric_cap, RATIOS, [0.3, 0.9, 1.0, 1.0, 1.0], id="asymmetric_cap"),
        pytest.param(
            partial(asymmetric_cap, cap_positive=1.2, cap_negative=inf),
            [0.3, 0.9, 1.0, 1.2, 1.2],
            RATIOS,
            id="asymmetric_cap the other way round",
        ),
    ],
)
def test_weights_of_the_ratio_by_hand(weight, up, down):
    """An advantage of 0 is as a negative one."""
    for A, expected in ((1.0, up), (-1.0, down), (0.0, down)):
        assert_close(weight(at_ratios(RATIOS, A)), tensor(expected).double())


def test_exponential_weight_by_hand():
    assert_close(
        exp_advantage(inputs([0.0] * 3, A=[0.0, 1.0, -1.0]), weight_temperature=0.5),
        tensor([1, exp(2), exp(-2)]),
    )


def test_weight_of_a_whole_completion_is_the_product_of_its_tokens_ratios():
    log_ratio_T = tensor([3.0, 4.0, 0.5]).log()
    x = inputs(log_ratio_T, torch.zeros(3), completion=[0, 0, 1])
    assert_close(capped_sequence(x), tensor([8.0, 8.0, 0.5]))
    assert_close(capped_sequence(x, cap=20.0), tensor([12.0, 12.0, 0.5]))


# SAPO (arXiv 2511.20347)


@pytest.mark.parametrize(
    ("A", "values"),
    [
        (1.0, {0.5: 0.470007, 1.0: 1.0, 2.0: 1.572895, 4.0: 0.722827}),
        (-1.0, {0.5: 0.467070, 1.0: 1.0, 2.0: 1.536220, 4.0: 0.630445}),
    ],
    ids=["temperature 1", "temperature 1.05"],
)
def test_sapo_has_the_worked_weights(A, values):
    weights = sapo(at_ratios(list(values), A))
    assert_close(weights, tensor([*values.values()]).double(), atol=5e-7, rtol=0.0)


def test_sapo_has_the_gradient_of_its_soft_clip():
    """(4/t) sigmoid(t (rho - 1)) A, t = 1 if A > 0, else 1.05."""
    _, x = random_inputs(200)
    rho = (x.logp - x.rollout_logp).exp()
    t = torch.where(x.advantage > 0, 1.0, 1.05)
    soft_clip = 4 / t * torch.sigmoid(t * (rho - 1)) * x.advantage
    gradient_T = gradient_of(resolve("sapo").value(x).sum(), x)
    assert_close(gradient_T, gradient_of(soft_clip.sum(), x))


# VESPO (arXiv 2602.10693)


@pytest.mark.parametrize(
    ("A", "values"),
    [
        (1.0, {0.5: 1.120422, 2 / 3: 1.208125, 1.0: 1.0, 2.0: 0.199148, 4.0: 0.001975}),
        (0.0, {0.5: 1.120422, 2.0: 0.199148}),
        (-1.0, {0.5: 0.339785, 1.0: 1.0, 1.5: 1.241593, 2.0: 1.082682, 4.0: 0.158640}),
    ],
    ids=["positive", "zero", "negative"],
)
def test_vespo_has_the_worked_weights(A, values):
    weights = vespo(at_ratios(list(values), A))
    assert_close(weights, tensor([*values.values()]).double(), atol=5e-7, rtol=0.0)


@pytest.mark.parametrize(("A", "peak"), [(1.0, 2 / 3), (-1.0, 1.5)])
def test_vespo_is_largest_where_the_ratio_is_power_over_decay(A, peak):
    below, at, above = vespo(at_ratios([0.99 * peak, peak, 1.01 * peak], A)).tolist()
    assert below < at > above


def test_vespo_weighs_whole_completions_and_limits_their_log_ratio():
    log_ratio_T = tensor([log(2.0), log(0.25), -300.0, 300.0]).double()
    x = inputs(log_ratio_T, torch.zeros(4).double(), A=[1.0, 1.0, 1.0], completion=[0, 0, 1, 2])
    weight_T = vespo(x)
    assert weight_T[:2].tolist() == pytest.approx([1.120422] * 2, abs=5e-7)  # s = 1/2
    assert float(weight_T[2]) == pytest.approx(exp(2 * -18.42 + 3), rel=1e-6)
    assert float(weight_T[3]) == 0.0


# Positives and negatives


def test_topr_with_the_ratio_of_tokens_differs_from_topr_inside_a_completion_alone():
    log_ratio_T = tensor([0.5, 4.0, 0.5]).log().double()
    x = inputs(
        (log_ratio_T - 3).requires_grad_(),
        torch.full((3,), -3.0).double(),
        A=[-1.0, -1.0],
        completion=[0, 0, 1],
    )
    by_tokens = gradient_of(resolve("topr_token").value(x).sum(), x)
    by_completions = gradient_of(resolve("topr").value(x).sum(), x)
    assert_close(by_tokens, tensor([-0.5, -1.0, -0.5]).double())
    assert_close(by_completions, tensor([-1.0, -1.0, -0.5]).double())


def test_asymmetric_cap_pushes_down_no_harder_than_reinforce():
    x = at_ratios([0.5, 3.0, 0.5, 3.0], A=[1.0, 1.0, -1.0, -1.0])
    gradient_T = gradient_of(resolve("asymmetric_cap").value(x).sum(), x)
    assert_close(gradient_T, tensor([0.5, 3.0, -0.5, -1.0]).double())
