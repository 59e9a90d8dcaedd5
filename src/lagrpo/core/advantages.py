"""Advantages: from the rewards of a group to one number per completion.

A group is the last dimension, G. Leading dimensions are groups that share a size; groups of different sizes are
separate calls. Statistics describe the group as alpha sampled it; s0 is the *biased* standard deviation (over G), s1
the standard deviation over G - 1.

Two conventions hold in every function here:
- a group of one completion is legal: its baseline is 0, so its advantage is its reward, and it has zero variance;
- a group whose rewards are all equal (and G > 1) has advantages that are exactly 0, not a rounding error blown up by
  a tiny standard deviation.
"""

from math import log, sqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lagrpo.core.shapes import require_above, require_at_least, require_group, require_vector


def zero_variance(rewards: Float[Tensor, "*N G"]) -> Bool[Tensor, "*N"]:
    """Whether s0 = 0: the groups that the indicator of Eq. 8 (Mroueh et al., arXiv 2505.22257) leaves out.

    Decided by equality of the rewards, not by a rounded s0: three rewards of 0.1 have a mean that is not 0.1.
    Raises ValueError for an empty group or a reward that is not finite."""
    require_group(rewards)
    return (rewards == rewards[..., :1]).all(dim=-1)


def sigma(rewards: Float[Tensor, "*N G"], eps_std: float) -> Float[Tensor, "*N"]:
    """sigma = sqrt(s0^2 + eps_std), the denominator of Eq. 2; s0^2 = mean_i (r_i - mu)^2, exactly 0 for equal rewards.

    Raises ValueError for an empty group, a reward that is not finite, or eps_std < 0."""
    require_group(rewards)
    require_at_least(0.0, eps_std=eps_std)
    unit = _unit(rewards)
    variance = (rewards / unit[..., None]).var(dim=-1, correction=0)
    variance = torch.where(zero_variance(rewards), torch.zeros_like(variance), variance)
    return (variance + eps_std / unit.square()).sqrt() * unit


def _unit(rewards: Float[Tensor, "*N G"]) -> Float[Tensor, "*N"]:
    """1, or a power of two near the largest reward where the squares of the rewards would overflow."""
    largest = rewards.abs().amax(dim=-1)
    exponent = torch.frexp(largest).exponent
    squares_fit = 2 * exponent < torch.frexp(torch.full_like(largest, torch.finfo(rewards.dtype).max)).exponent - 64
    return torch.where(squares_fit, torch.ones_like(largest), torch.ldexp(torch.ones_like(largest), exponent - 1))


def centered(rewards: Float[Tensor, "*N G"]) -> Float[Tensor, "*N G"]:
    """A_i = r_i - mu (Dr. GRPO, Liu et al., arXiv 2503.20783). Raises ValueError as `zero_variance` does."""
    require_group(rewards)
    if rewards.shape[-1] == 1:
        return rewards.clone()
    differences = rewards - rewards.mean(dim=-1, keepdim=True)
    return torch.where(zero_variance(rewards)[..., None], torch.zeros_like(rewards), differences)


def normalized(rewards: Float[Tensor, "*N G"], eps_std: float) -> Float[Tensor, "*N G"]:
    """A_i = (r_i - mu) / sqrt(s0^2 + eps_std), Eq. 2 (Mroueh et al., arXiv 2505.22257).

    All zero where s0 = 0, also at eps_std = 0: there is no 0/0. A single completion keeps its reward unscaled, as it
    has no spread to be scaled by. Raises ValueError as `sigma` does."""
    scale = sigma(rewards, eps_std)[..., None]
    if rewards.shape[-1] == 1:
        return rewards.clone()
    return torch.where(scale > 0, centered(rewards) / scale, torch.zeros_like(rewards))


def normalized_unbiased(rewards: Float[Tensor, "*N G"], std_offset: float) -> Float[Tensor, "*N G"]:
    """A_i = (r_i - mu) / (s1 + std_offset), s1^2 = sum_i (r_i - mu)^2 / (G - 1): as TRL does, with an offset of 1e-4.

    Equal rewards and a single completion are treated as in `normalized`. Raises ValueError as `sigma` does."""
    require_group(rewards)
    require_at_least(0.0, std_offset=std_offset)
    G = rewards.shape[-1]
    if G == 1:
        return rewards.clone()
    scale = (sigma(rewards, 0.0) * sqrt(G / (G - 1)) + std_offset)[..., None]
    return torch.where(scale > 0, centered(rewards) / scale, torch.zeros_like(rewards))


def leave_one_out(rewards: Float[Tensor, "*N G"]) -> Float[Tensor, "*N G"]:
    """A_i = r_i - mean of the other G - 1 rewards = (r_i - mu) G / (G - 1) (RLOO, Ahmadian et al., arXiv 2402.14740).

    With G = 1 there are no others and the baseline is 0. Raises ValueError as `zero_variance` does."""
    require_group(rewards)
    G = rewards.shape[-1]
    return centered(rewards) * (G / max(G - 1, 1))


def red_drop(rewards_G: Float[Tensor, "G"], uniform_G: Float[Tensor, "G"]) -> Float[Tensor, "G"]:
    """RED-Drop (Yao et al., arXiv 2509.24203): where completions below the mean outnumber the others, the surplus,
    chosen at random, gets advantage 0. The rest get r - mean of the rest.

    The dropped ones stay in the batch, and so in the denominator of a token mean. The caller passes the random numbers
    `uniform_G`: of the completions below the mean, the ones with the smallest numbers are dropped. [1, 0 x 7] keeps one
    of each: +-0.5. Raises ValueError for an empty group, a reward that is not finite, and unequal shapes."""
    require_group(rewards_G)
    require_vector(rewards_G=rewards_G, uniform_G=uniform_G)
    if bool(zero_variance(rewards_G)):
        return centered(rewards_G)
    below_G = rewards_G.double() < rewards_G.double().mean()  # a tie with the mean is not below it
    too_many = max(int(below_G.sum()) - int((~below_G).sum()), 0)
    order = torch.where(below_G, uniform_G, torch.full_like(uniform_G, 2.0)).argsort(stable=True)
    kept_G = torch.ones_like(below_G).index_fill(0, order[:too_many], False)
    return torch.where(kept_G, rewards_G - rewards_G[kept_G].mean(), torch.zeros_like(rewards_G))


def log_mean_exp(rewards: Float[Tensor, "*N G"], strength: float) -> Float[Tensor, "*N G"]:
    """A_i = r_i - strength log mean_j e^(r_j / strength), the soft baseline of OPMD (Kimi k1.5, arXiv 2501.12599).

    Between r_i - max and r_i - mu: it does not sum to 0. Raises ValueError as `zero_variance` does, and for
    strength <= 0."""
    require_group(rewards)
    require_above(0.0, strength=strength)
    if rewards.shape[-1] == 1:
        return rewards.clone()
    log_sum = (rewards / strength).logsumexp(dim=-1, keepdim=True)
    return rewards - strength * (log_sum - log(rewards.shape[-1]))


def overlong_penalty(lengths: Int[Tensor, "*N G"], max_length: int, buffer: int) -> Float[Tensor, "*N G"]:
    """What DAPO adds to the reward of a long completion (Yu et al., arXiv 2503.14476, Eq. 13): 0 up to
    max_length - buffer tokens, then down linearly to -1 at max_length, -1 beyond.
    Raises ValueError unless 1 <= buffer <= max_length."""
    if not 1 <= buffer <= max_length:
        raise ValueError(f"the buffer of the overlong penalty must lie in 1 .. {max_length}, but is {buffer}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)
