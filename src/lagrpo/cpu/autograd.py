"""What the kernels compute in the trainer, with gradients: attention, norms, rotary embedding, and linear layers.

The backward pass multiplies with PyTorch, as it need not agree with anything to the bit. It computes no gradient of
frozen weights: with adapters that saves a third of the trainer's products. Norms, activations and attention scores are
computed again in the backward pass, a hundredth of the time of the products, and not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagrpo.cpu import kernels
from lagrpo.cpu.panels import Panels, has_adapter


def attend(row: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend along a packed row: query [rows, Hq, D], key and value [rows, Hkv, D] -> [rows, Hq, D]."""
    return _Attention.apply(query, key, value, row, scaling)  # type: ignore[return-value]


def add_norm(x: Tensor, delta: Tensor | None, module: Any) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm by a module of the RMSNorm kind): [n, H] twice."""
    return _AddNorm.apply(x, delta, module.weight, module.variance_epsilon)  # type: ignore[return-value]


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding: x [n, heads, D], cosine and sine [n, D], the same in both halves of D. Raises
    ValueError for angles of a part of D only."""
    if cosine.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"rotary embedding of {cosine.shape[-1]} of {x.shape[-1]} head dimensions is not supported"
        )
    return _Rotary.apply(x, cosine, sine)  # type: ignore[return-value]


def normed_products(
    x: Tensor, delta: Tensor | None, norm: Any, linears: Linears
) -> tuple[Tensor, ...]:
    """x + delta, and what linear layers make of its norm."""
    given = x, delta, norm.weight, norm.variance_epsilon
    return _NormedProducts.apply(*given, linears, *linears.parameters)  # type: ignore[return-value]


def product(x: Tensor, linears: Linears) -> Tensor:
    return _Product.apply(x, linears, *linears.parameters)  # type: ignore[return-value]


def gated_product(gate: Tensor, up: Tensor, linears: Linears) -> Tensor:
    """What a linear layer makes of silu(gate) * up."""
    return _GatedProduct.apply(gate, up, linears, *linears.parameters)  # type: ignore[return-value]


class Linears:
    """Linear layers with the same input [rows, k], whose forward products `panels` compute, or PyTorch."""

    def __init__(self, modules: Sequence[Any], panels: Panels | None) -> None:
        self.modules, self.panels = modules, panels

    @property
    def parameters(self) -> list[Tensor | None]:
        """The weights of all, their biases, the A of their adapters, the B: None for what a layer lacks."""
        down = [m.lora_A if has_adapter(m) else None for m in self.modules]
        up = [m.lora_B if has_adapter(m) else None for m in self.modules]
        return [*(m.weight for m in self.modules), *(m.bias for m in self.modules), *down, *up]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of each layer, without a gradient."""
        if self.panels is None:
            return tuple(m.forward(x) for m in self.modules)
        return self.panels(x).split(self.panels.widths, 1)

    def grad_input(self, grads: Sequence[Tensor], parameters: Sequence[Any]) -> Tensor:
        """The gradient of the inputs [rows, k], from the gradients of the outputs."""
        count = len(self.modules)
        found = torch.mm(grads[0], parameters[0])
        for grad, weight in zip(grads[1:], parameters[1:count], strict=True):
            found.addmm_(grad, weight)
        for m, grad, down, up in zip(self.modules, grads, *self._adapters(parameters), strict=True):
            if down is not None:
                found.addmm_(torch.mm(grad, up).mul_(m.scale), down)
        return found

    def grad_parameters(
        self, x: Tensor, grads: Sequence[Tensor], parameters: Sequence[Any], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of the `parameters` that are `wanted`, from the inputs and the gradients of the outputs."""
        count = len(self.modules)
        found: list[Tensor | None] = [
            torch.mm(grad.mT, x) if wanted[n] else None for n, grad in enumerate(grads)
        ]
        found += [grad.sum(0) if wanted[count + n] else None for n, grad in enumerate(grads)]
        found += [None] * (2 * count)
        for n, (m, grad, down, up) in enumerate(
            zip(self.modules, grads, *self._adapters(parameters), strict=True)
        ):
            if down is not None:
                found[2 * count + n] = torch.mm(torch.mm(grad, up).mul_(m.scale).mT, x)
                found[3 * count + n] = torch.mm(grad.mT, torch.mm(x, down.mT)).mul_(m.scale)
        return found

    def _adapters(self, parameters: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        count = len(self.modules)
        return parameters[2 * count : 3 * count], parameters[3 * count :]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, row: Any, scaling: float) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))
        out, lse = kernels.attention(row, query, key, value, scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.row, ctx.scaling = row, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        given = (ctx.row, query, key, value, out, lse, grad_out.contiguous(), ctx.scaling)
        return *kernels.attention_backward(*given), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, y, rstd = kernels.norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.first = delta is None
        ctx.set_materialize_grads(False)
        return total.view_as(total) if delta is None else total, y

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, grad_y: Tensor):  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = kernels.norm_backward(x, weight, rstd, grad_y, grad_total)
        return grad_x, None if ctx.first else grad_x, grad_weight, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return kernels.rotary(x, cosine, sine)

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        return kernels.rotary(grad_y.contiguous(), cosine, sine, back=True), None, None


class _NormedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        delta: Tensor | None,
        scale: Tensor,
        eps: float,
        linears: Linears,
        *parameters: Tensor | None,
    ):
        total, h, rstd = kernels.norm(x, delta, scale, eps)
        ctx.save_for_backward(total, scale, rstd, *parameters)
        ctx.eps, ctx.first, ctx.linears = eps, delta is None, linears
        ctx.set_materialize_grads(False)
        return total.view_as(total) if delta is None else total, *linears.forward(h)

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, *grads: Tensor):  # type: ignore[override]
        total, scale, rstd, *parameters = ctx.saved_tensors
        h = kernels.norm(total, None, scale, ctx.eps)[1]
        found = ctx.linears.grad_parameters(h, grads, parameters, ctx.needs_input_grad[5:])
        if not any(ctx.needs_input_grad[:3]):  # the first layer, of frozen embeddings
            return *5 * (None,), *found
        grad_h = ctx.linears.grad_input(grads, parameters)
        grad_x, grad_scale = kernels.norm_backward(total, scale, rstd, grad_h, grad_total)
        return grad_x, None if ctx.first else grad_x, grad_scale, None, None, *found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, linears: Linears, *parameters: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.linears = linears
        return linears.forward(x)[0]

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        found = ctx.linears.grad_parameters(x, [grad_y], parameters, ctx.needs_input_grad[2:])
        return ctx.linears.grad_input([grad_y], parameters), None, *found


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, gate: Tensor, up: Tensor, linears: Linears, *parameters: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, *parameters)
        ctx.linears = linears
        return linears.forward(kernels.swiglu(gate, up))[0]

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        gate, up, *parameters = ctx.saved_tensors
        grad_made = ctx.linears.grad_input([grad_y], parameters)
        made, grad_gate, grad_up = kernels.swiglu_backward(gate, up, grad_made)
        found = ctx.linears.grad_parameters(made, [grad_y], parameters, ctx.needs_input_grad[3:])
        return grad_gate, grad_up, None, *found
