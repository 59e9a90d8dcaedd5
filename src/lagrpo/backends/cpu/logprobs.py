"""Log-probs of given tokens by the kernels: one pass over the logits as they are, and its gradient in their place."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends.cpu import kernels
from lagrpo.backends.logprobs import Product, check_tokens, chunks

KERNEL_LOGITS = 1 << 25  # logits in hand, in the model's dtype: 64 MiB in bfloat16
KEPT_LOGITS = 1 << 27  # at most so many wait for the backward pass (256 MiB); those beyond are computed again


def token_logp(
    hidden_TH: Tensor, head: nn.Linear, token_ids_T: Tensor, tau: float, entropy_T: Tensor | None = None,
    product: Product | None = None,
) -> Tensor:  # fmt: skip
    """As lagrpo.backends.logprobs.token_logp. `product` computes the logits in the place of PyTorch's product."""
    check_tokens(hidden_TH, head.weight, token_ids_T, tau)
    keep = min(len(token_ids_T), KEPT_LOGITS // head.weight.shape[0]) if torch.is_grad_enabled() else 0
    given = hidden_TH, head.weight, head.bias, token_ids_T
    return _TokenLogp.apply(*given, tau, entropy_T, product, keep)  # type: ignore[return-value]


class _TokenLogp(torch.autograd.Function):
    """Keeps the logits of the first `keep` rows for the backward pass, where autograd may ask for one."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *asked: Any) -> Tensor:
        tau, entropy_T, ctx.product, keep = asked
        logp, lse = kernels.floats(len(token_ids)), kernels.floats(len(token_ids))
        ctx.kept = _room("kept", (keep, weight.shape[0]), weight.dtype, taken=True) if keep else None
        for rows in _kept_and_chunks(keep, len(token_ids), weight.shape[0]):
            logits = _logits(hidden[rows], weight, bias, ctx.product, ctx.kept if rows.stop <= keep else None)
            entropy = None if entropy_T is None else entropy_T[rows]
            logp[rows], lse[rows] = kernels.token_logp(logits, token_ids[rows], tau, entropy)
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse)
        ctx.tau = tau
        return logp

    @staticmethod
    def backward(ctx, grad_logp: Tensor):  # type: ignore[override]
        hidden, weight, bias, token_ids, lse = ctx.saved_tensors
        grad_hidden, grad_logp = torch.empty_like(hidden), grad_logp.contiguous()
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        kept, ctx.kept = ctx.kept, None  # overwritten below: another backward pass computes them again
        pieces = _kept_and_chunks(0 if kept is None else len(kept), len(token_ids), weight.shape[0])
        total, share = _rooms_for_gradient(weight, len(pieces)) if ctx.needs_input_grad[1] else (None, None)
        for rows in pieces:
            logits = kept if kept is not None and rows.stop <= len(kept) else None
            logits = _logits(hidden[rows], weight, bias, ctx.product) if logits is None else logits
            dx = kernels.token_logp_backward(logits, token_ids[rows], ctx.tau, lse[rows], grad_logp[rows])
            torch.mm(dx, weight, out=grad_hidden[rows])
            if share is not None:
                torch.mm(dx.mT, hidden[rows], out=share)
                if total is not None:
                    total += share
            if grad_bias is not None:
                grad_bias += dx.sum(0, dtype=torch.float32)
        if kept is not None:
            _return_room("kept", kept)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        grad_weight = share if total is None else total.to(weight.dtype, copy=True)
        return grad_hidden, grad_weight, grad_bias, *5 * (None,)


def _rooms_for_gradient(weight: Tensor, pieces: int) -> tuple[Tensor | None, Tensor]:
    """For the sum of the gradients of all pieces, and for that of one; of one piece alone, which is the sum."""
    if pieces == 1:
        return None, torch.empty_like(weight)
    total = _room("gradient", weight.shape, torch.float32).zero_()
    return total, _room("share", weight.shape, weight.dtype)


def _kept_and_chunks(kept: int, rows: int, vocabulary: int) -> list[slice]:
    return [slice(0, kept)] * bool(kept) + chunks(kept, rows, vocabulary, KERNEL_LOGITS)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product | None, out: Tensor | None = None
) -> Tensor:
    """hidden · weightᵀ + bias [rows, V], in `out`; without it, until the next call."""
    out = _room("logits", (len(hidden), weight.shape[0]), weight.dtype) if out is None else out
    if product is not None:
        return product(hidden, out)
    return torch.mm(hidden, weight.mT, out=out) if bias is None else torch.addmm(bias, hidden, weight.mT, out=out)


_rooms = threading.local()


def _room(use: str, shape: Sequence[int], dtype: torch.dtype, taken: bool = False) -> Tensor:
    """Memory kept for a use, with anything in it: clearing fresh pages takes as long as the products that fill them.
    `taken`: nobody else's until it is returned (or forgotten)."""
    numbers = math.prod(shape)
    room: Tensor | None = _rooms.__dict__.pop(use, None)
    if room is None or room.numel() < numbers or room.dtype != dtype:
        room = torch.empty(numbers, dtype=dtype)
    if not taken:
        _rooms.__dict__[use] = room
    return room[:numbers].view(*shape)


def _return_room(use: str, room: Tensor) -> None:
    whole = room.untyped_storage().nbytes() // room.element_size()
    _rooms.__dict__[use] = room.as_strided((whole,), (1,), 0)
