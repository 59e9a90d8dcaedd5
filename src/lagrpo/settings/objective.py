"""The section [objective]: the recipe, and the knobs of it that a run replaces. core/recipes.py checks them."""

from __future__ import annotations

from typing import Any

from lagrpo.settings.section import Section


class ObjectiveSettings(Section):
    """The recipe, and every knob that a run may replace in it; None: as in the recipe."""

    recipe: str = "grpo"
    """Row of the table of recipes; the settings below replace its knobs. `lagrpo recipes` lists them."""
    advantage: str | None = None
    """normalized, normalized_unbiased (TRL's), centered, leave_one_out, red_drop or log_mean_exp."""
    surrogate: str | None = None
    """clipped (around 1), clipped_exact (around pi_k/alpha), clipped_proportional (around it, by a factor), unclipped,
    reinforce (M W A logp), opmd_kimi or opmd_pairwise."""
    ratio: str | None = None
    """Level at which pi/alpha (or pi/pi_k) is taken: token, sequence or length_normalized."""
    denominator: str | None = None
    """The policy under that ratio: alpha, or pi_k (recomputed by the trainer)."""
    mask: str | None = None
    """M of reinforce, which tokens count: none, one_side, two_side or ring."""
    weight: str | None = None
    """W of reinforce: none, importance, capped_ratio (CISPO), tapered_ratio (TOPR) or exp_advantage (RED-Weight)."""
    regularizer: str | None = None
    """What reinforce subtracts: none, asymre or opmd."""
    anchor: str | None = None
    """The policy that OPMD stays near: alpha, pi_k or pi_ref."""
    correction: str | None = None
    """For a ratio over pi_k: weigh the surrogate by pi_k/alpha, truncated (TIS) or masked (MIS, IcePop), or none."""
    correction_level: str | None = None
    """Level of the correction's pi_k/alpha: token, sequence or length_normalized."""
    reduction: str | None = None
    """From tokens to the loss: token_mean, sequence_mean, sequence_sum or constant_length."""
    kl: str | None = None
    """Estimator of KL(pi || pi_ref) if beta > 0: k2, k3, k3_clamped, k3_linear or k3_bias_corrected (TRL's)."""
    kl_importance: bool | None = None
    """Weight the KL estimate by pi/alpha of each token, as for samples of pi."""
    beta: float | None = None
    """Weight of KL(pi || pi_ref); 0 keeps no reference."""
    epsilon_low: float | None = None
    """Lower clip range."""
    epsilon_high: float | None = None
    """Upper clip range."""
    dual_clip: float | None = None
    """Largest ratio at which a token with A < 0 is pushed down (TRL's delta)."""
    outer_low: float | None = None
    """Outer lower range of the mask ring."""
    outer_high: float | None = None
    """Outer upper range of the mask ring."""
    correction_floor: float | None = None
    """Smallest pi_k/alpha of a correction: truncated raises lower ones to it, masked drops them."""
    correction_cap: float | None = None
    """Largest pi_k/alpha of a correction: truncated lowers higher ones to it, masked drops them."""
    eps_std: float | None = None
    """Variance floor under the root of sigma, in the normalized advantage."""
    std_offset: float | None = None
    """Added to the deviation in the advantage normalized_unbiased."""
    kl_bound: float | None = None
    """Largest value of k3_clamped, steepest slope of k3_linear."""
    strength: float | None = None
    """Strength of asymre and opmd; temperature of log_mean_exp (the papers' tau)."""
    weight_temperature: float | None = None
    """Temperature of exp_advantage."""
    overlong_buffer: int | None = None
    """Tokens before the limit over which DAPO's penalty for length falls from 0 to -1; 0: no penalty."""
    mask_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the objective (Eq. 8)."""
    masked_count: bool | None = None
    """Count the completions of masked groups in the normalizer."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The knobs of the recipe that are replaced."""
        return {name: value for name, value in self.model_dump(exclude={"recipe"}).items() if value is not None}
