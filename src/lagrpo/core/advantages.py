"""Advantages: from the rewards of a group to one number per completion.

A group is the last dimension, G. Leading dimensions are groups that share a size; groups of different sizes are
separate calls. Statistics describe the group as alpha sampled it; s0 is the *biased* standard deviation (over G), s1
the standard deviation over G - 1.

Three conventions hold in every function here:
- a group of one completion is legal: its baseline is 0, so its advantage is its reward, and it has zero variance;
- a group whose rewards are all equal (and G > 1) has advantages that are exactly 0, not a rounding error blown up by
  a tiny standard deviation;
- an empty group, a reward that is not finite and a number out of its domain raise ValueError.
"""

from math import log, sqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lagrpo.core.shapes import FloatG, FloatN, require_above, require_at_least, require_group, require_vector


def zero_variance(rewards: FloatG) -> Bool[Tensor, "*N"]:
    """Whether s0 = 0: the groups that the indicator of Eq. 8 (Mroueh et al., arXiv 2505.22257) leaves out. Decided by
    equality of the rewards, not by a rounded s0: three rewards of 0.1 have a mean that is not 0.1."""
    require_group(rewards)
    return (rewards == rewards[..., :1]).all(dim=-1)


def sigma(rewards: FloatG, eps_std: float) -> FloatN:
    """sigma = sqrt(s0^2 + eps_std), the denominator of Eq. 2; s0^2 = mean_i (r_i - mu)^2, exactly 0 for equal rewards.
    Raises ValueError for eps_std < 0."""
    require_group(rewards)
    require_at_least(0.0, eps_std=eps_std)
    unit = _unit(rewards)
    variance = (rewards / unit[..., None]).var(dim=-1, correction=0)
    variance = torch.where(zero_variance(rewards), torch.zeros_like(variance), variance)
    return (variance + eps_std / unit.square()).sqrt() * unit


def _unit(rewards: FloatG) -> FloatN:
    """1, or a power of two near the largest reward where the squares of the rewards would overflow."""
    exponent = torch.frexp(rewards.abs().amax(dim=-1)).exponent
    one = torch.ones_like(rewards[..., 0])
    squares_fit = 2 * exponent < torch.frexp(one * torch.finfo(rewards.dtype).max).exponent - 64
    return torch.where(squares_fit, one, torch.ldexp(one, exponent - 1))


def centered(rewards: FloatG) -> FloatG:
    """A_i = r_i - mu (Dr. GRPO, Liu et al., arXiv 2503.20783)."""
    flat = zero_variance(rewards)[..., None]
    if rewards.shape[-1] == 1:
        return rewards.clone()
    return torch.where(flat, torch.zeros_like(rewards), rewards - rewards.mean(dim=-1, keepdim=True))


def normalized(rewards: FloatG, eps_std: float) -> FloatG:
    """A_i = (r_i - mu) / sqrt(s0^2 + eps_std), Eq. 2 (Mroueh et al., arXiv 2505.22257). All zero where s0 = 0, also at
    eps_std = 0: there is no 0/0. A single completion keeps its reward unscaled, as it has no spread to be scaled by."""
    return _scaled(rewards, sigma(rewards, eps_std))


def normalized_unbiased(rewards: FloatG, std_offset: float) -> FloatG:
    """A_i = (r_i - mu) / (s1 + std_offset), s1^2 = sum_i (r_i - mu)^2 / (G - 1): as TRL does, with an offset of 1e-4.
    Equal rewards and a single completion are treated as in `normalized`."""
    require_at_least(0.0, std_offset=std_offset)
    s0, G = sigma(rewards, 0.0), rewards.shape[-1]
    return _scaled(rewards, s0 * sqrt(G / max(G - 1, 1)) + std_offset)


def _scaled(rewards: FloatG, scale: FloatN) -> FloatG:
    if rewards.shape[-1] == 1:
        return rewards.clone()
    return torch.where(scale[..., None] > 0, centered(rewards) / scale[..., None], torch.zeros_like(rewards))


def leave_one_out(rewards: FloatG) -> FloatG:
    """A_i = r_i - mean of the other G - 1 = (r_i - mu) G / (G - 1) (RLOO, Ahmadian et al., arXiv 2402.14740)."""
    A, G = centered(rewards), rewards.shape[-1]
    return A * (G / max(G - 1, 1))


def red_drop(rewards_G: Float[Tensor, "G"], uniform_G: Float[Tensor, "G"]) -> Float[Tensor, "G"]:
    """RED-Drop (Yao et al., arXiv 2509.24203): where completions below the mean outnumber the others, the surplus,
    chosen at random, gets advantage 0. The rest get r - mean of the rest.

    The dropped ones stay in the batch, and so in the denominator of a token mean. The caller passes the random numbers
    `uniform_G`: of the completions below the mean, the ones with the smallest numbers are dropped. [1, 0 x 7] keeps one
    of each: +-0.5. Raises ValueError for unequal shapes."""
    require_vector(rewards_G=rewards_G, uniform_G=uniform_G)
    if bool(zero_variance(rewards_G)):
        return centered(rewards_G)
    below_G = rewards_G.double() < rewards_G.double().mean()  # a tie with the mean is not below it
    too_many = max(int(below_G.sum()) - int((~below_G).sum()), 0)
    order = torch.where(below_G, uniform_G, torch.full_like(uniform_G, 2.0)).argsort(stable=True)
    kept_G = torch.ones_like(below_G).index_fill(0, order[:too_many], False)
    return torch.where(kept_G, rewards_G - rewards_G[kept_G].mean(), torch.zeros_like(rewards_G))


def log_mean_exp(rewards: FloatG, strength: float) -> FloatG:
    """A_i = r_i - strength log mean_j e^(r_j / strength), the soft baseline of OPMD (Kimi k1.5, arXiv 2501.12599).
    Between r_i - max and r_i - mu: it does not sum to 0. Raises ValueError for strength <= 0."""
    require_group(rewards)
    require_above(0.0, strength=strength)
    if rewards.shape[-1] == 1:
        return rewards.clone()
    log_sum = (rewards / strength).logsumexp(dim=-1, keepdim=True)
    return rewards - strength * (log_sum - log(rewards.shape[-1]))


def overlong_penalty(lengths: Int[Tensor, "*N G"], max_length: int, buffer: int) -> FloatG:
    """What DAPO adds to the reward of a long completion (Yu et al., arXiv 2503.14476, Eq. 13): 0 up to
    max_length - buffer tokens, then down linearly to -1 at max_length. Raises ValueError unless 1 <= buffer <=
    max_length."""
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the buffer of the overlong penalty must lie in 1 .. {max_length}, but is {buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)
