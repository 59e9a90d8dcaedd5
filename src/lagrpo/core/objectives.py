"""Surrogates: the value of the objective at each token [T], to be *maximised*, not yet reduced.

`ratio_T` is pi/alpha, `centre_T` is pi_k/alpha (no gradient), `advantage_T` the advantage of the token's completion.
Sources: Mroueh et al., arXiv 2505.22257 (Eq. 3, 6, 7).

The clipped objectives come with the mask of the tokens whose gradient they cut. Which those are depends on the sign of
the advantage: beyond the upper end only A > 0 is cut, beyond the lower end only A < 0.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lagrpo.core.shapes import require_at_least, require_vector


def f_eps(
    ratio_T: Float[Tensor, "T"],
    centre_T: Float[Tensor, "T"],
    advantage_T: Float[Tensor, "T"],
    epsilon_low: float,
    epsilon_high: float,
) -> Float[Tensor, "T"]:
    """f_eps(r, c, A) = min(r A, clip(r, max(c - epsilon_low, 0), c + epsilon_high) A), above Eq. 6.

    A >= 0: A min(r, c + epsilon_high);  A < 0: A max(r, max(c - epsilon_low, 0)). Raises ValueError on shapes and on a
    negative epsilon."""
    low_T, high_T = _range(ratio_T, centre_T, advantage_T, epsilon_low, epsilon_high)
    return torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low_T, high_T) * advantage_T)


def f_eps_cut(
    ratio_T: Float[Tensor, "T"],
    centre_T: Float[Tensor, "T"],
    advantage_T: Float[Tensor, "T"],
    epsilon_low: float,
    epsilon_high: float,
) -> Bool[Tensor, "T"]:
    """The tokens whose gradient `f_eps` cuts: r > c + epsilon_high with A > 0; r < max(c - epsilon_low, 0) with A < 0.
    Raises as `f_eps` does."""
    low_T, high_T = _range(ratio_T, centre_T, advantage_T, epsilon_low, epsilon_high)
    return ((ratio_T > high_T) & (advantage_T > 0)) | ((ratio_T < low_T) & (advantage_T < 0))


def clipped(
    ratio_T: Float[Tensor, "T"], advantage_T: Float[Tensor, "T"], epsilon_low: float, epsilon_high: float
) -> Float[Tensor, "T"]:
    """f_eps(r, 1, A): the practice for every alpha = pi_{k-v}, end of section 3.2 (pi_k/alpha taken as 1); with
    alpha = pi_k it is the on-policy GRPO objective (Shao et al., arXiv 2402.03300)."""
    return f_eps(ratio_T, torch.ones_like(ratio_T), advantage_T, epsilon_low, epsilon_high)


def clipped_exact(
    ratio_T: Float[Tensor, "T"],
    centre_T: Float[Tensor, "T"],
    advantage_T: Float[Tensor, "T"],
    epsilon_low: float,
    epsilon_high: float,
) -> Float[Tensor, "T"]:
    """f_eps(pi/alpha, pi_k/alpha, A), Eq. 6 as derived: the clip range follows pi_k, wherever alpha is."""
    return f_eps(ratio_T, centre_T.detach(), advantage_T, epsilon_low, epsilon_high)


def unclipped(ratio_T: Float[Tensor, "T"], advantage_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """r A, Eq. 3: the importance-weighted advantage. Raises ValueError on shapes."""
    require_vector(ratio_T=ratio_T, advantage_T=advantage_T)
    return ratio_T * advantage_T


def reinforce(logp_T: Float[Tensor, "T"], advantage_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """A logp: REINFORCE, the ratio left at 1 whoever drew the samples. Raises ValueError on shapes."""
    require_vector(logp_T=logp_T, advantage_T=advantage_T)
    return advantage_T * logp_T


def _range(
    ratio_T: Tensor, centre_T: Tensor, advantage_T: Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    require_vector(ratio_T=ratio_T, centre_T=centre_T, advantage_T=advantage_T)
    require_at_least(0.0, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return (centre_T - epsilon_low).clamp(min=0.0), centre_T + epsilon_high
