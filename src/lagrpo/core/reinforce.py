"""The pieces around REINFORCE: which tokens count (M), how much (W), and the regularizer that holds pi near alpha.

    objective at a token = M W A logp - regularizer

M and W carry no gradient, and M does not touch the regularizer. Source, unless said: [P2] Yao et al., arXiv 2509.24203.
A clip is a mask that also weighs: `one_side` with the ratio as weight has exactly the gradient of f_eps around 1.
All functions raise ValueError on shapes, and for an epsilon, a strength or a temperature out of its domain.
"""

import torch

from lagrpo.core import shapes
from lagrpo.core.shapes import BoolT, FloatC, FloatT, IntC, IntT, require_above, require_at_least, require_vector


def one_side(ratio_T: FloatT, advantage_T: FloatT, epsilon_low: float, epsilon_high: float) -> BoolT:
    """(A >= 0 and r <= 1 + epsilon_high) or (A <= 0 and r >= 1 - epsilon_low): what a clip keeps."""
    require_vector(ratio_T=ratio_T, advantage_T=advantage_T)
    require_at_least(0.0, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return ((advantage_T >= 0) & (ratio_T <= 1 + epsilon_high)) | ((advantage_T <= 0) & (ratio_T >= 1 - epsilon_low))


def two_side(ratio_T: FloatT, epsilon_low: float, epsilon_high: float) -> BoolT:
    """1 - epsilon_low <= r <= 1 + epsilon_high, whatever the advantage."""
    require_vector(ratio_T=ratio_T)
    require_at_least(0.0, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    return (ratio_T >= 1 - epsilon_low) & (ratio_T <= 1 + epsilon_high)


def ring(
    ratio_T: FloatT, advantage_T: FloatT, epsilon_low: float, epsilon_high: float, outer_low: float, outer_high: float
) -> BoolT:
    """`two_side`, or (A >= 0 and r <= 1 - outer_low), or (A <= 0 and r >= 1 + outer_high): also the tokens that have
    gone far the wrong way. Raises ValueError also for an outer range inside the inner one."""
    require_vector(ratio_T=ratio_T, advantage_T=advantage_T)
    require_at_least(epsilon_low, outer_low=outer_low)
    require_at_least(epsilon_high, outer_high=outer_high)
    too_low = (advantage_T >= 0) & (ratio_T <= 1 - outer_low)
    too_high = (advantage_T <= 0) & (ratio_T >= 1 + outer_high)
    return two_side(ratio_T, epsilon_low, epsilon_high) | too_low | too_high


def exp_advantage(advantage_T: FloatT, temperature: float) -> FloatT:
    """exp(A / temperature), RED-Weight: better completions weigh more; not normalized."""
    require_vector(advantage_T=advantage_T)
    require_above(0.0, temperature=temperature)
    return (advantage_T / temperature).exp()


def capped_ratio(ratio_T: FloatT, epsilon_high: float) -> FloatT:
    """min(r, 1 + epsilon_high), CISPO's weight (MiniMax-M1, arXiv 2506.13585, Eq. 4) with its upper cap only: a lower
    one would weigh up what pi has already made unlikely."""
    require_vector(ratio_T=ratio_T)
    require_at_least(0.0, epsilon_high=epsilon_high)
    return ratio_T.clamp(max=1 + epsilon_high)


def tapered_ratio(ratio_T: FloatT, advantage_T: FloatT) -> FloatT:
    """1 where A > 0, min(r, 1) where A <= 0, TOPR's weight (Le Roux et al., arXiv 2503.14286): push down only what pi
    still does."""
    require_vector(ratio_T=ratio_T, advantage_T=advantage_T)
    return torch.where(advantage_T > 0, torch.ones_like(ratio_T), ratio_T.clamp(max=1.0))


def asymre(logp_T: FloatT, strength: float) -> FloatT:
    """- strength logp, AsymRE (Arnal et al., arXiv 2506.20520) as a regularizer: A + strength in place of A, so the
    baseline is mu - strength. If all w = alpha (r - mu + strength) are positive, the optimum is pi = w / strength."""
    require_vector(logp_T=logp_T)
    require_at_least(0.0, strength=strength)
    return -strength * logp_T


def opmd(logp_T: FloatT, logp_anchor_T: FloatT, strength: float) -> FloatT:
    """strength (logp - logp_anchor)^2, per token: OPMD in the practical form of [P2], which holds pi near alpha."""
    require_vector(logp_T=logp_T, logp_anchor_T=logp_anchor_T)
    require_at_least(0.0, strength=strength)
    return strength * (logp_T - logp_anchor_T).square()


def opmd_kimi(
    logp_T: FloatT, logp_anchor_T: FloatT, advantage_C: FloatC, completion_T: IntT, strength: float
) -> FloatT:
    """- (A_i - strength log pi(y_i)/pi_ref(y_i))^2 with A = `log_mean_exp`: OPMD as in Kimi k1.5 (arXiv 2501.12599,
    section 2.3.2), the log-ratio of a completion regressed on its reward. Spread evenly over the tokens of the
    completion, so that the reduction `sequence_sum` gives the mean of the squares."""
    residual_C = _residual(logp_T, logp_anchor_T, advantage_C, completion_T, strength)
    return _spread(-residual_C.square(), completion_T)


def opmd_pairwise(
    logp_T: FloatT, logp_anchor_T: FloatT, advantage_C: FloatC, completion_T: IntT, group_C: IntC, strength: float
) -> FloatT:
    """- (a_i - mean of the group's a)^2 with a_i = r_i - strength log pi(y_i)/pi_t(y_i): pairwise OPMD [P2], as
    sum_{i<j} (a_i - a_j)^2 / G^2 is the biased variance of a in its group. Any advantage that differs from the reward
    by a constant of the group serves as r.

    At pi = pi_t its gradient is 2 strength mean_i (r_i - mu) grad log pi(y_i), whoever generated the samples; its
    optimum is pi_t e^(r / strength) / Z. Spread over tokens as in `opmd_kimi`. All completions of a group must be in
    one call."""
    require_vector(advantage_C=advantage_C, group_C=group_C)
    a_C = _residual(logp_T, logp_anchor_T, advantage_C, completion_T, strength)
    return _spread(-(a_C - shapes.mean_per_index(a_C, group_C, len(a_C))[group_C]).square(), completion_T)


def _residual(logp_T: FloatT, anchor_T: FloatT, advantage_C: FloatC, completion_T: IntT, strength: float) -> FloatC:
    """A_i - strength log pi(y_i)/pi_anchor(y_i)."""
    require_vector(logp_T=logp_T, logp_anchor_T=anchor_T, completion_T=completion_T)
    require_above(0.0, strength=strength)
    return advantage_C - strength * shapes.per_index(logp_T - anchor_T, completion_T, len(advantage_C))


def _spread(value_C: FloatC, completion_T: IntT) -> FloatT:
    """A completion's value in equal parts at its tokens."""
    lengths_C = shapes.per_index(torch.ones_like(value_C[completion_T]), completion_T, len(value_C))
    return (value_C / lengths_C.clamp(min=1))[completion_T]
