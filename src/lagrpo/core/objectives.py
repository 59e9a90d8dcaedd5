"""Surrogates: the value of the objective at each token [T], to be *maximized*, not yet reduced.

`ratio_T` is pi/alpha, `center_T` is pi_k/alpha (its gradient is stopped), `advantage_T` the advantage of the token's
completion. Sources: [P1] Mroueh et al., arXiv 2505.22257; [P2] Yao et al., arXiv 2509.24203.

Each clip comes with the mask of the tokens whose gradient it cuts. The sign of the advantage decides which: beyond the
upper end only A > 0 is cut, beyond the lower end only A < 0. All functions raise ValueError on shapes that differ and
for a negative epsilon.
"""

import torch

from lagrpo.core.extended import times
from lagrpo.core.shapes import BoolT, FloatT, require_at_least, require_vector


def unclipped(ratio_T: FloatT, advantage_T: FloatT) -> FloatT:
    """r A, the importance-weighted advantage; its mean over samples estimates Eq. 3 of [P1] for r = pi(y)/alpha(y)."""
    require_vector(ratio_T=ratio_T, advantage_T=advantage_T)
    return times(ratio_T, advantage_T)


def reinforce(logp_T: FloatT, advantage_T: FloatT, mask_T: BoolT, weight_T: FloatT) -> FloatT:
    """M W A logp, the one formula of the REC and RED methods [P2]; M, W and A carry no gradient (see core.reinforce).
    Where M and W are 1 it is REINFORCE, whoever generated the samples."""
    require_vector(logp_T=logp_T, advantage_T=advantage_T, mask_T=mask_T, weight_T=weight_T)
    return times(times(times(mask_T.to(weight_T.dtype), weight_T), advantage_T).detach(), logp_T)


def f_eps(ratio_T: FloatT, center_T: FloatT, advantage_T: FloatT, epsilon_low: float, epsilon_high: float) -> FloatT:
    """f_eps(r, c, A) = min(r A, clip(r, max(c - epsilon_low, 0), c + epsilon_high) A), [P1] above Eq. 6:
    A min(r, c + epsilon_high) for A >= 0, A max(r, max(c - epsilon_low, 0)) for A < 0. Around c = pi_k/alpha it is the
    clip of Eq. 6: its range follows pi_k, wherever alpha is. Eq. 6 has the ratios of completions; any level will do."""
    return clipped_between(ratio_T, *clip_range(center_T, epsilon_low, epsilon_high), advantage_T)


def clipped(ratio_T: FloatT, advantage_T: FloatT, epsilon_low: float, epsilon_high: float) -> FloatT:
    """f_eps(r, 1, A): the practice for every alpha = pi_{k-v}, end of section 3.2 of [P1]: pi_k/alpha taken as 1. With
    alpha = pi_k it is the on-policy GRPO objective (Shao et al., arXiv 2402.03300)."""
    return f_eps(ratio_T, torch.ones_like(ratio_T), advantage_T, epsilon_low, epsilon_high)


def clip_range(center_T: FloatT, epsilon_low: float, epsilon_high: float) -> tuple[FloatT, FloatT]:
    """The ends max(c - epsilon_low, 0) and c + epsilon_high of f_eps. The max changes nothing, as no ratio is negative:
    without it (GePPO, Queeney et al., arXiv 2111.00072) the objective is the same function."""
    require_at_least(0.0, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return (center_T.detach() - epsilon_low).clamp(min=0.0), center_T.detach() + epsilon_high


def proportional_range(center_T: FloatT, epsilon_low: float, epsilon_high: float) -> tuple[FloatT, FloatT]:
    """The ends c (1 - epsilon_low) and c (1 + epsilon_high): pi may leave pi_k by a factor, wherever alpha is
    (off-policy PPO, Meng et al. 2023)."""
    require_at_least(0.0, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return center_T.detach() * (1 - epsilon_low), center_T.detach() * (1 + epsilon_high)


def clipped_between(ratio_T: FloatT, low_T: FloatT, high_T: FloatT, advantage_T: FloatT) -> FloatT:
    """min(r A, clip(r, low, high) A)."""
    require_vector(ratio_T=ratio_T, low_T=low_T, high_T=high_T, advantage_T=advantage_T)
    return torch.minimum(times(ratio_T, advantage_T), times(ratio_T.clamp(low_T, high_T), advantage_T))


def dual_clipped(value_T: FloatT, advantage_T: FloatT, dual_clip: float) -> FloatT:
    """max(value, delta A) where A < 0, delta = `dual_clip`: a bad token whose ratio is above delta is not pushed down.
    Dual-clip PPO (Ye et al., arXiv 1912.09729), two-sided GRPO (INTELLECT-2, arXiv 2505.07291); `delta` in TRL,
    `clip_ratio_c` in verl. delta = inf: no such end. Raises ValueError for delta < 1."""
    require_vector(value_T=value_T, advantage_T=advantage_T)
    require_at_least(1.0, dual_clip=dual_clip)
    lowest_T = torch.where(advantage_T < 0, dual_clip * advantage_T, torch.full_like(advantage_T, -torch.inf))
    return torch.maximum(value_T, lowest_T)


def cut_by_dual_clip(ratio_T: FloatT, advantage_T: FloatT, dual_clip: float) -> BoolT:
    """The tokens whose gradient `dual_clipped` cuts beyond those that the clip cuts: r > delta with A < 0."""
    require_vector(ratio_T=ratio_T, advantage_T=advantage_T)
    return (ratio_T > dual_clip) & (advantage_T < 0)


def cut_between(ratio_T: FloatT, low_T: FloatT, high_T: FloatT, advantage_T: FloatT) -> BoolT:
    """The tokens whose gradient `clipped_between` cuts: r > high with A > 0, or r < low with A < 0."""
    require_vector(ratio_T=ratio_T, low_T=low_T, high_T=high_T, advantage_T=advantage_T)
    return ((ratio_T > high_T) & (advantage_T > 0)) | ((ratio_T < low_T) & (advantage_T < 0))
