"""Surrogates: what each token contributes to an objective.

A surrogate is a function of `LossInputs` and gives the value to maximize [T]. Its keyword-only
arguments are its knobs: numbers or functions, which the table in core/rows.py and the section
[loss] of the settings replace.

In formulas, rho is pi/alpha at the level `ratio` over the policy `denominator`, A the advantage,
and sg stops the gradient.
"""

from __future__ import annotations

from math import inf
from typing import Annotated

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, TokenFunction, alpha, collects, pi_k, pi_ref
from lagrpo.core.pieces import AtLeastOne, Minimum, NonNegative, Positive
from lagrpo.core.ratios import Ratio, length_normalized, limit, token, total

# Ratios times advantages, with and without a clip


def unclipped(x: LossInputs, *, ratio: Ratio = token, denominator: TokenFunction = alpha) -> Tensor:
    """rho A. With the ratio of sequences its mean estimates Eq. 3 of arXiv 2505.22257."""
    return ratio(x.logp - denominator(x), x.completion) * x.advantage


def clipped(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
    dual_clip: AtLeastOne = inf,
) -> Tensor:
    """min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A): f_eps around 1.

    It is the practice of arXiv 2505.22257 for every alpha (end of section 3.2); with alpha = pi_k
    it is the clip of PPO and GRPO (arXiv 2402.03300).
    """
    rho_T = ratio(x.logp - denominator(x), x.completion)
    A_T = x.advantage
    clipped_rho_T = rho_T.clamp(1 - epsilon_low, 1 + epsilon_high)
    # The smaller of the two: out of the range a token has no gradient only if it has moved the way
    # that A points. If it has moved the other way, it is still pulled back.
    value_T = torch.minimum(rho_T * A_T, clipped_rho_T * A_T)
    return limit_push(value_T, A_T, dual_clip)


def clipped_exact(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
    dual_clip: AtLeastOne = inf,
) -> Tensor:
    """min(rho A, clip(rho, max(c - epsilon_low, 0), c + epsilon_high) A) with c = pi_k/alpha.

    It is Eq. 6 of arXiv 2505.22257: the range follows pi_k, wherever alpha is. GePPO (arXiv
    2111.00072) leaves out the max, which changes nothing.
    """
    rho_T = ratio(x.logp - denominator(x), x.completion)
    center_T = ratio(pi_k(x) - denominator(x), x.completion).detach()
    A_T = x.advantage
    low_T = (center_T - epsilon_low).clamp(min=0)
    high_T = center_T + epsilon_high
    value_T = torch.minimum(rho_T * A_T, rho_T.clamp(low_T, high_T) * A_T)
    return limit_push(value_T, A_T, dual_clip)


def clipped_proportional(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
    dual_clip: AtLeastOne = inf,
) -> Tensor:
    """min(rho A, clip(rho, c (1 - epsilon_low), c (1 + epsilon_high)) A) with c = pi_k/alpha.

    pi may leave pi_k by a factor, wherever alpha is (off-policy PPO, Meng et al. 2023). With
    q = pi/pi_k it is c min(q A, clip(q, 1 - epsilon_low, 1 + epsilon_high) A): decoupled PPO
    (arXiv 2505.24298).
    """
    rho_T = ratio(x.logp - denominator(x), x.completion)
    center_T = ratio(pi_k(x) - denominator(x), x.completion).detach()
    A_T = x.advantage
    low_T = center_T * (1 - epsilon_low)
    high_T = center_T * (1 + epsilon_high)
    value_T = torch.minimum(rho_T * A_T, rho_T.clamp(low_T, high_T) * A_T)
    return limit_push(value_T, A_T, dual_clip)


def clipped_by_staleness(
    x: LossInputs,
    *,
    ratio: Ratio = token,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
) -> Tensor:
    """min(rho A, clip(rho, (1 - epsilon_low)^d, (1 + epsilon_high)^d) A), d = max(staleness, 1).

    It has the gradient of A-3PO (arXiv 2512.06547) with its full weight: A-3PO clips pi around a
    policy that lies 1/d of the way back from pi to alpha, in log-probs. At d = 16 and .2 the range
    is .03 to 18.5. Raises ValueError if the staleness is unknown.
    """
    if x.staleness is None:
        raise ValueError("this objective needs staleness: completions of a file have none")
    rho_T = ratio(x.logp - denominator(x), x.completion)
    A_T = x.advantage
    d_T = x.staleness.clamp(min=1).to(rho_T.dtype)
    low_T = (1 - epsilon_low) ** d_T
    high_T = (1 + epsilon_high) ** d_T
    return torch.minimum(rho_T * A_T, rho_T.clamp(low_T, high_T) * A_T)


