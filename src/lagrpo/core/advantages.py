"""Advantages: from the rewards of a batch to one number per completion.

An advantage is a function of `AdvantageInputs` and gives [C]; its keyword-only arguments are its
knobs. Completions lie flat, with the index of their group, so a function may use statistics of a
group or of the whole batch.

mu is the mean of a group, s0 its *biased* standard deviation (over G) as alpha sampled it, s1 the
one over G - 1. A group whose rewards are all equal says nothing about its completions, and neither
does a group of one, whose mean is its only reward. Their advantages are exactly 0, not a rounding
error blown up by a tiny standard deviation. Only `batch_whitened` then subtracts the mean over the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lagrpo.core.pieces import NonNegative, Positive


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The scored completions of a batch."""

    rewards: Tensor
    """[C]"""
    group: Tensor
    """[C] index of each completion's group, from 0; an index may be unused"""
    lengths: Tensor | None = None
    """[C] sampled tokens"""
    uniform: Tensor | None = None
    """[C] a random number in [0, 1) for each completion"""


def one_group(rewards_G: Tensor, uniform_G: Tensor | None = None) -> AdvantageInputs:
    """The inputs of a batch that is a single group."""
    group_G = torch.zeros_like(rewards_G, dtype=torch.long)
    return AdvantageInputs(rewards_G, group_G, uniform=uniform_G)


# Statistics of each completion's group, [C]


def group_sum(values_C: Tensor, group_C: Tensor) -> Tensor:
    """The sum over the completions of the group, at each of them."""
    sums = values_C.new_zeros(_count_groups(group_C)).index_add(0, group_C, values_C)
    return sums[group_C]


def group_size(group_C: Tensor) -> Tensor:
    """G of each completion's group."""
    return group_C.bincount(minlength=_count_groups(group_C))[group_C]


def group_mean(values_C: Tensor, group_C: Tensor) -> Tensor:
    """mu of each completion's group."""
    return group_sum(values_C, group_C) / group_size(group_C)


def group_largest(values_C: Tensor, group_C: Tensor) -> Tensor:
    """The largest value of each completion's group."""
    largest = values_C.new_full((_count_groups(group_C),), -torch.inf)
    return largest.scatter_reduce(0, group_C, values_C, "amax")[group_C]


def _count_groups(group_C: Tensor) -> int:
    return int(group_C.max()) + 1 if len(group_C) else 0


def zero_variance(rewards_C: Tensor, group_C: Tensor) -> Tensor:
    """True where s0 = 0: the groups that Eq. 8 of arXiv 2505.22257 leaves out, and groups of one.

    Decided by equality of the rewards, as three rewards of 0.1 have a mean that is not 0.1.
    """
    smallest_C = -group_largest(-rewards_C, group_C)
    return smallest_C == group_largest(rewards_C, group_C)


def _rounding_of_mean(rewards_C: Tensor, group_C: Tensor) -> Tensor:
    """A bound on the rounding error of mu, [C]: rewards of .1, .2 and .3 do not average .2."""
    largest_C = group_largest(rewards_C.abs(), group_C)
    return group_size(group_C) * torch.finfo(rewards_C.dtype).eps * largest_C


def sigma(rewards_C: Tensor, group_C: Tensor, eps_std: float) -> Tensor:
    """sqrt(s0^2 + eps_std), the denominator of Eq. 2 of arXiv 2505.22257.

    s0 is exactly 0 for equal rewards.
    """
    variance_C = group_mean((rewards_C - group_mean(rewards_C, group_C)).square(), group_C)
    exact_variance_C = variance_C.masked_fill(zero_variance(rewards_C, group_C), 0.0)
    return (exact_variance_C + eps_std).sqrt()


# Baselines and scales of a group


def centered(x: AdvantageInputs) -> Tensor:
    """r - mu (Dr. GRPO, arXiv 2503.20783)."""
    advantage_C = x.rewards - group_mean(x.rewards, x.group)
    return advantage_C.masked_fill(zero_variance(x.rewards, x.group), 0.0)


