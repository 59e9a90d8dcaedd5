"""Divergences: estimates from the log-probs of sampled tokens, and exact values for discrete distributions.

The three estimators are J. Schulman's ("Approximating KL Divergence", 2020), with d = logp - logp_ref. Their values on
tokens sampled by pi: k1 and k3 are unbiased for KL(pi || pi_ref); summed over a completion, for the KL of completions.
As penalties, what counts is the expected gradient on tokens sampled by pi, each given what precedes it:

    k1: E[grad logp] = 0                                 no penalty at all
    k2: E[d grad logp] = grad KL(pi || pi_ref)           the exact gradient of the token's KL
    k3: E[(1 - e^-d) grad logp] = grad KL(pi_ref || pi)  the gradient of the *other* KL (alike near d = 0)

None of them contains what an early token does to the KL of later ones. On tokens sampled by another policy alpha all
are biased, and k1 then pushes pi away from the samples; `importance_weighted` with a token's ratio restores the above
for each token given what precedes it. With the sequence's ratio it restores the above in full.
tests/core/test_enumeration.py has the numbers. All functions raise ValueError on shapes, and for no samples.
"""

from math import log1p

import torch
from jaxtyping import Float
from torch import Tensor

from lagrpo.core.extended import expm1, times
from lagrpo.core.shapes import FloatK, FloatN, FloatT, require_at_least, require_same_shape, require_vector


def k1(logp_T: FloatT, logp_ref_T: FloatT) -> FloatT:
    """d = logp - logp_ref."""
    require_vector(logp_T=logp_T, logp_ref_T=logp_ref_T)
    return logp_T - logp_ref_T


def k2(logp_T: FloatT, logp_ref_T: FloatT) -> FloatT:
    """d^2 / 2."""
    return k1(logp_T, logp_ref_T).square() / 2


def k3(logp_T: FloatT, logp_ref_T: FloatT) -> FloatT:
    """e^-d + d - 1 >= 0, GRPO's choice (Shao et al., arXiv 2402.03300, Eq. 4)."""
    d_T = k1(logp_T, logp_ref_T)
    return expm1(-d_T) + d_T


def k3_clamped(logp_T: FloatT, logp_ref_T: FloatT, bound: float) -> FloatT:
    """min(k3, bound), verl's `low_var_kl` with a bound of 10. Beyond the bound the gradient is 0: the penalty lets go
    of pi where it has lost most (`k3_linear` does not). Raises ValueError for a negative bound."""
    require_at_least(0.0, bound=bound)
    return k3(logp_T, logp_ref_T).clamp(max=bound)


def k3_linear(logp_T: FloatT, logp_ref_T: FloatT, bound: float) -> FloatT:
    """k3 whose slope ends at -bound: with d0 = -ln(1 + bound), where k3 has that slope,

        k3(max(d, d0)) + bound max(d0 - d, 0)

    It is k3 for d >= d0 and goes on along its tangent below, so that it neither explodes (at d = -25 k3 and its slope
    are 7e10) nor lets go. Raises ValueError as `k3_clamped` does."""
    require_at_least(0.0, bound=bound)
    d_T, d0 = k1(logp_T, logp_ref_T), -log1p(bound)
    near_T = d_T.clamp(min=d0)
    return torch.expm1(-near_T) + near_T + bound * (near_T - d_T)


def bias_corrected(estimate_T: FloatT, ratio_T: FloatT) -> FloatT:
    """rho times the estimate, with the gradient of rho: for k3 TRL calls it `use_bias_correction_kl` (after
    DeepSeek-V3.2, arXiv 2512.02556). grad (rho k3) = rho d grad logp, so as a penalty it is k2 under
    `importance_weighted`, the gradient of KL(pi || pi_ref), and not k3."""
    require_vector(estimate_T=estimate_T, ratio_T=ratio_T)
    nothing_T = ratio_T.isinf() & (estimate_T == 0)  # there d = 0, and the gradient rho d is 0 as well
    return times(torch.where(nothing_T, torch.zeros_like(ratio_T), ratio_T), estimate_T)


def importance_weighted(estimate_T: FloatT, ratio_T: FloatT) -> FloatT:
    """sg(rho) times the estimate, rho of the token or of the sequence: tokens sampled by alpha then stand for tokens
    sampled by pi."""
    return bias_corrected(estimate_T, ratio_T.detach())


def kl(p: FloatK, q: FloatK) -> FloatN:
    """KL(p || q) = sum p log(p/q) over the last dimension, in nats, with 0 log 0 = 0; infinite where q = 0 < p.
    Raises ValueError unless p and q are distributions of one shape."""
    require_distributions(p=p, q=q)
    return torch.where(p > 0, p * (p / q).log(), torch.zeros_like(p)).sum(dim=-1)


