"""Corrections for a rollout engine whose log-probs differ from the trainer's: weights [T].

The trainer computes pi_k, the rollout engine reported alpha. They differ by staleness, and by
arithmetic if the engine is another program (vLLM, say). A surrogate of pi/pi_k ignores both.
Multiplied by such a weight, made of pi_k/alpha, it counts samples of alpha as samples of pi_k.

Untruncated weights of whole completions make its gradient unbiased at pi = pi_k, weights of tokens
do not; floor and cap bound the variance and add a bias. tests/core/test_enumeration.py has the
numbers.

A weight has no gradient. 0 <= floor <= 1 <= cap: without a mismatch the weight is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, alpha, pi_k
from lagrpo.core.pieces import AtLeastOne, NonNegative
from lagrpo.core.ratios import Ratio, token


def truncated(
    x: LossInputs, *, level: Ratio = token, floor: NonNegative = 0.0, cap: AtLeastOne = 2.0
) -> Tensor:
    """clip(w, floor, cap), w = pi_k/alpha of the token or completion.

    Truncated importance sampling. With a floor of 0: Yao, Liu et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025.
    """
    w_T = level(pi_k(x) - alpha(x), x.completion).detach()
    return w_T.clamp(floor, cap)


def masked(
    x: LossInputs, *, level: Ratio = token, floor: NonNegative = 0.0, cap: AtLeastOne = 2.0
) -> Tensor:
    """w if floor <= w <= cap, else 0, w = pi_k/alpha of the token or completion.

    It drops a token or completion too far from the trainer's log-probs; what is dropped still
    counts in the normalizer. Tokens: IcePop (Ring-1T, arXiv 2510.18855). Completions, with a floor
    of 0: masked importance sampling (Liu, Li et al., "When speed kills stability", 2025).
    """
    w_T = level(pi_k(x) - alpha(x), x.completion).detach()
    return torch.where((w_T >= floor) & (w_T <= cap), w_T, 0.0)
