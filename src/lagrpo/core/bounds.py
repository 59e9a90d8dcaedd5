"""Lower bounds on the improvement D = J(pi) - J(pi_k) of the expected reward, from samples of alpha.

Exactly, for discrete distributions: `pi`, `pi_k`, `alpha` and the rewards `r` are [..., K] over K outcomes. From
samples: `sampled`. Rewards must lie in [0, 1]; `scaled` brings a stated range there (bounds are in units of the range).
With J the mean reward, s = sqrt(Var_alpha r + eps_std), L = E_alpha[(pi/alpha) A] the surrogate of Eq. 3:

    Theorem 1 [P1]    D >= L - c (1-s)/s TV(pi, alpha) - c TV(pi_k, alpha),  c = 2;  needs s <= 1
    constant 1        the same with c = 1, as |J(p) - J(q)| <= TV(p, q) for rewards in [0, 1]; attained
    identity bound    D >= s L - TV(pi_k, alpha),  for every s > 0, as s L = J(pi) - J(alpha) exactly
    capped gain       J(pi) - J(alpha) >= E_alpha[(min(pi/alpha, C) - 1) r]: terms in [-1, C - 1], so a finite sample
                      certifies it (`certified_improvement`)

The identity bound has no penalty on TV(pi, alpha) and is the largest of the three wherever s <= 1. With c = 2 and
s <= 1/2 (always, at eps_std = 0) the right side of Theorem 1 is never positive: it certifies no improvement.
[P1] Mroueh et al., arXiv 2505.22257. Its "sigma <= 1/4" reads sigma^2 <= 1/4.
"""

from math import log
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lagrpo.core import advantages
from lagrpo.core.divergences import require_distributions, sampled_tv, tv
from lagrpo.core.extended import times
from lagrpo.core.shapes import FloatG, FloatK, FloatN, require_above, require_at_least, require_same_shape


def scaled(rewards: FloatN, low: float, high: float) -> FloatN:
    """(r - low) / (high - low). Raises ValueError unless low < high and all rewards lie between them."""
    require_above(low, high=high)
    return _in_unit_interval((rewards - low) / (high - low))


def mean_reward(p: FloatK, r: FloatK) -> FloatN:
    """J(p) = E_p r, Eq. 1. Raises ValueError unless p is a distribution and r of its shape, in [0, 1]."""
    require_distributions(p=p)
    require_same_shape(p=p, r=r)
    return (p * _in_unit_interval(r)).sum(dim=-1)


def sigma(alpha: FloatK, r: FloatK, eps_std: float) -> FloatN:
    """s = sqrt(E_alpha (r - J(alpha))^2 + eps_std), the standard deviation of Eq. 2. Raises as `mean_reward` does."""
    require_at_least(0.0, eps_std=eps_std)
    return ((alpha * (r - mean_reward(alpha, r)[..., None]).square()).sum(dim=-1) + eps_std).sqrt()


def surrogate(pi: FloatK, alpha: FloatK, r: FloatK, eps_std: float) -> FloatN:
    """L_alpha(pi) = E_alpha[(pi/alpha) A_alpha] = (J(pi) - J(alpha)) / s, Eq. 3; 0 where s = 0, as A is 0 there.
    Raises as `mean_reward` does."""
    s, gain = sigma(alpha, r, eps_std), mean_reward(pi, r) - mean_reward(alpha, r)
    return torch.where(s > 0, gain / s, torch.zeros_like(gain))


def penalty(s: FloatN) -> FloatN:
    """(1 - s) / s, what TV(pi, alpha) costs in Theorem 1; for a success probability p, s = sqrt(p (1-p) + eps_std) and
    this is Fig. 1. Infinite at s = 0. Raises ValueError for s > 1, where the proof needs it not to be negative."""
    if bool((s > 1).any()):
        raise ValueError(f"Theorem 1 needs sigma <= 1 (eps_std at most 3/4), but sigma is {float(s.max()):.4g}")
    return (1 - s) / s


