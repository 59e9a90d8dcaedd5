"""Low-rank adapters (LoRA, arXiv:2106.09685) with frozen linear layers: y = W x + b + s B (A x).

A model with adapters has `AdaptedLinear` instead of some linear layers. All copies of the model share W and b, so a
version of the policy is A and B alone. The module's own forward pass computes, or the CPU's kernels (cpu/panels.py),
which add the adapter to the same sum.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

A, B = "lora_A", "lora_B"  # PEFT's names


class AdaptedLinear(nn.Linear):
    """The linear layer given, with an adapter of rank r that starts at 0; `scale` is s."""

    def __init__(self, linear: nn.Linear, r: int, scale: float) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale  # type: ignore[assignment]
        self.lora_A = nn.Parameter(linear.weight.new_zeros(r, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, r))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.lora_A), self.lora_B * self.scale)


def adapted(lm: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers of a model that have adapters, by name."""
    return {name: module for name, module in lm.named_modules() if isinstance(module, AdaptedLinear)}


def with_own_adapters(lm: Any) -> Any:
    """A copy of a model that does not learn: of its adapters where it has any, and all else is shared; else of all."""
    shared = {id(p): p for p in lm.parameters() if not p.requires_grad} if adapted(lm) else {}
    return copy.deepcopy(lm, shared).requires_grad_(False)
