"""KL(pi || pi_ref) estimated per token, and divergences, exact or from samples of alpha.

k1, k2 and k3 are J. Schulman's ("Approximating KL Divergence", 2020) with d = log pi - log pi_ref.
As values on tokens sampled by pi, k1 and k3 are unbiased; summed over a completion, for the KL of
completions. As penalties, what counts is the expected gradient on tokens sampled by pi, each given
what precedes it:

    k1: E[grad logp] = 0                                 no penalty at all
    k2: E[d grad logp] = grad KL(pi || pi_ref)           the exact gradient of the token's KL
    k3: E[(1 - e^-d) grad logp] = grad KL(pi_ref || pi)  the gradient of the *other* KL (alike near
                                                         d = 0)

None of them contains the effect of an early token on the KL of later ones. On tokens of another
policy alpha all are biased, and k1 then pushes pi away from the samples. The token's ratio as a
weight (`kl_importance`) restores the above for each token given what precedes it, the sequence's
ratio in full. tests/core/test_enumeration.py has the numbers.
"""

from __future__ import annotations

from math import log1p

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, TokenFunction, alpha, pi_ref
from lagrpo.core.pieces import NonNegative
from lagrpo.core.ratios import Ratio, limit, token


def k1(x: LossInputs) -> Tensor:
    """d."""
    return x.logp - pi_ref(x)


def k2(x: LossInputs) -> Tensor:
    """d^2 / 2."""
    return (x.logp - pi_ref(x)).square() / 2


def k3(x: LossInputs) -> Tensor:
    """e^-d + d - 1 >= 0: the choice of GRPO (arXiv 2402.03300, Eq. 4)."""
    d_T = limit(x.logp - pi_ref(x))
    # By expm1: for a small d the three terms nearly cancel, and d^2 / 2 is left.
    return torch.expm1(-d_T) + d_T


def k3_clamped(x: LossInputs, *, kl_bound: NonNegative = 10.0) -> Tensor:
    """min(k3, kl_bound): verl's `low_var_kl` with 10.

    Where k3 exceeds the bound the gradient is 0, so the tokens farthest below pi_ref get no
    penalty.
    """
    return k3(x).clamp(max=kl_bound)


def k3_linear(x: LossInputs, *, kl_bound: NonNegative = 10.0) -> Tensor:
    """k3 for d >= d0 = -ln(1 + kl_bound), below it the tangent of slope -kl_bound.

    The gradient is bounded, and never 0 below pi_ref.
    """
    d_T = x.logp - pi_ref(x)
    bounded_d_T = d_T.clamp(min=-log1p(kl_bound))
    return torch.expm1(-bounded_d_T) + bounded_d_T + kl_bound * (bounded_d_T - d_T)


def k3_bias_corrected(
    x: LossInputs, *, ratio: Ratio = token, denominator: TokenFunction = alpha
) -> Tensor:
    """rho k3, with the gradient of rho: TRL's `use_bias_correction_kl` (arXiv 2512.02556).

    As grad (rho k3) = rho d grad logp it acts as k2 weighted by rho, not as k3.
    """
    return ratio(x.logp - denominator(x), x.completion) * k3(x)


# Exact, over the last dimension


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p/q), nats, with 0 log 0 = 0; infinite if q = 0 < p."""
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(dim=-1)


def tv(p: Tensor, q: Tensor) -> Tensor:
    """TV(p, q) = sum |p - q| / 2, in [0, 1]."""
    return (p - q).abs().sum(dim=-1) / 2


def chi2(p: Tensor, q: Tensor) -> Tensor:
    """chi2(p || q) = sum (p - q)^2 / q: the variance of p/q under q; infinite if q = 0 < p."""
    return torch.where(p == q, 0.0, (p - q).square() / q).sum(dim=-1)


# From samples of alpha, over the last dimension, with their log rho = log p/alpha, nats


def ess(ratio: Tensor) -> Tensor:
    """Effective sample size of importance weights [..., n], not all 0: (sum rho)^2 / sum rho^2.

    Between 1 and n; ESS/n estimates 1/(1 + chi2(p || alpha)).
    """
    # Squares of the largest ratios would overflow; a common factor changes nothing.
    scaled = ratio / ratio.amax(dim=-1, keepdim=True)
    return scaled.sum(dim=-1).square() / scaled.square().sum(dim=-1)


CALM = 0.8
"""Share of the samples that their ESS reaches as long as |rho - 1| / 2 estimates TV better."""


def prefers_bounded(log_ratio: Tensor) -> bool:
    """True if `tv_terms` of these samples [n] should be bounded: if their ESS is below CALM n.

    Decide it on all samples together; per group it would favor the estimate that came out smaller.
    """
    # The largest ratio becomes 1, so that none overflows.
    ratio = (log_ratio - log_ratio.max()).exp()
    return float(ess(ratio)) < CALM * log_ratio.shape[-1]


def tv_terms(log_ratio: Tensor, *, bounded: bool) -> Tensor:
    """Terms whose mean is unbiased for TV(p, alpha), if p is 0 wherever alpha is 0.

    A softmax is 0 nowhere, so the condition always holds for language models.

    |rho - 1| / 2     half the standard deviation of the other near p = alpha, without bound if rho
                      is large
    max(0, 1 - rho)   `bounded`: in [0, 1], so that a mean over n has a standard error of at most
                      1 / (2 sqrt(n))
    """
    if bounded:
        return (-torch.expm1(log_ratio)).clamp(min=0)
    return torch.expm1(log_ratio).abs() / 2


def sampled_tv(log_ratio: Tensor, *, bounded: bool = False) -> Tensor:
    """The mean of `tv_terms`."""
    return tv_terms(log_ratio, bounded=bounded).mean(dim=-1)


def sampled_kl(log_ratio: Tensor) -> Tensor:
    """mean (rho - 1 - log rho): unbiased for KL(alpha || p).

    Every term is >= 0, so it has less variance than the mean of -log rho near p = alpha.
    """
    return (torch.expm1(log_ratio) - log_ratio).mean(dim=-1)
