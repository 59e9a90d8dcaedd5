"""Shared-prefix attention on a GPU: FlexAttention, one compiled kernel for every packed row, forward and backward.

A row attends to the rows before it in its own segment and to the prompt of its group. Which blocks of keys each block
of queries reads follows from the segments, so nothing of the size [T, T] is made, and keys that no query sees cost
nothing. It serves float16 and bfloat16 on GPUs where it can be compiled.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lagrpo.backends.layout import PackedLayout

logger = logging.getLogger("lagrpo")

BLOCK = 128  # rows in a block of queries or keys

_masks: WeakKeyDictionary[PackedLayout, Any] = WeakKeyDictionary()  # one mask serves every layer


def why_not(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> str | None:
    """Say why FlexAttention does not take queries and keys of this kind; None where it does."""
    if device.type != "cuda":
        return "no GPU"
    return "float32" if dtype == torch.float32 else _tried(device, dtype, heads, kv_heads, d)


@cache
def _tried(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> str | None:
    """Compute an example of less than a block and one of several, forward and backward. None where that works, else
    the reason, which is also logged."""
    try:
        for groups in ([(5, (3, 4))], [(150, (90, 100))]):
            layout = PackedLayout.build(groups, device)
            made = {"dtype": dtype, "device": device, "requires_grad": True}
            query, key, value = (torch.zeros(layout.rows, h, d, **made) for h in (heads, kv_heads, kv_heads))
            with torch.enable_grad():
                attend(layout, query, key, value, 1.0).sum().backward()
    except Exception as error:  # noqa: BLE001  # whatever a compiler may raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        logger.warning("FlexAttention is unavailable (%s); falling back to PyTorch", reason)
        return reason
    return None


def attend(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend along a packed row: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    out = _compiled()(q, k, v, block_mask=block_mask(layout), scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: PackedLayout) -> Any:
    """The BlockMask of a packed row, on the layout's device; made once for each layout."""
    from torch.nn.attention.flex_attention import BlockMask

    if layout in _masks:
        return _masks[layout]
    device = layout.position_ids.device
    segment, group, is_prompt = (t.to(device) for t in _of_each_row(layout))
    needed = needed_blocks(layout)
    order = torch.argsort(needed.int(), dim=1, descending=True, stable=True).int()

    def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own_or_prompt = (segment[q] == segment[k]) | ((group[q] == group[k]) & is_prompt[k])
        return (q >= k) & own_or_prompt

    blocks = (t.to(device)[None, None] for t in (needed.sum(1).int(), order))
    lengths = (layout.rows, layout.rows)
    _masks[layout] = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=lengths)
    return _masks[layout]


def _of_each_row(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """The segment and the group of each row, and whether the row is in a prompt. Rows that only fill the last block
    belong to no segment."""
    padding = -layout.rows % BLOCK
    lengths = layout.segments[:, 1]
    groups = torch.arange(len(layout.groups) - 1).repeat_interleave(layout.groups.diff())
    prompts = torch.zeros(len(lengths), dtype=torch.bool)
    prompts[layout.groups[:-1]] = True
    rows = (t.repeat_interleave(lengths) for t in (torch.arange(len(lengths)), groups, prompts))
    return tuple(torch.nn.functional.pad(t, (0, padding), value=v) for t, v in zip(rows, (-1, -1, False), strict=True))  # type: ignore[return-value]


def needed_blocks(layout: PackedLayout) -> Tensor:
    """bool [blocks, blocks]: whether a query in the first block sees a key in the second."""
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
