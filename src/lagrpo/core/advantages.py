"""Advantages: from the rewards of a group to one number per completion.

A group is the last dimension, G; leading dimensions are groups of one size. s0 is the *biased* standard deviation (over
G) of the group as alpha sampled it, s1 the one over G - 1. Two conventions hold everywhere:
- a group of one completion has a baseline of 0, so its advantage is its reward;
- a group whose rewards are all equal (and G > 1) has advantages of exactly 0, not a rounding error blown up by a tiny
  standard deviation.
"""

from __future__ import annotations

from math import log, sqrt

import torch
from torch import Tensor


def zero_variance(rewards: Tensor) -> Tensor:
    """Whether s0 = 0: the groups that Eq. 8 of arXiv 2505.22257 leaves out. Decided by equality of the rewards, as
    three rewards of 0.1 have a mean that is not 0.1."""
    return (rewards == rewards[..., :1]).all(dim=-1)


def sigma(rewards: Tensor, eps_std: float) -> Tensor:
    """sqrt(s0^2 + eps_std), the denominator of Eq. 2 of arXiv 2505.22257; s0 is exactly 0 for equal rewards."""
    variance = rewards.var(dim=-1, correction=0)
    return (torch.where(zero_variance(rewards), 0.0, variance) + eps_std).sqrt()


def normalized(rewards: Tensor, *, eps_std: float = 1e-4) -> Tensor:
    """(r - mu) / sqrt(s0^2 + eps_std). Eq. 2 of arXiv 2505.22257."""
    return _scale(rewards, sigma(rewards, eps_std))


def normalized_unbiased(rewards: Tensor, *, std_offset: float = 1e-4) -> Tensor:
    """(r - mu) / (s1 + std_offset): as TRL."""
    G = rewards.shape[-1]
    return _scale(rewards, sigma(rewards, 0.0) * sqrt(G / max(G - 1, 1)) + std_offset)


def _scale(rewards: Tensor, scale: Tensor) -> Tensor:
    if rewards.shape[-1] == 1:
        return rewards.clone()
    return torch.where(scale[..., None] > 0, centered(rewards) / scale[..., None], 0.0)


def centered(rewards: Tensor) -> Tensor:
    """r - mu (Dr. GRPO, arXiv 2503.20783)."""
    if rewards.shape[-1] == 1:
        return rewards.clone()
    return torch.where(
        zero_variance(rewards)[..., None], 0.0, rewards - rewards.mean(dim=-1, keepdim=True)
    )


def leave_one_out(rewards: Tensor) -> Tensor:
    """r - mean of the others = (r - mu) G / (G - 1) (RLOO, arXiv 2402.14740)."""
    G = rewards.shape[-1]
    return centered(rewards) * (G / max(G - 1, 1))


def red_drop(rewards_G: Tensor, uniform_G: Tensor) -> Tensor:
    """RED-Drop (arXiv 2509.24203): if the completions below the mean outnumber the others, the surplus, chosen at
    random, gets 0. The rest get r - mean of the rest. [1, 0 x 7] keeps one of each: ±0.5.

    The dropped stay in the batch, so in the denominator of a token mean. Of the completions below the mean, those with
    the smallest random numbers `uniform_G` are dropped."""
    if bool(zero_variance(rewards_G)):
        return centered(rewards_G)
    below_G = rewards_G.double() < rewards_G.double().mean()  # a tie with the mean is not below it
    surplus = max(int(below_G.sum()) - int((~below_G).sum()), 0)
    order = torch.where(below_G, uniform_G, 2.0).argsort(stable=True)
    kept_G = torch.ones_like(below_G).index_fill(0, order[:surplus], False)
    return torch.where(kept_G, rewards_G - rewards_G[kept_G].mean(), 0.0)


def log_mean_exp(rewards: Tensor, *, strength: float = 0.1) -> Tensor:
    """r - strength log mean e^(r / strength), the soft baseline of OPMD (Kimi k1.5, arXiv 2501.12599). Between r - max
    and r - mu: it does not sum to 0."""
    if rewards.shape[-1] == 1:
        return rewards.clone()
    log_sum = (rewards / strength).logsumexp(dim=-1, keepdim=True)
    return rewards - strength * (log_sum - log(rewards.shape[-1]))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """What DAPO adds to the reward of a long completion (arXiv 2503.14476, Eq. 13): 0 up to max_length - buffer tokens,
    then down linearly to -1 at max_length. Raises ValueError unless 1 <= buffer <= max_length."""
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong_buffer must lie in 1 .. {max_length}, but is {buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)
