"""The loss of a micro-batch, composed from functions; it looks at no name and no flag. Everything is a sum over tokens:
the loss because `weight_C` already holds its normalizer, the diagnostics so that micro-batches add up to the batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lagrpo.core.extended import times
from lagrpo.core.ratios import token_ratio
from lagrpo.core.shapes import BoolT, FloatC, FloatT, IntC, IntT, require_vector


class MissingError(ValueError):
    """An objective looked at something that was not given; `name` says at what."""

    def __init__(self, name: str, meaning: str) -> None:
        super().__init__(f"this objective needs {name}: {meaning}")
        self.name = name


class InfiniteGradientError(FloatingPointError):
    """The gradient at a token is not finite. `completion` and `position` count from 0, the completion in what the loss
    was given and the token in its completion; `reason` holds the numbers."""

    def __init__(self, completion: int, position: int, reason: str) -> None:
        super().__init__(f"the gradient at token {position} of completion {completion} is not finite: {reason}")
        self.completion, self.position, self.reason = completion, position, reason


@dataclass(frozen=True, slots=True)
class Terms:
    """What an objective may look at. Per completion token, flat [T]: the log-probs under pi (differentiable), alpha,
    pi_k and pi_ref, and the index of its completion; per completion [C]: the `advantages`, and in `groups` the index of
    its group. An absent field is None; its property raises `MissingError` when it is read."""

    logp: FloatT
    logp_alpha: FloatT | None
    logp_k: FloatT | None
    logp_ref: FloatT | None
    completion: IntT
    advantages: FloatC
    groups: IntC | None = None

    @property
    def C(self) -> int:  # noqa: N802
        return self.advantages.shape[0]

    @property
    def advantage(self) -> FloatT:
        """The advantage of each token's completion."""
        return self.advantages[self.completion]

    @property
    def alpha(self) -> FloatT:
        return _given(self.logp_alpha, "logp_alpha", "the log-probs of the policy that generated the samples")

    @property
    def pi_k(self) -> FloatT:
        return _given(self.logp_k, "logp_k", "the log-probs of the policy at the start of the batch")

    @property
    def pi_ref(self) -> FloatT:
        return _given(self.logp_ref, "logp_ref", "the log-probs of the reference policy")

    @property
    def group(self) -> IntC:
        return _given(self.groups, "group_C", "the group of each completion, all of the group in one micro-batch")


def _given(tensor: Tensor | None, name: str, meaning: str) -> Tensor:
    if tensor is None:
        raise MissingError(name, meaning)
    return tensor


def no_kl(terms: Terms) -> FloatT:
    """The KL term of an objective that has none: 0 at every token."""
    return torch.zeros_like(terms.logp)


