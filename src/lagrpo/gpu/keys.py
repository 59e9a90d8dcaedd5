"""The gradient of gathered keys by a Triton kernel.

`gather_keys` (model/attention.py) copies the keys of a packed row to where each segment sees them:
a prompt's keys once for each of its completions. The gradient of a row is the sum over its copies.
PyTorch sorts the indices to add in a fixed order. Here no sort is needed: the segments that see a
row follow one another in the packed row, so each program finds its copies by arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagrpo.gpu.common import STRICT


@triton.jit
def _gather_backward_kernel(
    grad_ptr,  # [K, width]: the gradient of the copies
    first_ptr,  # int32 [rows]: the first segment that sees the row
    count_ptr,  # int32 [rows]: how many segments see it, one after the other
    place_ptr,  # int32 [rows]: the row's place in what each of them sees
    starts_ptr,  # int32 [S]: where in grad the keys of a segment begin
    out_ptr,  # [rows, width], written
    width,
    BLOCK: tl.constexpr,
):
    """Sums one row per program: out[row] = Σ_s grad[starts[s] + place[row]].

    s runs over the segments that see the row, in their order. The sum is in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < width
    first = tl.load(first_ptr + row)
    count = tl.load(count_ptr + row)
    place = tl.load(place_ptr + row)
    total = tl.zeros([BLOCK], tl.float32)
    for segment in range(first, first + count):
        # int64, because K · width may exceed 2^31.
        offset = (tl.load(starts_ptr + segment) + place).to(tl.int64) * width
        total = total + tl.load(grad_ptr + offset + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total, mask=inside)


def gather_keys_backward(
    grad: Tensor, first: Tensor, count: Tensor, place: Tensor, starts: Tensor
) -> Tensor:
    """Returns the gradient of keys [rows, Hkv, D], from the gradient of their copies [K, Hkv, D].

    `grad` is contiguous. `PackedLayout.seen_by` returns the other arguments.
    """
    rows = len(first)
    out = torch.empty(rows, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    if out.numel() > 0:
        width = out[0].numel()
        block = triton.next_power_of_2(width)
        _gather_backward_kernel[(rows,)](
            grad,
            first,
            count,
            place,
            starts,
            out,
            width,
            BLOCK=block,
            num_warps=max(1, min(4, block // 256)),
            **STRICT,
        )
    return out
