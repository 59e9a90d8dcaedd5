"""The pieces a recipe is composed of, by name. All functions of a table have the same arguments, so any can replace any
other. A piece reads anything else through keyword-only parameters: a number, or a piece of the table of that name.
Nothing else in the settings reaches it.

    advantage                   (rewards_G, uniform_G) -> advantage_G    uniform_G: a draw in [0, 1) per completion
    surrogate                   (Terms) -> value [T], and the mask of the tokens whose gradient it cuts
    ratio                       (Terms, logp_T) -> the ratio of these log-probs to the denominator's [T]
    denominator                 (Terms) -> log-probs of the policy under the ratio [T]
    mask, weight, regularizer   (Terms) -> M, W, R in M W A logp - R [T]
    anchor                      (Terms) -> log-probs of the policy that OPMD stays near [T]
    correction                  (Terms) -> the weight of each value, 0 where it is dropped [T]
    correction_level            (Terms) -> pi_k/alpha [T]
    kl                          (Terms) -> estimate of KL(pi || pi_ref) [T]
    reduction                   (lengths_C, kept_C, counted_C, max_length) -> weight_C
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lagrpo.core import advantages, corrections, divergences, objectives, ratios, reductions, reinforce

Piece = Callable[..., Tensor]


def _ones(t, ratio=None):
    return torch.ones_like(t.logp)


def _nowhere(t):
    return torch.zeros_like(t.logp, dtype=torch.bool)


def _clip(ends: Callable[..., tuple[Tensor, Tensor]], center: Piece) -> tuple[Piece, Piece]:
    """A clipped surrogate and what it cuts, from the ends of its range around a center."""

    def value(t, *, ratio, epsilon_low, epsilon_high, dual_clip):
        range_T = ends(center(t, ratio), epsilon_low, epsilon_high)
        value_T = objectives.clipped_between(ratio(t, t.logp), *range_T, t.advantage)
        return objectives.dual_clipped(value_T, t.advantage, dual_clip)

    def cut(t, *, ratio, epsilon_low, epsilon_high, dual_clip):
        range_T, ratio_T = ends(center(t, ratio), epsilon_low, epsilon_high), ratio(t, t.logp)
        cut_T = objectives.cut_between(ratio_T, *range_T, t.advantage)
        return cut_T | objectives.cut_by_dual_clip(ratio_T, t.advantage, dual_clip)

    return value, cut


def _pi_k_over_alpha(t, ratio):
    return ratio(t, t.pi_k)


def _ratio(level: Piece) -> Piece:
    return lambda t, logp_T, *, denominator: level(t, logp_T, denominator(t))


def _mismatch(level: Piece) -> Piece:
    return lambda t: level(t, t.pi_k, t.alpha)


def _correction(weigh: Piece) -> Piece:
    def weight(t, *, correction_level, correction_floor, correction_cap):
        return weigh(correction_level(t), correction_floor, correction_cap)

    return weight


def _mean(reduce: Piece) -> Piece:
    return lambda lengths, kept, counted, max_length: reduce(lengths, kept, counted)


ADVANTAGES: dict[str, Piece] = {
    "normalized": lambda r, u=None, *, eps_std: advantages.normalized(r, eps_std),
    "normalized_unbiased": lambda r, u=None, *, std_offset: advantages.normalized_unbiased(r, std_offset),
    "centered": lambda r, u=None: advantages.centered(r),
    "leave_one_out": lambda r, u=None: advantages.leave_one_out(r),
    "red_drop": lambda r, u: advantages.red_drop(r, u),
    "log_mean_exp": lambda r, u=None, *, strength: advantages.log_mean_exp(r, strength),
}

SURROGATES: dict[str, tuple[Piece, Piece]] = {
    "unclipped": (lambda t, *, ratio: objectives.unclipped(ratio(t, t.logp), t.advantage), _nowhere),
    "clipped": _clip(objectives.clip_range, _ones),
    "clipped_exact": _clip(objectives.clip_range, _pi_k_over_alpha),
    "clipped_proportional": _clip(objectives.proportional_range, _pi_k_over_alpha),
    "reinforce": (
        lambda t, *, mask, weight, regularizer: (
            objectives.reinforce(t.logp, t.advantage, mask(t), weight(t)) - regularizer(t)
        ),
        lambda t, *, mask: ~mask(t),
    ),
    "opmd_kimi": (
        lambda t, *, anchor, strength: reinforce.opmd_kimi(t.logp, anchor(t), t.advantages, t.completion, strength),
        _nowhere,
    ),
    "opmd_pairwise": (
        lambda t, *, anchor, strength: reinforce.opmd_pairwise(
            t.logp, anchor(t), t.advantages, t.completion, t.group, strength
        ),
        _nowhere,
    ),
}

LEVELS: dict[str, Piece] = {
    "token": lambda t, logp_T, below_T: ratios.token_ratio(logp_T, below_T),
    "sequence": lambda t, logp_T, below_T: ratios.sequence_ratio(logp_T, below_T, t.completion, t.C),
    "length_normalized": lambda t, logp_T, below_T: ratios.length_normalized_ratio(logp_T, below_T, t.completion, t.C),
}

RATIOS: dict[str, Piece] = {name: _ratio(level) for name, level in LEVELS.items()}
CORRECTION_LEVELS: dict[str, Piece] = {name: _mismatch(level) for name, level in LEVELS.items()}
DENOMINATORS: dict[str, Piece] = {"alpha": lambda t: t.alpha, "pi_k": lambda t: t.pi_k}
ANCHORS: dict[str, Piece] = {**DENOMINATORS, "pi_ref": lambda t: t.pi_ref}

MASKS: dict[str, Piece] = {
    "none": lambda t: ~_nowhere(t),
    "one_side": lambda t, *, ratio, epsilon_low, epsilon_high: reinforce.one_side(
        ratio(t, t.logp), t.advantage, epsilon_low, epsilon_high
    ),
    "two_side": lambda t, *, ratio, epsilon_low, epsilon_high: reinforce.two_side(
        ratio(t, t.logp), epsilon_low, epsilon_high
    ),
    "ring": lambda t, *, ratio, epsilon_low, epsilon_high, outer_low, outer_high: reinforce.ring(
        ratio(t, t.logp), t.advantage, epsilon_low, epsilon_high, outer_low, outer_high
    ),
}

WEIGHTS: dict[str, Piece] = {
    "one": _ones,
    "ratio": lambda t, *, ratio: ratio(t, t.logp),
    "capped_ratio": lambda t, *, ratio, epsilon_high: reinforce.capped_ratio(ratio(t, t.logp), epsilon_high),
    "tapered_ratio": lambda t, *, ratio: reinforce.tapered_ratio(ratio(t, t.logp), t.advantage),
    "exp_advantage": lambda t, *, weight_temperature: reinforce.exp_advantage(t.advantage, weight_temperature),
}

REGULARIZERS: dict[str, Piece] = {
    "none": lambda t: torch.zeros_like(t.logp),
    "asymre": lambda t, *, strength: reinforce.asymre(t.logp, strength),
    "opmd": lambda t, *, anchor, strength: reinforce.opmd(t.logp, anchor(t), strength),
}

CORRECTIONS: dict[str, Piece] = {
    "none": _ones,
    "truncated": _correction(corrections.truncated),
    "masked": _correction(corrections.masked),
}

KLS: dict[str, Piece] = {
    "k1": lambda t: divergences.k1(t.logp, t.pi_ref),
    "k2": lambda t: divergences.k2(t.logp, t.pi_ref),
    "k3": lambda t: divergences.k3(t.logp, t.pi_ref),
    "k3_clamped": lambda t, *, kl_bound: divergences.k3_clamped(t.logp, t.pi_ref, kl_bound),
    "k3_linear": lambda t, *, kl_bound: divergences.k3_linear(t.logp, t.pi_ref, kl_bound),
    "k3_bias_corrected": lambda t, *, ratio: divergences.bias_corrected(
        divergences.k3(t.logp, t.pi_ref), ratio(t, t.logp)
    ),
}

REDUCTIONS: dict[str, Piece] = {
    "token_mean": _mean(reductions.token_mean),
    "sequence_mean": _mean(reductions.sequence_mean),
    "sequence_sum": _mean(reductions.sequence_sum),
    "constant_length": reductions.constant_length,
}

TABLES = {
    "advantage": ADVANTAGES,
    "surrogate": SURROGATES,
    "ratio": RATIOS,
    "denominator": DENOMINATORS,
    "mask": MASKS,
    "weight": WEIGHTS,
    "regularizer": REGULARIZERS,
    "anchor": ANCHORS,
    "correction": CORRECTIONS,
    "correction_level": CORRECTION_LEVELS,
    "kl": KLS,
    "reduction": REDUCTIONS,
}
