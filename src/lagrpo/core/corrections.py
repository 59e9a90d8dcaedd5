"""Corrections for a sampler whose log-probs differ from the learner's: weights made of pi_k/alpha, one per token [T].

The learner computes pi_k, the sampler reported alpha. They differ by the lag of alpha, and by the sampler's arithmetic
where the sampler is another program (a vLLM server, say). A surrogate of pi/pi_k ignores both. Multiplied by such a
weight it counts samples of alpha as samples of pi_k:

    value = sg(w(pi_k/alpha)) * surrogate(pi/pi_k)

Untruncated weights of whole completions make its gradient unbiased at pi = pi_k; weights of tokens do not. Floor and
cap bound the variance and add a bias of their own. tests/core/test_enumeration.py has the numbers. A weight never
carries a gradient. Floors and caps must satisfy 0 <= floor <= 1 <= cap: without a mismatch the weight is 1.
"""

import torch

from lagrpo.core.extended import times
from lagrpo.core.shapes import FloatT, require_at_least, require_vector


def truncated(ratio_T: FloatT, floor: float, cap: float) -> FloatT:
    """min(max(r, floor), cap) with r = pi_k/alpha of the token or the completion: truncated importance sampling; with a
    floor of 0 it is the weight of Yao, Liu et al. ("Your efficient RL framework secretly brings you off-policy RL
    training", 2025). Raises ValueError on shapes, floor and cap, as `masked` does."""
    _check(ratio_T, floor, cap)
    return ratio_T.detach().clamp(floor, cap)


def masked(ratio_T: FloatT, floor: float, cap: float) -> FloatT:
    """r where floor <= r <= cap, else 0: a token or completion too far from what the learner computes is dropped, not
    weighed down; it still counts in the normalizer. Tokens: IcePop (Ring-1T, arXiv 2510.18855); completions, with a
    floor of 0: masked importance sampling (Liu, Li et al., "When speed kills stability", 2025)."""
    _check(ratio_T, floor, cap)
    ratio_T = ratio_T.detach()
    return torch.where((ratio_T >= floor) & (ratio_T <= cap), ratio_T, torch.zeros_like(ratio_T))


def corrected(value_T: FloatT, weight_T: FloatT) -> FloatT:
    """sg(w) times the value of the surrogate. Raises ValueError on shapes."""
    require_vector(value_T=value_T, weight_T=weight_T)
    return times(weight_T.detach(), value_T)


def _check(ratio_T: FloatT, floor: float, cap: float) -> None:
    require_vector(ratio_T=ratio_T)
    require_at_least(0.0, floor=floor)
    require_at_least(1.0, cap=cap)
    if floor > 1:
        raise ValueError(f"floor must be at most 1, but is {floor}: the ratio is 1 where nothing is to be corrected")
