"""Advantages of a group, in Python's own numbers: the formulas as the papers print them, not the code that ran.

r are the rewards of the G scored completions of a group, mu their mean. A group of one keeps its reward; a group of
equal rewards has advantages of 0 (see core/advantages.py for both conventions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log, sqrt

from lagrpo.objective.composition import Composition

Rewards = Sequence[float]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_or_none(values: Sequence[float]) -> float | None:
    """The mean; None over nothing."""
    return mean(values) if values else None


def sigma(r: Rewards, eps_std: float) -> float:
    """sqrt(s0^2 + eps_std), the denominator of Eq. 2 of Mroueh et al., arXiv 2505.22257, with s0^2 = mean (r - mu)^2,
    exactly 0 for equal rewards."""
    mu = mean(r)
    return sqrt((mean([(x - mu) ** 2 for x in r]) if len(set(r)) > 1 else 0.0) + eps_std)


def normalized(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """(r - mu) / sqrt(s0^2 + eps_std), Eq. 2."""
    return [d / sigma(r, made.eps_std) if d else 0.0 for d in centered(r, made, uniform)]


def normalized_unbiased(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """(r - mu) / (s1 + std_offset), s1^2 = sum (r - mu)^2 / (G - 1): TRL's."""
    s1 = sigma(r, 0.0) * sqrt(len(r) / (len(r) - 1))
    return [d / (s1 + made.std_offset) if d else 0.0 for d in centered(r, made, uniform)]


def centered(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """r - mu."""
    mu = mean(r)
    return [0.0 if len(set(r)) == 1 else x - mu for x in r]


def leave_one_out(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """r - mean of the others."""
    return [0.0 if len(set(r)) == 1 else x - (sum(r) - x) / (len(r) - 1) for x in r]


def red_drop(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """Drop completions below the mean, least uniforms first, until they are no more than the others; center the rest
    among themselves."""
    if len(set(r)) == 1:
        return [0.0] * len(r)
    below = sorted((u, i) for i, (x, u) in enumerate(zip(r, uniform, strict=True)) if x < mean(r))
    too_many = max(2 * len(below) - len(r), 0)
    dropped = {i for _, i in below[:too_many]}
    kept = [x for i, x in enumerate(r) if i not in dropped]
    return [0.0 if i in dropped else x - mean(kept) for i, x in enumerate(r)]


def log_mean_exp(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """r - tau log mean e^(r / tau)."""
    tau, top = made.strength, max(r)
    return [x - top - tau * log(mean([exp((y - top) / tau) for y in r])) for x in r]


WRITTEN = (normalized, normalized_unbiased, centered, leave_one_out, red_drop, log_mean_exp)
ADVANTAGES: dict[str, Callable[[Rewards, Composition, Rewards], list[float]]] = {f.__name__: f for f in WRITTEN}


def advantages(r: Rewards, made: Composition, uniform: Rewards) -> list[float]:
    """The advantages of a group. Raises KeyError where no formula is written out here."""
    return list(r) if len(r) == 1 else ADVANTAGES[made.advantage](r, made, uniform)


def shaped(r: Rewards, lengths: Sequence[int], max_tokens: int, made: Composition) -> list[float]:
    """Rewards with DAPO's penalty for length (arXiv 2503.14476, Eq. 13), where the composition has one."""
    if not (buffer := made.overlong_buffer):
        return list(r)
    return [x + min(0.0, max(-1.0, (max_tokens - buffer - n) / buffer)) for x, n in zip(r, lengths, strict=True)]
