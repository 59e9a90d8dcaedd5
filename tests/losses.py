"""A recipe's loss from named tensors, for tests that hold them in a dict."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lagrpo.core.loss import Terms


def loss_of(recipe: Any, weight_C: Tensor, **given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """`recipe.loss` of logp_T, logp_alpha_T, logp_k_T, logp_ref_T, completion_T, advantage_C and perhaps group_C."""
    names = ("logp_T", "logp_alpha_T", "logp_k_T", "logp_ref_T", "completion_T", "advantage_C")
    return recipe.loss(Terms(*(given[name] for name in names), groups=given.get("group_C")), weight_C)
