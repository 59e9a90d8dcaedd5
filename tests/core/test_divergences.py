from functools import partial
from math import inf, log

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.divergences import (
    bias_corrected,
    chi2,
    ess,
    importance_weighted,
    k1,
    k2,
    k3,
    k3_clamped,
    k3_linear,
    kl,
    tv,
)

P, Q = tensor([0.5, 0.5]), tensor([0.25, 0.75])


def test_estimators_by_hand():
    logp_T, logp_ref_T = tensor([log(0.5), log(0.2)]), tensor([log(0.25), log(0.4)])  # d = ln 2, -ln 2
    assert_close(k1(logp_T, logp_ref_T), tensor([log(2), -log(2)]))
    assert_close(k2(logp_T, logp_ref_T), tensor([log(2) ** 2 / 2] * 2))
    assert_close(k3(logp_T, logp_ref_T), tensor([0.5 + log(2) - 1, 2 - log(2) - 1]))


def slope(estimator, d: float) -> tuple[float, float]:
    """The value at a gap of d nats, and its derivative by logp."""
    logp_T = tensor([d], dtype=torch.float64).requires_grad_()
    value = estimator(logp_T, torch.zeros(1, dtype=torch.float64)).sum()
    return value.item(), float(torch.autograd.grad(value, logp_T)[0])


def test_a_bounded_k3_does_not_explode_where_pi_has_lost_what_pi_ref_likes():
    assert slope(k3, -25.0) == pytest.approx((7.2005e10, -7.2005e10), rel=1e-4)
    assert slope(partial(k3_clamped, bound=10.0), -25.0) == (10.0, 0.0)
    d0 = -log(11)  # there k3 has the slope -10
    assert slope(k3, d0) == pytest.approx((10 - log(11), -10.0))
    assert slope(partial(k3_linear, bound=10.0), -25.0) == pytest.approx((10 - log(11) + 10 * (25 - log(11)), -10))
    for d in (-2.3, -0.1, 0.0, 0.1, 8.0):  # nothing is bounded here
        assert slope(partial(k3_linear, bound=10.0), d) == pytest.approx(slope(k3, d), abs=1e-12)
        assert slope(partial(k3_clamped, bound=10.0), d) == slope(k3, d)
    assert slope(partial(k3_clamped, bound=10.0), 25.0) == (10.0, 0.0)  # k3 = 24 there


def test_trls_bias_correction_has_the_value_of_k3_and_the_gradient_of_k2_both_weighted():
    generator = torch.Generator().manual_seed(0)
    logp_T, logp_alpha_T, logp_ref_T = -torch.rand(3, 50, generator=generator, dtype=torch.float64)
    logp_T.requires_grad_()
    ratio_T = (logp_T - logp_alpha_T).exp()
    corrected_T = bias_corrected(k3(logp_T, logp_ref_T), ratio_T)
    weighted_T = importance_weighted(k2(logp_T, logp_ref_T), ratio_T)
    assert_close(corrected_T, ratio_T * k3(logp_T, logp_ref_T))
    gradients = [torch.autograd.grad(x.sum(), logp_T, retain_graph=True)[0] for x in (corrected_T, weighted_T)]
    assert_close(gradients[0], gradients[1])
    of_k3 = torch.autograd.grad(importance_weighted(k3(logp_T, logp_ref_T), ratio_T).sum(), logp_T)[0]
    assert float((gradients[0] - of_k3).abs().max()) > 0.1


def test_k3_keeps_its_digits_near_zero():
    d = 1e-4  # k3 = d^2/2 - d^3/6 + ...: naive float32 would lose it all in e^-d - 1 + d
    assert_close(k3(tensor([d]), tensor([0.0])), tensor([d * d / 2]), rtol=1e-2, atol=0.0)
    assert float(k3(tensor([-0.3]), tensor([-0.3]))) == 0.0


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [(k1, [1.0, 1.0]), (k2, [log(2), -log(2)]), (k3, [1 - 0.5, 1 - 2.0])],  # 1, d, 1 - e^-d
)
def test_gradients_with_respect_to_logp(estimator, gradient):
    logp_T = tensor([log(0.5), log(0.2)]).requires_grad_()
    estimator(logp_T, tensor([log(0.25), log(0.4)])).sum().backward()
    assert logp_T.grad is not None
    assert_close(logp_T.grad, tensor(gradient))


def test_values_in_expectation_under_pi():
    expected = kl(P, Q)
    assert_close((P * k1(P.log(), Q.log())).sum(), expected)
    assert_close((P * k3(P.log(), Q.log())).sum(), expected)


def test_importance_weighting_moves_samples_of_alpha_to_pi_and_has_no_gradient_of_its_own():
    alpha, logp_T = tensor([0.9, 0.1]), P.log().requires_grad_()
    weighted_T = importance_weighted(k3(logp_T, Q.log()), (logp_T - alpha.log()).exp())
    assert_close((alpha * weighted_T).sum().detach(), kl(P, Q))
    (gradient,) = torch.autograd.grad(weighted_T.sum(), logp_T)
    assert_close(gradient, P / alpha * (1 - Q / P))


def test_exact_divergences_by_hand():
    assert_close(kl(P, Q), tensor(0.5 * log(2) + 0.5 * log(2 / 3)))
    assert_close(tv(P, Q), tensor(0.25))
    assert_close(chi2(P, Q), tensor(0.0625 / 0.25 + 0.0625 / 0.75))
    assert_close(chi2(P, Q), (P.square() / Q).sum() - 1)


def test_a_missing_outcome():
    certain, fair = tensor([1.0, 0.0]), tensor([0.5, 0.5])
    assert_close(kl(certain, fair), tensor(log(2)))
    assert float(kl(fair, certain)) == inf
    assert float(chi2(fair, certain)) == inf
    assert float(tv(certain, tensor([0.0, 1.0]))) == 1.0
    assert [float(f(certain, certain)) for f in (kl, tv, chi2)] == [0.0, 0.0, 0.0]


def test_pinsker_and_the_chi2_bound_on_random_distributions():
    p, q = torch.softmax(torch.randn(2, 5000, 4, generator=torch.Generator().manual_seed(0)).double() * 2, dim=-1)
    assert bool((tv(p, q) <= (kl(p, q) / 2).sqrt() + 1e-12).all())
    assert bool((kl(p, q) <= chi2(p, q).log1p() + 1e-12).all())


def test_effective_sample_size():
    assert_close(ess(tensor([1.0, 1.0, 1.0, 1.0])), tensor(4.0))
    assert_close(ess(tensor([5.0, 0.0, 0.0])), tensor(1.0))
    assert_close(ess(tensor([3.0, 1.0])), tensor(1.6))
    assert_close(ess(tensor([3e30, 1e30])), tensor(1.6))  # no overflow of the squares


def test_what_is_no_distribution_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"q must sum to 1 .* off by 0.5"):
        kl(P, tensor([0.5, 1.0]))
    with pytest.raises(ValueError, match="none of them negative"):
        tv(tensor([1.5, -0.5]), P)
    with pytest.raises(ValueError, match="one shape"):
        chi2(P, tensor([0.2, 0.3, 0.5]))
    with pytest.raises(ValueError, match="not negative and not all zero"):
        ess(tensor([0.0, 0.0]))
    with pytest.raises(ValueError, match="one shape"):
        k3(P.log(), Q.log()[:1])
