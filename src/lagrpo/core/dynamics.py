"""Success amplification: what GRPO with a binary reward does to the probability of success (Mroueh, arXiv 2503.06639).

Without clip, each iteration maximizes E_pi[A] - beta KL(pi || pi_ref), where A is normalized by the statistics of the
policy before. Its exact solution is the exponential tilt pi_ref e^(A / beta) / Z, whose probability of success is
p_n = h(p_{n-1}), with

    h(p) = 1 / (1 + (1 - p_ref)/p_ref exp(-1 / (beta sqrt(p (1-p) + eps_std)))).

The sequence need not be monotone; what holds is p* > p_ref at every fixed point p* = h(p*).

In practice GRPO normalizes by the statistics of a finite group; `group_weight` computes what that does to the gradient.
"""

from itertools import accumulate, pairwise
from math import exp, lgamma, log, log1p, sqrt

import torch

from lagrpo.core.divergences import require_distributions
from lagrpo.core.shapes import FloatK, require_above, require_at_least, require_same_shape


def amplified(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    """h(p): the probability of success after one iteration. Raises ValueError unless 0 < p_ref < 1, 0 <= p <= 1,
    beta > 0 and p (1-p) + eps_std > 0."""
    exponent = -1 / (beta * _spread(p, p_ref, beta, eps_std))
    return 1 / (1 + (1 - p_ref) / p_ref * exp(exponent))


def trajectory(p_ref: float, beta: float, eps_std: float, iterations: int) -> list[float]:
    """p_0 = p_ref, p_1 = h(p_0), ... p_iterations. Raises as `amplified` does."""
    return list(accumulate(range(iterations), lambda p, _: amplified(p, p_ref, beta, eps_std), initial=p_ref))


def slope(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    """h'(p) = - h (1-h) (1-2p) / (2 beta (p (1-p) + eps_std)^(3/2)). Raises as `amplified` does."""
    h = amplified(p, p_ref, beta, eps_std)
    return -h * (1 - h) * (1 - 2 * p) / (2 * beta * _spread(p, p_ref, beta, eps_std) ** 3)


def fixed_points(p_ref: float, beta: float, eps_std: float, cells: int = 10_000) -> list[tuple[float, bool]]:
    """Every p* = h(p*) that a grid of `cells` tells apart, in rising order, each with whether it is stable:
    |h'(p*)| < 1, so that iterations that start near it end in it. At least one exists, as h maps [0, 1] into (0, 1);
    for a small eps_std there are three, the last at nearly 1 (1.0 where it rounds to that): certainty is stable. Raises
    as `amplified` does, and for eps_std = 0, where h is not defined at 0 and 1."""
    require_above(0.0, eps_std=eps_std)

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


def group_weight(p: float, G: int, eps_std: float = 0.0) -> float:
    """w_G(p): at pi = alpha the expected gradient of a group of G binary rewards, normalized by the group itself, is
    w_G(p) grad p. With k ~ Bin(G, p) successes and m = k/G,

        w_G(p) = E[m (1-m) / sqrt(m (1-m) + eps_std)] / (p (1-p)),    0 where m is 0 or 1

    At eps_std = 0 it is below 1/sqrt(p (1-p)), its limit as G grows, and at most sqrt(G-1), its limit as p goes to 0 or
    1: see reports/theory.md. Raises ValueError unless 0 < p < 1, G >= 2, eps_std >= 0."""
    require_above(0.0, p=p)
    require_at_least(0.0, eps_std=eps_std)
    if p >= 1 or G < 2:
        raise ValueError(f"the weight of a group needs p < 1 and G >= 2, but p = {p} and G = {G}")
    total = 0.0
    for k in range(1, G):
        log_choices = lgamma(G + 1) - lgamma(k + 1) - lgamma(G - k + 1)
        variance = k * (G - k) / G**2
        total += exp(log_choices + k * log(p) + (G - k) * log1p(-p)) * variance / sqrt(variance + eps_std)
    return total / (p * (1 - p))


def tilted(p: FloatK, advantage: FloatK, beta: float) -> FloatK:
    """p e^(A / beta) / Z: the maximizer over pi of E_pi[A] - beta KL(pi || p). Raises ValueError unless p is a
    distribution of A's shape and beta > 0."""
    require_distributions(p=p)
    require_same_shape(p=p, advantage=advantage)
    require_above(0.0, beta=beta)
    return torch.softmax(p.log() + advantage / beta, dim=-1)


def _bisect(function, low: float, high: float) -> float:
    """The root of a function that changes sign between low and high, to the last bit."""
    rising = function(low) <= 0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if (function(middle) <= 0) == rising else (low, middle)
    return low


def _spread(p: float, p_ref: float, beta: float, eps_std: float) -> float:
    require_above(0.0, beta=beta, p_ref=p_ref)
    require_at_least(0.0, p=p, eps_std=eps_std)
    if p > 1 or p_ref >= 1 or p * (1 - p) + eps_std == 0:
        raise ValueError(f"h needs p_ref < 1, p <= 1 and p (1-p) + eps_std > 0, but p = {p}, p_ref = {p_ref}")
    return sqrt(p * (1 - p) + eps_std)
