"""The functions that knobs may name."""

from __future__ import annotations

from lagrpo.core import (
    advantages,
    corrections,
    filters,
    inputs,
    kl,
    losses,
    masks,
    token_advantages,
    weights,
)
from lagrpo.core.pieces import PieceFunction, as_piece
from lagrpo.core.ratios import length_normalized, sequence, token
from lagrpo.core.reductions import constant_length, sequence_mean, sequence_sum, token_mean

CHOICES: dict[str, tuple[PieceFunction, ...]] = {
    "advantage": (
        advantages.normalized,
        advantages.normalized_unbiased,
        advantages.normalized_positive,
        advantages.centered,
        advantages.leave_one_out,
        advantages.maxrl,
        advantages.sign_balanced,
        advantages.batch_scaled,
        advantages.batch_whitened,
        advantages.red_drop,
        advantages.log_mean_exp,
        advantages.zero,
    ),
    "token_advantage": (
        token_advantages.reverse_kl,
        token_advantages.reverse_kl_by_drift,
        token_advantages.forward_kl,
    ),
    "student": (inputs.pi, inputs.alpha, inputs.pi_k),
    "surrogate": (
        losses.clipped,
        losses.clipped_exact,
        losses.clipped_proportional,
        losses.clipped_by_staleness,
        losses.clipped_m2po_released,
        losses.clipped_bapo,
        losses.gmpo,
        losses.gepo,
        losses.unclipped,
        losses.reinforce,
        losses.opmd_kimi,
        losses.opmd_pairwise,
        losses.online_dpo,
        losses.online_ipo,
    ),
    "ratio": (token, sequence, length_normalized),
    "level": (token, sequence, length_normalized),
    "denominator": (inputs.alpha, inputs.pi_k),
    "anchor": (inputs.alpha, inputs.pi_k, inputs.pi_ref),
    "mask": (
        masks.one_side,
        masks.two_side,
        masks.ring,
        masks.tv,
        masks.binary_kl,
        masks.tv_two_side,
    ),
    "weight": (
        weights.importance,
        weights.capped_ratio,
        weights.capped_sequence,
        weights.tapered_ratio,
        weights.asymmetric_cap,
        weights.exp_advantage,
        weights.sapo,
        weights.vespo,
    ),
    "regularizer": (losses.asymre, losses.opmd),
    "filters": (
        filters.opsm,
        filters.seq_max_k3,
        filters.carm,
        filters.finished_only,
        filters.top_entropy,
        filters.clip_cov,
        filters.m2po,
    ),
    "correction": (corrections.truncated, corrections.masked),
    "kl": (kl.k1, kl.k2, kl.k3, kl.k3_clamped, kl.k3_linear, kl.k3_bias_corrected),
    "reduction": (token_mean, sequence_mean, sequence_sum, constant_length),
}
"""The functions that a setting may name, for each knob that is a function."""

MAY_BE_NONE = ("mask", "weight", "regularizer", "correction", "token_advantage")
"""Knobs that "none" unsets."""

KNOB_NAMES = frozenset(
    knob
    for functions in CHOICES.values()
    for function in functions
    for knob in as_piece(function).knobs
)
"""The names of all knobs of these functions."""
