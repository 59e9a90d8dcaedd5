"""Log-probs of given tokens, and tokens sampled from logits.

The rollout engine samples from softmax(logits / tau) and the trainer differentiates it: both take the same sum of
exponentials of the same rounded logits, so right after a weight sync the ratio π/α is 1 up to rounding in float32. The
C kernels do it in one pass over the logits as they are, and put the gradient in their place. PyTorch's operations make
float32 copies a chunk at a time, so that memory is bounded however many tokens there are.

Chunks of a CPU are about as large as its caches. A GPU needs larger ones: it computes a product of a few hundred rows
at a third of its speed, and each chunk is a dozen launches.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.cpu import kernels


@dataclass(frozen=True, slots=True)
class Chunks:
    """The most numbers of [rows, V] that are in memory at a time."""

    softmax: int  # float32 copies of logits
    product: int  # logits in the model's dtype
    sums_in_product: bool
    """True if the products of chunks are added up in float32 as they are computed, for the gradient of the weight"""


ON_CPU = Chunks(softmax=1 << 23, product=1 << 25, sums_in_product=False)  # 32 and 64 MiB (bfloat16)
ON_GPU = Chunks(softmax=1 << 27, product=1 << 29, sums_in_product=True)  # 512 MiB and 1 GiB
KEPT_LOGITS = 1 << 27  # wait for the backward pass (256 MiB); those beyond are computed again
CDF_BLOCK = 256  # the cumulative distribution is searched first over blocks of this many tokens

Product = Callable[[Tensor, Tensor], Tensor]  # (rows [n, H], where the result goes [n, V])


def token_logp(
    hidden_TH: Tensor,
    head: nn.Linear,
    token_ids_T: Tensor,
    tau: float,
    entropy_T: Tensor | None = None,
    by_kernels: bool = False,
    product: Product | None = None,
    sizes: Chunks | None = None,
) -> Tensor:
    """log softmax(head(hidden) / tau)[token] for each row: float32 [T], nats, differentiable in hidden and the head's
    parameters. `entropy_T`, float32 [T], is filled with the entropy of each softmax, nats, without a gradient.
    `product` computes the logits instead of PyTorch's product. `sizes`: other chunks than the device's."""
    vocabulary = head.weight.shape[0]
    # the kernels do not look
    if len(strange := token_ids_T[(token_ids_T < 0) | (token_ids_T >= vocabulary)]):
        raise ValueError(
            f"token {int(strange[0])} is outside the model's vocabulary of {vocabulary}"
        )
    keep = min(len(token_ids_T), KEPT_LOGITS // vocabulary) if torch.is_grad_enabled() else 0
    sizes = sizes or (ON_GPU if hidden_TH.is_cuda else ON_CPU)
    tensors = hidden_TH, head.weight, head.bias, token_ids_T
    return _TokenLogp.apply(*tensors, tau, entropy_T, by_kernels, product, keep, sizes)  # type: ignore[return-value]


# ---- the softmax by PyTorch's operations, as the kernels offer it ----


def scaled(logits: Tensor, tau: float) -> Tensor:
    """float32 logits / tau, from logits in the model's dtype."""
    return logits.float() if tau == 1.0 else logits.float() / tau