def limit_push(value_T: Tensor, A_T: Tensor, dual_clip: float) -> Tensor:
    """max(value, dual_clip A) if A < 0: a token with rho > dual_clip is not pushed down, [T].

    Dual-clip PPO (arXiv 1912.09729), two-sided GRPO (arXiv 2505.07291); `delta` in TRL,
    `clip_ratio_c` in verl.
    """
    # With dual_clip = inf, inf * 0 is NaN, but A = 0 takes the other branch.
    return torch.maximum(value_T, torch.where(A_T < 0, dual_clip * A_T, -inf))


def _released_m2po_range(
    x: LossInputs, *, tau: float, least_low: float, least_high: float
) -> Tensor:
    """[2]: epsilon_low and epsilon_high of `clipped_m2po_released` for a step."""
    log_ratio_T = x.logp - alpha(x)
    is_outward_T = x.advantage * log_ratio_T > 0
    # (log rho)^2 of the outward tokens, ascending. In float64: the sums run over the whole step.
    squares = log_ratio_T[is_outward_T].square().double().sort().values
    count = len(squares)
    if count == 0 or float(squares.mean()) <= tau:
        # No clip: the ratio is at least 0.
        return x.logp.new_tensor([1.0, inf])
    tokens_after = torch.arange(count - 1, -1, -1, device=squares.device)
    # The sum in which all larger squares are cut down to this one.
    cut_sums = squares * tokens_after + squares.cumsum(0)
    first_over = int((cut_sums >= tau * count).nonzero()[0])
    t = float(squares[first_over - 1].sqrt()) if first_over > 0 else 0.0
    low = max(-float(torch.expm1(torch.tensor(-t))), least_low)
    high = max(float(torch.expm1(torch.tensor(t))), least_high)
    return x.logp.new_tensor([low, high])


@collects(_released_m2po_range)
def clipped_m2po_released(
    x: LossInputs, *, tau: NonNegative = 0.04, least_low: float = 0.3, least_high: float = 0.5
) -> Tensor:
    """min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A), with a range of the step.

    It is the released code of M2PO, which is not the algorithm of its paper (`m2po` in
    core/filters.py).

    v: (log rho)^2 of the step's tokens with (A > 0, rho > 1) or (A < 0, rho < 1), ascending. t^2 is
    the largest v at which cutting all larger ones down to it keeps their mean below tau. The range
    is e^-t .. e^t, but at least 1 - least_low .. 1 + least_high. If the mean of v is at most tau,
    nothing is clipped.
    """
    epsilon_low, epsilon_high = x.step["clipped_m2po_released"]
    rho_T = token(x.logp - alpha(x), x.completion)
    A_T = x.advantage
    clipped_rho_T = torch.minimum(torch.maximum(rho_T, 1 - epsilon_low), 1 + epsilon_high)
    return torch.minimum(rho_T * A_T, clipped_rho_T * A_T)


def _bapo_range(
    x: LossInputs,
    *,
    low: float,
    low_most: float,
    high: float,
    high_most: float,
    step: float,
    balance: float,
    dual_clip: float,
) -> Tensor:
    """[2]: the ends of the range of `clipped_bapo` for a step."""
    rho_T = token(x.logp - alpha(x), x.completion).double()
    A_T = x.advantage.double()

    def is_balanced(low: float, high: float) -> bool:
        gain = (rho_T.clamp(max=high) * A_T.clamp(min=0)).sum()
        loss = (rho_T.clamp(min=low) * (-A_T).clamp(min=0)).sum()
        return bool(gain >= balance * loss)

    while not is_balanced(low, high) and low < low_most:
        low = min(low + step, low_most)
    while not is_balanced(low, high) and high < high_most:
        high = min(high + step, high_most)
    return x.logp.new_tensor([low, high])


@collects(_bapo_range)
def clipped_bapo(
    x: LossInputs,
    *,
    low: NonNegative = 0.6,
    low_most: NonNegative = 0.9,
    high: AtLeastOne = 1.2,
    high_most: AtLeastOne = 3.0,
    step: Annotated[float, Minimum(1e-3)] = 0.05,
    balance: NonNegative = 1.0,
    dual_clip: AtLeastOne = 3.0,
) -> Tensor:
    """min(rho A, clip(rho, low, high) A), with a range of the step: BAPO (arXiv 2510.18927).

    While the sum of min(rho, high) A over the step's tokens with A > 0 is below `balance` times the
    sum of max(rho, low) |A| over the others, first `low` rises by steps up to `low_most`, then
    `high` up to `high_most`. This is the released code, which also clips at `dual_clip`.
    """
    low_end, high_end = x.step["clipped_bapo"]
    rho_T = token(x.logp - alpha(x), x.completion)
    A_T = x.advantage
    clipped_rho_T = torch.minimum(torch.maximum(rho_T, low_end), high_end)
    return limit_push(torch.minimum(rho_T * A_T, clipped_rho_T * A_T), A_T, dual_clip)


