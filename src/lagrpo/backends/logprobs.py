"""Log-probs of given tokens from hidden states, in bounded memory however many tokens there are.

The sampler takes tokens from softmax(logits / tau) and the learner differentiates it: both take the same sum of
exponentials of the same rounded logits, so right after a weight sync the ratio π/α is 1 up to rounding in float32. On a
CPU the kernels (lagrpo.backends.cpu.kernels) read the logits as they are; elsewhere float32 copies are made, a chunk at
a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo.backends.cpu import kernels

CHUNK_LOGITS = 1 << 23  # float32 logits in hand: 32 MiB, about what a processor's cache holds
HELD_GRADIENTS = 1 << 26  # their gradients, in the model's dtype, gathered for one large matrix product: 128 MiB
KERNEL_LOGITS = 1 << 25  # logits in hand where the kernels run, in the model's dtype: 64 MiB in bfloat16
KEPT_LOGITS = 1 << 27  # at most so many wait there for the backward pass (256 MiB); those beyond are computed again

Product = Callable[[Tensor, Tensor], Tensor]  # (rows [n, H], where the result goes [n, V])


def log_normalizer(scaled: Tensor) -> Tensor:
    """log Σ_v exp(x_v) of float32 logits already divided by tau: [rows, V] -> [rows]."""
    return exponentials(scaled)[1]


def exponentials(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - max x) of each row, and the row's log Σ_v exp(x_v): [rows, V] -> [rows, V], [rows]."""
    top = scaled.amax(-1)
    weights = (scaled - top.unsqueeze(-1)).exp_()
    return weights, top + weights.sum(-1).log_()


def scaled(logits: Tensor, tau: float) -> Tensor:
    """float32 logits / tau, from logits in the model's dtype."""
    return logits.float() if tau == 1.0 else logits.float() / tau


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, tau: float) -> Tensor:
    """float32 logits / tau: hidden [rows, H], weight [V, H], bias [V] -> [rows, V]. The product is rounded to the
    model's dtype first, as the model itself does."""
    return scaled(F.linear(hidden, weight, bias), tau)


def logp_from_logits(logits: Tensor, token_ids_T: Tensor, tau: float) -> Tensor:
    """log softmax(logits / tau)[token] of logits [T, V] in the model's dtype: float32 [T], without a gradient."""
    if kernels.run_on(logits):
        return kernels.token_logp(logits, token_ids_T, tau)[0]
    x = scaled(logits, tau)
    return x.gather(1, token_ids_T.unsqueeze(1)).squeeze(1) - log_normalizer(x)


def token_logp(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    token_ids_T: Tensor,
    tau: float,
    entropy_T: Tensor | None = None,
    product: Product | None = None,
) -> Tensor:
    """log softmax(logits / tau)[token] for each row: float32 [T], nats, differentiable in hidden, weight and bias.
    `entropy_T`, float32 [T] on the same device, is filled with the entropy of each softmax, nats, without a gradient.
    `product`, where the kernels run, computes the logits of rows [n, H] into [n, V] in the place of PyTorch's.

    Raises:
        ValueError: shapes that do not go together, a token outside the vocabulary, or tau that is not positive.
    """
    if hidden_TH.shape[0] != token_ids_T.shape[0] or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_TH.shape)}, weight {tuple(weight_VH.shape)} and token_ids "
            f"{tuple(token_ids_T.shape)} do not go together: [T, H], [V, H], [T]"
        )
    if not tau > 0:
        raise ValueError(f"tau is {tau}; a sampling temperature is positive")
    lowest, highest = (int(i) for i in token_ids_T.aminmax()) if len(token_ids_T) else (0, 0)
    if lowest < 0 or highest >= weight_VH.shape[0]:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token {wrong} is outside the model's vocabulary of {weight_VH.shape[0]}")
    function = _KernelTokenLogp if kernels.run_on(hidden_TH, weight_VH) else _TokenLogp
    asked = _Asked(tau, entropy_T, torch.is_grad_enabled(), product)
    return function.apply(hidden_TH, weight_VH, bias_V, token_ids_T, asked)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The temperature, where entropies go if they are wanted, whether a backward pass may follow, and what computes the
    logits."""

    tau: float
    entropy: Tensor | None
    differentiable: bool
    product: Product | None


class _KernelTokenLogp(torch.autograd.Function):
    """As _TokenLogp, with the softmax in one pass over the logits and its gradient in their place."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, asked: _Asked) -> Tensor:
        logp, lse = kernels.floats(len(token_ids)), kernels.floats(len(token_ids))
        keep = min(len(token_ids), KEPT_LOGITS // weight.shape[0]) if asked.differentiable else 0
        ctx.kept = _take_room("kept", (keep, weight.shape[0]), weight.dtype) if keep else None
        for rows in _kept_and_chunks(keep, len(token_ids), weight.shape[0]):
            kept = ctx.kept if rows.stop <= keep else None
            logits = _logits(hidden[rows], weight, bias, asked.product, kept)
            entropy = None if asked.entropy is None else asked.entropy[rows]
            logp[rows], lse[rows] = kernels.token_logp(logits, token_ids[rows], asked.tau, entropy)
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse)
        ctx.tau, ctx.product = asked.tau, asked.product
        return logp

    @staticmethod
    def backward(ctx, grad_logp: Tensor):  # type: ignore[override]
        hidden, weight, bias, token_ids, lse = ctx.saved_tensors
        grad_hidden, grad_logp = torch.empty_like(hidden), grad_logp.contiguous()
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        kept, ctx.kept = ctx.kept, None  # overwritten below: another backward pass computes them again
        pieces = _kept_and_chunks(0 if kept is None else len(kept), len(token_ids), weight.shape[0])
        total = _room("gradient", weight.shape, torch.float32).zero_() if len(pieces) != 1 else None
        share = torch.empty_like(weight) if total is None else _room("share", weight.shape, weight.dtype)
        for rows in pieces:
            logits = kept if kept is not None and rows.stop <= len(kept) else None
            logits = _logits(hidden[rows], weight, bias, ctx.product) if logits is None else logits
            dx = kernels.token_logp_backward(logits, token_ids[rows], ctx.tau, lse[rows], grad_logp[rows])
            torch.mm(dx, weight, out=grad_hidden[rows])
            torch.mm(dx.mT, hidden[rows], out=share)
            if total is not None:
                total += share
            if grad_bias is not None:
                grad_bias += dx.sum(0, dtype=torch.float32)
        if kept is not None:
            _return_room("kept", kept)
        grad_bias = grad_bias.to(bias.dtype) if bias is not None and grad_bias is not None else None
        grad_weight = share if total is None else total.to(weight.dtype, copy=True)
        return grad_hidden, grad_weight, grad_bias, None, None


