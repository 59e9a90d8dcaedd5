"""Shared-prefix attention by PyTorch's plain operations, in two *parts* that are merged by their log-sum-exps:

    own      a segment's queries against the segment's keys, causally
    prefix   a completion's queries against its prompt's keys, all of them

    out = w_own · out_own + w_pre · out_pre,   w_own = 1 / (1 + exp(lse_pre - lse_own)),   w_pre = 1 - w_own

A prompt's keys and values are stored once per group, and grouped-query heads are never expanded: the queries that share
a key head are folded into the rows of one matrix product.

A decoding step (steps.py) and, where neither the C kernels nor FlexAttention run, the learner compute the same parts on
the same rounded numbers, so they differ by rounding alone. PyTorch's scaled_dot_product_attention would round bfloat16
elsewhere. Keys are padded to MIN_KEYS: a row of a softmax over at least so many does not depend on trailing zeros. The
order in which a matrix product adds up is the library's choice, and may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from lagrpo.backends.layout import PackedLayout

MIN_KEYS = 16  # below one vector register of float32 the order of the softmax's sum would depend on the padding
BLOCK_SCORES = 1 << 21  # scores per head that are in memory at a time: 8 MiB in float32


def fold_queries(query: Tensor, kv_heads: int) -> Tensor:
    """[B, t, Hq, D] -> [B·Hkv, rep·t, D]: the rep = Hq / Hkv query heads of a key head become rows."""
    b, t, heads, d = query.shape
    folded = query.view(b, t, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4)
    return folded.reshape(b * kv_heads, -1, d)


def unfold_queries(folded: Tensor, b: int, t: int) -> Tensor:
    """[B·Hkv, rep·t, D] -> [B·t, Hq, D], the inverse of `fold_queries`."""
    d = folded.shape[-1]
    return folded.view(b, -1, t, d).transpose(1, 2).reshape(b * t, -1, d)


def fold_keys(key: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """[B, K, Hkv, D] -> [B·Hkv, keys, D], zeros behind the K."""
    padded = F.pad(key, (0, 0, 0, 0, 0, keys - key.shape[1])).to(dtype)
    return padded.transpose(1, 2).reshape(-1, keys, key.shape[-1])


def scores(query: Tensor, key: Tensor, hidden: Tensor | None, scaling: float) -> Tensor:
    """float32 [B·Hkv, rep·t, K]: scaled dot products, -inf where `hidden` [B or 1, 1, t or 1, K] is True."""
    s = torch.bmm(query, key.mT).float().mul_(scaling)
    if hidden is not None:
        b, t = hidden.shape[0], hidden.shape[2]
        s.view(b, s.shape[0] // b, s.shape[1] // t, t, s.shape[2]).masked_fill_(hidden.unsqueeze(2), float("-inf"))
    return s


def part(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of folded queries over one block of keys: query [B·Hkv, rep·t, D], key and value [B·Hkv, K, D] -> out
    [B·Hkv, rep·t, D] in the dtype of `value`, log-sum-exp float32 [B·Hkv, rep·t, 1]. With p the softmax, max p =
    exp(max s - lse), which gives the log-sum-exp."""
    s = scores(query, key, hidden, scaling)
    p = torch.softmax(s, dim=-1)
    lse = s.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log()
    return torch.bmm(p.to(value.dtype), value), lse


def merge(own: Tensor, lse_own: Tensor, prefix: Tensor, lse_prefix: Tensor) -> Tensor:
    """The two parts as one attention, in the dtype of `own`: outs [..., D], log-sum-exps [..., 1] -> [..., D]."""
    gap = lse_prefix - lse_own
    return (own.float() * torch.sigmoid(-gap) + prefix.float() * torch.sigmoid(gap)).to(own.dtype)


def attend(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend along a packed row: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
    lengths, dtype = layout.segments[:, 1].tolist(), torch.promote_types(key.dtype, torch.float32)
    # keys are rounded again block by block: like this their gradients from several blocks add up in float32
    queries, keys, values = (t.split(lengths) for t in (query, key.to(dtype), value.to(dtype)))
    outs: list[Tensor] = []
    for start, stop in pairwise(layout.groups.tolist()):
        own = [(queries[n], keys[n], values[n]) for n in range(start, stop)]
        outs += _attend_side_by_side(own[:1], None, scaling)
        outs += _attend_side_by_side(own[1:], own[0][1:], scaling)
    return torch.cat(outs)


Own = tuple[Tensor, Tensor, Tensor]  # a segment's queries [t, Hq, D], keys and values [t, Hkv, D]


def _attend_side_by_side(segments: Sequence[Own], prompt: tuple[Tensor, Tensor] | None, scaling: float) -> list[Tensor]:
    """Segments of one group with the keys and values of their prompt [P, Hkv, D] -> [t, Hq, D] of each, a block of
    queries at a time, which a backward pass computes again."""
    lengths = [len(query) for query, _, _ in segments]
    keys = max(lengths, default=0) + (len(prompt[0]) if prompt else 0)
    step = max(1, BLOCK_SCORES // max(1, len(segments) * keys))
    outs: list[list[Tensor]] = [[] for _ in segments]
    for first in range(0, max(lengths, default=0), step):
        still, stop = [n for n, length in enumerate(lengths) if length > first], first + step
        block = [(q[first:stop], k[:stop], v[:stop]) for q, k, v in (segments[n] for n in still)]
        if torch.is_grad_enabled():
            made = checkpoint(_attend_block, block, prompt, scaling, use_reentrant=False, preserve_rng_state=False)
        else:
            made = _attend_block(block, prompt, scaling)
        for n, out, (query, _, _) in zip(still, made, block, strict=True):  # type: ignore[arg-type]
            outs[n].append(out[: len(query)])
    return [torch.cat(blocks) for blocks in outs]


def _attend_block(segments: Sequence[Own], prompt: tuple[Tensor, Tensor] | None, scaling: float) -> Tensor:
    """The last queries [≤ t, Hq, D] of each segment against its keys and values [≤ K, Hkv, D] -> [B, t, Hq, D], where
    rows beyond a segment's queries have no meaning. Causality hides the padding of the keys."""
    q, k, v = (pad_sequence(list(t), batch_first=True) for t in zip(*segments, strict=True))
    (b, t), dtype, kv_heads = q.shape[:2], q.dtype, k.shape[2]
    first = k.shape[1] - t
    keys = max(MIN_KEYS, k.shape[1])
    hidden = torch.arange(keys, device=q.device) > torch.arange(first, first + t, device=q.device)[:, None]
    k, v = (fold_keys(x, keys, dtype) for x in (k, v))
    own = part(fold_queries(q, kv_heads), k, v, hidden[None, None], scaling)
    out, lse = (unfold_queries(x, b, t) for x in own)
    if prompt is not None:
        length = len(prompt[0])
        keys = max(MIN_KEYS, length)
        k, v = (fold_keys(x[None], keys, dtype) for x in prompt)
        hidden = (torch.arange(keys, device=q.device) >= length)[None, None, None] if keys > length else None
        prefix = part(fold_queries(q.view(1, b * t, *q.shape[2:]), kv_heads), k, v, hidden, scaling)
        out = merge(out, lse, *(unfold_queries(x, 1, b * t) for x in prefix))
    return out.view(b, t, *out.shape[1:])