def exponentials(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - max x) of each row of logits divided by tau, and its log Σ_v exp(x_v): float32 [rows, V] and [rows]."""
    top = scaled.amax(-1)
    weights = (scaled - top.unsqueeze(-1)).exp_()
    return weights, top + weights.sum(-1).log_()


def logp_forward(
    logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """As kernels.token_logp, with at most `chunk` float32 logits at a time."""
    logp = torch.empty(len(token_ids), dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(logp)
    for rows in chunks(0, len(logits), logits.shape[1], chunk):
        x = scaled(logits[rows], tau)
        lse[rows] = exponentials(x)[1]
        logp[rows] = x.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1) - lse[rows]
        if entropy is not None:
            entropy[rows] = torch.special.entr((x - lse[rows].unsqueeze(1)).exp_()).sum(1)
    return logp, lse


def logp_backward(
    logits: Tensor, token_ids: Tensor, tau: float, lse: Tensor, grad: Tensor, chunk: int
) -> Tensor:
    """As kernels.token_logp_backward, with at most `chunk` float32 logits at a time: the gradient of a row is
    g / tau · (onehot - softmax). A scatter would add g to its token; on a GPU it sorts if sums must be in a fixed
    order, although here no two numbers meet. So the one number of each row is computed apart, and put in its place."""
    vocabulary = logits.shape[1]
    starts = (
        torch.arange(len(logits), device=logits.device) * vocabulary
    )  # of the rows, in one line
    for rows in chunks(0, len(logits), vocabulary, chunk):
        g = (grad[rows] / tau).unsqueeze(1)  # [rows, 1]
        p = (scaled(logits[rows], tau) - lse[rows].unsqueeze(1)).exp_().mul_(-g)  # [rows, V]
        of_token = p.gather(1, token_ids[rows].unsqueeze(1)) + g
        logits[rows] = p
        logits.view(-1)[starts[rows] + token_ids[rows]] = of_token.squeeze(1).to(logits.dtype)
    return logits


def sample_tokens(logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens from softmax(logits / tau) by inverse CDF at uniform_R, float64 in [0, 1), and their log-probs: int64 [R],
    float32 [R] (nats). Two levels: sums of blocks in float64, then the cumulative sum inside the chosen block, so a
    token's interval of uniform numbers is exact to about 1e-7 of its probability."""
    scaled_RV = scaled(logits_RV, tau)
    rows, vocabulary = scaled_RV.shape
    weights, log_sum = exponentials(scaled_RV)
    if vocabulary % CDF_BLOCK:
        weights = F.pad(weights, (0, -vocabulary % CDF_BLOCK))
    padded = weights.view(rows, -1, CDF_BLOCK)
    block_ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniform_R * block_ends[:, -1]).unsqueeze(1)
    block = torch.searchsorted(block_ends, target, right=True).clamp_(max=block_ends.shape[1] - 1)
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, block.unsqueeze(-1).expand(-1, -1, CDF_BLOCK)).squeeze(1)
    ends = inside.double().cumsum(-1)
    offset = torch.searchsorted(ends, target - before, right=True)
    last = (
        CDF_BLOCK - 1 - inside.flip(-1).gt(0).int().argmax(-1, keepdim=True)
    )  # rounding must not pick a zero
    token = (block * CDF_BLOCK + torch.minimum(offset, last)).squeeze(1)
    return token, scaled_RV.gather(1, token.unsqueeze(1)).squeeze(1) - log_sum


# ---- the head, its softmax and their gradient, piece by piece ----


