"""Weights W of `reinforce`: functions of `LossInputs` that give a factor per token [T].

The factor is used without a gradient. rho is pi/alpha at the level `ratio` over the policy
`denominator`, s the ratio of the whole completion, A the advantage.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, TokenFunction, alpha
from lagrpo.core.pieces import NonNegative, Positive
from lagrpo.core.ratios import Ratio, sequence, token, total


def importance(
    x: LossInputs, *, ratio: Ratio = token, denominator: TokenFunction = alpha
) -> Tensor:
    """rho."""
    return ratio(x.logp - denominator(x), x.completion)


def capped_ratio(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_high: NonNegative = 0.2,
) -> Tensor:
    """min(rho, 1 + epsilon_high): CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4), its upper cap alone.

    A lower cap would weigh up tokens that pi has already made unlikely.
    """
    return ratio(x.logp - denominator(x), x.completion).clamp(max=1 + epsilon_high)


def capped_sequence(
    x: LossInputs, *, denominator: TokenFunction = alpha, cap: NonNegative = 8.0
) -> Tensor:
    """min(s, cap): truncated importance sampling of whole completions."""
    return sequence(x.logp - denominator(x), x.completion).clamp(max=cap)


def tapered_ratio(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    cap: NonNegative = 1.0,
) -> Tensor:
    """1 if A > 0, else min(rho, cap): TOPR (arXiv 2503.14286, cap 1).

    Tokens that pi has already made unlikely are pushed down less.
    """
    rho_T = ratio(x.logp - denominator(x), x.completion)
    return torch.where(x.advantage > 0, 1.0, rho_T.clamp(max=cap))


def exp_advantage(x: LossInputs, *, weight_temperature: Positive = 1.0) -> Tensor:
    """e^(A / weight_temperature), not normalized: RED-Weight (arXiv 2509.24203).

    Better completions weigh more.
    """
    return (x.advantage / weight_temperature).exp()


def sapo(
    x: LossInputs,
    *,
    denominator: TokenFunction = alpha,
    temperature_positive: NonNegative = 1.0,
    temperature_negative: NonNegative = 1.05,
) -> Tensor:
    """4 rho p (1 - p) with p = sigmoid(t (rho - 1)): SAPO (arXiv 2511.20347).

    It is the gradient of the soft clip (4/t) sigmoid(t (rho - 1)) A. t = temperature_positive if A
    > 0, else temperature_negative. With t = 1 the weight is 1 at rho = 1, 1.57 at 2, .72 at 4.
    """
    rho_T = token(x.logp - denominator(x), x.completion)
    t_T = torch.where(x.advantage > 0, temperature_positive, temperature_negative)
    p_T = torch.sigmoid(t_T * (rho_T - 1))
    return 4 * rho_T * p_T * (1 - p_T)


def vespo(
    x: LossInputs,
    *,
    denominator: TokenFunction = alpha,
    power_positive: NonNegative = 2.0,
    decay_positive: NonNegative = 3.0,
    power_negative: NonNegative = 3.0,
    decay_negative: NonNegative = 2.0,
) -> Tensor:
    """s^k e^(l (1 - s)): VESPO (arXiv 2602.10693). 1 at s = 1, largest at s = k/l, 0 at both ends.

    k, l = power_positive, decay_positive if A >= 0, else power_negative, decay_negative. log s is
    limited to [-18.42, 20] nats, as in the authors' code.
    """
    # -18.42 is ln 1e-8.
    log_s_T = total(x.logp - denominator(x), x.completion).clamp(-18.42, 20.0)
    is_positive_T = x.advantage >= 0
    k_T = torch.where(is_positive_T, power_positive, power_negative)
    l_T = torch.where(is_positive_T, decay_positive, decay_negative)
    return (k_T * log_s_T + l_T * (1 - log_s_T.exp())).exp()


def asymmetric_cap(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    cap_positive: NonNegative = inf,
    cap_negative: NonNegative = 1.0,
) -> Tensor:
    """min(rho, cap_positive) if A > 0, else min(rho, cap_negative)."""
    rho_T = ratio(x.logp - denominator(x), x.completion)
    return torch.where(
        x.advantage > 0, rho_T.clamp(max=cap_positive), rho_T.clamp(max=cap_negative)
    )
