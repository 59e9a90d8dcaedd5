"""Shared-prefix attention along a packed row by the C kernels, with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from lagrpo.backends.cpu import kernels
from lagrpo.backends.layout import PackedLayout
from lagrpo.threads import team


def attend(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
    return _Attention.apply(query, key, value, layout, scaling)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """The backward pass computes the scores again; they are never stored."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))
        out, lse = kernels.attention(layout.segments, query, key, value, scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[override]
        team.look()
        attended = kernels.Attended(ctx.layout.segments, *ctx.saved_tensors, scaling=ctx.scaling)
        return *kernels.attention_backward(ctx.layout.groups, attended, grad_out.contiguous()), None, None
