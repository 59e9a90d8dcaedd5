"""Lower bounds on the improvement of a step, D = J(pi) - J(pi_k), from samples of alpha.

Exactly, for discrete distributions: `pi`, `pi_k`, `alpha` and the rewards `r` are [..., K] over K
outcomes. From samples: `sampled`. Rewards must lie in [0, 1]; `scaled` brings a stated range there
(bounds are in units of the range). With J the mean reward, s = sqrt(Var_alpha r + eps_std),
L = E_alpha[(pi/alpha) A] the surrogate of Eq. 3:

    Theorem 1 [P1]    D >= L - c (1-s)/s TV(pi, alpha) - c TV(pi_k, alpha),  c = 2;  needs s <= 1
    constant 1        the same with c = 1, as |J(p) - J(q)| <= TV(p, q) for rewards in [0, 1];
                      attained
    identity bound    D >= s L - TV(pi_k, alpha),  for every s > 0, as s L = J(pi) - J(alpha)
                      exactly

The identity bound has no penalty on TV(pi, alpha) and is the largest of the three wherever s <= 1.
With c = 2 and s <= 1/2 (always, at eps_std = 0) the right side of Theorem 1 is never positive: it
certifies no improvement.
[P1] Mroueh et al., arXiv 2505.22257. Its "sigma <= 1/4" reads sigma^2 <= 1/4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lagrpo.core import advantages
from lagrpo.core.kl import sampled_tv, tv

# Exact quantities and bounds. The last dimension of the arguments, K, is summed.


def scaled(rewards: Tensor, low: float, high: float) -> Tensor:
    """(r - low) / (high - low). Raises ValueError unless all rewards lie between them."""
    return _in_unit_interval((rewards - low) / (high - low))


def mean_reward(p: Tensor, r: Tensor) -> Tensor:
    """J(p) = E_p r, Eq. 1. Raises ValueError for r outside [0, 1]."""
    return (p * _in_unit_interval(r)).sum(dim=-1)


def sigma(alpha: Tensor, r: Tensor, eps_std: float) -> Tensor:
    """s = sqrt(E_alpha (r - J(alpha))^2 + eps_std), the standard deviation of Eq. 2.

    Raises as `mean_reward` does.
    """
    mean = mean_reward(alpha, r)[..., None]
    variance = (alpha * (r - mean).square()).sum(dim=-1)
    return (variance + eps_std).sqrt()


def surrogate(pi: Tensor, alpha: Tensor, r: Tensor, eps_std: float) -> Tensor:
    """L_alpha(pi) = E_alpha[(pi/alpha) A_alpha] = (J(pi) - J(alpha)) / s, Eq. 3.

    0 where s = 0, as A is 0 there. Raises as `mean_reward` does.
    """
    s = sigma(alpha, r, eps_std)
    gain = mean_reward(pi, r) - mean_reward(alpha, r)
    return torch.where(s > 0, gain / s, 0.0)


def penalty(s: Tensor) -> Tensor:
    """(1 - s) / s, the factor of TV(pi, alpha) in Theorem 1; infinite at s = 0.

    For a success probability p, s = sqrt(p (1-p) + eps_std) and this is Fig. 1. Raises ValueError
    for s > 1: the proof needs a factor that is not negative.
    """
    if bool((s > 1).any()):
        raise ValueError(
            f"Theorem 1 needs sigma <= 1 (eps_std at most 3/4), but sigma is {float(s.max()):.4g}"
        )
    return (1 - s) / s


def theorem1(
    pi: Tensor, pi_k: Tensor, alpha: Tensor, r: Tensor, eps_std: float, constant: float = 2.0
) -> Tensor:
    """The right side of Theorem 1, per prompt; `constant` 1 for its sharp form.

    Minus infinity where s = 0 and pi is not alpha. Raises ValueError for r outside [0, 1], and for
    s > 1 (counter-example: alpha = pi_k = (.5, .5), r = (0, 1), pi = (0, 1), eps_std = .9, where
    D = .5 and this would be .534).
    """
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
    """The right side of Eq. 4, a lower bound on the mean of D over prompts.

    mean L - c M sqrt(mean TV(pi, alpha)^2) - c mean TV(pi_k, alpha), M = sqrt(mean ((1-s)/s)^2).
    Prompts are all leading dimensions, with equal weights. By Cauchy-Schwarz the bound is at most
    the mean of Theorem 1. Raises as `theorem1` does.
    """
    M = penalty(sigma(alpha, r, eps_std)).square().mean().sqrt()
    cost = _times(M, tv(pi, alpha).square().mean().sqrt())
    return surrogate(pi, alpha, r, eps_std).mean() - constant * (cost + tv(pi_k, alpha).mean())


def identity_bound(pi: Tensor, pi_k: Tensor, alpha: Tensor, r: Tensor, eps_std: float) -> Tensor:
    """s L_alpha(pi) - TV(pi_k, alpha), from D = s L_alpha(pi) - (J(pi_k) - J(alpha)).

    Minus infinity where s = 0: alpha's samples say nothing about pi there. Raises ValueError for r
    outside [0, 1].
    """
    s = sigma(alpha, r, eps_std)
    bound = s * surrogate(pi, alpha, r, eps_std) - tv(pi_k, alpha)
    return torch.where(s > 0, bound, -torch.inf)


# Bounds from samples


class Sampled(NamedTuple):
    """Estimates from groups, one per group: [...].

    For a mean over prompts with its interval, give a field of all groups to
    `estimators.bootstrap_interval`.
    """

    sigma: Tensor
    """of the group, biased standard deviation: as the objective has it"""
    surrogate: Tensor
    """mean rho A, estimates L_alpha(pi); biased, as A is made of the same rewards"""
    gain: Tensor
    """mean rho (r - mean of the others): unbiased for J(pi) - J(alpha) = s L_alpha(pi)"""
    tv: Tensor
    """mean of `kl.tv_terms`, unbiased for TV(pi, alpha) of *whole completions*"""
    tv_k: Tensor
    """the same for TV(pi_k, alpha)"""
    theorem1: Tensor
    """surrogate - 2 (1-s)/s tv - 2 tv_k, a plug-in estimate of the right side of Theorem 1"""
    identity_bound: Tensor
    """gain - tv_k: unbiased for the identity bound, at any group size above 1"""


def sampled(
    rewards: Tensor,
    log_ratio: Tensor,
    log_ratio_k: Tensor,
    eps_std: float,
    *,
    bounded: bool = False,
    bounded_k: bool = False,
) -> Sampled:
    """The bounds from groups of completions sampled by alpha, all arguments [..., G].

    rewards                 in [0, 1]
    log_ratio, log_ratio_k  of whole completions, log pi(y)/alpha(y) and log pi_k(y)/alpha(y), nats
    bounded, bounded_k      choose the estimates of TV(pi, alpha) and TV(pi_k, alpha), see
                            `kl.prefers_bounded`

    The variance of a sequence ratio grows exponentially with its length: once the effective sample
    size nears 1 the estimates mean nothing. Raises ValueError for G < 2, r outside [0, 1], s > 1.
    """
    if rewards.shape[-1] < 2:
        raise ValueError("the bounds need groups of at least two completions: one has no spread")
    _in_unit_interval(rewards)
    rho = log_ratio.exp()
    groups = _as_groups(rewards)
    # All completions of a group have the same sigma.
    s = advantages.sigma(groups.rewards, groups.group, eps_std).view_as(rewards)[..., 0]
    A = advantages.normalized(groups, eps_std=eps_std).view_as(rewards)
    value = (rho * A).mean(dim=-1)
    gain = (rho * advantages.leave_one_out(groups).view_as(rewards)).mean(dim=-1)
    tv_pi = sampled_tv(log_ratio, bounded=bounded)
    tv_k = sampled_tv(log_ratio_k, bounded=bounded_k)
    return Sampled(
        sigma=s,
        surrogate=value,
        gain=gain,
        tv=tv_pi,
        tv_k=tv_k,
        theorem1=value - 2 * (_times(penalty(s), tv_pi) + tv_k),
        identity_bound=gain - tv_k,
    )


def _as_groups(rewards: Tensor) -> advantages.AdvantageInputs:
    """The rewards of groups of one size [..., G] as a batch, flat."""
    G = rewards.shape[-1]
    group_C = torch.arange(rewards.numel() // G, device=rewards.device).repeat_interleave(G)
    return advantages.AdvantageInputs(rewards.flatten(), group_C)


def _in_unit_interval(r: Tensor) -> Tensor:
    """The rewards themselves. Raises ValueError for a reward outside [0, 1]."""
    if not bool(((r >= 0) & (r <= 1)).all()):
        extremes = f"range from {float(r.min()):g} to {float(r.max()):g}"
        raise ValueError(f"rewards must lie in [0, 1], but {extremes}: scale them")
    return r


def _times(cost: Tensor, distance: Tensor) -> Tensor:
    """The product, in which an infinite cost of no distance is 0."""
    return torch.where(distance == 0, 0.0, cost * distance)
