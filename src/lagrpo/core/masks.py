"""Masks M of `reinforce`: functions of `LossInputs` that give True for the tokens [T] that keep their gradient.

rho is pi/alpha at the level `ratio` over the policy `denominator`, A the advantage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, alpha
from lagrpo.core.ratios import token

# Bounds on the ratio


def one_side(
    x: LossInputs,
    *,
    ratio: Callable = token,
    denominator: Callable = alpha,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:
    """(A >= 0 and rho <= 1 + epsilon_high) or (A <= 0 and rho >= 1 - epsilon_low): what `clipped` keeps."""
    rho = ratio(x.logp - denominator(x), x.completion)
    A = x.advantage
    is_kept_up = (A >= 0) & (rho <= 1 + epsilon_high)
    is_kept_down = (A <= 0) & (rho >= 1 - epsilon_low)
    return is_kept_up | is_kept_down


def two_side(
    x: LossInputs,
    *,
    ratio: Callable = token,
    denominator: Callable = alpha,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:
    """1 - epsilon_low <= rho <= 1 + epsilon_high, whatever the sign of A."""
    rho = ratio(x.logp - denominator(x), x.completion)
    return (rho >= 1 - epsilon_low) & (rho <= 1 + epsilon_high)


def ring(
    x: LossInputs,
    *,
    ratio: Callable = token,
    denominator: Callable = alpha,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    outer_low: float = 0.6,
    outer_high: float = 2.0,
) -> Tensor:
    """`two_side`, or (A >= 0 and rho <= 1 - outer_low) or (A <= 0 and rho >= 1 + outer_high): also tokens that have
    gone far the wrong way."""
    rho = ratio(x.logp - denominator(x), x.completion)
    A = x.advantage
    is_inside = (rho >= 1 - epsilon_low) & (rho <= 1 + epsilon_high)
    is_far_below = (A >= 0) & (rho <= 1 - outer_low)
    is_far_above = (A <= 0) & (rho >= 1 + outer_high)
    return is_inside | is_far_below | is_far_above


# Bounds on the change of the token's probability: DPPO (arXiv 2602.04879)


def tv(
    x: LossInputs,
    *,
    denominator: Callable = alpha,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
) -> Tensor:
    """All but (A > 0 and pi - alpha > delta_high) and (A < 0 and alpha - pi > delta_low), pi and alpha being the
    probabilities of the sampled token: DPPO-TV. |pi - alpha| is a lower bound of the token's total variation, so the
    bound is strict for probable tokens and loose for rare ones, which a bound on the ratio is not."""
    change = x.logp.exp() - denominator(x).exp()
    A = x.advantage
    is_above = (A > 0) & (change > delta_high)
    is_below = (A < 0) & (-change > delta_low)
    return ~(is_above | is_below)


def binary_kl(
    x: LossInputs,
    *,
    denominator: Callable = alpha,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
) -> Tensor:
    """All but (A > 0, pi > alpha and D > delta_high) and (A < 0, pi < alpha and D > delta_low): DPPO-KL. D = a log(a/p)
    + (1 - a) log((1 - a)/(1 - p)), nats, is the KL divergence of "this token or another one", a lower bound of the
    token's KL(alpha || pi)."""
    log_a, log_p = denominator(x), x.logp
    a, p = log_a.exp(), log_p.exp()
    tiny = 1e-8  # keeps the second logarithm finite for a probability of 1, as in the sources
    D = a * (log_a - log_p) + (1 - a) * torch.log((1 - a + tiny) / (1 - p + tiny))
    A = x.advantage
    is_above = (A > 0) & (p > a) & (delta_high < D)
    is_below = (A < 0) & (p < a) & (delta_low < D)
    return ~(is_above | is_below)


def tv_two_side(x: LossInputs, *, denominator: Callable = alpha, delta: float = 0.1) -> Tensor:
    """|pi - alpha| <= delta, probabilities of the sampled token, whatever the sign of A: prime-rl's `ipo`, which is not
    the preference optimization of that name (`online_ipo`)."""
    return (x.logp.exp() - denominator(x).exp()).abs() <= delta
