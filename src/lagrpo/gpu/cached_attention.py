"""Attention of a decoding step to a cache of keys and values, without a copy of the cache.

Each token of a step has one query for each of its heads, and sees the first tokens of one row of
the cache. The query heads that share a key head read the same keys, so they stand where the tokens
of a sequence would: [m, Hq, D] becomes m sequences of Hq / Hkv tokens with Hkv heads.

Shapes: m tokens of a step; rows and capacity of the cache; Hq query heads, Hkv key heads of D.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_by_flash(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, num_seen: Tensor, scaling: float
) -> Tensor:
    """Attends by FlashAttention, which reads the keys in place: query [m, Hq, D] -> [m, Hq, D].

    Keys and values are [rows, capacity, Hkv, D] and contiguous. Token i sees the first
    `num_seen[i]` keys of the cache's row `rows[i]`; both are int64 [m].
    """
    m, num_heads, d = query.shape
    _, capacity, num_key_heads, _ = keys.shape
    group = num_heads // num_key_heads
    q = query.unflatten(1, (num_key_heads, group)).transpose(1, 2)  # [m, Hq / Hkv, Hkv, D]
    q = q.reshape(m * group, num_key_heads, d)
    query_starts = torch.arange(m + 1, dtype=torch.int32, device=query.device) * group
    # Where the keys of each token begin. The lengths come from `seqused_k`, so the starts need not
    # rise, and the last one is never read.
    key_starts = F.pad(rows * capacity, (0, 1)).int()  # [m + 1]
    out = torch.ops.aten._flash_attention_forward(
        q,
        keys.view(-1, num_key_heads, d),
        values.view(-1, num_key_heads, d),
        query_starts,
        key_starts,
        group,  # the most queries of a sequence
        capacity,  # the most keys of a sequence
        dropout_p=0.0,
        is_causal=False,  # each query sees all of its keys
        return_debug_mask=False,
        scale=scaling,
        seqused_k=num_seen.int(),
    )[0]
    out = out.view(m, group, num_key_heads, d).transpose(1, 2)  # [m, Hkv, Hq / Hkv, D]
    return out.reshape(m, num_heads, d)


def attend_by_mask(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    num_seen: Tensor,
    scaling: float,
    num_keys: int,
) -> Tensor:
    """Attends by PyTorch's attention on any device and in any dtype.

    Shapes as in `attend_by_flash`.

    It copies the first `num_keys` keys of each row; `num_seen` must not be larger.
    """
    k = keys[:, :num_keys].index_select(0, rows).transpose(1, 2)  # [m, Hkv, num_keys, D]
    v = values[:, :num_keys].index_select(0, rows).transpose(1, 2)
    mask = torch.arange(num_keys, device=query.device) < num_seen[:, None]  # bool [m, num_keys]
    q = query.unflatten(1, (keys.shape[2], -1))  # [m, Hkv, Hq / Hkv, D]
    attended = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=scaling)
    return attended.flatten(1, 2)


@cache
def flash_reads_caches(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_key_heads: int, d: int
) -> bool:
    """True if `attend_by_flash` works on a device, for these heads, and gives what a mask gives.

    The function below it is internal to PyTorch. It may be missing, or take other arguments.
    """
    if device.type != "cuda":
        return False
    rng = torch.Generator(device).manual_seed(0)
    shape = (3, 48, num_key_heads, d)
    query = torch.randn(4, num_heads, d, generator=rng, device=device).to(dtype)
    keys = torch.randn(shape, generator=rng, device=device).to(dtype)
    values = torch.randn(shape, generator=rng, device=device).to(dtype)
    # Rows in any order, one of them twice.
    rows = torch.tensor([2, 0, 1, 2], device=device)
    num_seen = torch.tensor([1, 48, 17, 33], device=device)
    try:
        ours = attend_by_flash(query, keys, values, rows, num_seen, d**-0.5)
        expected = attend_by_mask(query, keys, values, rows, num_seen, d**-0.5, num_keys=48)
    except (RuntimeError, TypeError, AttributeError):
        return False
    # Values of about 1, rounded to 8 binary digits after sums of up to 48.
    return bool(torch.allclose(ours.float(), expected.float(), rtol=0, atol=0.05))
