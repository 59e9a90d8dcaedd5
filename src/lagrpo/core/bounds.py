"""Theory: lower bounds on the improvement of a step, and what a binary reward does to the probability of success.

**Bounds** on the improvement D = J(pi) - J(pi_k) of the expected reward, from samples of alpha. Exactly, for discrete
distributions: `pi`, `pi_k`, `alpha` and the rewards `r` are [..., K] over K outcomes. From samples: `sampled`. Rewards
must lie in [0, 1]; `scaled` brings a stated range there (bounds are in units of the range). With J the mean reward, s =
sqrt(Var_alpha r + eps_std), L = E_alpha[(pi/alpha) A] the surrogate of Eq. 3:

    Theorem 1 [P1]    D >= L - c (1-s)/s TV(pi, alpha) - c TV(pi_k, alpha),  c = 2;  needs s <= 1
    constant 1        the same with c = 1, as |J(p) - J(q)| <= TV(p, q) for rewards in [0, 1]; attained
    identity bound    D >= s L - TV(pi_k, alpha),  for every s > 0, as s L = J(pi) - J(alpha) exactly
    capped gain       J(pi) - J(alpha) >= E_alpha[(min(pi/alpha, C) - 1) r]: terms in [-1, C - 1], so a finite sample
                      certifies it (`certified_improvement`)

The identity bound has no penalty on TV(pi, alpha) and is the largest of the three wherever s <= 1. With c = 2 and
s <= 1/2 (always, at eps_std = 0) the right side of Theorem 1 is never positive: it certifies no improvement.
[P1] Mroueh et al., arXiv 2505.22257. Its "sigma <= 1/4" reads sigma^2 <= 1/4.

**Success amplification** (Mroueh, arXiv 2503.06639). Without clip, each iteration of GRPO maximizes E_pi[A] - beta
KL(pi || pi_ref), A normalized by the statistics of the policy before. Its exact solution is the exponential tilt
pi_ref e^(A / beta) / Z, whose probability of success is p_n = h(p_{n-1}), with

    h(p) = 1 / (1 + (1 - p_ref)/p_ref exp(-1 / (beta sqrt(p (1-p) + eps_std)))).

The sequence need not be monotone; what holds is p* > p_ref at every fixed point p* = h(p*).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import exp, lgamma, log, log1p, sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lagrpo.core import advantages
from lagrpo.core.kl import sampled_tv, tv


def scaled(rewards: Tensor, low: float, high: float) -> Tensor:
    """(r - low) / (high - low). Raises ValueError unless all rewards lie between them."""
    return _in_unit_interval((rewards - low) / (high - low))


def mean_reward(p: Tensor, r: Tensor) -> Tensor:
    """J(p) = E_p r, Eq. 1. Raises ValueError for r outside [0, 1]."""
    return (p * _in_unit_interval(r)).sum(dim=-1)


def sigma(alpha: Tensor, r: Tensor, eps_std: float) -> Tensor:
    """s = sqrt(E_alpha (r - J(alpha))^2 + eps_std), the standard deviation of Eq. 2. Raises as `mean_reward` does."""
    return ((alpha * (r - mean_reward(alpha, r)[..., None]).square()).sum(dim=-1) + eps_std).sqrt()


def surrogate(pi: Tensor, alpha: Tensor, r: Tensor, eps_std: float) -> Tensor:
    """L_alpha(pi) = E_alpha[(pi/alpha) A_alpha] = (J(pi) - J(alpha)) / s, Eq. 3; 0 where s = 0, as A is 0 there.
    Raises as `mean_reward` does."""
    s, gain = sigma(alpha, r, eps_std), mean_reward(pi, r) - mean_reward(alpha, r)
    return torch.where(s > 0, gain / s, 0.0)


def penalty(s: Tensor) -> Tensor:
    """(1 - s) / s, what TV(pi, alpha) costs in Theorem 1; for a success probability p, s = sqrt(p (1-p) + eps_std) and
    this is Fig. 1. Infinite at s = 0. Raises ValueError for s > 1, where the proof needs it not to be negative."""
    if bool((s > 1).any()):
        raise ValueError(
            f"Theorem 1 needs sigma <= 1 (eps_std at most 3/4), but sigma is {float(s.max()):.4g}"
        )
    return (1 - s) / s


def theorem1(
    pi: Tensor, pi_k: Tensor, alpha: Tensor, r: Tensor, eps_std: float, constant: float = 2.0
) -> Tensor:
    """The right side of Theorem 1, per prompt; `constant` 1 for its sharp form; minus infinity where s = 0 and pi is
    not alpha. Raises ValueError for s > 1 (counter-example: alpha = pi_k = (.5, .5), r = (0, 1), pi = (0, 1),
    eps_std = .9, where D = .5 and this would say .534), and for r outside [0, 1]."""
    cost = _times(penalty(sigma(alpha, r, eps_std)), tv(pi, alpha))
    return surrogate(pi, alpha, r, eps_std) - constant * (cost + tv(pi_k, alpha))


def corollary1(
    pi: Tensor, pi_k: Tensor, r: Tensor, eps_std: float, constant: float = 2.0
) -> Tensor:
    """Theorem 1 with alpha = pi_k: on-policy GRPO. Raises as `theorem1` does."""
    return theorem1(pi, pi_k, pi_k, r, eps_std, constant)


def over_prompts(
    pi: Tensor, pi_k: Tensor, alpha: Tensor, r: Tensor, eps_std: float, constant: float = 2.0
) -> Tensor:
    """The right side of Eq. 4, a lower bound on the mean of D over prompts (all leading dimensions, equal weights):
    mean L - c M sqrt(mean TV(pi, alpha)^2) - c mean TV(pi_k, alpha), M = sqrt(mean ((1-s)/s)^2).
    By Cauchy-Schwarz it is at most the mean of Theorem 1. Raises as `theorem1` does."""
    M = penalty(sigma(alpha, r, eps_std)).square().mean().sqrt()
    cost = _times(M, tv(pi, alpha).square().mean().sqrt())
    return surrogate(pi, alpha, r, eps_std).mean() - constant * (cost + tv(pi_k, alpha).mean())


def identity_bound(pi: Tensor, pi_k: Tensor, alpha: Tensor, r: Tensor, eps_std: float) -> Tensor:
    """s L_alpha(pi) - TV(pi_k, alpha), from D = s L_alpha(pi) - (J(pi_k) - J(alpha)). Minus infinity where s = 0: there
    alpha's samples say nothing about pi. Raises ValueError for r outside [0, 1]."""
    s = sigma(alpha, r, eps_std)
    bound = s * surrogate(pi, alpha, r, eps_std) - tv(pi_k, alpha)
    return torch.where(s > 0, bound, -torch.inf)