# Clips of whole completions


def gmpo(
    x: LossInputs,
    *,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.4,
    epsilon_high: NonNegative = 0.4,
) -> Tensor:
    """exp(mean of the clipped log rho) A at each token of the completion: GMPO (arXiv 2507.20673).

    Each token's log rho is cut at epsilon_high if A > 0, at -epsilon_low if A < 0: a token beyond
    has no gradient, but its completion has.
    """
    log_rho_T = limit(x.logp - denominator(x))
    A_T = x.advantage
    cut_T = torch.where(A_T > 0, log_rho_T.clamp(max=epsilon_high), log_rho_T)
    cut_T = torch.where(A_T < 0, cut_T.clamp(min=-epsilon_low), cut_T)
    return length_normalized(cut_T, x.completion) * A_T


def gepo(
    x: LossInputs,
    *,
    denominator: TokenFunction = alpha,
    epsilon_low: NonNegative = 0.2,
    epsilon_high: NonNegative = 0.2,
) -> Tensor:
    """min(w A, clip(w, 1 - epsilon_low, 1 + epsilon_high) A), w = p / sum(q^2) * sum(q).

    GEPO (arXiv 2508.17850): p = pi(y)^(1/|y|), q = alpha(y)^(1/|y|), and the sums run over the
    completions of the group. So w compares a completion with the group's expectation of q, and is
    not 1 at pi = alpha. All completions of a group are in one call.
    """
    group_C = _groups(x)
    lengths_C = x.logp.new_zeros(len(x.advantages)).index_add(
        0, x.completion, torch.ones_like(x.logp)
    )
    # A completion without tokens, as a benchmark has for padding, must not divide by 0.
    lengths_C = lengths_C.clamp(min=1)
    q_C = (_completion_sum(x, denominator(x)) / lengths_C).exp()
    p_C = (_completion_sum(x, x.logp) / lengths_C).exp()
    expected_q_C = total(q_C.square(), group_C) / total(q_C, group_C)
    w_T = (p_C / expected_q_C)[x.completion]
    A_T = x.advantage
    return torch.minimum(w_T * A_T, w_T.clamp(1 - epsilon_low, 1 + epsilon_high) * A_T)


# REINFORCE with a mask, a weight and a regularizer


def reinforce(
    x: LossInputs,
    *,
    mask: TokenFunction | None = None,
    weight: TokenFunction | None = None,
    regularizer: TokenFunction | None = None,
) -> Tensor:
    """sg(M W A) log pi - R: the one formula of the REC and RED methods of arXiv 2509.24203.

    Without mask M, weight W and regularizer R it is REINFORCE, on samples of any policy. M is a
    function of core/masks.py, W of core/weights.py.
    """
    factor_T = x.advantage
    if mask is not None:
        factor_T = factor_T * mask(x)
    if weight is not None:
        factor_T = factor_T * weight(x)
    value_T = factor_T.detach() * x.logp
    if regularizer is None:
        return value_T
    return value_T - regularizer(x)


def asymre(x: LossInputs, *, strength: NonNegative = 0.1) -> Tensor:
    """-strength log pi: A + strength instead of A, so the baseline is mu - strength.

    AsymRE (arXiv 2506.20520). If all w = alpha (r - mu + strength) are positive, the optimum is
    pi = w / strength.
    """
    return -strength * x.logp


def opmd(x: LossInputs, *, anchor: TokenFunction = alpha, strength: NonNegative = 0.1) -> Tensor:
    """strength (log pi - log anchor)^2: OPMD in the practical form of arXiv 2509.24203.

    With strength = beta / 2 it is DRO, as verl (anchor pi_k) and Tinker (anchor alpha) have it.
    """
    return strength * (x.logp - anchor(x)).square()


# Regressions on whole completions


def opmd_kimi(x: LossInputs, *, anchor: TokenFunction = alpha, strength: Positive = 0.1) -> Tensor:
    """-(A - strength log pi(y)/anchor(y))^2 with A = `log_mean_exp`.

    Kimi k1.5 (arXiv 2501.12599, section 2.3.2): the log-ratio of a completion is regressed on its
    reward. Each token has an equal part, for the reduction `sequence_sum`. OAPL (arXiv 2602.19362)
    has the anchor alpha and another strength than its advantage.
    """
    # The log-ratio of the completion, at each of its tokens.
    residual_T = x.advantage - strength * total(x.logp - anchor(x), x.completion)
    lengths_T = total(torch.ones_like(residual_T), x.completion)
    return -residual_T.square() / lengths_T


