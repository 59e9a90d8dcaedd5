"""exp, expm1 and multiplication in which 0 * inf = 0, in values and in gradients.

A ratio of more than 88.7 nats overflows float32. Where a clip cuts the token, or its advantage or weight is 0, nothing
is asked of that ratio, and the 0 that meets its infinity is exact: the product is 0, not NaN. An infinity that meets
anything else stays one. Where nothing overflows these are torch's own operations, to the bit.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def exp(x: Tensor) -> Tensor:
    """e^x; no gradient flows where none comes in, though e^x be infinite."""
    return _Exp.apply(x, False)


def expm1(x: Tensor) -> Tensor:
    """e^x - 1, with the gradient of `exp`."""
    return _Exp.apply(x, True)


def times(a: Tensor, b: Tensor) -> Tensor:
    """a b for tensors of one shape; 0 where one is 0 and the other infinite."""
    return _Times.apply(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    product = a * b
    return torch.where(((a == 0) & b.isinf()) | (a.isinf() & (b == 0)), torch.zeros_like(product), product)


class _Exp(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, less_one: bool) -> Tensor:
        return x.expm1() if less_one else x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.less_one = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return _product(gradients[0], output + 1 if ctx.less_one else output), None


class _Times(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        return _product(gradients[0], b) if needs_a else None, _product(gradients[0], a) if needs_b else None
