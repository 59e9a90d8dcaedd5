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

    def grad_input(self, grads: Sequence[Tensor], parameters: Tensors) -> Tensor:
        """The gradient of the inputs [rows, k], from the gradients of the outputs."""
        count, found = len(self.modules), None
        for grad, weight in zip(grads, parameters, strict=False):
            assert weight is not None
            found = torch.mm(grad, weight) if found is None else found.addmm_(grad, weight)
        assert found is not None
        adapters = zip(self.modules, grads, parameters[2 * count : 3 * count], parameters[3 * count :], strict=True)
        for m, grad, down, up in adapters:
            if isinstance(m, AdaptedLinear) and down is not None and up is not None:
                found.addmm_(torch.mm(grad, up).mul_(m.scale), down)
        return found

    def grad_parameters(
        self, x: Tensor, grads: Sequence[Tensor], parameters: Tensors, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of the `parameters` that are `wanted`, from the inputs and the gradients of the outputs."""
        count = len(self.modules)
        downs, ups = parameters[2 * count : 3 * count], parameters[3 * count :]
        found: list[Tensor | None] = [torch.mm(grad.mT, x) if wanted[n] else None for n, grad in enumerate(grads)]
        found += [grad.sum(0) if wanted[count + n] else None for n, grad in enumerate(grads)]
        found += [None] * (2 * count)
        for n, (m, grad, down, up) in enumerate(zip(self.modules, grads, downs, ups, strict=True)):
            if isinstance(m, AdaptedLinear) and down is not None and up is not None:
                found[2 * count + n] = torch.mm(torch.mm(grad, up).mul_(m.scale).mT, x)
                found[3 * count + n] = torch.mm(grad.mT, torch.mm(x, down.mT)).mul_(m.scale)
        return found
