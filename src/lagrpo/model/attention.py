"""Shared-prefix attention: a prompt appears once; its G completions attend to it and to themselves.

The model is called on one packed row of tokens with an extra keyword, `layout`, which says who attends to whom and
attends: along a packed row in the trainer and the prefill, or from new tokens to caches in a decoding step.

Along a packed row the C kernels attend on a CPU (cpu/). Elsewhere PyTorch does, with the keys and values of each
segment gathered as [prompt, own]: by `varlen_attn` on GPUs in float16 or bfloat16, else segment by segment by
`scaled_dot_product_attention`. A segment's last query sees all of its gathered keys, the query before it all but one.
"""

from __future__ import annotations

from inspect import signature
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
        return Shape(
            text.num_hidden_layers, heads, getattr(text, "num_key_value_heads", None) or heads, d
        )


# ---- in transformers ----


def register() -> None:
    """Make `attn_implementation="lagrpo_shared_prefix"` known to transformers, without masks: the layout is one."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, shared_prefix_attention)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer: query [1, Hq, rows, D], key and value [1, Hkv, rows, D] ->
    ([1, rows, Hq, D], None). Raises ValueError for a call without a layout, and for what this attention lacks."""
    if layout is None:
        raise ValueError(
            f"attention {NAME!r} was called without a layout: call the model through lagrpo.model"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError("shared-prefix attention lacks soft-capping and attention sinks")
    check_window(module, layout, sliding_window)
    rows = [t.squeeze(0).transpose(0, 1) for t in (query, key, value)]
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    return layout.attend(module.layer_idx, *rows, scaling).unsqueeze(0), None  # type: ignore[arg-type]


# ---- along a packed row ----


def attend(
    layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Attend along a packed row: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
    varlen = takes_varlen(query.device, query.dtype, query.shape[-1])
    return (attend_varlen if varlen else attend_by_segments)(layout, query, key, value, scaling)


def takes_varlen(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """Whether FlashAttention computes on a device, in a dtype, with heads of d numbers."""
    fits = dtype in (torch.float16, torch.bfloat16) and d % 8 == 0 and d <= 256
    return device.type == "cuda" and fits and torch.cuda.get_device_capability(device) >= (8, 0)


def gather_keys(layout: PackedLayout, key: Tensor) -> Tensor:
    """The keys (or values) that each segment sees, [prompt, own], segment after segment: [rows, Hkv, D] -> [K, Hkv, D].
    Gradients of a prompt's keys add up over its completions in float32."""
    own = key.to(torch.promote_types(key.dtype, torch.float32))
    return own.index_select(0, layout.seen_rows).to(key.dtype)


def attend_varlen(
    layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """By one kernel for all segments. Its causal mask is aligned to the end of each segment's keys."""
    from torch.nn.attention.varlen import varlen_attn

    most = int(layout.segments[:, 1].max()), int(layout.segments[:, [1, 3]].sum(1).max())
    causal: dict[str, Any] = {"window_size": (-1, 0), "scale": scaling}
    if (
        "enable_gqa" in signature(varlen_attn).parameters
    ):  # PyTorch 2.11 groups queries without being told
        causal["enable_gqa"] = query.shape[1] != key.shape[1]
    keys, values = gather_keys(layout, key), gather_keys(layout, value)
    return varlen_attn(query.contiguous(), keys, values, *layout.offsets, *most, **causal)  # type: ignore[return-value]


def attend_by_segments(
    layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Segment by segment."""
    outs, lengths, seen = (
        [],
        layout.segments[:, 1].tolist(),
        layout.segments[:, [1, 3]].sum(1).tolist(),
    )
    keys, values = (gather_keys(layout, t).split(seen) for t in (key, value))
    for segment in zip(query.split(lengths), keys, values, strict=True):
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in segment)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(
            k.shape[2] - q.shape[2]
        )
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)
