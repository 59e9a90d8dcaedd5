"""Linear layers with the same input in the learner's forward and backward pass.

The backward pass multiplies by PyTorch, as it need not agree with anything to the bit. Of frozen weights it computes no
gradient: with adapters that is a third of the learner's products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lagrpo.backends.adapters import AdaptedLinear
from lagrpo.backends.cpu.panels import LowRank, Panels

Tensors = Sequence[Tensor | None]


class Linears:
    """Linear layers with the same input [rows, k], whose forward products `panels` compute, or PyTorch."""

    def __init__(self, modules: Sequence[nn.Linear], panels: Panels | LowRank | None) -> None:
        self.modules, self.panels = modules, panels

    @property
    def parameters(self) -> list[Tensor | None]:
        """The weights of all, their biases, the A of their adapters, the B: None for what a layer lacks."""
        down = [m.lora_A if isinstance(m, AdaptedLinear) else None for m in self.modules]
        up = [m.lora_B if isinstance(m, AdaptedLinear) else None for m in self.modules]
        return [*(m.weight for m in self.modules), *(m.bias for m in self.modules), *down, *up]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of each layer, without a gradient."""
        if self.panels is None:
            return tuple(m.forward(x) for m in self.modules)
        return self.panels(x).split(self.panels.widths, 1)

    def backward(
        self, x: Tensor, grads: Sequence[Tensor], parameters: Tensors, wanted: Sequence[bool], wants_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of x and of the `parameters`, where they are `wanted`, from those of the outputs."""
        count = len(self.modules)
        weights, _, downs, ups = (parameters[n : n + count] for n in range(0, 4 * count, count))
        grad_x = _grad_input(grads, weights) if wants_x else None
        found: list[Tensor | None] = [torch.mm(grad.mT, x) if wanted[n] else None for n, grad in enumerate(grads)]
        found += [grad.sum(0) if wanted[count + n] else None for n, grad in enumerate(grads)]
        found += [None] * (2 * count)
        for n, (m, grad, down, up) in enumerate(zip(self.modules, grads, downs, ups, strict=True)):
            if isinstance(m, AdaptedLinear) and down is not None and up is not None:
                low = torch.mm(grad, up).mul_(m.scale)
                found[2 * count + n] = torch.mm(low.mT, x)
                found[3 * count + n] = torch.mm(grad.mT, torch.mm(x, down.mT)).mul_(m.scale)
                if grad_x is not None:
                    grad_x.addmm_(low, down)
        return grad_x, found


def _grad_input(grads: Sequence[Tensor], weights: Tensors) -> Tensor:
    found: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        assert weight is not None
        found = torch.mm(grad, weight) if found is None else found.addmm_(grad, weight)
    assert found is not None
    return found