def opmd_pairwise(
    x: LossInputs, *, anchor: TokenFunction = alpha, strength: Positive = 0.1
) -> Tensor:
    """-(a - mean of the group's a)^2 with a = A - strength log pi(y)/anchor(y).

    Pairwise OPMD (arXiv 2509.24203), as sum_{i<j} (a_i - a_j)^2 / G^2 is the biased variance of a.
    All completions of a group are in one call.

    At pi = anchor its gradient is 2 strength mean_i (r_i - mu) grad log pi(y_i), whoever sampled
    the group; its optimum is anchor e^(r / strength) / Z. With the anchor pi_ref it is the
    trajectory balance of TBA (arXiv 2503.18929).
    """
    group_C = _groups(x)
    log_ratio_C = _completion_log_ratio(x, anchor)
    a_C = x.advantages - strength * log_ratio_C
    mean_C = total(a_C, group_C) / total(torch.ones_like(a_C), group_C)
    value_T = -(a_C - mean_C).square()[x.completion]
    lengths_T = total(torch.ones_like(value_T), x.completion)
    return value_T / lengths_T


# Preferences: the best completion of a group against the worst


def online_dpo(
    x: LossInputs, *, anchor: TokenFunction = pi_ref, strength: Positive = 0.1
) -> Tensor:
    """log sigmoid(strength h) at the best and the worst completion of a group, 0 at the others.

    h = log pi(y_best) - log anchor(y_best) - log pi(y_worst) + log anchor(y_worst): DPO (arXiv
    2305.18290, Eq. 7) on pairs that the policy sampled. With the reduction `sequence_sum` the
    objective is the mean over groups, weighted by their sizes. Groups without a difference count as
    0. All completions of a group are in one call.
    """
    margin_T, share_T = _pairs(x, anchor)
    return share_T * torch.nn.functional.logsigmoid(strength * margin_T)


def online_ipo(
    x: LossInputs, *, anchor: TokenFunction = pi_ref, strength: Positive = 0.1
) -> Tensor:
    """-(h - 1 / (2 strength))^2 at the best and the worst completion of a group, 0 at the others.

    h as in `online_dpo`: IPO (arXiv 2310.12036, Eq. 17, its tau is `strength`).
    """
    margin_T, share_T = _pairs(x, anchor)
    return -share_T * (margin_T - 1 / (2 * strength)).square()


def _pairs(x: LossInputs, anchor: TokenFunction) -> tuple[Tensor, Tensor]:
    """The margin h of the token's group, and the token's share of the group's value, both [T].

    The share is G / (2 * length) for the two completions of the pair, so that a mean over all
    completions is one over groups, each weighted by G; 0 for the other completions.
    """
    group_C = _groups(x)
    size_C = total(torch.ones_like(x.advantages), group_C)
    is_best_C = _is_first_largest(x.advantages, group_C)
    is_worst_C = _is_first_largest(-x.advantages, group_C)
    # +1 for the best, -1 for the worst. In a group without a difference, one completion is both.
    sign_C = is_best_C.to(x.logp.dtype) - is_worst_C.to(x.logp.dtype)
    log_ratio_C = _completion_log_ratio(x, anchor)
    margin_C = total(sign_C * log_ratio_C, group_C)
    lengths_T = total(torch.ones_like(x.logp), x.completion)
    share_C = sign_C.abs() * size_C / 2
    return margin_C[x.completion], share_C[x.completion] / lengths_T


def _is_first_largest(values_C: Tensor, group_C: Tensor) -> Tensor:
    """True for the first completion with the largest value of its group, [C]."""
    groups = int(group_C.max()) + 1
    largest = values_C.new_full((groups,), -inf).scatter_reduce(0, group_C, values_C, "amax")
    index_C = torch.arange(len(values_C), device=values_C.device)
    # An index past the end never is the smallest.
    candidate_C = torch.where(values_C == largest[group_C], index_C, len(values_C))
    no_candidate = torch.full_like(group_C[:1], len(values_C)).expand(groups).clone()
    first = no_candidate.scatter_reduce(0, group_C, candidate_C, "amin")  # [groups]
    return index_C == first[group_C]


def _groups(x: LossInputs) -> Tensor:
    """A number below C for the group of each completion, [C]: the index of its first completion.

    Raises ValueError if the groups are unknown.
    """
    if x.group is None:
        raise ValueError("this objective needs the groups of the completions")
    # `x.group` counts the groups of the whole batch, so its numbers may be larger than C.
    is_same_CC = x.group[:, None] == x.group
    return is_same_CC.int().argmax(dim=1)


def _completion_log_ratio(x: LossInputs, anchor: TokenFunction) -> Tensor:
    """log pi(y)/anchor(y) of each completion [C], nats."""
    return _completion_sum(x, x.logp - anchor(x))


def _completion_sum(x: LossInputs, values_T: Tensor) -> Tensor:
    """The sum over the tokens of each completion, [C]."""
    zeros_C = values_T.new_zeros(len(x.advantages))
    return zeros_C.index_add(0, x.completion, values_T)
