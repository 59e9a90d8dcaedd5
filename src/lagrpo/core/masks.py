"""Masks M of `reinforce`: functions of `LossInputs`, True for the tokens that keep their gradient.

A mask gives [T]. rho is pi/alpha at the level `ratio` over the policy `denominator`, A the
advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, TokenFunction, alpha
from lagrpo.core.pieces import NonNegative
from lagrpo.core.ratios import Ratio, token

# Bounds on the ratio


def one_side(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
) -> Tensor:
    """(A >= 0 and rho <= 1 + epsilon_high) or (A <= 0 and rho >= 1 - epsilon_low).

    It keeps the tokens that have a gradient in `clipped`.
    """
    rho_T = ratio(x.logp - denominator(x), x.completion)
    A_T = x.advantage
    is_kept_up_T = (A_T >= 0) & (rho_T <= 1 + epsilon_high)
    is_kept_down_T = (A_T <= 0) & (rho_T >= 1 - epsilon_low)
    return is_kept_up_T | is_kept_down_T


def two_side(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
) -> Tensor:
    """1 - epsilon_low <= rho <= 1 + epsilon_high, whatever the sign of A."""
    rho_T = ratio(x.logp - denominator(x), x.completion)
    return (rho_T >= 1 - epsilon_low) & (rho_T <= 1 + epsilon_high)


def ring(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
    outer_low: NonNegative = 0.6,
    outer_high: NonNegative = 2.0,
) -> Tensor:
    """`two_side`, or (A >= 0 and rho <= 1 - outer_low) or (A <= 0 and rho >= 1 + outer_high).

    It also keeps tokens that have gone far the wrong way.
    """
    rho_T = ratio(x.logp - denominator(x), x.completion)
    A_T = x.advantage
    is_inside_T = (rho_T >= 1 - epsilon_low) & (rho_T <= 1 + epsilon_high)
    is_far_below_T = (A_T >= 0) & (rho_T <= 1 - outer_low)
    is_far_above_T = (A_T <= 0) & (rho_T >= 1 + outer_high)
    return is_inside_T | is_far_below_T | is_far_above_T


# Bounds on the change of the token's probability: DPPO (arXiv 2602.04879)


def tv(
    x: LossInputs,
    *,
    denominator: TokenFunction = alpha,
    delta_low: NonNegative = 0.15,
    delta_high: NonNegative = 0.15,
) -> Tensor:
    """All but (A > 0 and pi - alpha > delta_high) and (A < 0 and alpha - pi > delta_low): DPPO-TV.

    pi and alpha are the probabilities of the sampled token. |pi - alpha| is a lower bound of the
    token's total variation, so the bound is strict for probable tokens and loose for rare ones,
    which a bound on the ratio is not.
    """
    change_T = x.logp.exp() - denominator(x).exp()
    A_T = x.advantage
    is_above_T = (A_T > 0) & (change_T > delta_high)
    is_below_T = (A_T < 0) & (-change_T > delta_low)
    return ~(is_above_T | is_below_T)


def binary_kl(
    x: LossInputs,
    *,
    denominator: TokenFunction = alpha,
    delta_low: NonNegative = 0.05,
    delta_high: NonNegative = 0.05,
) -> Tensor:
    """All but (A > 0, pi > alpha, D > delta_high) and (A < 0, pi < alpha, D > delta_low): DPPO-KL.

    a and p being the probabilities of the sampled token under alpha and pi, D = a log(a/p) +
    (1 - a) log((1 - a)/(1 - p)), nats, is the KL divergence of "this token or another one", a lower
    bound of the token's KL(alpha || pi).
    """
    log_a_T = denominator(x)
    log_p_T = x.logp
    a_T = log_a_T.exp()
    p_T = log_p_T.exp()
    tiny = 1e-8  # keeps the second logarithm finite for a probability of 1, as in the sources
    # All other tokens count as one outcome, of probability 1 - a under alpha and 1 - p under pi.
    other_tokens_T = (1 - a_T) * torch.log((1 - a_T + tiny) / (1 - p_T + tiny))
    D_T = a_T * (log_a_T - log_p_T) + other_tokens_T
    A_T = x.advantage
    is_above_T = (A_T > 0) & (p_T > a_T) & (delta_high < D_T)
    is_below_T = (A_T < 0) & (p_T < a_T) & (delta_low < D_T)
    return ~(is_above_T | is_below_T)


def tv_two_side(
    x: LossInputs, *, denominator: TokenFunction = alpha, delta: NonNegative = 0.1
) -> Tensor:
    """|pi - alpha| <= delta, probabilities of the sampled token, whatever the sign of A.

    It is prime-rl's `ipo`, not the preference optimization of that name (`online_ipo`).
    """
    return (x.logp.exp() - denominator(x).exp()).abs() <= delta