def theorem1(pi: FloatK, pi_k: FloatK, alpha: FloatK, r: FloatK, eps_std: float, constant: float = 2.0) -> FloatN:
    """The right side of Theorem 1, per prompt; `constant` 1 for its sharp form; minus infinity where s = 0 and pi is
    not alpha. Raises ValueError for s > 1 (counter-example: alpha = pi_k = (.5, .5), r = (0, 1), pi = (0, 1),
    eps_std = .9, where D = .5 and this would say .534), r outside [0, 1], constant below 1."""
    require_at_least(1.0, constant=constant)
    cost = times(penalty(sigma(alpha, r, eps_std)), tv(pi, alpha))
    return surrogate(pi, alpha, r, eps_std) - constant * (cost + tv(pi_k, alpha))


def corollary1(pi: FloatK, pi_k: FloatK, r: FloatK, eps_std: float, constant: float = 2.0) -> FloatN:
    """Theorem 1 with alpha = pi_k: on-policy GRPO. Raises as `theorem1` does."""
    return theorem1(pi, pi_k, pi_k, r, eps_std, constant)


def over_prompts(
    pi: FloatK, pi_k: FloatK, alpha: FloatK, r: FloatK, eps_std: float, constant: float = 2.0
) -> Float[Tensor, ""]:
    """The right side of Eq. 4, a lower bound on the mean of D over prompts (all leading dimensions, equal weights):
    mean L - c M sqrt(mean TV(pi, alpha)^2) - c mean TV(pi_k, alpha), M = sqrt(mean ((1-s)/s)^2).
    By Cauchy-Schwarz it is at most the mean of Theorem 1. Raises as `theorem1` does."""
    require_at_least(1.0, constant=constant)
    M = penalty(sigma(alpha, r, eps_std)).square().mean().sqrt()
    cost = times(M, tv(pi, alpha).square().mean().sqrt())
    return surrogate(pi, alpha, r, eps_std).mean() - constant * (cost + tv(pi_k, alpha).mean())


def identity_bound(pi: FloatK, pi_k: FloatK, alpha: FloatK, r: FloatK, eps_std: float) -> FloatN:
    """s L_alpha(pi) - TV(pi_k, alpha), from D = s L_alpha(pi) - (J(pi_k) - J(alpha)). Minus infinity where s = 0: there
    alpha's samples say nothing about pi. Raises ValueError for r outside [0, 1]."""
    s = sigma(alpha, r, eps_std)
    bound = s * surrogate(pi, alpha, r, eps_std) - tv(pi_k, alpha)
    return torch.where(s > 0, bound, torch.full_like(bound, -torch.inf))


class Sampled(NamedTuple):
    """Estimates from groups, one per group: [...]. For a mean over prompts with its interval, give a field of all
    groups to `estimators.bootstrap_interval`.

    sigma            of the group, biased std: as the objective has it
    surrogate        mean rho A, estimates L_alpha(pi); biased, as A is made of the same rewards
    gain             mean rho (r - mean of the others): unbiased for J(pi) - J(alpha) = s L_alpha(pi)
    tv, tv_k         means of `divergences.tv_terms`, unbiased for TV(pi, alpha), TV(pi_k, alpha) of *whole completions*
    theorem1         surrogate - 2 (1-s)/s tv - 2 tv_k, a plug-in estimate of the right side of Theorem 1
    identity_bound   gain - tv_k: unbiased for the identity bound, at any group size above 1
    """

    sigma: Tensor
    surrogate: Tensor
    gain: Tensor
    tv: Tensor
    tv_k: Tensor
    theorem1: Tensor
    identity_bound: Tensor


def sampled(
    rewards: FloatG,
    log_ratio: FloatG,
    log_ratio_k: FloatG,
    eps_std: float,
    bounded: bool = False,
    bounded_k: bool = False,
) -> Sampled:
    """The bounds from groups of completions sampled by alpha: their rewards in [0, 1], and the log-ratios of whole
    completions log pi(y)/alpha(y) and log pi_k(y)/alpha(y). `bounded` and `bounded_k` choose the estimates of TV(pi,
    alpha) and TV(pi_k, alpha), see `divergences.prefers_bounded`. The variance of a sequence ratio grows exponentially
    with its length: once the effective sample size nears 1 the estimates mean nothing. Raises ValueError for G < 2, r
    outside [0, 1], s > 1."""
    require_same_shape(rewards=rewards, log_ratio=log_ratio, log_ratio_k=log_ratio_k)
    if rewards.shape[-1] < 2:
        raise ValueError("the bounds need groups of at least two completions: one has no spread")
    _in_unit_interval(rewards)
    rho = log_ratio.exp()
    s = advantages.sigma(rewards, eps_std)
    value = (rho * advantages.normalized(rewards, eps_std)).mean(dim=-1)
    gain = (rho * advantages.leave_one_out(rewards)).mean(dim=-1)
    tv_pi, tv_k = sampled_tv(log_ratio, bounded), sampled_tv(log_ratio_k, bounded_k)
    bound = value - 2 * (times(penalty(s), tv_pi) + tv_k)
    return Sampled(s, value, gain, tv_pi, tv_k, bound, gain - tv_k)


