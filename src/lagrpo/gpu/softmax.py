"""The softmax over the vocabulary by Triton kernels: log-probs of tokens, their gradient, sampling.

The functions are twins of `token_logp`, `token_logp_backward` and `sample_tokens` in
cpu/kernels.py: same arguments, same results. Logits are float32 or bfloat16 in memory; all
arithmetic is in float32, and the search for a sampled token in float64.

Three facts about the bits:

- A row is summed by programs whose number and order depend on the vocabulary alone. So a row's
  log-prob does not depend on the rows around it.
- Trainer and sampler add the blocks of a row in the same order (`_add_block`). So `sample_tokens`
  returns the log-prob that `token_logp` gives.
- Nothing is tuned by timing, and nothing is added by atomics. So every run gives the same bits.

Notation: x is a row of logits divided by the temperature tau. V is the vocabulary, BLOCK the number
of logits that a program has in registers, BLOCKS the number of blocks in a row, rounded up to a
power of two. A tensor over the blocks of a row is called `…_of_block`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lagrpo.gpu.common import STRICT, exp

# 8 warps of 32 threads with 16 logits each: two loads of 16 bytes in bfloat16. With larger blocks a
# thread needs more than 64 registers, so fewer programs are resident to hide the loads. Smaller
# blocks reduce across the warps more often, and each reduction costs a barrier.
BLOCK = 4096
LAUNCH: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 8, **STRICT}

# The least float32. It stands for the maximum of a block in which no token is possible.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# Pieces that the kernels share


@triton.jit
def _load_block(row_ptr, block, vocabulary, inverse_tau, BLOCK: tl.constexpr):
    """Loads block number `block` of a row of logits.

    Returns x - max x [BLOCK], exp(x - max x) [BLOCK] and max x, a scalar.
    """
    column = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    logits = tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf"))
    x = logits.to(tl.float32) * inverse_tau
    # A finite maximum: -inf - LOWEST is -inf, while -inf - (-inf) would be NaN.
    largest = tl.maximum(tl.max(x, 0), LOWEST)
    gap = x - largest
    return gap, exp(gap), largest


@triton.jit
def _add_block(largest, total, largest_of_block, sum_of_block):
    """Adds a block to the running sum of a row.

    The running sum is (`largest`, `total`): Σ exp(x) = exp(largest) · total over the blocks so far.
    The block is (`largest_of_block`, `sum_of_block`) in the same form. Returns the new running sum,
    the rise of the maximum, and exp(-|rise|), the factor by which the smaller of the two was
    scaled.
    """
    rise = largest_of_block - largest
    scale = exp(-tl.abs(rise))
    total = tl.where(rise > 0, total * scale + sum_of_block, total + sum_of_block * scale)
    return tl.maximum(largest, largest_of_block), total, rise, scale


# Log-probs of given tokens


@triton.jit
def _token_logp_kernel(
    logits_ptr,  # [rows, V]
    tokens_ptr,  # int64 [rows]
    log_sum_exp_ptr,  # float32 [rows], written
    logp_ptr,  # float32 [rows], written
    entropy_ptr,  # float32 [rows], written if ENTROPY
    vocabulary,
    inverse_tau,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one row per program, and reads its logits once.

    With m = max x, S = Σ exp(x - m) and M = Σ exp(x - m) (x - m):

        log-sum-exp  = m + log S
        log p(token) = x[token] - log-sum-exp
        entropy      = -Σ p log p = log S - M / S
    """
    # int64, because rows · V exceeds 2^31.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocabulary
    largest = tl.full([], LOWEST, tl.float32)  # m of the blocks so far
    total = tl.full([], 0.0, tl.float32)  # S of the blocks so far
    moment = tl.full([], 0.0, tl.float32)  # M of the blocks so far
    for block in range(0, tl.cdiv(vocabulary, BLOCK)):
        gap, e, largest_of_block = _load_block(row_ptr, block, vocabulary, inverse_tau, BLOCK)
        sum_of_block = tl.sum(e, 0)
        total_before = total
        largest, total, rise, scale = _add_block(largest, total, largest_of_block, sum_of_block)
        if ENTROPY:
            # An impossible token has e = 0 and gap = -inf, whose product would be NaN. So would
            # be a block without a possible token, with scale = 0 and an infinite rise.
            moment_of_block = tl.sum(tl.where(e == 0, 0.0, e * gap), 0)
            # If m rises by r, then M becomes scale · (M - r S).
            moved = tl.where(scale == 0, 0.0, scale * (moment - rise * total_before))
            # If m stays, the moment of the block is relative to a maximum that is r too low.
            added = tl.where(scale == 0, 0.0, scale * (moment_of_block + rise * sum_of_block))
            moment = tl.where(rise > 0, moved + moment_of_block, moment + added)
    log_sum_exp = largest + tl.log(total)
    token = tl.load(tokens_ptr + row)
    x_of_token = tl.load(row_ptr + token).to(tl.float32) * inverse_tau
    tl.store(log_sum_exp_ptr + row, log_sum_exp)
    tl.store(logp_ptr + row, x_of_token - log_sum_exp)
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.log(total) - moment / total)


