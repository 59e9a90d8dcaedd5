"""Shared-prefix attention: a prompt appears once; its G completions attend to it and to themselves.

One attention function serves every decoder model of transformers that takes its attention from the registry. The model
is called on one packed row of tokens with an extra keyword, `layout`: a `PackedLayout` with its backend (learning,
scoring), or a layout with caches (prefill and decoding in the sampler). The backend decides what computes:

    C kernels      on a CPU with a C compiler (cpu/): one softmax over prompt and own keys together, key after key in
                   the order of the sequence, in sampler and learner alike, to the bit
    FlexAttention  on a GPU in float16 or bfloat16 (flex.py)
    PyTorch        elsewhere (parts.py)
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

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


class Layout(Protocol):
    """Who attends to whom in one call of the model, and what computes it."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend in one layer: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]."""
        ...


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
    ([1, rows, Hq, D], None). Raises ValueError where no layout came with the call, or the model asks for what this
    attention lacks: a sliding window shorter than the longest sequence, soft-capping, attention sinks."""
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} was called without a layout: with attention {NAME!r} the model must be called "
            "through lagrpo.model (or load it with attn_implementation='sdpa' for other uses)"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} uses soft-capping or attention sinks, which shared-prefix attention lacks"
        )
    check_window(module, layout, sliding_window)
    rows = [t.squeeze(0).transpose(0, 1) for t in (query, key, value)]
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    return layout.attend(module.layer_idx, *rows, scaling).unsqueeze(0), None  # type: ignore[arg-type]


def check_window(module: nn.Module, layout: Layout, sliding_window: int | None) -> None:
    """Raise ValueError where a sequence is longer than the window that a layer attends within."""
    if sliding_window is not None and layout.longest > sliding_window:
        raise ValueError(
            f"{type(module).__name__} attends within a window of {sliding_window} tokens, but a sequence here is "
            f"{layout.longest} tokens long; shorten prompts and completions so that they fit the window"
        )
