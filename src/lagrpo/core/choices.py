"""Values that knobs may have: the functions by name, and the smallest numbers."""

from __future__ import annotations

from lagrpo.core import advantages, corrections, filters, inputs, kl, losses, masks, weights
from lagrpo.core.pieces import PieceFunction
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
    ),
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

MAY_BE_NONE = ("mask", "weight", "regularizer", "correction")
"""Knobs that "none" unsets."""

MINIMUM = {
    "beta": 0.0,
    "epsilon_low": 0.0,
    "epsilon_high": 0.0,
    "dual_clip": 1.0,
    "outer_low": 0.0,
    "outer_high": 0.0,
    "delta": 0.0,
    "delta_low": 0.0,
    "delta_high": 0.0,
    "tau": 0.0,
    "low": 0.0,
    "low_most": 0.0,
    "high": 1.0,
    "high_most": 1.0,
    "step": 1e-3,
    "balance": 0.0,
    "share": 0.0,
    "eps_std": 0.0,
    "std_offset": 0.0,
    "kl_bound": 0.0,
    "strength": 0.0,
    "advantage.strength": 1e-9,
    "surrogate.strength": 1e-9,
    "weight_temperature": 1e-9,
    "eps_variance": 0.0,
    "cap": 0.0,
    "cap_positive": 0.0,
    "cap_negative": 0.0,
    "temperature_positive": 0.0,
    "temperature_negative": 0.0,
    "power_positive": 0.0,
    "power_negative": 0.0,
    "decay_positive": 0.0,
    "decay_negative": 0.0,
    "overlong_buffer": 0.0,
    "correction.floor": 0.0,
    "correction.cap": 1.0,
}
"""The smallest value of a number, by the last part of its path or by all of it.

1e-9 stands for "more than 0": the number is a divisor.
"""
