"""Shared-prefix attention: a prompt appears once; its G completions attend to it and to themselves.

The model is called on one packed row of tokens with an extra keyword, `layout`, which says who attends to whom and
attends: along a packed row in the trainer and the prefill, or from new tokens to caches in a decoding step.

Along a packed row the C kernels attend on a CPU (cpu/). Elsewhere PyTorch does, with the keys and values of each
segment gathered as [prompt, own]: by `varlen_attn` on GPUs in float16 or bfloat16, else segment by segment by
`scaled_dot_product_attention`. A segment's last query sees all of its gathered keys, the query before it all but one.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.cpu.decoder import Layout, check_window
from lagrpo.model.layout import PackedLayout

NAME = "lagrpo_shared_prefix"


class Shape(NamedTuple):
    """The sizes of a model's attention: layers, query heads, key-value heads, numbers in a head."""

    layers: int
    heads: int
    kv_heads: int
    d: int

    @staticmethod
    def of(text: Any) -> Shape:
        heads = text.num_attention_heads
        d = getattr(text, "head_dim", None) or text.hidden_size // heads
        return Shape(text.num_hidden_layers, heads, getattr(text, "num_key_value_heads", None) or heads, d)


# ---- in transformers ----


def register() -> None:
    """Make `attn_implementation="lagrpo_shared_prefix"` known to transformers, without masks: the layout is one."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, shared_prefix_attention)


def shared_prefix_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, layout: Layout | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls in each layer: query [1, Hq, rows, D], key and value [1, Hkv, rows, D] ->
    ([1, rows, Hq, D], None). Raises ValueError for a call without a layout, and for what this attention lacks."""
    if layout is None:
        raise ValueError(f"attention {NAME!r} was called without a layout: call the model through lagrpo.model")
    if softcap is not None or s_aux is not None:
        raise ValueError("shared-prefix attention lacks soft-capping and attention sinks")
    check_window(module, layout, sliding_window)
    rows = [t.squeeze(0).transpose(0, 1) for t in (query, key, value)]
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    return layout.attend(module.layer_idx, *rows, scaling).unsqueeze(0), None  # type: ignore[arg-type]


# ---- along a packed row ----


def attend(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend along a packed row: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
    varlen = takes_varlen(query.device, query.dtype, query.shape[-1])
    return (attend_varlen if varlen else attend_by_segments)(layout, query, key, value, scaling)


def takes_varlen(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """Whether FlashAttention computes on a device, in a dtype, with heads of d numbers."""
    fits = dtype in (torch.float16, torch.bfloat16) and d % 8 == 0 and d <= 256
    return device.type == "cuda" and fits and torch.cuda.get_device_capability(device) >= (8, 0)


def gather_keys(layout: PackedLayout, key: Tensor) -> Iterator[Tensor]:
    """The keys (or values) that each segment sees, [prompt, own]: [rows, Hkv, D] -> [P + t, Hkv, D] of each segment.
    Gradients of a prompt's keys add up over its completions in float32."""
    own = key.to(torch.promote_types(key.dtype, torch.float32)).split(layout.segments[:, 1].tolist())
    for start, stop in pairwise(layout.groups.tolist()):
        yield own[start].to(key.dtype)
        yield from (torch.cat([own[start], own[n]]).to(key.dtype) for n in range(start + 1, stop))


def attend_varlen(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """By one kernel for all segments. Its causal mask is aligned to the end of each segment's keys."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = layout.segments[:, 1].tolist()
    seen = layout.segments[:, [1, 3]].sum(1).tolist()
    offsets = (
        torch.tensor([*accumulate(n, initial=0)], dtype=torch.int32, device=query.device) for n in (lengths, seen)
    )
    keys, values = (torch.cat([*gather_keys(layout, t)]) for t in (key, value))
    causal: dict[str, Any] = {"window_size": (-1, 0), "scale": scaling}
    if "enable_gqa" in signature(varlen_attn).parameters:  # PyTorch 2.11 groups queries without being told
        causal["enable_gqa"] = query.shape[1] != key.shape[1]
    return varlen_attn(query.contiguous(), keys, values, *offsets, max(lengths), max(seen), **causal)  # type: ignore


def attend_by_segments(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Segment by segment."""
    outs, lengths = [], layout.segments[:, 1].tolist()
    gathered = zip(query.split(lengths), gather_keys(layout, key), gather_keys(layout, value), strict=True)
    for segment in gathered:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in segment)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)