class Sampled(NamedTuple):
    """Estimates from groups, one per group: [...]. For a mean over prompts with its interval, give a field of all
    groups to `estimators.bootstrap_interval`.

    sigma            of the group, biased std: as the objective has it
    surrogate        mean rho A, estimates L_alpha(pi); biased, as A is made of the same rewards
    gain             mean rho (r - mean of the others): unbiased for J(pi) - J(alpha) = s L_alpha(pi)
    tv, tv_k         means of `kl.tv_terms`, unbiased for TV(pi, alpha), TV(pi_k, alpha) of *whole completions*
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
    rewards: Tensor,
    log_ratio: Tensor,
    log_ratio_k: Tensor,
    eps_std: float,
    bounded: bool = False,
    bounded_k: bool = False,
) -> Sampled:
    """The bounds from groups of completions sampled by alpha: their rewards in [0, 1], and the log-ratios of whole
    completions log pi(y)/alpha(y) and log pi_k(y)/alpha(y). `bounded` and `bounded_k` choose the estimates of TV(pi,
    alpha) and TV(pi_k, alpha), see `kl.prefers_bounded`. The variance of a sequence ratio grows exponentially
    with its length: once the effective sample size nears 1 the estimates mean nothing. Raises ValueError for G < 2, r
    outside [0, 1], s > 1."""
    if rewards.shape[-1] < 2:
        raise ValueError("the bounds need groups of at least two completions: one has no spread")
    _in_unit_interval(rewards)
    rho = log_ratio.exp()
    groups = _as_groups(rewards)
    s = advantages.sigma(groups.rewards, groups.group, eps_std).view_as(rewards)[..., 0]
    A = advantages.normalized(groups, eps_std=eps_std).view_as(rewards)
    value = (rho * A).mean(dim=-1)
    gain = (rho * advantages.leave_one_out(groups).view_as(rewards)).mean(dim=-1)
    tv_pi, tv_k = sampled_tv(log_ratio, bounded), sampled_tv(log_ratio_k, bounded_k)
    bound = value - 2 * (_times(penalty(s), tv_pi) + tv_k)
    return Sampled(s, value, gain, tv_pi, tv_k, bound, gain - tv_k)


def _as_groups(rewards: Tensor) -> advantages.AdvantageInputs:
    """The rewards of groups of one size [..., G] as a batch, flat."""
    G = rewards.shape[-1]
    group_C = torch.arange(rewards.numel() // G, device=rewards.device).repeat_interleave(G)
    return advantages.AdvantageInputs(rewards.flatten(), group_C)


def capped_gain(pi: Tensor, alpha: Tensor, r: Tensor, cap: float) -> Tensor:
    """E_alpha[min(pi/alpha, C) r] - E_alpha r <= J(pi) - J(alpha) for r >= 0; the gap, E_pi[max(1 - C alpha/pi, 0) r],
    is at most the probability under pi of a ratio above C. Raises ValueError as `mean_reward` does."""
    return (torch.minimum(pi, cap * alpha) * _in_unit_interval(r)).sum(dim=-1) - mean_reward(
        alpha, r
    )


def certified_improvement(
    rewards: Tensor,
    log_ratio: Tensor,
    cap: float,
    delta: float,
    prompts: Literal["fixed", "drawn"] = "fixed",
) -> Tensor:
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
    7 C ln(2/delta) / (3 (C - 1)). Raises ValueError for r outside [0, 1], delta
    outside (0, 1), n < 2."""
    if not 0 < delta < 1:
        raise ValueError(
            f"delta must lie between 0 and 1, but is {delta:g}: it is the chance of a false certificate"
        )
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


