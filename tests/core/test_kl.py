"""Estimators of KL(pi || pi_ref) and divergences."""

from functools import partial
from math import inf, log

import pytest
import torch
from losses import gradient_of, inputs
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.kl import (
    chi2,
    ess,
    k1,
    k2,
    k3,
    k3_bias_corrected,
    k3_clamped,
    k3_linear,
    kl,
    sampled_kl,
    sampled_tv,
    tv,
)
from lagrpo.core.weights import importance

P = tensor([0.5, 0.5])
Q = tensor([0.25, 0.75])


@pytest.mark.parametrize(
    ("estimator", "values", "gradient"),
    [
        (k1, [log(2), -log(2)], [1.0, 1.0]),
        (k2, [log(2) ** 2 / 2] * 2, [log(2), -log(2)]),
        (k3, [0.5 + log(2) - 1, 2 - log(2) - 1], [0.5, -1.0]),  # 1 - e^-d
    ],
)
def test_estimators_and_their_gradients_by_hand(estimator, values, gradient):
    x = inputs(
        tensor([log(0.5), log(0.2)]).requires_grad_(), ref=[log(0.25), log(0.4)]
    )  # d = ln 2, -ln 2
    assert_close(estimator(x), tensor(values))
    assert_close(gradient_of(estimator(x).sum(), x), tensor(gradient))


def test_k3_keeps_its_digits_near_zero():
    d = 1e-4  # k3 = d^2/2 - d^3/6 + ...: naive float32 would lose it all in e^-d - 1 + d
    assert_close(k3(inputs([d], ref=[0.0])), tensor([d * d / 2]), rtol=1e-2, atol=0.0)


def slope(estimator, d: float) -> tuple[float, float]:
    """The value at a gap of d nats, and its derivative by log pi."""
    x = inputs(
        tensor([d], dtype=torch.float64).requires_grad_(), ref=torch.zeros(1, dtype=torch.float64)
    )
    return estimator(x).item(), gradient_of(estimator(x).sum(), x).item()


def test_bounded_k3_does_not_explode_where_pi_has_lost_what_pi_ref_likes():
    assert slope(k3, -19.0) == pytest.approx((1.7848e8, -1.7848e8), rel=1e-4)
    assert slope(k3, -25.0)[1] == 0.0  # beyond 20 nats
    assert slope(k3_clamped, -15.0) == (10.0, 0.0)
    assert slope(k3, -log(11)) == pytest.approx((10 - log(11), -10.0))
    assert slope(k3_linear, -25.0) == pytest.approx((10 - log(11) + 10 * (25 - log(11)), -10))
    for d in (-2.3, -0.1, 0.0, 0.1, 8.0):  # nothing is bounded here
        assert slope(k3_linear, d) == pytest.approx(slope(k3, d), abs=1e-12)
        assert slope(k3_clamped, d) == slope(k3, d)
    assert slope(partial(k3_clamped, kl_bound=5.0), 15.0) == (5.0, 0.0)


def test_trls_bias_correction_has_the_value_of_k3_and_the_gradient_of_k2_both_weighted():
    logp, alpha, ref = -torch.rand(
        3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    x = inputs(logp.requires_grad_(), alpha, ref=ref)
    weight = importance(x).detach()
    assert_close(k3_bias_corrected(x), weight * k3(x))
    assert_close(gradient_of(k3_bias_corrected(x).sum(), x), gradient_of((weight * k2(x)).sum(), x))


def test_exact_divergences_by_hand():
    assert_close(kl(P, Q), tensor(0.5 * log(2) + 0.5 * log(2 / 3)))
    assert_close(tv(P, Q), tensor(0.25))
    assert_close(chi2(P, Q), (P.square() / Q).sum() - 1)
    certain = tensor([1.0, 0.0])
    fair = tensor([0.5, 0.5])
    assert_close(kl(certain, fair), tensor(log(2)))
    assert float(kl(fair, certain)) == float(chi2(fair, certain)) == inf
    assert [float(f(certain, certain)) for f in (kl, tv, chi2)] == [0.0, 0.0, 0.0]


def test_pinskers_and_the_chi2_bound_hold_for_random_distributions():
    p, q = torch.softmax(
        torch.randn(2, 5000, 4, generator=torch.Generator().manual_seed(0)).double() * 2, dim=-1
    )
    assert bool((tv(p, q) <= (kl(p, q) / 2).sqrt() + 1e-12).all())
    assert bool((kl(p, q) <= chi2(p, q).log1p() + 1e-12).all())


def test_second_moment_of_the_log_ratio_bounds_chi2_while_ratios_are_bounded():
    """chi2(pi || alpha) <= R^2 E_alpha[(log rho)^2] if 1/R <= rho <= R: Theorem 5.1 of M2PO (arXiv
    2510.01161)."""
    noise = torch.randn(2, 5000, 4, generator=torch.Generator().manual_seed(0)).double()
    p, alpha = torch.softmax(noise, dim=-1)
    log_rho = (p / alpha).log()
    R = log_rho.abs().amax(dim=-1).exp()
    second_moment = (alpha * log_rho.square()).sum(dim=-1)
    assert bool((chi2(p, alpha) <= R.square() * second_moment + 1e-12).all())


def test_effective_sample_size_by_hand():
    assert_close(ess(tensor([1.0, 1.0, 1.0, 1.0])), tensor(4.0))
    assert_close(ess(tensor([5.0, 0.0, 0.0])), tensor(1.0))
    assert_close(ess(tensor([3e30, 1e30])), tensor(1.6))  # no overflow of the squares
    assert float(ess(tensor([2.0, 1.0, 0.5, 0.5])) / 4) == pytest.approx(0.727273, abs=5e-7)


def test_divergences_of_samples_by_hand():
    log_ratio = tensor([2.0, 0.5, 1.0]).log()
    assert_close(sampled_tv(log_ratio), tensor((1 + 0.5 + 0) / 3 / 2))
    assert_close(sampled_tv(log_ratio, bounded=True), tensor(0.5 / 3))
    assert_close(sampled_kl(log_ratio), tensor((1 - log(2) - 0.5 + log(2)) / 3))
