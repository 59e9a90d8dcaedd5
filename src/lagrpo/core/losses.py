"""What each token contributes to an objective.

A loss is a function of `LossInputs` and gives the value to maximize [T]. Its keyword-only arguments are its knobs:
numbers or functions, which the table in core/recipes.py and the section [loss] of the settings replace. `reads`
declares which log-probs it needs besides the trainer's own. rho is pi/alpha at the level `ratio` over the policy
`denominator`, A the advantage, sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from lagrpo.core.ratios import limit, token, total

Function = TypeVar("Function", bound=Callable)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch of whole completions: log-probs of its tokens [T], and what belongs to a completion [C]. Raises
    ValueError for log-probs that are not aligned."""

    logp: Tensor
    """under pi, the only ones with a gradient"""
    rollout_logp: Tensor | None
    """under alpha, recorded when the tokens were sampled"""
    old_logp: Tensor | None
    """under pi_k, the policy at the start of the batch"""
    ref_logp: Tensor | None
    completion: Tensor
    """[T] index of each token's completion"""
    advantages: Tensor
    group: Tensor | None = None
    """[C] index of each completion's group"""

    def __post_init__(self) -> None:
        for each in (self.rollout_logp, self.old_logp, self.ref_logp, self.completion):
            if each is not None and (each.dim() != 1 or each.shape != self.logp.shape):
                raise ValueError(
                    f"log-probs must be flat and aligned: {list(self.logp.shape)}, {list(each.shape)}"
                )

    @property
    def advantage(self) -> Tensor:
        """[T] of each token's completion."""
        return self.advantages[self.completion]


def reads(*names: str) -> Callable[[Function], Function]:
    """Declare the fields of LossInputs that a function needs beyond logp, completion and advantages. "zero_advantage"
    says that completions with an advantage of 0 have a gradient, too."""

    def declare(function: Function) -> Function:
        function.reads = frozenset(names)  # type: ignore[attr-defined]
        return function

    return declare


# Policies, for `denominator` and `anchor`


@reads("rollout_logp")
def alpha(x: LossInputs) -> Tensor:
    """The behavior policy, which sampled the tokens."""
    return _given(x.rollout_logp, "rollout_logp")


@reads("old_logp")
def pi_k(x: LossInputs) -> Tensor:
    """The policy at the start of the batch."""
    return _given(x.old_logp, "old_logp")


@reads("ref_logp")
def pi_ref(x: LossInputs) -> Tensor:
    """The reference policy."""
    return _given(x.ref_logp, "ref_logp")