def capped_gain(pi: FloatK, alpha: FloatK, r: FloatK, cap: float) -> FloatN:
    """E_alpha[min(pi/alpha, C) r] - E_alpha r <= J(pi) - J(alpha) for r >= 0; the gap, E_pi[max(1 - C alpha/pi, 0) r],
    is at most the probability under pi of a ratio above C. Raises ValueError as `mean_reward` does, and for C < 1."""
    require_at_least(1.0, cap=cap)
    require_distributions(pi=pi, alpha=alpha)
    return (torch.minimum(pi, cap * alpha) * _in_unit_interval(r)).sum(dim=-1) - mean_reward(alpha, r)


def certified_improvement(
    rewards: Float[Tensor, "N G"],
    log_ratio: Float[Tensor, "N G"],
    cap: float,
    delta: float,
    prompts: Literal["fixed", "drawn"] = "fixed",
) -> Float[Tensor, ""]:
    """A number that is at most J(pi) - J(alpha) with probability 1 - delta or more, from N groups of G completions
    sampled by alpha: rewards in [0, 1] and the log-ratios of whole completions log pi(y)/alpha(y).

    With n independent terms z in [-1, C - 1], C = `cap`, of sample variance V (over n - 1), empirical Bernstein
    (Maurer & Pontil, arXiv 0907.3740; the terms need not be identically distributed):

        E mean z >= mean z - sqrt(2 V ln(2/delta) / n) - 7 C ln(2/delta) / (3 (n - 1)),    z = (min(rho, C) - 1) r

    What J averages over says which terms are independent:

    fixed   J is the mean over these N prompts. Given the prompts, all completions are independent: n = N G terms
    drawn   J is the mean over what the prompts are drawn from, independently. Completions share their prompt, so only
            groups are independent: n = N means of a group

    pi and C must not depend on these samples: pi_k on a batch it has not yet learned from is right, pi after an update
    on the batch is not. To test m batches and use the first that certifies, give delta / m. Every completion of the
    groups must be there: if some are left out because of what they say, the rest are not a sample of alpha.

    Never below -1, which rewards in [0, 1] certify without a sample. Not positive unless C > 1 and n > 1 +
    7 C ln(2/delta) / (3 (C - 1)). Raises ValueError for r outside [0, 1], log-ratios that are NaN or infinite, C < 1,
    delta outside (0, 1), n < 2."""
    require_same_shape(rewards=rewards, log_ratio=log_ratio)
    require_at_least(1.0, cap=cap)
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, but is {delta:g}: it is the chance of a false certificate")
    if not bool(log_ratio.isfinite().all()):
        raise ValueError("log_ratio must be finite: a completion sampled by alpha has a probability under pi and alpha")
    ratio = log_ratio.double().clamp(max=log(cap)).exp()
    terms = (ratio - 1) * _in_unit_interval(rewards).double()
    terms = terms.flatten() if prompts == "fixed" else terms.mean(dim=-1)
    n, doubt = terms.shape[0], log(2 / delta)
    if n < 2:
        raise ValueError(f"a certificate needs at least two independent terms, but has {n}")
    margin = (2 * terms.var() * doubt / n).sqrt() + 7 * cap * doubt / (3 * (n - 1))
    return (terms.mean() - margin).clamp(min=-1.0)


def _in_unit_interval(r: Tensor) -> Tensor:
    if not bool(((r >= 0) & (r <= 1)).all()):
        found = f"range from {float(r.min()):g} to {float(r.max()):g}"
        raise ValueError(f"rewards must lie in [0, 1], but {found}: scale them")
    return r