def _kept_and_chunks(kept: int, rows: int, vocabulary: int) -> list[slice]:
    """The first `kept` rows in one piece, the others in chunks."""
    first = [slice(0, kept)] if kept else []
    return first + _chunks(kept, rows, vocabulary, KERNEL_LOGITS)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product | None, out: Tensor | None = None
) -> Tensor:
    """hidden · weightᵀ + bias [rows, V], in `out`; without it, until the next call."""
    out = _room("logits", (len(hidden), weight.shape[0]), weight.dtype) if out is None else out
    if product is not None:
        return product(hidden, out)
    return torch.mm(hidden, weight.mT, out=out) if bias is None else torch.addmm(bias, hidden, weight.mT, out=out)


_rooms = threading.local()


def _room(use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that is kept for a use, with anything in it. To clear fresh pages for such large tensors takes the system
    as long as the products that fill them."""
    room = _take_room(use, shape, dtype)
    _return_room(use, room)
    return room


def _take_room(use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `_room`, and nobody else's until it is returned (or forgotten)."""
    numbers = math.prod(shape)
    room: Tensor | None = _rooms.__dict__.pop(use, None)
    if room is None or room.numel() < numbers or room.dtype != dtype:
        room = torch.empty(numbers, dtype=dtype)
    return room[:numbers].view(*shape)


def _return_room(use: str, room: Tensor) -> None:
    """For the next one who asks for it."""
    whole = room.untyped_storage().nbytes() // room.element_size()
    _rooms.__dict__[use] = room.as_strided((whole,), (1,), 0)


class _TokenLogp(torch.autograd.Function):
    """Chunks of rows forward and again backward; the gradient of a row is g/tau · (onehot - softmax)."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, asked: _Asked) -> Tensor:
        logp = torch.empty(len(token_ids), dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(logp)
        for rows in _chunks(0, len(token_ids), weight.shape[0], CHUNK_LOGITS):
            x = scaled_logits(hidden[rows], weight, bias, asked.tau)
            chosen = x.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1)
            lse[rows] = log_normalizer(x)
            logp[rows] = chosen - lse[rows]
            if asked.entropy is not None:
                asked.entropy[rows] = torch.special.entr(x.sub_(lse[rows].unsqueeze(1)).exp_()).sum(1)
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse)
        ctx.tau = asked.tau
        return logp

    @staticmethod
    def backward(ctx, grad_logp: Tensor):  # type: ignore[override]
        hidden, weight, bias, token_ids, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for held in _chunks(0, len(token_ids), weight.shape[0], HELD_GRADIENTS):
            dx = weight.new_empty(held.stop - held.start, weight.shape[0])
            for rows in _chunks(held.start, held.stop, weight.shape[0], CHUNK_LOGITS):
                g = (grad_logp[rows] / ctx.tau).unsqueeze(1)
                p = scaled_logits(hidden[rows], weight, bias, ctx.tau).sub_(lse[rows].unsqueeze(1)).exp_().mul_(-g)
                dx[rows.start - held.start : rows.stop - held.start] = p.scatter_add_(
                    1, token_ids[rows].unsqueeze(1), g
                )
            grad_hidden[held] = dx @ weight
            grad_weight += dx.mT @ hidden[held]
            if grad_bias is not None:
                grad_bias += dx.sum(0, dtype=torch.float32)
        grad_bias = grad_bias.to(bias.dtype) if bias is not None and grad_bias is not None else None
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None


def _chunks(start: int, stop: int, vocabulary: int, numbers: int) -> list[slice]:
    """Rows start .. stop cut into pieces of at most `numbers` numbers of [rows, vocabulary]."""
    step = max(1, numbers // vocabulary)
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]
