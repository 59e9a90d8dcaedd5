"""Shared-prefix attention on a GPU: PyTorch's flex attention, one compiled kernel for every packed row, forward and
backward.

A row attends to those before it in its own segment and in the prompt of its group. Which blocks of keys each block of
queries reads follows from the segments, so nothing of the size [T, T] is made, and what no query sees costs nothing.
It serves float16 and bfloat16; float32, and GPUs where it cannot be compiled, keep the tiles of layout.py.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagrpo.backends.cpu import kernels

if TYPE_CHECKING:
    from lagrpo.backends.layout import PackedLayout

BLOCK = 128  # rows in a block of queries or keys


def attends(query: Tensor, key: Tensor) -> bool:
    """Whether flex attention takes these, [rows, heads, D] each."""
    return why_not(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2]) is None


def why_not(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> str | None:
    """None where flex attention takes queries and keys of this kind, else the reason."""
    if device.type != "cuda":
        return "no GPU"
    if kernels.chosen() == "torch":
        return "as chosen"
    return "float32" if dtype == torch.float32 else _tried(device, dtype, heads, kv_heads, d)


@cache
def _tried(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> str | None:
    """None where examples of less than a block and of several can be computed, forward and backward; else the reason,
    which is also printed."""
    from lagrpo.backends.layout import PackedLayout

    try:
        for groups in ([(5, (3, 4))], [(150, (90, 100))]):
            layout = PackedLayout.build(groups, device)
            query, key, value = (
                torch.zeros(layout.rows, h, d, dtype=dtype, device=device, requires_grad=True)
                for h in (heads, kv_heads, kv_heads)
            )
            with torch.enable_grad():
                attend(layout, query, key, value, 1.0).sum().backward()
    except Exception as error:  # noqa: BLE001  # whatever a compiler may raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        print(f"FlexAttention is unavailable ({reason}); falling back to PyTorch", file=sys.stderr, flush=True)
        return reason
    return None


def attend(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    out = _compiled()(q, k, v, block_mask=layout.block_mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: PackedLayout) -> Any:
    """The BlockMask of a packed row, on the layout's device."""
    from torch.nn.attention.flex_attention import BlockMask

    device = layout.position_ids.device
    segment, group, is_prompt = (t.to(device) for t in _of_each_row(layout))
    needed = needed_blocks(layout)
    order = torch.argsort(needed.int(), dim=1, descending=True, stable=True).int()

    def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own_or_prompt = (segment[q] == segment[k]) | ((group[q] == group[k]) & is_prompt[k])
        return (q >= k) & own_or_prompt

    return BlockMask.from_kv_blocks(
        needed.sum(1).int().to(device)[None, None],
        order.to(device)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(layout.rows, layout.rows),
    )


def _of_each_row(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """The segment and the group of each row, and whether it is a prompt's; rows up to a whole block belong to none."""
    padding = -layout.rows % BLOCK
    lengths = layout.segments[:, 1]
    groups = torch.arange(len(layout.groups) - 1).repeat_interleave(layout.groups.diff())
    prompts = torch.zeros(len(lengths), dtype=torch.bool)
    prompts[layout.groups[:-1]] = True
    rows = (t.repeat_interleave(lengths) for t in (torch.arange(len(lengths)), groups, prompts))
    return tuple(torch.nn.functional.pad(t, (0, padding), value=v) for t, v in zip(rows, (-1, -1, False), strict=True))  # type: ignore[return-value]


def needed_blocks(layout: PackedLayout) -> Tensor:
    """bool [blocks, blocks]: whether a query in the first sees a key in the second."""
    count = -(-layout.rows // BLOCK)
    needed = torch.zeros(count, count, dtype=torch.bool)
    for first, length, prefix, prefix_length in layout.segments.tolist():
        last = first + length - 1
        queries = slice(first // BLOCK, last // BLOCK + 1)
        if prefix_length:
            needed[queries, prefix // BLOCK : (prefix + prefix_length - 1) // BLOCK + 1] = True
        for block in range(queries.start, queries.stop):
            needed[block, first // BLOCK : block + 1] = True
    return needed