def tv(p: FloatK, q: FloatK) -> FloatN:
    """TV(p, q) = sum |p - q| / 2, in [0, 1], as Mroueh et al. define it before Theorem 1. Raises as `kl` does."""
    require_distributions(p=p, q=q)
    return (p - q).abs().sum(dim=-1) / 2


def chi2(p: FloatK, q: FloatK) -> FloatN:
    """chi2(p || q) = sum (p - q)^2 / q = E_q[(p/q)^2] - 1, the variance of the ratio p/q under q; infinite where
    q = 0 < p. Raises as `kl` does."""
    require_distributions(p=p, q=q)
    return torch.where(p == q, torch.zeros_like(p), (p - q).square() / q).sum(dim=-1)


def ess(ratio: Float[Tensor, "*N n"]) -> FloatN:
    """Effective sample size of n importance weights: (sum rho)^2 / sum rho^2, between 1 and n; ESS/n estimates
    1/(1 + chi2(pi || alpha)). Raises ValueError for no weights, negative weights, or none above 0."""
    if ratio.dim() == 0 or ratio.shape[-1] == 0:
        raise ValueError(f"ess needs at least one weight, but ratio has shape {tuple(ratio.shape)}")
    if bool((ratio < 0).any()) or not bool((ratio > 0).any(dim=-1).all()):
        raise ValueError("ess needs weights that are not negative and not all zero")
    scaled = ratio / ratio.amax(dim=-1, keepdim=True)
    return scaled.sum(dim=-1).square() / scaled.square().sum(dim=-1)


CALM = 0.8  # share of the samples that their effective number reaches where |rho - 1| / 2 estimates TV better


def prefers_bounded(log_ratio: Float[Tensor, "n"]) -> bool:
    """Whether `tv_terms` of these samples should be the bounded ones: where their ESS is below CALM of their number.
    Decided on all samples together; deciding per group would favor the estimate that came out smaller."""
    _require_samples(log_ratio)
    return float(ess((log_ratio - log_ratio.max()).exp())) < CALM * log_ratio.shape[-1]


def tv_terms(log_ratio: Float[Tensor, "*N n"], bounded: bool) -> Float[Tensor, "*N n"]:
    """Terms over samples of alpha, with their log rho = log p/alpha, whose mean is unbiased for TV(p, alpha) where p
    puts nothing outside alpha's support (never for a softmax):

        |rho - 1| / 2     half the standard deviation of the other near p = alpha, without bound where rho is large
        max(0, 1 - rho)   `bounded`: in [0, 1], so that a mean over n has a standard error of at most 1 / (2 sqrt(n))
    """
    return (-torch.expm1(log_ratio)).clamp(min=0) if bounded else torch.expm1(log_ratio).abs() / 2


def sampled_tv(log_ratio: Float[Tensor, "*N n"], bounded: bool = False) -> FloatN:
    """Mean of `tv_terms`."""
    _require_samples(log_ratio)
    return tv_terms(log_ratio, bounded).mean(dim=-1)


def sampled_kl(log_ratio: Float[Tensor, "*N n"]) -> FloatN:
    """mean (rho - 1 - log rho) over samples of alpha: unbiased for KL(alpha || p), every term >= 0, and so with less
    variance than the mean of -log rho near p = alpha."""
    _require_samples(log_ratio)
    return (torch.expm1(log_ratio) - log_ratio).mean(dim=-1)


def sampled_chi2(log_ratio: Float[Tensor, "*N n"]) -> FloatN:
    """mean (rho - 1)^2 over samples of alpha: unbiased for chi2(p || alpha)."""
    _require_samples(log_ratio)
    return torch.expm1(log_ratio).square().mean(dim=-1)


def pinsker(kl: FloatN) -> FloatN:
    """min(sqrt(KL / 2), 1) >= TV, for either direction of the KL. Raises ValueError for a negative KL."""
    if bool((kl < 0).any()):
        raise ValueError("a KL divergence is not negative; use an estimate that cannot be, as `sampled_kl`")
    return (kl / 2).sqrt().clamp(max=1.0)


def _require_samples(log_ratio: Tensor) -> None:
    if log_ratio.dim() == 0 or log_ratio.shape[-1] == 0:
        raise ValueError(f"needs a last dimension of at least one sample, but has shape {tuple(log_ratio.shape)}")


def require_distributions(**tensors: Tensor) -> None:
    """Raises ValueError unless each holds probabilities over its last dimension, and all have one shape."""
    require_same_shape(**tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or bool((tensor < 0).any()):
            raise ValueError(f"{name} must hold probabilities over its last dimension, none of them negative")
        off = float((tensor.sum(dim=-1) - 1).abs().max())
        if not off <= 1e-4:
            raise ValueError(f"{name} must sum to 1 over its last dimension, but is off by {off:.2g}")
