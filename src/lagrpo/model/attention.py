"""Shared-prefix attention: a prompt appears once; its G completions attend to it and to themselves.

The model is called on one packed row of tokens with an extra keyword, `layout`, which says who
attends to whom and attends: along a packed row in the trainer and the prefill, or from new tokens
to caches in a decoding step.

Along a packed row the C kernels attend on a CPU (cpu/). Elsewhere PyTorch does, with the keys and
values of each segment gathered as [prompt, own]: by FlashAttention on GPUs in float16 or bfloat16,
else segment by segment by `scaled_dot_product_attention`. A segment's last query sees all of its
gathered keys, the query before it all but one.
"""

from __future__ import annotations

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
        """Returns the sizes in the text config of a model of transformers."""
        heads = text.num_attention_heads
        return Shape(
            layers=text.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            d=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )


# In transformers


def register() -> None:
    """Makes `attn_implementation="lagrpo_shared_prefix"` known to transformers.

    It gets no mask, because the layout takes its place.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, shared_prefix_attention)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the layout says what attends to what
    scaling: float | None = None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends in one layer; transformers calls this function.

    For a query [1, Hq, rows, D], a key and a value [1, Hkv, rows, D] it returns
    ([1, rows, Hq, D], None). Raises ValueError for a call without a layout, and for options that
    this attention lacks.
    """
    if layout is None:
        config: Any = module.config
        raise ValueError(
            f"attention {NAME!r} was called without a layout: call the model through lagrpo.model. "
            f"If it was, models of type {config.model_type!r} do not pass the layout on, "
            "which lagrpo does not support"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError("shared-prefix attention lacks soft-capping and attention sinks")
    check_window(module, layout, sliding_window)
    if scaling is None:
        scaling = float(query.shape[-1] ** -0.5)
    layer: Any = module.layer_idx
    attended = layout.attend(
        layer,
        query.squeeze(0).transpose(0, 1),  # [rows, Hq, D]
        key.squeeze(0).transpose(0, 1),  # [rows, Hkv, D]
        value.squeeze(0).transpose(0, 1),
        scaling,
    )
    return attended.unsqueeze(0), None


# Along a packed row


def attend(
    layout: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    by_triton: bool = False,
) -> Tensor:
    """Attends along a packed row; differentiable.

    The query is [rows, Hq, D], key and value are [rows, Hkv, D]; the result is [rows, Hq, D]. With
    `by_triton` a Triton kernel adds up the gradients of keys and values.
    """
    if by_triton:
        seen_key: Tensor = _GatheredKeys.apply(key, layout)  # type: ignore[assignment]
        seen_value: Tensor = _GatheredKeys.apply(value, layout)  # type: ignore[assignment]
    else:
        seen_key = gather_keys(layout, key)
        seen_value = gather_keys(layout, value)
    if takes_varlen(query.device, query.dtype, query.shape[-1]):
        return attend_varlen(layout, query, seen_key, seen_value, scaling)
    return attend_by_segments(layout, query, seen_key, seen_value, scaling)


def takes_varlen(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """True if FlashAttention computes on a device, in a dtype, with heads of d numbers."""
    fits = dtype in (torch.float16, torch.bfloat16) and d % 8 == 0 and d <= 256
    return device.type == "cuda" and fits and torch.cuda.get_device_capability(device) >= (8, 0)


def gather_keys(layout: PackedLayout, key: Tensor) -> Tensor:
    """Returns the keys (or values) that each segment sees, [prompt, own], segment after segment.

    From [rows, Hkv, D] it gathers [K, Hkv, D]. Gradients of a prompt's keys add up over its
    completions in float32.
    """
    wide_key = key.to(torch.promote_types(key.dtype, torch.float32))
    return wide_key.index_select(0, layout.seen_rows).to(key.dtype)


class _GatheredKeys(torch.autograd.Function):
    """As `gather_keys`, without the sort by which PyTorch adds gradients in a fixed order."""

    @staticmethod
    def forward(ctx, key: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return key.index_select(0, layout.seen_rows)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        # Not at the top: CPU builds of PyTorch come without Triton.
        from lagrpo.gpu.keys import gather_keys_backward

        return gather_keys_backward(grad.contiguous(), *ctx.layout.seen_by), None


def attend_varlen(
    layout: PackedLayout, query: Tensor, seen_key: Tensor, seen_value: Tensor, scaling: float
) -> Tensor:
    """Attends by one kernel of FlashAttention for all segments.

    The query is [rows, Hq, D], seen keys and values are [K, Hkv, D].

    Its causal mask is aligned to the end of each segment's keys.
    """
    query_offsets, key_offsets = layout.offsets
    # The operation under PyTorch's `varlen_attn`. Its gradient is C++. The gradient
    # of `varlen_attn` is Python, which takes the host as long as the kernel takes the GPU.
    return torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        seen_key,
        seen_value,
        query_offsets,
        key_offsets,
        layout.most_queries,
        layout.most_keys,
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=-1,
        window_size_right=0,
    )[0]


def attend_by_segments(
    layout: PackedLayout, query: Tensor, seen_key: Tensor, seen_value: Tensor, scaling: float
) -> Tensor:
    """Attends segment by segment. Shapes as in `attend_varlen`."""
    num_queries = layout.segments[:, 1].tolist()
    num_keys = layout.segments[:, [1, 3]].sum(1).tolist()
    queries = query.split(num_queries)  # each [t, Hq, D]
    keys = seen_key.split(num_keys)  # each [P + t, Hkv, D]
    values = seen_value.split(num_keys)
    grouped = query.shape[1] != seen_key.shape[1]
    attended: list[Tensor] = []
    for segment_query, segment_key, segment_value in zip(queries, keys, values, strict=True):
        q = segment_query.transpose(0, 1).unsqueeze(0)  # [1, Hq, t, D]
        k = segment_key.transpose(0, 1).unsqueeze(0)  # [1, Hkv, P + t, D]
        v = segment_value.transpose(0, 1).unsqueeze(0)
        t = q.shape[2]
        seen = k.shape[2]
        # The last query sees all keys, the query before it all but one.
        mask = torch.ones(t, seen, dtype=torch.bool, device=q.device).tril(seen - t)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=grouped)
        attended.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(attended)
