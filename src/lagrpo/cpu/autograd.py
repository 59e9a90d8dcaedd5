"""The kernels of the trainer with gradients: attention, norms, rotary embedding, linear layers.

The kernels between the products of a layer are an argument: the C kernels, or their twins on a GPU.

The backward pass multiplies with PyTorch, as it need not agree with anything to the bit. It
computes no gradient of frozen weights: with adapters that saves a third of the trainer's products.
Norms, activations and attention scores are not stored. The backward pass computes them again, in a
hundredth of the time of the products.

Shapes: n rows of a packed row; H hidden size; Hq query heads, Hkv key-value heads, D numbers in a
head; k inputs and o outputs of a linear layer, r rank of its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.cpu import kernels
from lagrpo.cpu.kernels import Row
from lagrpo.cpu.panels import Panels, has_adapter

# The fewest rows of a product on a GPU. Decoding steps have multiples of it.
FEWEST_ROWS = 16


class RMSNorm(Protocol):
    """The attributes of a norm of transformers."""

    weight: Tensor  # [H]
    variance_epsilon: float


class LayerKernels(Protocol):
    """What computes between the products of a layer: the modules cpu.kernels and gpu.layers."""

    def norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x + delta, its RMS norm times weight, [n, width] each, and 1 / rms [n]."""
        ...

    def norm_backward(
        self, x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, grad_total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x + delta [n, width] and of the weight [width]."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, [n, width] each."""
        ...

    def swiglu_backward(
        self, gate: Tensor, up: Tensor, grad_y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `swiglu` returned, and its gradients of gate and up."""
        ...

    def rotary(self, x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool = False) -> Tensor:
        """Turns x [n, heads, D] by the angles of [n, D], or turns it `back`."""
        ...


def attend(row: Row, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attends along a packed row: query [n, Hq, D], key and value [n, Hkv, D] -> [n, Hq, D]."""
    return _Attention.apply(query, key, value, row, scaling)  # type: ignore[return-value]


def add_norm(
    x: Tensor, delta: Tensor | None, norm: RMSNorm, layer_kernels: LayerKernels = kernels
) -> tuple[Tensor, Tensor]:
    """Returns x + delta, and its norm: [n, H] each."""
    return _AddNorm.apply(  # type: ignore[return-value]
        x, delta, norm.weight, norm.variance_epsilon, layer_kernels
    )


def rotary(
    x: Tensor, cosine: Tensor, sine: Tensor, layer_kernels: LayerKernels = kernels
) -> Tensor:
    """Applies the rotary position embedding to x [n, heads, D].

    cosine and sine [n, D] are the same in both halves of D. Raises ValueError for angles of a part
    of D only.
    """
    if cosine.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"rotary embedding of {cosine.shape[-1]} of {x.shape[-1]} head dimensions "
            "is not supported"
        )
    return _Rotary.apply(x, cosine, sine, layer_kernels)  # type: ignore[return-value]


def normed_products(
    x: Tensor,
    delta: Tensor | None,
    norm: RMSNorm,
    linears: Linears,
    layer_kernels: LayerKernels = kernels,
) -> tuple[Tensor, ...]:
    """Returns x + delta [n, H], and the outputs [n, o] of each linear layer for its norm."""
    return _NormedProducts.apply(  # type: ignore[return-value]
        x, delta, norm.weight, norm.variance_epsilon, layer_kernels, linears, *linears.parameters
    )


def product(x: Tensor, linears: Linears) -> Tensor:
    """Returns the output [n, o] of a single linear layer for x [n, k]."""
    return _Product.apply(x, linears, *linears.parameters)  # type: ignore[return-value]


def gated_product(
    gate: Tensor, up: Tensor, linears: Linears, layer_kernels: LayerKernels = kernels
) -> Tensor:
    """Returns the output [n, o] of a single linear layer for silu(gate) * up, [n, k] each."""
    return _GatedProduct.apply(  # type: ignore[return-value]
        gate, up, layer_kernels, linears, *linears.parameters
    )


def with_enough_rows(x: Tensor) -> Tensor:
    """Returns x [n, k], on a GPU with rows of zeros behind it if it has fewer than FEWEST_ROWS.

    A GPU computes products of very few rows by kernels of another kind, which may add in another
    order. The sampler and the trainer have to agree on every row.
    """
    missing = FEWEST_ROWS - len(x)
    if missing <= 0 or not x.is_cuda:
        return x
    return F.pad(x, (0, 0, 0, missing))


class _LayerParameters(NamedTuple):
    """The parameters of a linear layer; None for what it lacks."""

    weight: Tensor  # [o, k]
    bias: Tensor | None  # [o]
    lora_A: Tensor | None  # [r, k]
    lora_B: Tensor | None  # [o, r]
    scale: float


class Linears:
    """Linear layers with the same input, whose forward products `panels` compute, or PyTorch.

    A function of autograd takes the parameters one by one. Their order is: the weights of all
    layers, then all biases, all A of adapters, all B; None for what a layer lacks.
    """

    def __init__(self, modules: Sequence[nn.Linear], panels: Panels | None) -> None:
        self.modules = modules
        self.panels = panels

    @property
    def parameters(self) -> list[Tensor | None]:
        """The parameters in the order that autograd gets them in."""
        weights: list[Tensor | None] = [module.weight for module in self.modules]
        biases: list[Tensor | None] = [module.bias for module in self.modules]
        lora_A = [module.lora_A if has_adapter(module) else None for module in self.modules]
        lora_B = [module.lora_B if has_adapter(module) else None for module in self.modules]
        return [*weights, *biases, *lora_A, *lora_B]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs [n, o] of each layer for x [n, k], without a gradient."""
        if self.panels is None:
            enough = with_enough_rows(x)
            outputs = tuple(module.forward(enough) for module in self.modules)
            if enough is x:
                return outputs
            # No views: FSDP2 warns of a layer that returns one.
            return tuple(output[: len(x)].clone() for output in outputs)
        return self.panels(x).split(self.panels.widths, 1)

    def grad_input(self, grads: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> Tensor:
        """Returns the gradient of the input [n, k], from the gradients of the outputs [n, o]."""
        layers = self._by_layer(parameters)
        # y = x W^T, so dx = dy W: [n, o] times [o, k]. The layers share x: their gradients add up.
        grad_input = torch.mm(grads[0], layers[0].weight)
        for grad, layer in zip(grads[1:], layers[1:], strict=True):
            grad_input.addmm_(grad, layer.weight)
        for grad, layer in zip(grads, layers, strict=True):
            if layer.lora_A is not None and layer.lora_B is not None:
                grad_low = torch.mm(grad, layer.lora_B).mul_(layer.scale)  # [n, r]
                grad_input.addmm_(grad_low, layer.lora_A)
        return grad_input

    def grad_parameters(
        self,
        x: Tensor,
        grads: Sequence[Tensor],
        parameters: Sequence[Tensor | None],
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:
        """Returns the gradients of the parameters, in their order.

        x [n, k] is the input, `grads` are the gradients of the outputs [n, o]. The gradient of a
        weight or bias is None unless it is true in `needs_grad`.
        """
        count = len(self.modules)
        weights: list[Tensor | None] = [None] * count
        biases: list[Tensor | None] = [None] * count
        lora_A: list[Tensor | None] = [None] * count
        lora_B: list[Tensor | None] = [None] * count
        for index, (grad, layer) in enumerate(zip(grads, self._by_layer(parameters), strict=True)):
            if needs_grad[index]:
                weights[index] = torch.mm(grad.mT, x)  # [o, k]
            if needs_grad[count + index]:
                biases[index] = grad.sum(0)  # [o]
            if layer.lora_A is not None and layer.lora_B is not None:
                low = torch.mm(x, layer.lora_A.mT)  # [n, r]
                grad_low = torch.mm(grad, layer.lora_B).mul_(layer.scale)  # [n, r]
                lora_A[index] = torch.mm(grad_low.mT, x)  # [r, k]
                lora_B[index] = torch.mm(grad.mT, low).mul_(layer.scale)  # [o, r]
        return [*weights, *biases, *lora_A, *lora_B]

    def _by_layer(self, parameters: Sequence[Tensor | None]) -> list[_LayerParameters]:
        """Sorts parameters in the order of `parameters` by layer."""
        count = len(self.modules)
        layers: list[_LayerParameters] = []
        for index, module in enumerate(self.modules):
            weight = parameters[index]
            assert weight is not None
            layers.append(
                _LayerParameters(
                    weight=weight,
                    bias=parameters[count + index],
                    lora_A=parameters[2 * count + index],
                    lora_B=parameters[3 * count + index],
                    scale=module.scale if has_adapter(module) else 1.0,
                )
            )
        return layers


# In `backward` the functions return a gradient for each argument of `forward`, None for the ones
# that are not tensors.


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, row: Row, scaling: float) -> Tensor:
        query = query.contiguous()
        key = key.contiguous()
        value = value.contiguous()
        out, lse = kernels.attention(row, query, key, value, scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.row = row
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        grad_query, grad_key, grad_value = kernels.attention_backward(
            row=ctx.row,
            query=query,
            key=key,
            value=value,
            out=out,
            lse=lse,
            grad_out=grad_out.contiguous(),
            scaling=ctx.scaling,
        )
        return grad_query, grad_key, grad_value, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        layer_kernels: LayerKernels,
    ) -> tuple[Tensor, Tensor]:
        total, y, rstd = layer_kernels.norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.layer_kernels = layer_kernels
        ctx.has_delta = delta is not None
        # `backward` gets None, not a tensor of zeros, for an output that the loss does not use.
        ctx.set_materialize_grads(False)
        return _as_output(total, delta), y

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, grad_y: Tensor):  # type: ignore[override]
        total, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = ctx.layer_kernels.norm_backward(
            total, weight, rstd, grad_y, grad_total
        )
        # x and delta enter only as their sum, so both have the gradient of the sum.
        return grad_x, grad_x if ctx.has_delta else None, grad_weight, None, None


def _as_output(total: Tensor, delta: Tensor | None) -> Tensor:
    """Returns x + delta as an output of a function.

    Without a delta the sum is the input x itself. Autograd needs another object for the output, so
    this returns a view.
    """
    return total.view_as(total) if delta is None else total


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, cosine: Tensor, sine: Tensor, layer_kernels: LayerKernels
    ) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.layer_kernels = layer_kernels
        return layer_kernels.rotary(x, cosine, sine)

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        grad_x = ctx.layer_kernels.rotary(grad_y.contiguous(), cosine, sine, back=True)
        return grad_x, None, None, None


class _NormedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        layer_kernels: LayerKernels,
        linears: Linears,
        *parameters: Tensor | None,
    ):
        total, normed, rstd = layer_kernels.norm(x, delta, norm_weight, eps)
        ctx.layer_kernels = layer_kernels
        ctx.save_for_backward(total, norm_weight, rstd, *parameters)
        ctx.eps = eps
        ctx.has_delta = delta is not None
        ctx.linears = linears
        # `backward` gets None, not a tensor of zeros, for an output that the loss does not use.
        ctx.set_materialize_grads(False)
        return _as_output(total, delta), *linears.forward(normed)

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, *grads: Tensor):  # type: ignore[override]
        total, norm_weight, rstd, *parameters = ctx.saved_tensors
        _, normed, _ = ctx.layer_kernels.norm(total, None, norm_weight, ctx.eps)
        # `forward` has six arguments before the parameters.
        needs_grad = ctx.needs_input_grad[6:]
        grad_parameters = ctx.linears.grad_parameters(normed, grads, parameters, needs_grad)
        needs_grad_x = any(ctx.needs_input_grad[:3])
        if not needs_grad_x:
            # The first layer of a model whose embeddings are frozen.
            return None, None, None, None, None, None, *grad_parameters
        grad_normed = ctx.linears.grad_input(grads, parameters)
        grad_x, grad_norm_weight = ctx.layer_kernels.norm_backward(
            total, norm_weight, rstd, grad_normed, grad_total
        )
        grad_delta = grad_x if ctx.has_delta else None
        return grad_x, grad_delta, grad_norm_weight, None, None, None, *grad_parameters


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, linears: Linears, *parameters: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.linears = linears
        (y,) = linears.forward(x)
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        # After x and linears come the parameters.
        needs_grad = ctx.needs_input_grad[2:]
        grad_parameters = ctx.linears.grad_parameters(x, [grad_y], parameters, needs_grad)
        grad_x = ctx.linears.grad_input([grad_y], parameters)
        return grad_x, None, *grad_parameters


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        gate: Tensor,
        up: Tensor,
        layer_kernels: LayerKernels,
        linears: Linears,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, *parameters)
        ctx.layer_kernels = layer_kernels
        ctx.linears = linears
        (y,) = linears.forward(layer_kernels.swiglu(gate, up))
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        gate, up, *parameters = ctx.saved_tensors
        grad_gated = ctx.linears.grad_input([grad_y], parameters)
        gated, grad_gate, grad_up = ctx.layer_kernels.swiglu_backward(gate, up, grad_gated)
        # After gate, up, kernels and linears come the parameters.
        needs_grad = ctx.needs_input_grad[4:]
        grad_parameters = ctx.linears.grad_parameters(gated, [grad_y], parameters, needs_grad)
        return grad_gate, grad_up, None, None, *grad_parameters
