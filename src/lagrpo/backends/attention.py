"""Shared-prefix attention: a prompt appears once, its G completions attend to it and to themselves.

One attention function serves every decoder model of transformers that takes its attention from the registry. The model
is called on one packed row of tokens with an extra keyword, `layout`, that says who attends to whom; the layout
does the attending: `PackedLayout` (learning, prefill: see layout.py) or the sampler's decoding layout.

Attention over (prompt ++ own tokens) is computed in two *parts* that are merged by their log-sum-exps:

    own      a segment's queries against the segment's keys, causally
    prefix   a completion's queries against its prompt's keys, all of them

    out = w_own · out_own + w_pre · out_pre,   w_own = 1 / (1 + exp(lse_pre - lse_own)),   w_pre = 1 - w_own

so that the prompt's keys and values are stored once per group and grouped-query heads are never expanded: the queries
that share a key head are folded into the rows of one matrix product.

Sampler and learner run these same functions on the same rounded numbers. They differ by rounding alone: each row of a
softmax over at least MIN_KEYS keys does not depend on trailing zeros, which is why key blocks are padded to MIN_KEYS,
but in which order a matrix product adds up is the library's choice, and may depend on the number of rows.

Where the kernels run (lagrpo.backends.cpu.kernels: on a CPU with a C compiler) they take the place of the functions
below: one softmax over prompt and own keys together, key after key in the order of the sequence, in sampler and learner
alike, to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

NAME = "lagrpo_shared_prefix"
MIN_KEYS = 16  # below one vector register of float32 the order of the softmax's sum would depend on the padding


class Shape(NamedTuple):
    """Of a model's attention: layers, query heads, heads of keys and values, numbers in a head."""

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


class Layout(Protocol):
    """Who attends to whom in one call of the model."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [rows, Hq, D], key and value [rows, Hkv, D] -> [rows, Hq, D]."""
        ...


def register() -> None:
    """Make `attn_implementation="lagrpo_shared_prefix"` known to transformers. It makes no masks for an attention that
    has not registered any: the layout is the mask."""
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
        ValueError: no layout came with the model call, or the model asks for something this attention does not do
            (a sliding window shorter than the longest sequence, soft-capping, attention sinks).
    """
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} was called without layout: with attention {NAME!r} the model must be "
            "called through lagrpo.policy (or load it with attn_implementation='sdpa' for other uses)"
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
    longest = getattr(layout, "longest", 0)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"{type(module).__name__} attends within a window of {sliding_window} tokens, but a sequence here is "
            f"{longest} tokens long; shorten prompts and completions so that they fit the window"
        )


def fold_queries(query: Tensor, kv_heads: int) -> Tensor:
    """[B, t, Hq, D] -> [B·Hkv, rep·t, D]: the rep = Hq / Hkv query heads of a key head become rows."""
    b, t, heads, d = query.shape
    folded = query.view(b, t, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4)
    return folded.reshape(b * kv_heads, -1, d)


def unfold_queries(folded: Tensor, b: int, t: int) -> Tensor:
    """[B·Hkv, rep·t, D] -> [B·t, Hq, D], the inverse of `fold_queries`."""
    d = folded.shape[-1]
    return folded.view(b, -1, t, d).transpose(1, 2).reshape(b * t, -1, d)


def fold_keys(key: Tensor) -> Tensor:
    """[B, K, Hkv, D] -> [B·Hkv, K, D]."""
    return key.transpose(1, 2).reshape(-1, key.shape[1], key.shape[-1])


def scores(query: Tensor, key: Tensor, hidden: Tensor | None, scaling: float) -> Tensor:
    """float32 [B·Hkv, rep·t, K]: scaled dot products, -inf where `hidden` [B or 1, 1, t or 1, K] is True."""
    s = torch.bmm(query, key.mT).float().mul_(scaling)
    if hidden is not None:
        b, t = hidden.shape[0], hidden.shape[2]
        groups = s.shape[0] if b == 1 else s.shape[0] // b
        queries = s.shape[1] // t if t > 1 else s.shape[1]
        s.view(b, groups, queries, t, s.shape[2]).masked_fill_(hidden.unsqueeze(2), float("-inf"))
    return s


def part(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of folded queries over one block of keys: (out in the dtype of `value`, log-sum-exp float32).

    query [B·Hkv, rep·t, D], key and value [B·Hkv, K, D] -> out [B·Hkv, rep·t, D], lse [B·Hkv, rep·t].
    With p the softmax, max p = exp(max s - lse), from which the log-sum-exp is read off."""
    s = scores(query, key, hidden, scaling)
    p = torch.softmax(s, dim=-1)
    lse = s.amax(-1) - p.amax(-1).log()
    return torch.bmm(p.to(value.dtype), value), lse


def merge(own: Tensor, lse_own: Tensor, prefix: Tensor, lse_prefix: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts as one attention: (out in the dtype of `own` [..., D], lse [...])."""
    gap = lse_prefix - lse_own
    weight_own, weight_prefix = 1 / (1 + gap.exp()), 1 / (1 + (-gap).exp())
    out = own.float() * weight_own.unsqueeze(-1) + prefix.float() * weight_prefix.unsqueeze(-1)
    return out.to(own.dtype), lse_own - weight_own.log()


def part_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scaling: float,
    lse: Tensor,
    grad_out: Tensor,
    inner: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of folded queries, keys and values through one part of a merged attention.

    `lse` and `inner` = Σ_d out·grad_out, both float32 [B·Hkv, rep·t], belong to the *merged* result: with
    p = exp(s - lse) the probabilities over prefix and own keys together, dv = pᵀ·do, ds = p∘(do·vᵀ - inner)."""
    s = scores(query, key, hidden, scaling)
    p = s.sub_(lse.unsqueeze(-1)).exp_()
    grad_value = torch.bmm(p.to(value.dtype).mT, grad_out)
    ds = torch.bmm(grad_out, value.mT).float().sub_(inner.unsqueeze(-1)).mul_(p).mul_(scaling).to(query.dtype)
    return torch.bmm(ds, key), torch.bmm(ds.mT, query), grad_value