def token_logp(
    logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(logits / tau)[token] and the log-sum-exp of each row.

    The logits [rows, V] are contiguous; both results are float32 [rows], in nats. `entropy`,
    float32 [rows], is filled with the entropy of each softmax, in nats.
    """
    rows, vocabulary = logits.shape
    logp = torch.empty(rows, dtype=torch.float32, device=logits.device)
    log_sum_exp = torch.empty_like(logp)
    if rows > 0:
        _token_logp_kernel[(rows,)](
            logits,
            token_ids,
            log_sum_exp,
            logp,
            entropy,
            vocabulary,
            1.0 / tau,
            ENTROPY=entropy is not None,
            **LAUNCH,
        )
    return logp, log_sum_exp


@triton.jit
def _token_logp_backward_kernel(
    logits_ptr,  # [rows, V], overwritten by their gradient
    tokens_ptr,  # int64 [rows]
    log_sum_exp_ptr,  # float32 [rows]
    grad_ptr,  # float32 [rows]: the gradient of the log-probs
    entropy_ptr,  # float32 [rows], read if ENTROPY
    grad_entropy_ptr,  # float32 [rows], read if ENTROPY: the gradient of the entropies
    vocabulary,
    inverse_tau,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one block of one row per program.

    The gradient of logit v is grad / tau · (1{v = token} - p_v). With ENTROPY it also has
    -grad_entropy / tau · p_v (log p_v + entropy).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < vocabulary
    block_ptr = logits_ptr + row * vocabulary + column
    grad = tl.load(grad_ptr + row) * inverse_tau
    x = tl.load(block_ptr, mask=inside, other=0.0).to(tl.float32) * inverse_tau
    log_p = x - tl.load(log_sum_exp_ptr + row)
    p = exp(log_p)
    is_token = column == tl.load(tokens_ptr + row)
    grad_logits = tl.where(is_token, grad * (1.0 - p), -grad * p)
    if ENTROPY:
        grad_entropy = tl.load(grad_entropy_ptr + row) * inverse_tau
        slope = p * (log_p + tl.load(entropy_ptr + row))
        # An impossible token has p = 0 and log p = -inf, whose product would be NaN.
        grad_logits -= grad_entropy * tl.where(p == 0, 0.0, slope)
    tl.store(block_ptr, grad_logits, mask=inside)


def token_logp_backward(
    logits: Tensor,
    token_ids: Tensor,
    tau: float,
    lse: Tensor,
    grad: Tensor,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """Overwrites the logits [rows, V] by their gradient grad / tau · (onehot - softmax).

    `lse` is the log-sum-exp of each row, `grad` the gradient of its log-prob: float32 [rows] each.
    `entropy` and `grad_entropy`, its gradient, come together: they add -grad_entropy / tau ·
    softmax · (log softmax + entropy). Returns the logits.
    """
    rows, vocabulary = logits.shape
    if rows > 0:
        grid = (rows, triton.cdiv(vocabulary, BLOCK))
        _token_logp_backward_kernel[grid](
            logits,
            token_ids,
            lse,
            grad,
            entropy,
            grad_entropy,
            vocabulary,
            1.0 / tau,
            ENTROPY=grad_entropy is not None,
            **LAUNCH,
        )
    return logits


# Sampling
#
# A token is found by inverting the cumulative distribution: first the block, then the token inside
# it. Two kernels do it. The first has one program per block of each row: a decoding step has a
# hundred rows, and one program per row would leave most of the GPU without work. The second has one
# program per row.


@triton.jit
def _block_sums_kernel(
    logits_ptr,  # [rows, V]
    largest_ptr,  # float32 [rows, BLOCKS], written: max x of each block
    sums_ptr,  # float32 [rows, BLOCKS], written: Σ exp(x - max x) of each block
    exact_sums_ptr,  # float64 [rows, BLOCKS], written: the same sum in float64
    vocabulary,
    inverse_tau,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sums one block of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row_ptr = logits_ptr + row * vocabulary
    _, e, largest_of_block = _load_block(row_ptr, block, vocabulary, inverse_tau, BLOCK)
    place = row * BLOCKS + block
    tl.store(largest_ptr + place, largest_of_block)
    # As the trainer sums the block.
    tl.store(sums_ptr + place, tl.sum(e, 0))
    # Exact enough to tell apart neighbors in a vocabulary of 150,000.
    tl.store(exact_sums_ptr + place, tl.sum(e.to(tl.float64), 0))


@triton.jit
def _first_beyond(ends, masses, target, SIZE: tl.constexpr):
    """Returns the first index whose cumulative mass exceeds `target`.

    `ends` are the cumulative sums of `masses`, both float64 [SIZE]. If rounding leaves no such
    index, it is the last one that has a mass. An index without a mass is never returned.
    """
    index = tl.arange(0, SIZE)
    first = tl.min(tl.where((ends > target) & (masses > 0), index, SIZE), 0)
    last = tl.max(tl.where(masses > 0, index, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def _draw_kernel(
    logits_ptr,  # [rows, V]
    uniform_ptr,  # float64 [rows]
    largest_ptr,  # float32 [rows, BLOCKS]
    sums_ptr,  # float32 [rows, BLOCKS]
    exact_sums_ptr,  # float64 [rows, BLOCKS]
    tokens_ptr,  # int64 [rows], written
    logp_ptr,  # float32 [rows], written
    vocabulary,
    inverse_tau,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Finds the token of one row per program, from the sums of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocabulary
    num_blocks = tl.cdiv(vocabulary, BLOCK)

    # The log-sum-exp, with the trainer's bits: the same blocks in the same order.
    largest = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for number in range(0, num_blocks):
        place = row * BLOCKS + number
        largest_of_block = tl.load(largest_ptr + place)
        sum_of_block = tl.load(sums_ptr + place)
        largest, total, _, _ = _add_block(largest, total, largest_of_block, sum_of_block)
    log_sum_exp = largest + tl.log(total)

    # The block: masses are relative to exp(largest of the row).
    index = tl.arange(0, BLOCKS)
    places = row * BLOCKS + index
    is_block = index < num_blocks
    largest_of_block = tl.load(largest_ptr + places, mask=is_block, other=LOWEST)  # [BLOCKS]
    exact_sum = tl.load(exact_sums_ptr + places, mask=is_block, other=0.0)  # [BLOCKS]
    weight_of_block = exp(largest_of_block - largest).to(tl.float64)  # [BLOCKS]
    mass_of_block = exact_sum * weight_of_block
    target = tl.load(uniform_ptr + row) * tl.sum(mass_of_block, 0)
    block = _first_beyond(tl.cumsum(mass_of_block, 0), mass_of_block, target, BLOCKS)
    mass_before = tl.sum(tl.where(index < block, mass_of_block, 0.0), 0)
    weight = tl.sum(tl.where(index == block, weight_of_block, 0.0), 0)

    # The token inside the block.
    _, e, _ = _load_block(row_ptr, block, vocabulary, inverse_tau, BLOCK)
    mass = e.to(tl.float64) * weight  # [BLOCK]
    token = block * BLOCK + _first_beyond(mass_before + tl.cumsum(mass, 0), mass, target, BLOCK)

    x_of_token = tl.load(row_ptr + token).to(tl.float32) * inverse_tau
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, x_of_token - log_sum_exp)


def sample_tokens(logits: Tensor, tau: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples tokens from softmax(logits / tau) by inverse CDF at `uniform`, float64 [rows].

    The logits [rows, V] are contiguous. Returns the tokens, int64 [rows], and their log-probs,
    float32 [rows]: to the bit what `token_logp` gives for these tokens.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.long, device=device)
    logp = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return tokens, logp

    num_blocks = triton.cdiv(vocabulary, BLOCK)
    size = triton.next_power_of_2(num_blocks)  # BLOCKS of the kernels
    largest = torch.empty(rows, size, dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    exact_sums = torch.empty(rows, size, dtype=torch.float64, device=device)
    _block_sums_kernel[(rows, num_blocks)](
        logits, largest, sums, exact_sums, vocabulary, 1.0 / tau, BLOCKS=size, **LAUNCH
    )
    _draw_kernel[(rows,)](
        logits,
        uniform,
        largest,
        sums,
        exact_sums,
        tokens,
        logp,
        vocabulary,
        1.0 / tau,
        BLOCKS=size,
        **LAUNCH,
    )
    return tokens, logp
