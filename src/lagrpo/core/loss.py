"""The loss of a micro-batch, composed from functions. No name and no flag is looked at here.

Everything is a sum over tokens: the loss because its normaliser is already in `weight_C`, the diagnostics so that those
of the micro-batches add up to those of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lagrpo.core.ratios import token_ratio
from lagrpo.core.shapes import require_vector

Ratio = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(logp_T, logp_alpha_T, completion_T, C) -> ratio_T, at the level of a token, a sequence, a normalised sequence."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an objective may look at: one number per completion token, flat [T].

    `ratio` is pi/alpha at the level that `level` gives, differentiable in `logp`; `advantage` is that of the token's
    completion; `completion` its index, 0 .. C-1. `logp_k` and `logp_ref` are None where nobody computed them."""

    logp: Float[Tensor, "T"]
    logp_alpha: Float[Tensor, "T"]
    logp_k: Float[Tensor, "T"] | None
    logp_ref: Float[Tensor, "T"] | None
    advantage: Float[Tensor, "T"]
    ratio: Float[Tensor, "T"]
    completion: Int[Tensor, "T"]
    C: int
    level: Ratio

    @property
    def centre(self) -> Float[Tensor, "T"]:
        """pi_k/alpha at the level of `ratio`, without gradient. Raises ValueError without logp_k."""
        if self.logp_k is None:
            raise ValueError("this surrogate is centred on pi_k/alpha: logp_k_T must be given")
        return self.level(self.logp_k, self.logp_alpha, self.completion, self.C).detach()

    @property
    def reference(self) -> Float[Tensor, "T"]:
        """logp_ref. Raises ValueError where it was not computed."""
        if self.logp_ref is None:
            raise ValueError("the KL term needs the reference policy: logp_ref_T must be given when beta > 0")
        return self.logp_ref


def no_kl(terms: Terms) -> Float[Tensor, "T"]:
    """The KL term of an objective that has none: 0 at every token."""
    return torch.zeros_like(terms.logp)


def objective_sum(
    logp_T: Float[Tensor, "T"],
    logp_alpha_T: Float[Tensor, "T"],
    logp_k_T: Float[Tensor, "T"] | None,
    logp_ref_T: Float[Tensor, "T"] | None,
    advantage_C: Float[Tensor, "C"],
    completion_T: Int[Tensor, "T"],
    weight_C: Float[Tensor, "C"],
    *,
    ratio: Ratio,
    value: Callable[[Terms], Tensor],
    cut: Callable[[Terms], Tensor],
    kl: Callable[[Terms], Tensor] = no_kl,
    beta: float = 0.0,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """loss = - sum_t weight_C[completion_T[t]] (value_t - beta kl_t): a micro-batch's share of minus Eq. 7 (of Eq. 8
    when masked completions are left out) of Mroueh et al., arXiv 2505.22257. Backward on each micro-batch in turn
    gives the gradient of the whole batch.

    `value` gives the surrogate per token, `cut` the mask of the tokens whose gradient it cuts, `kl` the estimate of
    KL(pi || pi_ref) per token. `C` here counts the completions of this micro-batch, each of them whole.
    The second result holds detached sums over tokens, see `diagnostics`. Raises ValueError on shapes and where a
    function needs log-probs that were not given."""
    given = {"logp_k_T": logp_k_T, "logp_ref_T": logp_ref_T}
    require_vector(
        logp_T=logp_T,
        logp_alpha_T=logp_alpha_T,
        completion_T=completion_T,
        **{name: logp for name, logp in given.items() if logp is not None},
    )
    require_vector(advantage_C=advantage_C, weight_C=weight_C)
    C = advantage_C.shape[0]
    ratio_T = ratio(logp_T, logp_alpha_T, completion_T, C)
    advantage_T = advantage_C[completion_T]
    terms = Terms(logp_T, logp_alpha_T, logp_k_T, logp_ref_T, advantage_T, ratio_T, completion_T, C, ratio)
    weight_T, value_T, kl_T = weight_C[completion_T], value(terms), kl(terms)
    loss = -(weight_T * (value_T - beta * kl_T)).sum()
    with torch.no_grad():
        return loss, diagnostics(terms, weight_T * value_T, kl_T, cut(terms))


def diagnostics(
    terms: Terms, weighted_value_T: Float[Tensor, "T"], kl_T: Float[Tensor, "T"], cut_T: Tensor
) -> dict[str, Tensor]:
    """Sums over tokens, to be added over micro-batches and divided by `tokens` (or combined as stated):

    tokens            how many
    ratio             rho = pi/alpha of each token, whatever level the objective uses; the mean is near 1 at small lag
    ratio_squared     rho^2: ESS = ratio^2 / ratio_squared, chi2(pi || alpha) = ratio_squared / tokens - 1
    abs_log_ratio     |ln rho|: the mean mismatch between learner and sampler, nats
    kl_alpha          rho - 1 - ln rho: estimates KL(alpha || pi) per token, nats, never negative
    kl_ref            the estimate of KL(pi || pi_ref) that the objective uses; 0 without one
    clipped_positive  tokens with A > 0 whose gradient is cut (by a PPO-like clip: those above its upper end)
    clipped_negative  tokens with A < 0 whose gradient is cut (by a PPO-like clip: those below its lower end)
    objective         the surrogate, already weighted: the sum itself is the value, without the KL term
    """
    log_rho_T = (terms.logp - terms.logp_alpha).detach()
    rho_T = token_ratio(terms.logp, terms.logp_alpha).detach()
    return {
        "tokens": torch.tensor(float(rho_T.shape[0]), device=rho_T.device),
        "ratio": rho_T.sum(),
        "ratio_squared": rho_T.square().sum(),
        "abs_log_ratio": log_rho_T.abs().sum(),
        "kl_alpha": (torch.expm1(log_rho_T) - log_rho_T).sum(),
        "kl_ref": kl_T.detach().sum(),
        "clipped_positive": (cut_T & (terms.advantage > 0)).sum(),
        "clipped_negative": (cut_T & (terms.advantage < 0)).sum(),
        "objective": weighted_value_T.detach().sum(),
    }