def normalized(x: AdvantageInputs, *, eps_std: NonNegative = 1e-4) -> Tensor:
    """(r - mu) / sqrt(s0^2 + eps_std). Eq. 2 of arXiv 2505.22257."""
    return _scaled(x, sigma(x.rewards, x.group, eps_std))


def normalized_unbiased(x: AdvantageInputs, *, std_offset: NonNegative = 1e-4) -> Tensor:
    """(r - mu) / (s1 + std_offset): as TRL."""
    return _scaled(x, sigma(x.rewards, x.group, 0.0) * _bessel_factor(x).sqrt() + std_offset)


def normalized_positive(x: AdvantageInputs, *, eps_std: NonNegative = 1e-4) -> Tensor:
    """max(r - mu, 0) / sqrt(s0^2 + eps_std): learn from the better completions alone."""
    return normalized(x, eps_std=eps_std).clamp(min=0.0)


def leave_one_out(x: AdvantageInputs) -> Tensor:
    """r - mean of the others = (r - mu) G / (G - 1) (RLOO, arXiv 2402.14740)."""
    return centered(x) * _bessel_factor(x)


def maxrl(x: AdvantageInputs) -> Tensor:
    """(r - mu) / mu, and 0 where mu <= 0, up to rounding: MaxRL (arXiv 2602.02710).

    Rare successes weigh more than with `centered`.
    """
    mu_C = group_mean(x.rewards, x.group)
    is_positive_C = mu_C > _rounding_of_mean(x.rewards, x.group)
    # A division by infinity gives the 0.
    scale_C = torch.where(is_positive_C, mu_C, torch.inf)
    return _scaled(x, scale_C)


def sign_balanced(x: AdvantageInputs) -> Tensor:
    """1 above the group's mean, -n+/n- below it: SignBalance (arXiv 2609.04063).

    n+ and n- are the numbers of completions above and below, up to rounding, so that a group sums
    to 0. For rewards of 0 and 1 it is (r - mu)/(1 - mu); other rewards are not in the paper.
    """
    above_mean_C = x.rewards - group_mean(x.rewards, x.group)
    rounding_C = _rounding_of_mean(x.rewards, x.group)
    is_above_C = (above_mean_C > rounding_C).to(x.rewards.dtype)
    is_below_C = (above_mean_C < -rounding_C).to(x.rewards.dtype)
    number_below_C = group_sum(is_below_C, x.group).clamp(min=1)
    ratio_C = group_sum(is_above_C, x.group) / number_below_C
    advantage_C = is_above_C - is_below_C * ratio_C
    return advantage_C.masked_fill(zero_variance(x.rewards, x.group), 0.0)


def _bessel_factor(x: AdvantageInputs) -> Tensor:
    """G / (G - 1) of each completion's group, [C]: from a mean over G to one over G - 1."""
    G_C = group_size(x.group).to(x.rewards.dtype)
    return G_C / (G_C - 1).clamp(min=1)


def _scaled(x: AdvantageInputs, scale_C: Tensor) -> Tensor:
    """(r - mu) / scale [C]; 0 if the scale is 0."""
    return (centered(x) / scale_C).masked_fill(scale_C == 0, 0.0)


# Scales of the whole batch


def batch_scaled(x: AdvantageInputs, *, std_offset: NonNegative = 1e-4) -> Tensor:
    """(r - mu) / (s + std_offset), s the standard deviation of all C rewards (over C - 1).

    TRL's `scale_rewards = "batch"` (Lite PPO, arXiv 2508.08221).
    """
    if len(x.rewards) < 2:
        return centered(x)
    scale = x.rewards.std() + std_offset
    # Without an offset the scale is 0 if all rewards are equal.
    return torch.where(scale > 0, centered(x) / scale, 0.0)


