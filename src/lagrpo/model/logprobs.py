"""Log-probs of given tokens, and tokens sampled from logits.

The rollout engine samples from softmax(logits / tau) and the trainer differentiates it. Both take
the same sum of exponentials of the same rounded logits, so right after a weight sync the ratio π/α
is 1 up to rounding in float32. The C kernels, and on a GPU the Triton kernels, do it in one pass
over the logits as they are, and put the gradient in their place. PyTorch's operations make float32
copies a chunk at a time, so that memory is bounded however many tokens there are.

Chunks on a CPU are about as large as its caches. A GPU needs larger ones: it computes a product of
a few hundred rows at a third of its speed, and each chunk is a dozen launches.

Shapes: T tokens, or R rows of logits; H hidden size; V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.cpu.autograd import with_enough_rows


@dataclass(frozen=True, slots=True)
class Chunks:
    """The most numbers of [rows, V] that are in memory at a time.

    - `softmax`: float32 copies of logits
    - `product`: logits in the model's dtype
    - `sums_in_product`: True if the products of chunks, for the gradient of the weight, are added
      up in float32 as they are computed
    """

    softmax: int
    product: int
    sums_in_product: bool


# 32 MiB of float32, and 64 MiB of bfloat16.
ON_CPU = Chunks(softmax=1 << 23, product=1 << 25, sums_in_product=False)
# 512 MiB of float32, and 1 GiB of bfloat16.
ON_GPU = Chunks(softmax=1 << 27, product=1 << 29, sums_in_product=True)
# Numbers of logits that wait for the backward pass (256 MiB of bfloat16). Others are computed
# again.
KEPT_LOGITS = 1 << 27
# The cumulative distribution is searched first over blocks of this many tokens.
CDF_BLOCK = 256

# Computes logits from rows [n, H] into the second argument [n, V], and returns it.
Product = Callable[[Tensor, Tensor], Tensor]


class SoftmaxKernels(Protocol):
    """Kernels of the softmax over the vocabulary: the modules cpu.kernels and gpu.softmax."""

    def token_logp(
        self, logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-probs of tokens and the log-sum-exp of each row: float32 [rows] each."""
        ...

    def token_logp_backward(
        self,
        logits: Tensor,
        token_ids: Tensor,
        tau: float,
        lse: Tensor,
        grad: Tensor,
        entropy: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        """Overwrites the logits [rows, V] by their gradient, and returns them."""
        ...

    def sample_tokens(self, logits: Tensor, tau: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens, int64 [rows], and their log-probs, float32 [rows]."""
        ...


def token_logp(
    hidden_TH: Tensor,
    head: nn.Linear,
    token_ids_T: Tensor,
    tau: float,
    entropy_T: Tensor | None = None,
    softmax: SoftmaxKernels | None = None,
    product: Product | None = None,
    sizes: Chunks | None = None,
) -> Tensor:
    """Returns log softmax(head(hidden) / tau)[token] for each row: float32 [T], nats.

    It is differentiable in hidden and the head's parameters. `entropy_T`, float32 [T], is filled
    with the entropy of each softmax, nats, and is then differentiable too. `softmax` and `product`
    compute the softmax and the logits instead of PyTorch's operations. `sizes` replaces the
    device's chunks. Raises ValueError for a token outside the vocabulary.
    """
    vocabulary = head.weight.shape[0]
    # The kernels do not check the bounds.
    is_outside = (token_ids_T < 0) | (token_ids_T >= vocabulary)
    outside = token_ids_T[is_outside]
    if len(outside) > 0:
        raise ValueError(
            f"token {int(outside[0])} is outside the model's vocabulary of {vocabulary}"
        )
    num_kept = 0
    if torch.is_grad_enabled():
        num_kept = min(len(token_ids_T), KEPT_LOGITS // vocabulary)
    if sizes is None:
        sizes = ON_GPU if hidden_TH.is_cuda else ON_CPU
    options = _Options(tau, softmax, product, num_kept, sizes)
    # The second result is `entropy_T` itself.
    logp, _ = _TokenLogp.apply(  # type: ignore[misc]
        hidden_TH, head.weight, head.bias, token_ids_T, entropy_T, options
    )
    return logp


# The softmax by PyTorch's operations, as the kernels offer it


def scaled(logits: Tensor, tau: float) -> Tensor:
    """Returns float32 logits / tau, from logits in the model's dtype."""
    if tau == 1.0:
        return logits.float()
    return logits.float() / tau


def exponentials(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the exponentials of logits that are divided by tau, and the log of their sum.

    For each row x these are exp(x - max x), float32 [rows, V], and log Σ_v exp(x_v), float32
    [rows].
    """
    largest = scaled.amax(-1)  # [rows]
    weights = (scaled - largest.unsqueeze(-1)).exp_()  # [rows, V]
    return weights, largest + weights.sum(-1).log_()


def logp_forward(
    logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Computes what SoftmaxKernels.token_logp does, with at most `chunk` float32 logits at a time.

    Returns the log-probs of the tokens and the log-sum-exp of each row: float32 [T] each.
    """
    logp = torch.empty(len(token_ids), dtype=torch.float32, device=logits.device)
    log_sum_exp = torch.empty_like(logp)
    for rows in chunks(0, len(logits), logits.shape[1], chunk):
        x = scaled(logits[rows], tau)  # [rows, V]
        # No name for the exponentials [rows, V], so that their memory is free at once.
        log_sum_exp[rows] = exponentials(x)[1]
        x_of_token = x.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1)  # [rows]
        logp[rows] = x_of_token - log_sum_exp[rows]
        if entropy is not None:
            entropy[rows] = _entropy(x, log_sum_exp[rows])
    return logp, log_sum_exp


def _entropy(x: Tensor, log_sum_exp: Tensor) -> Tensor:
    """Returns the entropy of softmax(x) of each row, from its log-sum-exp: float32 [rows], nats."""
    p = (x - log_sum_exp.unsqueeze(1)).exp_()  # [rows, V]
    return torch.special.entr(p).sum(1)


def logp_backward(
    logits: Tensor,
    token_ids: Tensor,
    tau: float,
    lse: Tensor,
    grad: Tensor,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    *,
    chunk: int,
) -> Tensor:
    """Computes what SoftmaxKernels.token_logp_backward does.

    It has at most `chunk` float32 logits at a time.

    Puts the gradient of the logits in their place: g / tau · (onehot - softmax) for a row with
    gradient g. `lse` is the log-sum-exp of each row. A row whose entropy H has the gradient e also
    gets -e / tau · softmax · (log softmax + H).
    """
    vocabulary = logits.shape[1]
    # Where each row begins in the flat logits.
    row_starts = torch.arange(len(logits), device=logits.device) * vocabulary
    for rows in chunks(0, len(logits), vocabulary, chunk):
        g = (grad[rows] / tau).unsqueeze(1)  # [rows, 1]
        log_p = scaled(logits[rows], tau) - lse[rows].unsqueeze(1)  # [rows, V]
        if entropy is not None and grad_entropy is not None:
            e = (grad_entropy[rows] / tau).unsqueeze(1)  # [rows, 1]
            p = log_p.exp()
            # An impossible token has p = 0 and log p = -inf, whose product would be NaN.
            slope = log_p.add_(entropy[rows].unsqueeze(1)).mul_(p).masked_fill_(p == 0, 0.0)
            grad_logits = p.mul_(-g).sub_(slope.mul_(e))
        else:
            grad_logits = log_p.exp_().mul_(-g)
        grad_of_token = grad_logits.gather(1, token_ids[rows].unsqueeze(1)) + g  # [rows, 1]
        logits[rows] = grad_logits
        # A scatter would add g to its token. On a GPU it sorts if sums must be in a fixed order,
        # although here no two numbers meet. So the one number of each row is put in its place.
        token_places = row_starts[rows] + token_ids[rows]
        logits.view(-1)[token_places] = grad_of_token.squeeze(1).to(logits.dtype)
    return logits


def sample_tokens(logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Samples tokens from softmax(logits / tau) by inverse CDF at uniform_R, float64 in [0, 1).

    Returns the tokens, int64 [R], and their log-probs, float32 [R] (nats). There are two levels:
    sums of blocks in float64, then the cumulative sum inside the chosen block. So a token's
    interval of uniform numbers is exact to about 1e-7 of its probability.
    """
    scaled_RV = scaled(logits_RV, tau)
    rows, vocabulary = scaled_RV.shape
    weights, log_sum = exponentials(scaled_RV)
    if vocabulary % CDF_BLOCK:
        weights = F.pad(weights, (0, -vocabulary % CDF_BLOCK))
    blocks = weights.view(rows, -1, CDF_BLOCK)  # [R, blocks, CDF_BLOCK]

    # The block in which the cumulative sum passes `target`.
    block_ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, blocks]
    target = (uniform_R * block_ends[:, -1]).unsqueeze(1)  # [R, 1]
    block = torch.searchsorted(block_ends, target, right=True)  # int64 [R, 1]
    block.clamp_(max=block_ends.shape[1] - 1)
    end_before = block_ends.gather(1, (block - 1).clamp(min=0))
    start = torch.where(block > 0, end_before, 0.0)  # [R, 1]: the cumulative sum before the block

    # The token inside the block.
    block_index = block.unsqueeze(-1).expand(-1, -1, CDF_BLOCK)
    inside = blocks.gather(1, block_index).squeeze(1)  # [R, CDF_BLOCK]
    token_ends = inside.double().cumsum(-1)
    offset = torch.searchsorted(token_ends, target - start, right=True)  # int64 [R, 1]
    # Rounding must not pick a token of probability 0 behind the last one that has any.
    num_zeros_behind = inside.flip(-1).gt(0).int().argmax(-1, keepdim=True)
    last = CDF_BLOCK - 1 - num_zeros_behind
    token = (block * CDF_BLOCK + torch.minimum(offset, last)).squeeze(1)  # int64 [R]

    logp = scaled_RV.gather(1, token.unsqueeze(1)).squeeze(1) - log_sum
    return token, logp


# The head, its softmax and their gradient, piece by piece


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `token_logp` that have no gradient.

    `num_kept` is the number of rows whose logits wait for the backward pass.
    """

    tau: float
    softmax: SoftmaxKernels | None
    product: Product | None
    num_kept: int
    sizes: Chunks


class _TokenLogp(torch.autograd.Function):
    """The head, its softmax and their gradient, piece by piece.

    The logits of the first `num_kept` rows are kept for the backward pass, if autograd may ask for
    one; the others are computed again.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        entropy: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        num_kept = options.num_kept
        forward_of_softmax, ctx.backward_of_softmax = _softmax(options.softmax, options.sizes)
        vocabulary = weight.shape[0]
        logp = torch.empty(len(token_ids), dtype=torch.float32, device=hidden.device)  # [T]
        log_sum_exp = torch.empty_like(logp)
        ctx.kept_logits = None
        if num_kept > 0:
            ctx.kept_logits = _buffer("kept", (num_kept, vocabulary), weight, taken=True)
        for rows in _kept_and_chunks(num_kept, len(token_ids), vocabulary, options.sizes.product):
            out = ctx.kept_logits if rows.stop <= num_kept else None
            logits = _logits(hidden[rows], weight, bias, options.product, out)  # [rows, V]
            logp[rows], log_sum_exp[rows] = forward_of_softmax(
                logits, token_ids[rows], options.tau, _rows_of(entropy, rows)
            )
            # Free memory before there is another chunk.
            del logits
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_sum_exp, entropy)
        if entropy is not None:
            # The caller's tensor gets the gradient that is defined below.
            ctx.mark_dirty(entropy)
        # A loss without the entropy gives it no gradient: None instead of zeros.
        ctx.set_materialize_grads(False)
        ctx.product = options.product
        ctx.tau = options.tau
        ctx.sizes = options.sizes
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp: Tensor | None, grad_entropy: Tensor | None):  # type: ignore[override]
        hidden, weight, bias, token_ids, log_sum_exp, entropy = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(log_sum_exp)
        grad_logp = grad_logp.contiguous()  # [T]
        if grad_entropy is not None:
            grad_entropy = grad_entropy.contiguous()  # [T]
        grad_hidden = torch.empty_like(hidden)  # [T, H]
        grad_bias = None
        if bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)  # [V]

        # The gradient overwrites the kept logits. A second backward pass computes them again.
        kept_logits = ctx.kept_logits
        ctx.kept_logits = None
        num_kept = 0 if kept_logits is None else len(kept_logits)
        pieces = _kept_and_chunks(num_kept, len(token_ids), weight.shape[0], ctx.sizes.product)

        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = _WeightGradient(
                weight, len(pieces), sums_in_product=ctx.sizes.sums_in_product
            )

        for rows in pieces:
            if kept_logits is not None and rows.stop <= num_kept:
                logits = kept_logits
            else:
                logits = _logits(hidden[rows], weight, bias, ctx.product)  # [rows, V]
            # The gradient of the logits, in their place.
            grad_logits = ctx.backward_of_softmax(
                logits,
                token_ids[rows],
                ctx.tau,
                log_sum_exp[rows],
                grad_logp[rows],
                _rows_of(entropy, rows),
                _rows_of(grad_entropy, rows),
            )
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if weight_gradient is not None:
                weight_gradient.add_piece(grad_logits, hidden[rows])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            # Free memory before there is another chunk.
            del logits, grad_logits

        if kept_logits is not None:
            _return_buffer("kept", kept_logits)
        if bias is not None and grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        grad_weight = None if weight_gradient is None else weight_gradient.result()
        # The token ids, the room for the entropy and the options have no gradient.
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _rows_of(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


class _WeightGradient:
    """The gradient of the head's weight [V, H]: the sum over pieces of grad_logitsᵀ · hidden.

    A single piece is its product. Several are added up in float32, and rounded once. With
    `sums_in_product` the matrix product adds to the sum directly; else each product is first
    written to a buffer in the weight's dtype, which rounds it.
    """

    def __init__(self, weight: Tensor, num_pieces: int, *, sums_in_product: bool) -> None:
        self._dtype = weight.dtype
        # The sum so far, and the product of one piece: [V, H] each.
        self._total: Tensor | None = None
        self._product: Tensor | None = None
        if num_pieces == 1:
            self._product = torch.empty_like(weight)
            return
        self._total = _buffer("gradient", weight.shape, weight, torch.float32).zero_()
        if not sums_in_product:
            self._product = _buffer("share", weight.shape, weight)

    def add_piece(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Adds the product of rows: grad_logits [rows, V] and hidden [rows, H]."""
        if self._product is not None:
            torch.mm(grad_logits.mT, hidden, out=self._product)
            if self._total is not None:
                self._total += self._product
        elif self._total is not None:
            add_product(self._total, grad_logits.mT, hidden)

    def result(self) -> Tensor | None:
        """Returns the gradient [V, H] in the weight's dtype. It shares no memory with a buffer."""
        if self._total is None:
            return self._product
        # A copy, because the sum is in a buffer.
        return self._total.to(self._dtype, copy=True)


# Logits [rows, V], tokens int64 [rows], tau, room for entropies [rows] or None -> log-probs and
# log-sum-exps, float32 [rows] each.
SoftmaxForward = Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]
# Logits [rows, V], tokens, tau, log-sum-exps, gradients of log-probs [rows], entropies and their
# gradients [rows] or None -> gradient of logits.
SoftmaxBackward = Callable[
    [Tensor, Tensor, float, Tensor, Tensor, Tensor | None, Tensor | None], Tensor
]


def _softmax(
    kernels: SoftmaxKernels | None, sizes: Chunks
) -> tuple[SoftmaxForward, SoftmaxBackward]:
    """Returns two functions: the log-probs of tokens, and the gradient of logits.

    Kernels compute them, or PyTorch's operations.
    """
    if kernels is not None:
        return kernels.token_logp, kernels.token_logp_backward
    return (
        partial(logp_forward, chunk=sizes.softmax),
        partial(logp_backward, chunk=sizes.softmax),
    )


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a [n, m] · b [m, k] to `total` [n, k] in float32.

    The product is not rounded to the dtype of a and b.
    """
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
    """Returns hidden · weightᵀ + bias [rows, V], in `out`.

    Without `out` the logits are in a buffer that the next call overwrites.
    """
    if out is None:
        out = _buffer("logits", (len(hidden), weight.shape[0]), weight)
    if product is not None:
        return product(hidden, out)
    enough = with_enough_rows(hidden)
    if enough is not hidden:
        return out.copy_(F.linear(enough, weight, bias)[: len(hidden)])
    if bias is not None:
        return torch.addmm(bias, hidden, weight.mT, out=out)
    return torch.mm(hidden, weight.mT, out=out)


def _kept_and_chunks(num_kept: int, rows: int, vocabulary: int, numbers: int) -> list[slice]:
    """Returns the rows whose logits are kept, as one piece, and chunks of the other rows."""
    pieces = chunks(num_kept, rows, vocabulary, numbers)
    if num_kept > 0:
        return [slice(0, num_kept), *pieces]
    return pieces


def chunks(start: int, stop: int, vocabulary: int, numbers: int) -> list[slice]:
    """Returns pieces of the rows start .. stop, of at most `numbers` numbers of [rows, V] each."""
    step = max(1, numbers // vocabulary)
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


_buffers = threading.local()


def _buffer(
    use: str,
    shape: Sequence[int],
    like: Tensor,
    dtype: torch.dtype | None = None,
    *,
    taken: bool = False,
) -> Tensor:
    """Returns memory with anything in it: a tensor of `shape` on the device of `like`.

    On a CPU the memory is kept for a use, because clearing fresh pages takes as long as the
    products that fill them. With `taken` no other call gets the memory until it is returned (or
    forgotten).
    """
    numbers = math.prod(shape)
    dtype = dtype or like.dtype
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
    """Keeps memory that was `taken` for the next call. On a GPU PyTorch keeps it."""
    if buffer.is_cuda:
        return
    # The buffer may be a part of the memory.
    num_elements = buffer.untyped_storage().nbytes() // buffer.element_size()
    _buffers.__dict__[use] = buffer.as_strided((num_elements,), (1,), 0)
