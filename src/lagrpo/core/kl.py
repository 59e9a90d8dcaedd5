"""KL(pi || pi_ref) estimated per token, and divergences: from samples of alpha, and exact for discrete distributions.

k1, k2 and k3 are J. Schulman's ("Approximating KL Divergence", 2020) with d = log pi - log pi_ref. Their values on
tokens sampled by pi: k1 and k3 are unbiased; summed over a completion, for the KL of completions. As penalties, what
counts is the expected gradient on tokens sampled by pi, each given what precedes it:

    k1: E[grad logp] = 0                                 no penalty at all
    k2: E[d grad logp] = grad KL(pi || pi_ref)           the exact gradient of the token's KL
    k3: E[(1 - e^-d) grad logp] = grad KL(pi_ref || pi)  the gradient of the *other* KL (alike near d = 0)

None of them contains what an early token does to the KL of later ones. On tokens of another policy alpha all are
biased, and k1 then pushes pi away from the samples. The token's ratio as a weight (`kl_importance`) restores the above
for each token given what precedes it, the sequence's ratio in full. tests/core/test_enumeration.py has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log1p

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, alpha, pi_ref
from lagrpo.core.ratios import limit, token


def k1(x: LossInputs) -> Tensor:
    """d."""
    return x.logp - pi_ref(x)


def k2(x: LossInputs) -> Tensor:
    """d^2 / 2."""
    return (x.logp - pi_ref(x)).square() / 2


def k3(x: LossInputs) -> Tensor:
    """e^-d + d - 1 >= 0: the choice of GRPO (arXiv 2402.03300, Eq. 4)."""
    d = limit(x.logp - pi_ref(x))
    return torch.expm1(-d) + d


def k3_clamped(x: LossInputs, *, kl_bound: float = 10.0) -> Tensor:
    """min(k3, kl_bound): verl's `low_var_kl` with 10. Beyond, the gradient is 0: the penalty lets go of pi where it has
    lost most."""
    return k3(x).clamp(max=kl_bound)


def k3_linear(x: LossInputs, *, kl_bound: float = 10.0) -> Tensor:
    """k3 for d >= d0 = -ln(1 + kl_bound), below it the tangent of slope -kl_bound: neither explodes nor lets go."""
    d, d0 = x.logp - pi_ref(x), -log1p(kl_bound)
    near = d.clamp(min=d0)
    return torch.expm1(-near) + near + kl_bound * (near - d)


def k3_bias_corrected(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha
) -> Tensor:
    """rho k3, with the gradient of rho: TRL's `use_bias_correction_kl` (DeepSeek-V3.2, arXiv 2512.02556). As
    grad (rho k3) = rho d grad logp it acts as k2 weighted by rho, not as k3."""
    return ratio(x.logp - denominator(x), x.completion) * k3(x)


# Exact, over the last dimension


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p/q), nats, with 0 log 0 = 0; infinite if q = 0 < p."""
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(dim=-1)


def tv(p: Tensor, q: Tensor) -> Tensor:
    """TV(p, q) = sum |p - q| / 2, in [0, 1]."""
    return (p - q).abs().sum(dim=-1) / 2


def chi2(p: Tensor, q: Tensor) -> Tensor:
    """chi2(p || q) = sum (p - q)^2 / q, the variance of the ratio p/q under q; infinite if q = 0 < p."""
    return torch.where(p == q, 0.0, (p - q).square() / q).sum(dim=-1)


# From samples of alpha, over the last dimension, with their log rho = log p/alpha


def ess(ratio: Tensor) -> Tensor:
    """Effective sample size of importance weights [..., n], not all 0: (sum rho)^2 / sum rho^2, between 1 and n; ESS/n
    estimates 1/(1 + chi2(p || alpha))."""
    scaled = ratio / ratio.amax(dim=-1, keepdim=True)
    return scaled.sum(dim=-1).square() / scaled.square().sum(dim=-1)


CALM = (
    0.8  # share of the samples that their ESS reaches as long as |rho - 1| / 2 estimates TV better
)


def prefers_bounded(log_ratio: Tensor) -> bool:
    """Whether `tv_terms` of these samples [n] should be the bounded ones: if their ESS is below CALM n. Decided on all
    samples together; deciding per group would favor the estimate that came out smaller."""
    return float(ess((log_ratio - log_ratio.max()).exp())) < CALM * log_ratio.shape[-1]


def tv_terms(log_ratio: Tensor, bounded: bool) -> Tensor:
    """Terms whose mean is unbiased for TV(p, alpha) if p puts nothing outside alpha's support (never for a softmax):

    |rho - 1| / 2     half the standard deviation of the other near p = alpha, without bound if rho is large
    max(0, 1 - rho)   `bounded`: in [0, 1], so that a mean over n has a standard error of at most 1 / (2 sqrt(n))
    """
    return (-torch.expm1(log_ratio)).clamp(min=0) if bounded else torch.expm1(log_ratio).abs() / 2


def sampled_tv(log_ratio: Tensor, bounded: bool = False) -> Tensor:
    """Mean of `tv_terms`."""
    return tv_terms(log_ratio, bounded).mean(dim=-1)


def sampled_kl(log_ratio: Tensor) -> Tensor:
    """mean (rho - 1 - log rho): unbiased for KL(alpha || p), every term >= 0, so with less variance than the mean of
    -log rho near p = alpha."""
    return (torch.expm1(log_ratio) - log_ratio).mean(dim=-1)
