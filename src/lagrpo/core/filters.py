"""Filters: functions of `LossInputs`, True for the tokens [T] that stay in the surrogate.

A filter multiplies the surrogate's value at each token. It has no gradient. A dropped token keeps
its place in the normalizer, and its KL term if there is one. Some filters read a statistic of the
whole step, which is collected before the losses (`collects`).

Where the value of a token depends on other tokens, a dropped one would still have a gradient. So
core/recipes.py rejects filters of objectives that compare completions, and filters of single tokens
with a ratio of the whole completion.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, TokenFunction, alpha, collects
from lagrpo.core.pieces import NonNegative
from lagrpo.core.ratios import limit, total

# Whole completions


def opsm(x: LossInputs, *, denominator: TokenFunction = alpha, delta: NonNegative = 0.5) -> Tensor:
    """All but completions with A < 0 whose mean of log alpha - log pi exceeds delta, nats.

    It drops failures that the policy has already left. Off-policy sequence masking of DeepSeek-V3.2
    (arXiv 2512.02556, Eq. 9). Its delta is not published: slime has 1e-4, TRL's help names .5.
    """
    log_ratio_T = denominator(x) - x.logp
    lengths_T = total(torch.ones_like(log_ratio_T), x.completion)
    mean_T = total(log_ratio_T, x.completion) / lengths_T
    return ~((x.advantage < 0) & (mean_T > delta))


def seq_max_k3(
    x: LossInputs, *, denominator: TokenFunction = alpha, delta: NonNegative = 0.05
) -> Tensor:
    """Completions none of whose tokens has rho - log rho - 1 > delta, nats.

    The trust-region mask of arXiv 2512.23075 (TRM) as verl estimates it from sampled tokens
    (`seq_max_k3`). Long completions are dropped more often. No delta is published; a token with
    rho = 2 reaches .31.
    """
    log_rho_T = limit(x.logp - denominator(x)).detach()
    k3_T = torch.expm1(log_rho_T) - log_rho_T
    C = len(x.advantages)
    # k3 is at least 0, so zeros are below every maximum.
    largest_C = k3_T.new_zeros(C).scatter_reduce(0, x.completion, k3_T, "amax")
    return (largest_C <= delta)[x.completion]


def carm(
    x: LossInputs, *, denominator: TokenFunction = alpha, delta: NonNegative = 0.1823
) -> Tensor:
    """Completions whose mean of |log rho| is at most delta, nats: CARM (arXiv 2610.02039).

    delta is its log(1 + epsilon), here with an epsilon of .2. Ratios above and below 1 do not
    cancel, as they do in the mean of log rho.
    """
    distance_T = (x.logp - denominator(x)).detach().abs()
    lengths_T = total(torch.ones_like(distance_T), x.completion)
    return total(distance_T, x.completion) / lengths_T <= delta


def finished_only(x: LossInputs) -> Tensor:
    """Completions that ended by themselves: TRL's `mask_truncated_completions`."""
    if x.finished is None:
        raise ValueError("this objective needs to know which completions have finished")
    return x.finished[x.completion]


# Tokens, by statistics of the whole step


def _entropy_threshold(x: LossInputs, *, share: float) -> Tensor:
    """The entropy that the share of the step's tokens with the highest entropy reach, nats.

    The quantile 1 - share, interpolated as by torch.quantile, which takes at most 16 million
    numbers.
    """
    entropies = _known_entropy(x).double().sort().values
    position = (1 - share) * (len(entropies) - 1)
    below = int(position)
    above = min(below + 1, len(entropies) - 1)
    threshold = torch.lerp(entropies[below], entropies[above], position - below)
    return threshold.to(x.logp.dtype)


@collects(_entropy_threshold)
def top_entropy(x: LossInputs, *, share: NonNegative = 0.2) -> Tensor:
    """The share of the step's tokens at which the policy's entropy is highest.

    Wang et al., arXiv 2506.01939; TRL's `top_entropy_quantile`.
    """
    return _known_entropy(x) >= x.step["top_entropy"]


def _known_entropy(x: LossInputs) -> Tensor:
    """The entropy at each token, [T]. Raises ValueError if it is unknown."""
    if x.entropy is None:
        raise ValueError("this objective needs the entropy at each token")
    return x.entropy


def _m2po_threshold(x: LossInputs, *, tau: float) -> Tensor:
    """The smallest (log rho)^2 that must go, so that the mean of the others is at most tau.

    Of outward tokens of the step only. Infinite if all may stay. Equal values go together:
    completions of the same text have the same ratios.
    """
    log_ratio_T = x.logp - alpha(x)
    is_outward_T = x.advantage * log_ratio_T > 0
    squares = log_ratio_T[is_outward_T].square().sort().values
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    mean_of_smallest = squares.double().cumsum(0) / counts
    # The means of an ascending list do not fall, so those within tau come first.
    number_kept = int((mean_of_smallest <= tau).sum())
    if number_kept == len(squares):
        return x.logp.new_tensor(inf)
    return squares[number_kept]


@collects(_m2po_threshold)
def m2po(x: LossInputs, *, tau: NonNegative = 0.04) -> Tensor:
    """All but the outward tokens with the largest (log rho)^2 of the step.

    As many go as it takes for the mean over the outward tokens to be at most tau: M2PO (arXiv
    2510.01161, Algorithm 1). Outward: (A > 0 and rho > 1) or (A < 0 and rho < 1).
    """
    log_ratio_T = x.logp - alpha(x)
    is_outward_T = x.advantage * log_ratio_T > 0
    return ~(is_outward_T & (log_ratio_T.square() >= x.step["m2po"]))


def _covariance_bound(x: LossInputs, *, share: float) -> Tensor:
    """[3]: the means of log pi and A over the step's tokens, and the covariance that must go.

    As many tokens reach it as the share is, at least one. It is infinite for a share of 0.
    """
    mean_logp = x.logp.double().mean()
    mean_advantage = x.advantage.double().mean()
    bound = x.logp.new_tensor([mean_logp, mean_advantage, inf])
    if share > 0:
        # As the filter computes it, so that both round alike.
        covariances = _covariance(x, bound).sort(descending=True).values
        number_dropped = max(1, int(share * len(covariances)))
        bound[2] = covariances[number_dropped - 1]
    return bound


def _covariance(x: LossInputs, bound: Tensor) -> Tensor:
    """(log pi - its mean) (A - its mean) at each token, [T]."""
    return (x.logp - bound[0]) * (x.advantage.to(x.logp.dtype) - bound[1])


@collects(_covariance_bound)
def clip_cov(x: LossInputs, *, share: NonNegative = 2e-4) -> Tensor:
    """All but the share of the step's tokens with the highest covariance of log pi and A.

    These tokens lower the entropy most: likely ones that are pushed up, and unlikely ones that are
    pushed down. At least one token goes, and only tokens with a covariance above 0 do. Equal values
    go together. Clip-Cov (arXiv 2505.22617, section 4) draws its share, 2e-4, at random from the
    tokens with a covariance of 1 to 5; the highest ones are the choice of its KL-Cov.
    """
    covariance_T = _covariance(x, x.step["clip_cov"])
    return ~((covariance_T > 0) & (covariance_T >= x.step["clip_cov"][2]))
