"""Success amplification by binary rewards (Mroueh, arXiv 2503.06639).

Without clip, each iteration of GRPO maximizes E_pi[A] - beta KL(pi || pi_ref), A normalized by the
statistics of the policy before. Its exact solution is the exponential tilt pi_ref e^(A / beta) / Z,
whose probability of success p is p_n = h(p_{n-1}), with

    h(p) = 1 / (1 + (1 - p_ref)/p_ref exp(-1 / (beta sqrt(p (1-p) + eps_std)))).

The sequence need not be monotone; what holds is p* > p_ref at every fixed point p* = h(p*).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import exp, lgamma, log, log1p, sqrt

import torch
from torch import Tensor


def amplified(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    """h(p): the probability of success after one iteration.

    Needs 0 < p_ref < 1 and p (1-p) + eps_std > 0.
    """
    return 1 / (1 + (1 - p_ref) / p_ref * exp(-1 / (beta * sqrt(p * (1 - p) + eps_std))))


def trajectory(p_ref: float, beta: float, eps_std: float, iterations: int) -> list[float]:
    """p_0 = p_ref, p_1 = h(p_0), ... p_iterations."""
    probabilities = [p_ref]
    for _ in range(iterations):
        probabilities.append(amplified(probabilities[-1], p_ref, beta, eps_std))
    return probabilities


def slope(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    """h'(p) = - h (1-h) (1-2p) / (2 beta (p (1-p) + eps_std)^(3/2))."""
    h = amplified(p, p_ref, beta, eps_std)
    return -h * (1 - h) * (1 - 2 * p) / (2 * beta * (p * (1 - p) + eps_std) ** 1.5)


def fixed_points(
    p_ref: float, beta: float, eps_std: float, cells: int = 10_000
) -> list[tuple[float, bool]]:
    """Every p* = h(p*) that a grid of `cells` tells apart, in rising order: (p*, is_stable).

    p* is stable if |h'(p*)| < 1: iterations that start near it end in it. At least one fixed point
    exists, as h maps [0, 1] into (0, 1); for a small eps_std > 0 there are three, the last at
    nearly 1 (1.0 if it rounds to that): certainty is stable.
    """

    def excess(p: float) -> float:
        return amplified(p, p_ref, beta, eps_std) - p

    grid = [cell / cells for cell in range(cells + 1)]
    excesses = [(p, excess(p)) for p in grid]
    points: list[float] = []
    for (low, excess_low), (high, excess_high) in pairwise(excesses):
        if excess_low * excess_high < 0:
            points.append(_bisect(excess, low, high))
        # A root on a point of the grid, such as p = 1, makes the product 0, not negative.
        elif excess_high == 0:
            points.append(high)
    return [(p, abs(slope(p, p_ref, beta, eps_std)) < 1) for p in points]


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a function that changes sign between low and high, to the last bit."""
    is_rising = function(low) <= 0
    middle = (low + high) / 2
    # Once no number lies between low and high, their rounded mean is one of them.
    while low < middle < high:
        is_before_root = (function(middle) <= 0) == is_rising
        if is_before_root:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return low


def group_weight(p: float, G: int, eps_std: float = 0.0) -> float:
    """w_G(p): the expected gradient of a group at pi = alpha is w_G(p) grad p.

    The group has G >= 2 binary rewards of mean p, normalized by the group itself. With
    k ~ Bin(G, p) successes and m = k/G,

        w_G(p) = E[m (1-m) / sqrt(m (1-m) + eps_std)] / (p (1-p)),    0 if m is 0 or 1

    At eps_std = 0 it is below 1/sqrt(p (1-p)), its limit as G grows, and at most sqrt(G-1), its
    limit as p goes to 0 or 1: see reports/theory.md.
    """
    total = 0.0
    for k in range(1, G):
        log_choices = lgamma(G + 1) - lgamma(k + 1) - lgamma(G - k + 1)
        probability = exp(log_choices + k * log(p) + (G - k) * log1p(-p))
        variance = k * (G - k) / G**2
        total += probability * variance / sqrt(variance + eps_std)
    return total / (p * (1 - p))


def tilted(p: Tensor, advantage: Tensor, beta: float) -> Tensor:
    """p e^(A / beta) / Z: the maximizer over pi of E_pi[A] - beta KL(pi || p)."""
    return torch.softmax(p.log() + advantage / beta, dim=-1)
