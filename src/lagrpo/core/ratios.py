"""Importance ratios pi/alpha at three levels, each given per token [T] and differentiable in logp_T.

Log-probs are in nats at the sampling temperature. Arguments are in the order (numerator, denominator), so that
pi_k/alpha is the same function of (logp_k_T, logp_alpha_T). Beyond 88.7 nats a ratio is infinite in float32, with a
gradient of 0 where a clip, an advantage or a weight asks for none (see core.extended). `completion_T` holds 0 .. C-1;
all tokens of a completion must be in one call. All functions raise ValueError on shapes.
"""

from lagrpo.core.extended import exp
from lagrpo.core.shapes import FloatT, IntT, mean_per_index, per_index, require_vector


def token_ratio(logp_T: FloatT, logp_alpha_T: FloatT) -> FloatT:
    """rho_t = exp(logp_t - logp_alpha_t): each token on its own."""
    require_vector(logp_T=logp_T, logp_alpha_T=logp_alpha_T)
    return exp(logp_T - logp_alpha_T)


def sequence_ratio(logp_T: FloatT, logp_alpha_T: FloatT, completion_T: IntT, C: int) -> FloatT:
    """pi(y|x)/alpha(y|x) = exp(sum over the completion of logp - logp_alpha), the ratio of Eq. 3 and Eq. 6
    (Mroueh et al., arXiv 2505.22257), at every token of the completion."""
    require_vector(logp_T=logp_T, logp_alpha_T=logp_alpha_T, completion_T=completion_T)
    return exp(per_index(logp_T - logp_alpha_T, completion_T, C))[completion_T]


def length_normalized_ratio(logp_T: FloatT, logp_alpha_T: FloatT, completion_T: IntT, C: int) -> FloatT:
    """(pi(y|x)/alpha(y|x))^(1/|y|) = exp(mean over the completion of logp - logp_alpha), GSPO (Zheng et al., arXiv
    2507.18071, Eq. 7), at every token of the completion. The gradient flows through the mean:
    d ratio / d logp_t = ratio / |y| for every token of the completion."""
    require_vector(logp_T=logp_T, logp_alpha_T=logp_alpha_T, completion_T=completion_T)
    return exp(mean_per_index(logp_T - logp_alpha_T, completion_T, C))[completion_T]
