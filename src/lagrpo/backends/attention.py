"""Shared-prefix attention: a prompt appears once; its G completions attend to it and to themselves.

One attention function serves every decoder model of transformers that takes its attention from the registry. The model
is called on one packed row of tokens with an extra keyword, `layout`, that says who attends to whom: a `PackedLayout`
(learning, scoring), or a layout with caches (prefill and decoding in the sampler). `attend` is the one place that
decides what computes it:

    C kernels      on a CPU with a C compiler (backends/cpu): one softmax over prompt and own keys together, key after
                   key in the order of the sequence, in sampler and learner alike, to the bit
    FlexAttention  on a GPU in float16 or bfloat16 (backends/flex.py)
    PyTorch        elsewhere (backends/parts.py)
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from lagrpo.backends import flex, parts
from lagrpo.backends.cpu import attention as cpu_attention
from lagrpo.backends.cpu import kernels
from lagrpo.backends.layout import PackedLayout
from lagrpo.threads import team

NAME = "lagrpo_shared_prefix"


class Shape(NamedTuple):
    """The sizes of a model's attention: layers, query heads, key-value heads, numbers in a head."""

    layers: int
    heads: int
    kv_heads: int
    d: int

    @staticmethod
    def of(text: Any) -> Shape:
        """From a model's text config."""
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return Shape(
            text.num_hidden_layers, heads, kv_heads, getattr(text, "head_dim", None) or text.hidden_size // heads
        )


class CachedLayout(Protocol):
    """A layout that keeps keys and values from one call of the model to the next."""

    longest: int
    """Tokens of the longest sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store keys and values of this layer and attend: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]."""
        ...


Layout = PackedLayout | CachedLayout


def register() -> None:
    """Make `attn_implementation="lagrpo_shared_prefix"` known to transformers. transformers makes no masks for an
    attention that has registered none: the layout is the mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, shared_prefix_attention)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer: query [1, Hq, rows, D], key and value [1, Hkv, rows, D]
    -> ([1, rows, Hq, D], None).

    Raises:
        ValueError: no layout came with the model call, or the model asks for something that this attention lacks
            (a sliding window shorter than the longest sequence, soft-capping, attention sinks).
    """
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} was called without a layout: with attention {NAME!r} the model must be called "
            "through lagrpo.policy (or load it with attn_implementation='sdpa' for other uses)"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} uses soft-capping or attention sinks, which shared-prefix attention lacks"
        )
    check_window(module, layout, sliding_window)
    rows = [t.squeeze(0).transpose(0, 1) for t in (query, key, value)]
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(layout, module.layer_idx, *rows, scaling).unsqueeze(0), None  # type: ignore[arg-type]


def check_window(module: nn.Module, layout: Layout, sliding_window: int | None) -> None:
    """Raise ValueError where a sequence is longer than the window that a layer attends within."""
    if sliding_window is not None and layout.longest > sliding_window:
        raise ValueError(
            f"{type(module).__name__} attends within a window of {sliding_window} tokens, but a sequence here is "
            f"{layout.longest} tokens long; shorten prompts and completions so that they fit the window"
        )


def attend(layout: Layout, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend along a layout in one layer: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]."""
    if isinstance(layout, PackedLayout):
        return attend_packed(layout, query, key, value, scaling)
    return layout.attend(layer, query, key, value, scaling)


def attend_packed(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend along a packed row: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable. No [T, T] matrix
    is ever stored."""
    team.look()
    if kernels.attend_on(query, key, value):
        return cpu_attention.attend(layout, query, key, value, scaling)
    if flex.attends(query, key):
        return flex.attend(layout, query, key, value, scaling)
    return parts.attend(layout, query, key, value, scaling)