def objective_sum(
    terms: Terms,
    weight_C: FloatC,
    *,
    value: Callable[[Terms], Tensor],
    cut: Callable[[Terms], Tensor],
    kl: Callable[[Terms], Tensor] = no_kl,
    beta: float = 0.0,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """loss = - sum_t weight_C[completion_t] (value_t - beta kl_t): a micro-batch's share of minus Eq. 7 (of Eq. 8
    when masked completions are left out) of Mroueh et al., arXiv 2505.22257. Backward on each micro-batch in turn
    gives the gradient of the whole batch.

    `value` gives the surrogate per token, `cut` the mask of the tokens whose gradient it cuts, `kl` the estimate of
    KL(pi || pi_ref) per token. Each completion must be whole. The second result holds detached sums over tokens, see
    `diagnostics`. A token without weight contributes nothing, whatever its value. Raises ValueError on shapes,
    MissingError where a function needs log-probs that were not given, InfiniteGradientError where a token's gradient is
    not finite."""
    optional = {"logp_alpha": terms.logp_alpha, "logp_k": terms.logp_k, "logp_ref": terms.logp_ref}
    present = {name: logp for name, logp in optional.items() if logp is not None}
    require_vector(logp=terms.logp, completion=terms.completion, **present)
    require_vector(advantages=terms.advantages, weight_C=weight_C)
    weight_T, value_T, kl_T = weight_C[terms.completion], value(terms), kl(terms)
    net_T = torch.where(weight_T == 0, torch.zeros_like(value_T), value_T - beta * kl_T)
    loss = -(weight_T * net_T).sum()
    with torch.no_grad():
        cut_T = cut(terms)
        if not bool(loss.isfinite()):
            # A cut value may be infinite, as the end of its clip is: no gradient flows there.
            infinite_T = value_T.isnan() | (value_T.isinf() & ~cut_T) | ~kl_T.isfinite()
            _refuse_infinite(terms, (weight_T != 0) & infinite_T)
        return loss, diagnostics(terms, times(weight_T, value_T), kl_T, cut_T)


def _refuse_infinite(terms: Terms, infinite_T: BoolT) -> None:
    """Raises InfiniteGradientError for the first of these tokens, if there is one."""
    if not bool(infinite_T.any()):
        return
    t = int(infinite_T.int().argmax())
    c = int(terms.completion[t])
    own_T = terms.completion == c
    said = [f"its advantage is {float(terms.advantages[c]):g}, log pi {float(terms.logp[t]):g}"]
    for name, logp_T in (("alpha", terms.logp_alpha), ("pi_k", terms.logp_k), ("pi_ref", terms.logp_ref)):
        if logp_T is not None:
            gap_T = terms.logp - logp_T
            whole = f"{float(gap_T[own_T].sum()):g} over the completion"
            said.append(f"log pi/{name} {float(gap_T[t]):g} nats at the token and {whole}")
    raise InfiniteGradientError(c, int(own_T[:t].sum()), ", ".join(said))


def diagnostics(terms: Terms, weighted_value_T: FloatT, kl_T: FloatT, cut_T: BoolT) -> dict[str, Tensor]:
    """Sums over tokens, to be added over micro-batches and divided by `tokens` (or combined as stated):

    tokens            how many
    kl_ref            the estimate of KL(pi || pi_ref) that the objective uses; 0 without one
    clipped_positive  tokens with A > 0 whose gradient is cut (by a PPO-like clip: those above its upper end)
    clipped_negative  tokens with A < 0 whose gradient is cut (by a PPO-like clip: those below its lower end)
    objective         the surrogate, already weighted: the sum itself is the value. The KL term is left out, so the loss
                      is its negative only at beta = 0

    and where logp_alpha is given, with rho = pi/alpha of each token, whatever level the objective uses:

    ratio             rho; the mean is near 1 at small lag
    ratio_squared     rho^2: ESS = ratio^2 / ratio_squared, chi2(pi || alpha) = ratio_squared / tokens - 1
    abs_log_ratio     |ln rho|: the mean mismatch between learner and sampler, nats
    kl_alpha          rho - 1 - ln rho: estimates KL(alpha || pi) per token, nats, never negative
    """
    sums = {
        "tokens": torch.tensor(float(terms.logp.shape[0]), device=terms.logp.device),
        "kl_ref": kl_T.sum(),
        "clipped_positive": (cut_T & (terms.advantage > 0)).sum(),
        "clipped_negative": (cut_T & (terms.advantage < 0)).sum(),
        "objective": weighted_value_T.sum(),
    }
    if terms.logp_alpha is not None:
        log_rho_T, rho_T = terms.logp - terms.logp_alpha, token_ratio(terms.logp, terms.logp_alpha)
        sums |= {
            "ratio": rho_T.sum(),
            "ratio_squared": rho_T.square().sum(),
            "abs_log_ratio": log_rho_T.abs().sum(),
            "kl_alpha": (torch.expm1(log_rho_T) - log_rho_T).sum(),
        }
    return {name: value.detach() for name, value in sums.items()}
