"""The settings of adapters: section model.lora."""

from __future__ import annotations

from pydantic import Field, field_validator

from lagrpo.settings.section import Section


class LoraSettings(Section):
    r: int = Field(default=0, ge=0, le=512)
    """Rank of the adapters (LoRA) that are trained in place of the model's own weights; 0: full training."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapters' product counts alpha / r times."""
    dropout: float = Field(default=0.0, ge=0)
    """There is none: sampler and learner must be one policy."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Linear layers that get adapters, by name (q_proj, down_proj …), or all-linear: all in the decoder's layers."""
    merge: bool = False
    """Write saved policies as whole models, each with its adapter added to the weights, in place of adapters. `lagrpo
    train --merge` is the same."""

    @field_validator("dropout")
    @classmethod
    def _refuse_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"dropout = {dropout:g}: the learner would compute another policy than the one that sampled, anew for "
                "every pass, and the ratios of the objective would measure that; use 0, and optimizer.weight_decay or "
                "fewer updates against overfitting"
            )
        return dropout
