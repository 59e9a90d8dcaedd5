"""Log-probs of given tokens, and tokens sampled from logits, by PyTorch's operations.

The sampler samples from softmax(logits / tau) and the learner differentiates it: both take the same sum of exponentials
of the same rounded logits, so right after a weight sync the ratio π/α is 1 up to rounding in float32. Memory is bounded
however many tokens there are: float32 copies of the logits are made a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 23  # float32 logits in hand: 32 MiB, about what a processor's cache holds
HELD_GRADIENTS = 1 << 26  # their gradients, in the model's dtype, gathered for one large matrix product: 128 MiB
CDF_BLOCK = 256  # the cumulative distribution is searched first over blocks of this many tokens

Product = Callable[[Tensor, Tensor], Tensor]  # (rows [n, H], where the result goes [n, V])


def exponentials(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - max x) of each row of logits divided by tau, and its log Σ_v exp(x_v): float32 [rows, V] and [rows]."""
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
    """log softmax(logits / tau)[token] of logits [T, V] in the model's dtype: float32 [T], differentiable."""
    x = scaled(logits, tau)
    return x.gather(1, token_ids_T.unsqueeze(1)).squeeze(1) - exponentials(x)[1]


def sample_tokens(logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens from softmax(logits / tau) by inverse CDF, and their log-probs: int64 [R], float32 [R] (nats). uniform_R
    float64 in [0, 1).

    Two levels: sums of blocks in float64, then the cumulative sum inside the chosen block, so a token's interval of
    uniform numbers is exact to about 1e-7 of its probability, wherever it lies in the vocabulary."""
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
    last = CDF_BLOCK - 1 - inside.flip(-1).gt(0).int().argmax(-1, keepdim=True)  # rounding must not pick a zero
    token = (block * CDF_BLOCK + torch.minimum(offset, last)).squeeze(1)
    return token, scaled_RV.gather(1, token.unsqueeze(1)).squeeze(1) - log_sum


def token_logp(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_ids_T: Tensor, tau: float,
    entropy_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """log softmax(logits / tau)[token] for each row: float32 [T], nats, differentiable in hidden, weight and bias.
    `entropy_T`, float32 [T] on the same device, is filled with the entropy of each softmax, nats, without a gradient.
    Raises as `check_tokens`."""
    check_tokens(hidden_TH, weight_VH, token_ids_T, tau)
    return _TokenLogp.apply(hidden_TH, weight_VH, bias_V, token_ids_T, tau, entropy_T)  # type: ignore[return-value]


def token_logp_by_module(
    hidden_TH: Tensor, head: nn.Linear, token_ids_T: Tensor, tau: float, entropy_T: Tensor | None = None
) -> Tensor:
    """The same through calls of the LM head, so that its hooks fire; a chunk's logits are computed again in the
    backward pass. Its weights' gradients from several chunks add up in their own dtype."""
    check_tokens(hidden_TH, head.weight, token_ids_T, tau)

    def of(hidden: Tensor, token_ids: Tensor) -> Tensor:
        return logp_from_logits(head(hidden), token_ids, tau)

    found = [hidden_TH.new_empty(0, dtype=torch.float32)]
    for rows in chunks(0, len(token_ids_T), head.weight.shape[0], CHUNK_LOGITS):
        given = hidden_TH[rows], token_ids_T[rows]
        found.append(checkpoint(of, *given, use_reentrant=False) if torch.is_grad_enabled() else of(*given))  # type: ignore[arg-type]
        if entropy_T is not None:
            with torch.no_grad():
                entropy_T[rows] = torch.special.entr(scaled(head(given[0]), tau).softmax(1)).sum(1)
    return torch.cat(found)


def check_tokens(hidden_TH: Tensor, weight_VH: Tensor, token_ids_T: Tensor, tau: float) -> None:
    """Raise ValueError for shapes that do not go together, a token outside the vocabulary, or tau that is not
    positive."""
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


class _TokenLogp(torch.autograd.Function):
    """Chunks of rows forward and again backward; the gradient of a row is g/tau · (onehot - softmax)."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, tau: float, entropy: Tensor | None
    ) -> Tensor:
        logp = torch.empty(len(token_ids), dtype=torch.float32, device=hidden.device)
        lse = torch.empty_like(logp)
        for rows in chunks(0, len(token_ids), weight.shape[0], CHUNK_LOGITS):
            x = scaled_logits(hidden[rows], weight, bias, tau)
            lse[rows] = exponentials(x)[1]
            logp[rows] = x.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1) - lse[rows]
            if entropy is not None:
                entropy[rows] = torch.special.entr(x.sub_(lse[rows].unsqueeze(1)).exp_()).sum(1)
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse)
        ctx.tau = tau
        return logp

    @staticmethod
    def backward(ctx, grad_logp: Tensor):  # type: ignore[override]
        hidden, weight, bias, token_ids, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        zeros = partial(torch.zeros, weight.shape, dtype=torch.float32, device=weight.device)
        grad_weight = zeros() if ctx.needs_input_grad[1] else None  # a head beside adapters is frozen
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for held in chunks(0, len(token_ids), weight.shape[0], HELD_GRADIENTS):
            dx, first = weight.new_empty(held.stop - held.start, weight.shape[0]), held.start
            for rows in chunks(held.start, held.stop, weight.shape[0], CHUNK_LOGITS):
                g = (grad_logp[rows] / ctx.tau).unsqueeze(1)
                p = scaled_logits(hidden[rows], weight, bias, ctx.tau).sub_(lse[rows].unsqueeze(1)).exp_().mul_(-g)
                dx[rows.start - first : rows.stop - first] = p.scatter_add_(1, token_ids[rows].unsqueeze(1), g)
            grad_hidden[held] = dx @ weight
            if grad_weight is not None:
                grad_weight += dx.mT @ hidden[held]
            if grad_bias is not None:
                grad_bias += dx.sum(0, dtype=torch.float32)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def chunks(start: int, stop: int, vocabulary: int, numbers: int) -> list[slice]:
    """Rows start .. stop cut into pieces of at most `numbers` numbers of [rows, vocabulary]."""
    step = max(1, numbers // vocabulary)
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]
