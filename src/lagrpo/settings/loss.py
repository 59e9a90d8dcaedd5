"""The section of the loss: a recipe, and changes of its knobs."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from lagrpo.settings.section import Section, Table

KNOBS = {"kl_estimator": "kl"}
"""Settings of [loss] whose knob in core/recipes.py has another name."""

OUTSIDE_RECIPES = ("reference", "reference_prompt", "entropy_coef", "entropy_target")
"""Settings of [loss] that do not belong to a recipe."""

LARGEST_ENTROPY_COEF = 10.0
"""The largest coefficient that loss.entropy_target leads to. Without it, a target that is out of
reach would let the coefficient grow forever."""


class LossSettings(Section):
    """The recipe, and changes of its knobs."""

    recipe: str = "grpo"
    """Name of lagrpo recipes, or package.module:name of your own"""
    beta: float | None = None
    """Weight of KL(policy, reference); 0: no reference; default here and below: the recipe's"""
    reference: str | None = None
    """Reference model or teacher: hub id or directory; default: model.path"""
    reference_prompt: str | None = None
    """Prompt of the reference: a Jinja text, or a file with it (docs/distillation.md)"""
    kl_estimator: str | None = None
    """Estimator of that KL: k2, k3, k3_clamped, k3_linear or k3_bias_corrected"""
    epsilon: float | None = None
    """The ratio is clipped to 1 - epsilon .. 1 + epsilon"""
    epsilon_high: float | None = None
    """Upper end of the clip range, if it differs: 1 + epsilon_high"""
    advantage: str | None = None
    """normalized, centered, leave_one_out, maxrl, batch_scaled … (docs/algorithms.md)"""
    reduction: str | None = None
    """Mean over tokens: token_mean, sequence_mean, sequence_sum or constant_length"""
    mask_zero_variance: bool | None = None
    """Leave out groups whose rewards are all equal"""
    filters: tuple[str, ...] | None = None
    """Leaves out: finished_only, opsm, seq_max_k3, carm, top_entropy, clip_cov, m2po"""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy in the loss; with entropy_target: where it starts"""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy to hold at least, nats per token: moves entropy_coef after each batch"""
    overrides: Table = Field(default={})
    """The recipe's other knobs by path, such as mask.epsilon_high (lagrpo recipes NAME)"""

    @model_validator(mode="before")
    @classmethod
    def _flatten_overrides(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        overrides = values.get("overrides")
        flat_overrides = flatten_paths(overrides) if isinstance(overrides, dict) else {}
        for path, value in flat_overrides.items():
            if value is None:
                flat_overrides[path] = "none"  # TOML cannot write None
        _check_no_functions(flat_overrides, values.get("filters"))
        if not isinstance(overrides, dict):
            return values
        return values | {"overrides": flat_overrides}

    @model_validator(mode="after")
    def _check_given_once(self) -> LossSettings:
        for knob in self._named_knobs:
            if knob in self.overrides:
                raise ValueError(
                    f"{name_setting(knob)} and loss.overrides.{knob}: give one of them"
                )
        return self

    @model_validator(mode="after")
    def _check_entropy(self) -> LossSettings:
        if self.entropy_target is not None and self.entropy_coef > LARGEST_ENTROPY_COEF:
            raise ValueError(
                f"entropy_coef = {self.entropy_coef:g}: with entropy_target it is at most "
                f"{LARGEST_ENTROPY_COEF:g}; lower it"
            )
        return self

    @property
    def _named_knobs(self) -> Table:
        """The knobs set by a named setting such as loss.epsilon, by their paths."""
        values = self.model_dump(
            exclude={"recipe", "overrides", *OUTSIDE_RECIPES}, exclude_none=True
        )
        return {KNOBS.get(name, name): value for name, value in values.items()}

    @property
    def knobs(self) -> Table:
        """The knobs of the recipe that are replaced, by their paths in core/recipes.py."""
        return self._named_knobs | self.overrides


def _check_no_functions(overrides: Table, filters: object) -> None:
    """Raises ValueError for a function itself. Settings name functions: they are kept as text."""
    entries: list[tuple[str, object]] = [*overrides.items(), ("filters", filters)]
    if isinstance(filters, list | tuple):
        entries += [("filters", entry) for entry in filters]
    for path, value in entries:
        if callable(value):
            raise ValueError(
                f"{path} is a function: write 'module:function', or give a lagrpo.Recipe as loss"
            )


def flatten_paths(table: Mapping[str, object], prefix: str = "") -> Table:
    """Returns the values of nested tables by their paths.

    In a table, `function` names the function whose knobs the table has.

    >>> flatten_paths({"mask": {"function": "one_side", "epsilon_high": 0.3}, "beta": 0.1})
    {'mask': 'one_side', 'mask.epsilon_high': 0.3, 'beta': 0.1}
    """
    flat: Table = {}
    for name, value in table.items():
        path = f"{prefix}{name}"
        if not isinstance(value, Mapping):
            flat[path] = value
            continue
        knobs = dict(value)
        if "function" in knobs:
            flat[path] = knobs.pop("function")
        flat |= flatten_paths(knobs, f"{path}.")
    return flat


def name_setting(knob: str) -> str:
    """Returns the setting of a recipe's knob: loss.epsilon, say, or loss.overrides.dual_clip."""
    setting_names = {knob_name: name for name, knob_name in KNOBS.items()}
    name = setting_names.get(knob, knob)
    return f"loss.{name}" if name in LossSettings.model_fields else f"loss.overrides.{name}"