def _times(cost: Tensor, distance: Tensor) -> Tensor:
    """The product, in which an infinite cost of no distance is 0."""
    return torch.where(distance == 0, 0.0, cost * distance)


def amplified(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    """h(p): the probability of success after one iteration; 0 < p_ref < 1, p (1-p) + eps_std > 0."""
    return 1 / (1 + (1 - p_ref) / p_ref * exp(-1 / (beta * sqrt(p * (1 - p) + eps_std))))


def trajectory(p_ref: float, beta: float, eps_std: float, iterations: int) -> list[float]:
    """p_0 = p_ref, p_1 = h(p_0), ... p_iterations."""
    return list(
        accumulate(
            range(iterations), lambda p, _: amplified(p, p_ref, beta, eps_std), initial=p_ref
        )
    )


def slope(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    """h'(p) = - h (1-h) (1-2p) / (2 beta (p (1-p) + eps_std)^(3/2))."""
    h = amplified(p, p_ref, beta, eps_std)
    return -h * (1 - h) * (1 - 2 * p) / (2 * beta * (p * (1 - p) + eps_std) ** 1.5)


def fixed_points(
    p_ref: float, beta: float, eps_std: float, cells: int = 10_000
) -> list[tuple[float, bool]]:
    """Every p* = h(p*) that a grid of `cells` tells apart, in rising order, each with whether it is stable: |h'(p*)| <
    1, so that iterations that start near it end in it. At least one exists, as h maps [0, 1] into (0, 1); for a small
    eps_std > 0 there are three, the last at nearly 1 (1.0 if it rounds to that): certainty is stable."""

    def excess(p: float) -> float:
        return amplified(p, p_ref, beta, eps_std) - p

    grid = [(p, excess(p)) for p in (cell / cells for cell in range(cells + 1))]
    found = []
    for (low, at_low), (high, at_high) in pairwise(grid):
        if at_low * at_high < 0:
            found.append(_bisect(excess, low, high))
        elif at_high == 0:
            found.append(high)
    return [(p, abs(slope(p, p_ref, beta, eps_std)) < 1) for p in found]


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a function that changes sign between low and high, to the last bit."""
    rising = function(low) <= 0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if (function(middle) <= 0) == rising else (low, middle)
    return low


def group_weight(p: float, G: int, eps_std: float = 0.0) -> float:
    """w_G(p): at pi = alpha the expected gradient of a group of G >= 2 binary rewards of mean p, normalized by the
    group itself, is w_G(p) grad p. With k ~ Bin(G, p) successes and m = k/G,

        w_G(p) = E[m (1-m) / sqrt(m (1-m) + eps_std)] / (p (1-p)),    0 if m is 0 or 1

    At eps_std = 0 it is below 1/sqrt(p (1-p)), its limit as G grows, and at most sqrt(G-1), its limit as p goes to 0 or
    1: see reports/theory.md."""
    total = 0.0
    for k in range(1, G):
        log_choices = lgamma(G + 1) - lgamma(k + 1) - lgamma(G - k + 1)
        variance = k * (G - k) / G**2
        total += (
            exp(log_choices + k * log(p) + (G - k) * log1p(-p))
            * variance
            / sqrt(variance + eps_std)
        )
    return total / (p * (1 - p))


def tilted(p: Tensor, advantage: Tensor, beta: float) -> Tensor:
    """p e^(A / beta) / Z: the maximizer over pi of E_pi[A] - beta KL(pi || p)."""
    return torch.softmax(p.log() + advantage / beta, dim=-1)