def _given(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this objective needs {name}")
    return tensor


# Surrogates


def unclipped(x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha) -> Tensor:
    """rho A. With the ratio of sequences its mean estimates Eq. 3 of arXiv 2505.22257."""
    return ratio(x.logp - denominator(x), x.completion) * x.advantage


def clipped(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2, dual_clip: float = inf,
) -> Tensor:  # fmt: skip
    """min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A): f_eps of arXiv 2505.22257 around 1, its practice for
    every alpha (end of section 3.2); with alpha = pi_k the clip of PPO and GRPO (arXiv 2402.03300)."""
    rho, A = ratio(x.logp - denominator(x), x.completion), x.advantage
    value = torch.minimum(rho * A, rho.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return limit_push(value, A, dual_clip)


@reads("old_logp")
def clipped_exact(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2, dual_clip: float = inf,
) -> Tensor:  # fmt: skip
    """min(rho A, clip(rho, max(c - epsilon_low, 0), c + epsilon_high) A) with c = pi_k/alpha: Eq. 6 of arXiv
    2505.22257. The range follows pi_k, wherever alpha is. GePPO (arXiv 2111.00072) leaves out the max, which changes
    nothing."""
    rho, A = ratio(x.logp - denominator(x), x.completion), x.advantage
    c = ratio(pi_k(x) - denominator(x), x.completion).detach()
    value = torch.minimum(rho * A, rho.clamp((c - epsilon_low).clamp(min=0), c + epsilon_high) * A)
    return limit_push(value, A, dual_clip)


@reads("old_logp")
def clipped_proportional(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2, dual_clip: float = inf,
) -> Tensor:  # fmt: skip
    """min(rho A, clip(rho, c (1 - epsilon_low), c (1 + epsilon_high)) A) with c = pi_k/alpha: pi may leave pi_k by a
    factor, wherever alpha is (off-policy PPO, Meng et al. 2023)."""
    rho, A = ratio(x.logp - denominator(x), x.completion), x.advantage
    c = ratio(pi_k(x) - denominator(x), x.completion).detach()
    value = torch.minimum(rho * A, rho.clamp(c * (1 - epsilon_low), c * (1 + epsilon_high)) * A)
    return limit_push(value, A, dual_clip)


def limit_push(value: Tensor, A: Tensor, dual_clip: float) -> Tensor:
    """max(value, dual_clip A) if A < 0: a token whose ratio is above dual_clip is not pushed down. Dual-clip PPO (arXiv
    1912.09729), two-sided GRPO (arXiv 2505.07291); `delta` in TRL, `clip_ratio_c` in verl."""
    return torch.maximum(value, torch.where(A < 0, dual_clip * A, -inf))


def reinforce(
    x: LossInputs,
    *,
    mask: Callable | None = None,
    weight: Callable | None = None,
    regularizer: Callable | None = None,
) -> Tensor:
    """sg(M W A) log pi - R: the one formula of the REC and RED methods of arXiv 2509.24203. Without mask M, weight W
    and regularizer R it is REINFORCE, whoever sampled."""
    M = mask(x) if mask else 1.0
    W = weight(x) if weight else 1.0
    value = (M * W * x.advantage).detach() * x.logp
    return value - regularizer(x) if regularizer else value


# M of reinforce


def one_side(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:  # fmt: skip
    """(A >= 0 and rho <= 1 + epsilon_high) or (A <= 0 and rho >= 1 - epsilon_low): what `clipped` keeps."""
    rho, A = ratio(x.logp - denominator(x), x.completion), x.advantage
    return ((A >= 0) & (rho <= 1 + epsilon_high)) | ((A <= 0) & (rho >= 1 - epsilon_low))


def two_side(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> Tensor:  # fmt: skip
    """1 - epsilon_low <= rho <= 1 + epsilon_high."""
    rho = ratio(x.logp - denominator(x), x.completion)
    return (rho >= 1 - epsilon_low) & (rho <= 1 + epsilon_high)


def ring(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha, epsilon_low: float = 0.2,
    epsilon_high: float = 0.2, outer_low: float = 0.6, outer_high: float = 2.0,
) -> Tensor:  # fmt: skip
    """`two_side`, or (A >= 0 and rho <= 1 - outer_low) or (A <= 0 and rho >= 1 + outer_high): also tokens that have
    gone far the wrong way."""
    rho, A = ratio(x.logp - denominator(x), x.completion), x.advantage
    inside = (rho >= 1 - epsilon_low) & (rho <= 1 + epsilon_high)
    return inside | ((A >= 0) & (rho <= 1 - outer_low)) | ((A <= 0) & (rho >= 1 + outer_high))


# W of reinforce


def importance(x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha) -> Tensor:
    """rho."""
    return ratio(x.logp - denominator(x), x.completion)


def capped_ratio(
    x: LossInputs,
    *,
    ratio: Callable = token,
    denominator: Callable = alpha,
    epsilon_high: float = 0.2,
) -> Tensor:
    """min(rho, 1 + epsilon_high): CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4), its upper cap alone. A lower one would
    weigh up what pi has already made unlikely."""
    return ratio(x.logp - denominator(x), x.completion).clamp(max=1 + epsilon_high)


def tapered_ratio(
    x: LossInputs, *, ratio: Callable = token, denominator: Callable = alpha
) -> Tensor:
    """1 if A > 0, else min(rho, 1): TOPR (arXiv 2503.14286) pushes down only what pi still does."""
    return torch.where(
        x.advantage > 0, 1.0, ratio(x.logp - denominator(x), x.completion).clamp(max=1.0)
    )


def exp_advantage(x: LossInputs, *, weight_temperature: float = 1.0) -> Tensor:
    """e^(A / weight_temperature), not normalized: RED-Weight (arXiv 2509.24203), better completions weigh more."""
    return (x.advantage / weight_temperature).exp()


# R of reinforce


@reads("zero_advantage")
def asymre(x: LossInputs, *, strength: float = 0.1) -> Tensor:
    """-strength log pi: A + strength instead of A, so the baseline is mu - strength. AsymRE (arXiv 2506.20520). If all
    w = alpha (r - mu + strength) are positive, the optimum is pi = w / strength."""
    return -strength * x.logp


@reads("zero_advantage")
def opmd(x: LossInputs, *, anchor: Callable = alpha, strength: float = 0.1) -> Tensor:
    """strength (log pi - log anchor)^2: OPMD in the practical form of arXiv 2509.24203."""
    return strength * (x.logp - anchor(x)).square()


# OPMD on whole completions


@reads("zero_advantage")
def opmd_kimi(x: LossInputs, *, anchor: Callable = alpha, strength: float = 0.1) -> Tensor:
    """-(A - strength log pi(y)/anchor(y))^2 with A = `log_mean_exp`: Kimi k1.5 (arXiv 2501.12599, section 2.3.2). The
    log-ratio of a completion is regressed on its reward. Each token has an equal part, for the reduction
    `sequence_sum`.
    """
    a_T = x.advantage - strength * total(x.logp - anchor(x), x.completion)
    return -a_T.square() / total(torch.ones_like(a_T), x.completion)


@reads("group", "zero_advantage")
def opmd_pairwise(x: LossInputs, *, anchor: Callable = alpha, strength: float = 0.1) -> Tensor:
    """-(a - mean of the group's a)^2 with a = A - strength log pi(y)/anchor(y): pairwise OPMD (arXiv 2509.24203), as
    sum_{i<j} (a_i - a_j)^2 / G^2 is the biased variance of a. All completions of a group are in one call.

    At pi = anchor its gradient is 2 strength mean_i (r_i - mu) grad log pi(y_i), whoever sampled the group; its optimum
    is anchor e^(r / strength) / Z."""
    group, C = _given(x.group, "group"), len(x.advantages)
    log_ratio_C = x.logp.new_zeros(C).index_add(0, x.completion, x.logp - anchor(x))
    a_C = x.advantages - strength * log_ratio_C
    mean_C = total(a_C, group) / total(torch.ones_like(a_C), group)
    value_T = -(a_C - mean_C).square()[x.completion]
    return value_T / total(torch.ones_like(value_T), x.completion)


# What the metrics are made of


def find_clipped(x: LossInputs, value: Callable[[LossInputs], Tensor]) -> Tensor:
    """The tokens [T] that a loss clips, masks or drops: those at which its gradient is 0. If it differentiates a ratio,
    tokens whose log-ratio is beyond MAX_LOG_RATIO are among them."""
    with torch.enable_grad():
        logp = x.logp.detach().requires_grad_()
        inputs = LossInputs(
            logp, x.rollout_logp, x.old_logp, x.ref_logp, x.completion, x.advantages, x.group
        )
        (gradient,) = torch.autograd.grad(value(inputs).sum(), logp)
    return gradient == 0


@torch.no_grad()
def diagnostics(
    x: LossInputs, weighted_value_T: Tensor, kl_T: Tensor, clipped_T: Tensor
) -> dict[str, Tensor]:
    """Sums over tokens, to be added over micro-batches and divided by `tokens` (or combined as stated):

    tokens            how many
    kl_ref            the estimate of KL(pi || pi_ref) that the objective uses; 0 without one
    clipped_positive  clipped tokens with A > 0 (a PPO-like clip: above its upper end)
    clipped_negative  clipped tokens with A < 0 (a PPO-like clip: below its lower end)
    objective         the weighted surrogate without the KL term: the sum itself is the value

    and if alpha is known, with rho = pi/alpha of each token, whatever level the objective uses:

    ratio             rho; the mean is near 1 if samples are fresh
    ratio_squared     rho^2: ESS = ratio^2 / ratio_squared, chi2(pi || alpha) = ratio_squared / tokens - 1
    abs_log_ratio     |ln rho|: the mean mismatch between trainer and rollout engine, nats
    kl_alpha          rho - 1 - ln rho: estimates KL(alpha || pi) per token, nats, never negative
    """
    sums = {
        "tokens": torch.tensor(float(len(x.logp)), device=x.logp.device),
        "kl_ref": kl_T.sum(),
        "clipped_positive": (clipped_T & (x.advantage > 0)).sum(),
        "clipped_negative": (clipped_T & (x.advantage < 0)).sum(),
        "objective": weighted_value_T.sum(),
    }
    if x.rollout_logp is not None:
        log_rho_T = limit(x.logp - x.rollout_logp)
        sums |= {
            "ratio": log_rho_T.exp().sum(),
            "ratio_squared": log_rho_T.exp().square().sum(),
            "abs_log_ratio": (x.logp - x.rollout_logp).abs().sum(),
            "kl_alpha": (torch.expm1(log_rho_T) - log_rho_T).sum(),
        }
    return {name: value.detach() for name, value in sums.items()}
