"""The section [loss]: the recipe, and what a run replaces in it. core/recipes.py checks it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lagrpo.settings.section import Section

KNOBS = {"kl_estimator": "kl", "epsilon": "epsilon_low"}
"""Settings whose knob in core/recipes.py has another name."""


class LossSettings(Section):
    """The recipe, and the knobs that a run replaces in it; None: as in the recipe."""

    recipe: str = "grpo"
    """Row of the table of recipes; the settings below replace its knobs. `lagrpo recipes` lists them."""
    recipe: str = "grpo"
    """Row of the table of recipes; the settings below replace its knobs. `lagrpo recipes` lists them."""
    advantage: str | None = None
    """normalized, normalized_unbiased (TRL's), centered, leave_one_out, red_drop or log_mean_exp."""
    reduction: str | None = None
    """From tokens to the loss: token_mean, sequence_mean, sequence_sum or constant_length."""
    kl_estimator: str | None = None
    """Estimator of KL(pi || pi_ref) if beta > 0: k2, k3, k3_clamped, k3_linear or k3_bias_corrected (TRL's)."""
    beta: float | None = None
    """Weight of KL(pi || pi_ref); 0 keeps no reference."""
    epsilon: float | None = None
    """Lower clip range."""
    epsilon_high: float | None = None
    """Upper clip range."""
    mask_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the objective (Eq. 8)."""
    overrides: dict[str, Any] = Field(default={})
    """A table of the recipe's other knobs, such as surrogate, correction or dual_clip (`lagrpo recipes NAME`)."""

    @property
    def knobs(self) -> dict[str, Any]:
        """The knobs of the recipe that are replaced, by their names in core/recipes.py."""
        given = self.model_dump(exclude={"recipe", "overrides"}, exclude_none=True)
        return {KNOBS.get(name, name): value for name, value in given.items()} | self.overrides


def name_setting(knob: str) -> str:
    """The setting that replaces a knob of a recipe.

    >>> name_setting("epsilon_low"), name_setting("dual_clip")
    ('loss.epsilon', 'loss.overrides.dual_clip')
    """
    name = {own: name for name, own in KNOBS.items()}.get(knob, knob)
    return f"loss.{name}" if name in LossSettings.model_fields else f"loss.overrides.{name}"
