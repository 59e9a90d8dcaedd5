"""Weights W of `reinforce`: functions of `LossInputs` that give a factor per token [T], used without a gradient.

rho is pi/alpha at the level `ratio` over the policy `denominator`, s the ratio of the whole completion, A the
advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, alpha
from lagrpo.core.ratios import sequence, token, total


def importance(x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha) -> Tensor:
    """rho."""
    return ratio(x.logp - denominator(x), x.completion)


def capped_ratio(
    x: LossInputs,
    *,
    ratio: Callable = token,
    denominator: Callable = alpha,
    epsilon_high: float = 0.2,
) -> Tensor:
    """min(rho, 1 + epsilon_high): CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4), its upper cap alone. A lower one would
    weigh up what pi has already made unlikely."""
    return ratio(x.logp - denominator(x), x.completion).clamp(max=1 + epsilon_high)


def capped_sequence(x: LossInputs, *, denominator: Callable = alpha, cap: float = 8.0) -> Tensor:
    """min(s, cap): truncated importance sampling of whole completions."""
    return sequence(x.logp - denominator(x), x.completion).clamp(max=cap)


def tapered_ratio(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, cap: float = 1.0
) -> Tensor:
    """1 if A > 0, else min(rho, cap): TOPR (arXiv 2503.14286, cap 1) pushes down only what pi still does."""
    rho = ratio(x.logp - denominator(x), x.completion)
    return torch.where(x.advantage > 0, 1.0, rho.clamp(max=cap))


def exp_advantage(x: LossInputs, *, weight_temperature: float = 1.0) -> Tensor:
    """e^(A / weight_temperature), not normalized: RED-Weight (arXiv 2509.24203), better completions weigh more."""
    return (x.advantage / weight_temperature).exp()


def sapo(
    x: LossInputs,
    *,
    denominator: Callable = alpha,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """4 rho p (1 - p) with p = sigmoid(t (rho - 1)), t = temperature_positive if A > 0, else temperature_negative: the
    gradient of (4/t) sigmoid(t (rho - 1)) A, SAPO's soft clip (arXiv 2511.20347). 1 at rho = 1, 1.57 at 2, .72 at 4."""
    rho = token(x.logp - denominator(x), x.completion)
    t = torch.where(x.advantage > 0, temperature_positive, temperature_negative)
    p = torch.sigmoid(t * (rho - 1))
    return 4 * rho * p * (1 - p)


def vespo(
    x: LossInputs,
    *,
    denominator: Callable = alpha,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Tensor:
    """s^k e^(l (1 - s)) with k, l = power_positive, decay_positive if A >= 0, else the negative ones: VESPO (arXiv
    2602.10693). 1 at s = 1, largest at s = k/l, 0 at both ends. log s is limited to [-18.42, 20] nats, as in the
    authors' code."""
    log_s = total(x.logp - denominator(x), x.completion).clamp(-18.42, 20.0)
    is_positive = x.advantage >= 0
    k = torch.where(is_positive, power_positive, power_negative)
    l = torch.where(is_positive, decay_positive, decay_negative)  # noqa: E741 - the paper's letter
    return (k * log_s + l * (1 - log_s.exp())).exp()


def asymmetric_cap(
    x: LossInputs,
    *,
    ratio: Callable = token,
    denominator: Callable = alpha,
    cap_positive: float = inf,
    cap_negative: float = 1.0,
) -> Tensor:
    """min(rho, cap_positive) if A > 0, else min(rho, cap_negative)."""
    rho = ratio(x.logp - denominator(x), x.completion)
    return torch.where(x.advantage > 0, rho.clamp(max=cap_positive), rho.clamp(max=cap_negative))