def batch_whitened(x: AdvantageInputs, *, eps_variance: NonNegative = 1e-8) -> Tensor:
    """(a - m) / sqrt(v + eps_variance) with a = r - mu.

    m and v are the mean and variance (over T - 1) of a over the T sampled tokens of the batch: the
    baseline variant of REINFORCE++ (arXiv 2501.03262), as in verl.
    """
    a_C = centered(x)
    lengths_C = torch.ones_like(a_C) if x.lengths is None else x.lengths.to(a_C.dtype)
    tokens = lengths_C.sum()
    mean = (lengths_C * a_C).sum() / tokens
    variance = (lengths_C * (a_C - mean).square()).sum() / (tokens - 1).clamp(min=1)
    scale = (variance + eps_variance).sqrt()
    return torch.where(scale > 0, (a_C - mean) / scale, 0.0)


# Two methods of Yao et al. (arXiv 2509.24203)


def red_drop(x: AdvantageInputs) -> Tensor:
    """RED-Drop (arXiv 2509.24203): drops completions below the mean until at most half are below.

    If the completions below the mean outnumber the others, the surplus, chosen at random, gets 0.
    The others get r - their mean. [1, 0 x 7] keeps one of each: ±0.5.

    The dropped stay in the batch, so in the denominator of a token mean. Of the completions below
    the mean, those with the smallest random numbers `uniform` are dropped. A completion at the mean
    is not below it. Raises ValueError without random numbers.
    """
    if x.uniform is None:
        raise ValueError("red_drop needs a random number for each completion")
    below_mean_C = group_mean(x.rewards, x.group) - x.rewards
    is_below_C = below_mean_C > _rounding_of_mean(x.rewards, x.group)
    number_below_C = group_sum(is_below_C.long(), x.group)
    number_above_C = group_size(x.group) - number_below_C
    surplus_C = (number_below_C - number_above_C).clamp(min=0)
    is_dropped_C = is_below_C & (_rank_in_group(x.uniform, is_below_C, x.group) < surplus_C)
    remaining_C = (~is_dropped_C).to(x.rewards.dtype)
    sums_C = group_sum(remaining_C * x.rewards, x.group)
    mean_C = sums_C / group_sum(remaining_C, x.group)
    advantage_C = (x.rewards - mean_C).masked_fill(is_dropped_C, 0.0)
    return torch.where(zero_variance(x.rewards, x.group), centered(x), advantage_C)


def _rank_in_group(values_C: Tensor, is_ranked_C: Tensor, group_C: Tensor) -> Tensor:
    """The rank of each completion's value among the ranked ones of its group: 0 the smallest, [C].

    Completions that are not ranked come last.
    """
    by_value = torch.where(is_ranked_C, values_C, torch.inf).argsort(stable=True)
    # A stable sort by group keeps the order by value inside each group.
    order = by_value[group_C[by_value].argsort(stable=True)]
    first_of_group = group_C.bincount().cumsum(0) - group_C.bincount()
    position_C = torch.empty_like(group_C)
    position_C[order] = torch.arange(len(order), device=order.device)
    return position_C - first_of_group[group_C]


def log_mean_exp(x: AdvantageInputs, *, strength: Positive = 0.1) -> Tensor:
    """r - strength log mean e^(r / strength): a soft baseline between mu and the group's maximum.

    Of OPMD (Kimi k1.5, arXiv 2501.12599) and OAPL (arXiv 2602.19362). It does not sum to 0.
    """
    # Differences to the maximum keep the exponentials from overflowing.
    largest_C = group_largest(x.rewards, x.group)
    mean_C = group_mean(((x.rewards - largest_C) / strength).exp(), x.group)
    return x.rewards - largest_C - strength * mean_C.log()


def zero(x: AdvantageInputs) -> Tensor:
    """0: the reward does not count, so only a `token_advantage` can teach."""
    return torch.zeros_like(x.rewards)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """The term that DAPO adds to the reward of a long completion (arXiv 2503.14476, Eq. 13).

    0 up to max_length - buffer tokens, then down linearly to -1 at max_length. Raises ValueError
    unless 1 <= buffer <= max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong_buffer must lie in 1 .. {max_length}, but is {buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)
