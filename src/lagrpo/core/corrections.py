"""Corrections for a rollout engine whose log-probs differ from the trainer's: weights made of pi_k/alpha, per token
[T].

The trainer computes pi_k, the rollout engine reported alpha. They differ by staleness, and by arithmetic if the engine
is another program (vLLM, say). A surrogate of pi/pi_k ignores both. Multiplied by such a weight it counts samples of
alpha as samples of pi_k. Untruncated weights of whole completions make its gradient unbiased at pi = pi_k, weights of
tokens do not; floor and cap bound the variance and add a bias. tests/core/test_enumeration.py has the numbers.

A weight has no gradient. 0 <= floor <= 1 <= cap: without a mismatch the weight is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, alpha, pi_k
from lagrpo.core.ratios import token


def truncated(
    x: LossInputs,
    *,
    level: Callable = token,
    floor: float = 0.0,
    cap: float = 2.0,
) -> Tensor:
    """clip(w, floor, cap) with w = pi_k/alpha of the token or completion: truncated importance
    sampling; with a floor of 0 as Yao, Liu et al. ("Your efficient RL framework secretly brings you off-policy RL
    training", 2025)."""
    w = level(pi_k(x) - alpha(x), x.completion).detach()
    return w.clamp(floor, cap)


def masked(
    x: LossInputs,
    *,
    level: Callable = token,
    floor: float = 0.0,
    cap: float = 2.0,
) -> Tensor:
    """w if floor <= w <= cap, else 0: drops a token or completion too far from what the trainer
    computes; it still counts in the normalizer. Tokens: IcePop (Ring-1T, arXiv 2510.18855); completions, with a floor
    of 0: masked importance sampling (Liu, Li et al., "When speed kills stability", 2025)."""
    w = level(pi_k(x) - alpha(x), x.completion).detach()
    return torch.where((w >= floor) & (w <= cap), w, 0.0)
