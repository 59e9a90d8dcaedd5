"""Triton kernels for a decoder layer, between its matrix products.

They are RMS norm with the addition before it, gated activation, rotary embedding, and the gradients
of these. The functions are twins of `norm`, `norm_backward`, `swiglu`, `swiglu_backward` and
`rotary` in cpu/kernels.py: same arguments, same results. Numbers are float32 or bfloat16 in memory,
and float32 in registers.

Results are rounded to the dtype of the tensors where transformers rounds them. A row's bits do not
depend on the rows around it: each row is summed by one program, in an order that its width alone
decides. Nothing is added by atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagrpo.gpu.common import STRICT, exp

# Numbers in a tile of short rows, such as the norms of heads: 4 warps with 8 numbers a thread,
# which is one load of 16 bytes in bfloat16.
NORM_TILE = 1024
# The gradient of a norm's weight is a sum over all rows, in as many parts: about 6 programs for
# each of the 132 processors of an H100.
SLICES = 768
# Columns of gate and up in one program: 4 warps with 8 numbers a thread.
COLUMNS = 1024


# RMS norm


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr,  # [rows, width]
    delta_ptr,  # [rows, width], read if ADDS
    weight_ptr,  # [width]
    total_ptr,  # [rows, width], written if ADDS
    y_ptr,  # [rows, width], written
    rstd_ptr,  # float32 [rows], written
    rows,
    width,
    eps,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes ROWS whole rows per program.

        total = round(x + delta)
        rstd  = 1 / sqrt(mean total² + eps)
        y     = round(weight · round(total · rstd))

    The mean is over the row; `round` is to the dtype of the tensors.
    """
    # int64, because rows · width may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = (row < rows) & (column < width)
    offset = row * width + column
    total = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total = total + tl.load(delta_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, rounded, mask=inside)
        total = rounded.to(tl.float32)
    mean_square = tl.sum(total * total, 1, keep_dims=True) / width  # [ROWS, 1]
    rstd = tl.rsqrt(mean_square + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    normed = (total * rstd).to(y_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, normed * weight, mask=inside)


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x + delta, its RMS norm times `weight`, and 1 / rms.

    x and delta are [rows, width]. The results are [rows, width] twice, and float32 [rows].
    """
    rows, width = x.shape
    x = x.contiguous()
    if delta is None:
        total = x
    else:
        delta = delta.contiguous()
        total = torch.empty_like(x)
    y = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows > 0:
        tile = _norm_tile(width)
        _norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            x, delta, weight, total, y, rstd, rows, width, eps, ADDS=delta is not None, **tile
        )
    return total, y, rstd


def _norm_tile(width: int) -> dict[str, Any]:
    """Returns the tile of a program of the norm's kernels, and the options of the launch."""
    block = triton.next_power_of_2(width)
    return {
        "ROWS": max(1, NORM_TILE // block),
        "BLOCK": block,
        # 16 numbers a thread: two loads of 16 bytes in bfloat16.
        "num_warps": min(16, max(4, block // 512)),
        **STRICT,
    }


@triton.jit(do_not_specialize=["rows", "slices"])
def _norm_backward_kernel(
    x_ptr,  # [rows, width]: the total of the forward pass
    weight_ptr,  # [width]
    rstd_ptr,  # float32 [rows]
    grad_y_ptr,  # [rows, width]
    grad_total_ptr,  # [rows, width], read if ADDS
    grad_x_ptr,  # [rows, width], written
    grad_weight_ptr,  # float32 [slices, width], written
    rows,
    width,
    slices,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one slice of the rows per program, ROWS rows at a time.

    With xhat = x · rstd and g = weight · grad_y:

        grad_x      = grad_total + rstd · (g - xhat · mean(g · xhat))
        grad_weight = Σ over the slice's rows of grad_y · round(xhat), in the order of the rows
    """
    part = tl.program_id(0).to(tl.int64)
    first = rows * part // slices
    stop = rows * (part + 1) // slices
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, stop, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        inside = (row < stop) & (column < width)
        offset = row * width + column
        rstd = tl.load(rstd_ptr + row, mask=row < stop, other=0.0)  # [ROWS, 1]
        xhat = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) * rstd
        grad_y = tl.load(grad_y_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        grad_weight = grad_weight + grad_y * xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        g = grad_y * weight
        mean = tl.sum(g * xhat, 1, keep_dims=True) / width  # [ROWS, 1]
        grad_x = rstd * (g - xhat * mean)
        if ADDS:
            grad_total = tl.load(grad_total_ptr + offset, mask=inside, other=0.0)
            grad_x = grad_x + grad_total.to(tl.float32)
        tl.store(grad_x_ptr + offset, grad_x, mask=inside)
    grad_weight_of_slice = tl.sum(grad_weight, 0, keep_dims=True)  # [1, BLOCK]
    tl.store(grad_weight_ptr + part * width + column, grad_weight_of_slice, mask=column < width)


def norm_backward(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `norm`.

    The first is by x + delta [rows, width], and includes the sum's own `grad_total`; the second is
    by the weight [width].
    """
    rows, width = x.shape
    tile = _norm_tile(width)
    slices = min(triton.cdiv(rows, tile["ROWS"]), SLICES)
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty(slices, width, dtype=torch.float32, device=x.device)
    grad_y = grad_y.contiguous()
    if grad_total is not None:
        grad_total = grad_total.contiguous()
    if rows > 0:
        _norm_backward_kernel[(slices,)](
            x,
            weight,
            rstd,
            grad_y,
            grad_total,
            grad_x,
            grad_weight,
            rows,
            width,
            slices,
            ADDS=grad_total is not None,
            **tile,
        )
    return grad_x, grad_weight.sum(0).to(weight.dtype)


# Gated activation


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [rows, width], rows `gate_stride` apart
    up_ptr,  # [rows, width], rows `up_stride` apart
    y_ptr,  # [rows, width] contiguous, written
    width,
    gate_stride,
    up_stride,
    BLOCK: tl.constexpr,
):
    """Computes BLOCK columns of one row per program: y = round(round(silu(gate)) · up)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * width + column, silu * up, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) · up [rows, width], contiguous.

    Gate and up are tensors [rows, width], or the halves of one [rows, 2 · width].
    """
    rows, width = gate.shape
    y = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    if y.numel() > 0:
        grid = (rows, triton.cdiv(width, COLUMNS))
        _swiglu_kernel[grid](
            gate, up, y, width, gate.stride(0), up.stride(0), BLOCK=COLUMNS, num_warps=4, **STRICT
        )
    return y


@triton.jit
def _swiglu_backward_kernel(
    gate_ptr,  # [rows, width], rows `gate_stride` apart
    up_ptr,  # [rows, width], rows `up_stride` apart
    grad_y_ptr,  # [rows, width] contiguous
    y_ptr,  # [rows, width] contiguous, written
    grad_gate_ptr,  # [rows, width], rows `grad_stride` apart, written
    grad_up_ptr,  # [rows, width], rows `grad_stride` apart, written
    width,
    gate_stride,
    up_stride,
    grad_stride,
    BLOCK: tl.constexpr,
):
    """Computes BLOCK columns of one row per program. With s = 1 / (1 + exp(-gate)):

        grad_up   = grad_y · gate · s
        grad_gate = grad_y · up · s · (1 + gate · (1 - s))

    Each is rounded once; y is rounded as in the forward pass.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    denominator = 1.0 + exp(-gate)
    s = 1.0 / denominator
    # A division as in the forward pass, not a product with s: the same rounding.
    silu = (gate / denominator).to(y_ptr.dtype.element_ty).to(tl.float32)
    grad_up = grad_y * gate * s
    grad_gate = grad_y * up * s * (1.0 + gate * (1.0 - s))
    tl.store(y_ptr + row * width + column, silu * up, mask=inside)
    tl.store(grad_up_ptr + row * grad_stride + column, grad_up, mask=inside)
    tl.store(grad_gate_ptr + row * grad_stride + column, grad_gate, mask=inside)


def swiglu_backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `swiglu` returned, and the gradients of gate and up: [rows, width] each.

    The gradients are the halves of one tensor [rows, 2 · width].
    """
    rows, width = gate.shape
    y = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    grads = torch.empty(rows, 2 * width, dtype=gate.dtype, device=gate.device)
    grad_gate, grad_up = grads.split(width, 1)
    if y.numel() > 0:
        grid = (rows, triton.cdiv(width, COLUMNS))
        _swiglu_backward_kernel[grid](
            gate,
            up,
            grad_y.contiguous(),
            y,
            grad_gate,
            grad_up,
            width,
            gate.stride(0),
            up.stride(0),
            grads.stride(0),
            BLOCK=COLUMNS,
            num_warps=4,
            **STRICT,
        )
    return y, grad_gate, grad_up


# Rotary position embedding


@triton.jit
def _rotary_kernel(
    x_ptr,  # [rows, heads, 2 · half], rows `x_stride` apart
    cosine_ptr,  # [rows, 2 · half], rows `angle_stride` apart
    sine_ptr,  # [rows, 2 · half], rows `angle_stride` apart
    y_ptr,  # [rows, heads, 2 · half], rows `y_stride` apart, written
    heads,
    half,
    x_stride,
    y_stride,
    angle_stride,
    sign,  # 1.0, or -1.0 for the transpose
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turns all heads of one row per program. With the halves (a, b) of a head and its angle:

        y = (a · cos - b · sin, b · cos + a · sin)

    Each product is rounded, and then their sum, as in transformers. Both halves of the angles are
    the same, so the first one is read.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    index = tl.arange(0, HALF)[None, :]  # [1, HALF]
    inside = (head < heads) & (index < half)
    offset = head * 2 * half + index  # of the first half; the second is `half` further
    angle_offset = row * angle_stride + index
    cosine = tl.load(cosine_ptr + angle_offset, mask=index < half, other=0.0).to(tl.float32)
    sine = tl.load(sine_ptr + angle_offset, mask=index < half, other=0.0).to(tl.float32) * sign
    x_row_ptr = x_ptr + row * x_stride + offset
    a = tl.load(x_row_ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_row_ptr + half, mask=inside, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    turned_a = (a * cosine).to(dtype).to(tl.float32) + (-b * sine).to(dtype).to(tl.float32)
    turned_b = (b * cosine).to(dtype).to(tl.float32) + (a * sine).to(dtype).to(tl.float32)
    y_row_ptr = y_ptr + row * y_stride + offset
    tl.store(y_row_ptr, turned_a, mask=inside)
    tl.store(y_row_ptr + half, turned_b, mask=inside)


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool = False) -> Tensor:
    """Turns x [rows, heads, d] by the angles of [rows, d], or turns it `back`.

    The heads of a row are contiguous; rows may be any distance apart. The result is contiguous.
    """
    rows, heads, d = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        _rotary_kernel[(rows,)](
            x,
            cosine,
            sine,
            y,
            heads,
            d // 2,
            x.stride(0),
            y.stride(0),
            cosine.stride(0),
            -1.0 if back else 1.0,
            HEADS=triton.next_power_of_2(heads),
            HALF=triton.next_power_of_2(d // 2),
            num_warps=4,
            **STRICT,
        )
    return y