class _TokenLogp(torch.autograd.Function):
    """Keeps the logits of the first `keep` rows for the backward pass, if autograd may ask for one."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *asked: Any
    ) -> Tensor:
        tau, entropy_T, by_kernels, ctx.product, keep, sizes = asked
        forward, ctx.backward_of_softmax = _softmax(by_kernels, sizes)
        logp = torch.empty(len(token_ids), dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(logp)
        ctx.kept = _buffer("kept", (keep, weight.shape[0]), weight, taken=True) if keep else None
        for rows in _kept_and_chunks(keep, len(token_ids), weight.shape[0], sizes.product):
            out = ctx.kept if rows.stop <= keep else None
            logits = _logits(hidden[rows], weight, bias, ctx.product, out)
            entropy = None if entropy_T is None else entropy_T[rows]
            logp[rows], lse[rows] = forward(logits, token_ids[rows], tau, entropy)
            del logits  # before there is another chunk
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse)
        ctx.tau, ctx.sizes = tau, sizes
        return logp

    @staticmethod
    def backward(ctx, grad_logp: Tensor):  # type: ignore[override]
        hidden, weight, bias, token_ids, lse = ctx.saved_tensors
        grad_hidden, grad_logp = torch.empty_like(hidden), grad_logp.contiguous()
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        # overwritten below: another backward pass computes them again
        kept, ctx.kept = ctx.kept, None
        keep = 0 if kept is None else len(kept)
        pieces = _kept_and_chunks(keep, len(token_ids), weight.shape[0], ctx.sizes.product)
        # The gradient of the weight: the product of a single piece, else the sum of products in float32, to which a
        # piece adds its own `share` [V, H], or its product directly.
        total = share = None
        if ctx.needs_input_grad[1] and len(pieces) == 1:
            share = torch.empty_like(weight)
        elif ctx.needs_input_grad[1]:
            total = _buffer("gradient", weight.shape, weight, torch.float32).zero_()
            if not ctx.sizes.sums_in_product:
                share = _buffer("share", weight.shape, weight)
        for rows in pieces:
            logits = kept if kept is not None and rows.stop <= keep else None
            if logits is None:
                logits = _logits(hidden[rows], weight, bias, ctx.product)
            # the gradient of the logits, in their place
            dx = ctx.backward_of_softmax(
                logits, token_ids[rows], ctx.tau, lse[rows], grad_logp[rows]
            )
            torch.mm(dx, weight, out=grad_hidden[rows])
            if share is not None:
                torch.mm(dx.mT, hidden[rows], out=share)
                if total is not None:
                    total += share
            elif total is not None:
                add_product(total, dx.mT, hidden[rows])
            if grad_bias is not None:
                grad_bias += dx.sum(0, dtype=torch.float32)
            del logits, dx  # before there is another chunk
        if kept is not None:
            _return_buffer("kept", kept)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        grad_weight = share if total is None else total.to(weight.dtype, copy=True)
        return grad_hidden, grad_weight, grad_bias, *7 * (None,)


def _softmax(by_kernels: bool, sizes: Chunks) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The log-probs of tokens and the gradient of logits, by the C kernels or by PyTorch's operations."""
    if by_kernels:
        return kernels.token_logp, kernels.token_logp_backward
    return (
        partial(logp_forward, chunk=sizes.softmax),
        partial(logp_backward, chunk=sizes.softmax),
    )


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b in float32, where the product is not rounded to the dtype of a and b."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Product | None,
    out: Tensor | None = None,
) -> Tensor:
    """hidden · weightᵀ + bias [rows, V], in `out`; without it, until the next call."""
    out = _buffer("logits", (len(hidden), weight.shape[0]), weight) if out is None else out
    if product is not None:
        return product(hidden, out)
    return (
        torch.mm(hidden, weight.mT, out=out)
        if bias is None
        else torch.addmm(bias, hidden, weight.mT, out=out)
    )


def _kept_and_chunks(kept: int, rows: int, vocabulary: int, numbers: int) -> list[slice]:
    return [slice(0, kept)] * bool(kept) + chunks(kept, rows, vocabulary, numbers)


def chunks(start: int, stop: int, vocabulary: int, numbers: int) -> list[slice]:
    """Rows start .. stop cut into pieces of at most `numbers` numbers of [rows, vocabulary]."""
    step = max(1, numbers // vocabulary)
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


_buffers = threading.local()


def _buffer(
    use: str,
    shape: Sequence[int],
    like: Tensor,
    dtype: torch.dtype | None = None,
    taken: bool = False,
) -> Tensor:
    """Memory with anything in it, on a CPU kept for a use: clearing fresh pages takes as long as the products that fill
    them. `taken`: no other call gets it until it is returned (or forgotten)."""
    numbers, dtype = math.prod(shape), dtype or like.dtype
    buffer: Tensor | None = _buffers.__dict__.pop(use, None)
    if (
        buffer is None
        or buffer.numel() < numbers
        or buffer.dtype != dtype
        or like.device != buffer.device
    ):
        buffer = torch.empty(numbers, dtype=dtype, device=like.device)
    if not taken and not like.is_cuda:
        _buffers.__dict__[use] = buffer
    return buffer[:numbers].view(*shape)


def _return_buffer(use: str, buffer: Tensor) -> None:
    if not buffer.is_cuda:
        whole = buffer.untyped_storage().nbytes() // buffer.element_size()
        _buffers.__dict__[use] = buffer.as_strided((whole,), (1,), 0)
