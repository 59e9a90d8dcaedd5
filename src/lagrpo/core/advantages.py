"""Advantages: from the rewards of a group to one number per completion.

A group is the last dimension, G. Leading dimensions are groups that share a size; groups of different sizes are
separate calls. Statistics are those of the group as drawn by alpha; s0 is the *biased* standard deviation (over G).

Two conventions hold in every function here:
- a group of one completion is legal: its baseline is 0, so its advantage is its reward, and it has zero variance;
- a group whose rewards are all equal (and G > 1) has advantages that are exactly 0, not a rounding error blown up by
  a tiny standard deviation.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lagrpo.core.shapes import require_at_least, require_group


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
    variance = rewards.var(dim=-1, correction=0)
    return torch.where(zero_variance(rewards), torch.zeros_like(variance), variance).add(eps_std).sqrt()


def centred(rewards: Float[Tensor, "*N G"]) -> Float[Tensor, "*N G"]:
    """A_i = r_i - mu (Dr. GRPO, Liu et al., arXiv 2503.20783). Raises ValueError as `zero_variance` does."""
    require_group(rewards)
    if rewards.shape[-1] == 1:
        return rewards.clone()
    differences = rewards - rewards.mean(dim=-1, keepdim=True)
    return torch.where(zero_variance(rewards)[..., None], torch.zeros_like(rewards), differences)


def whitened(rewards: Float[Tensor, "*N G"], eps_std: float) -> Float[Tensor, "*N G"]:
    """A_i = (r_i - mu) / sqrt(s0^2 + eps_std), Eq. 2 (Mroueh et al., arXiv 2505.22257).

    All zero where s0 = 0, also at eps_std = 0: there is no 0/0. A single completion keeps its reward unscaled, as it
    has no spread to be scaled by. Raises ValueError as `sigma` does."""
    scale = sigma(rewards, eps_std)[..., None]
    if rewards.shape[-1] == 1:
        return rewards.clone()
    return torch.where(scale > 0, centred(rewards) / scale, torch.zeros_like(rewards))


def leave_one_out(rewards: Float[Tensor, "*N G"]) -> Float[Tensor, "*N G"]:
    """A_i = r_i - mean of the other G - 1 rewards = (r_i - mu) G / (G - 1) (RLOO, Ahmadian et al., arXiv 2402.14740).

    With G = 1 there are no others and the baseline is 0. Raises ValueError as `zero_variance` does."""
    require_group(rewards)
    G = rewards.shape[-1]
    return centred(rewards) * (G / max(G - 1, 1))
