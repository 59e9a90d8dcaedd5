"""Reductions: from the lengths of all completions of a batch to one weight per completion, such that

    loss = - sum over tokens t of  weight_C[completion_T[t]] * value_T[t].

The weights hold the normalizer, which belongs to the whole optimizer step. Splitting the batch into micro-batches
splits a sum: it cannot change the gradient.

`lengths_C` counts completion tokens. `kept_C` says which completions are in the objective; the others have weight 0.
`counted_C` says which completions enter the normalizer: `kept_C` itself (masked tokens do not count, the default of
every recipe) or all of them (masked tokens count). A kept completion must be counted. With nothing to count all weights
are 0.
"""

import torch
from torch import Tensor

from lagrpo.core.shapes import BoolC, FloatC, IntC, require_vector


def token_mean(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC) -> FloatC:
    """1 / (tokens counted): the mean over the tokens of the batch, long completions weighing more
    (DAPO, Yu et al., arXiv 2503.14476, Eq. 8). Raises ValueError on shapes, empty completions, kept but not counted."""
    _check(lengths_C, kept_C, counted_C)
    return _weights(torch.ones_like(lengths_C), (lengths_C * counted_C).sum(), kept_C)


def sequence_mean(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC) -> FloatC:
    """1 / (completions counted * own length): the mean over completions of the mean over their tokens
    (GRPO as published, Shao et al., arXiv 2402.03300, Eq. 3). Raises as `token_mean` does."""
    _check(lengths_C, kept_C, counted_C)
    return _weights(lengths_C, counted_C.sum(), kept_C)


def sequence_sum(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC) -> FloatC:
    """1 / (completions counted): the mean over completions of the *sum* over their tokens, the policy gradient of a
    whole completion (RLOO, Ahmadian et al., arXiv 2402.14740). Raises as `token_mean` does."""
    _check(lengths_C, kept_C, counted_C)
    return _weights(torch.ones_like(lengths_C), counted_C.sum(), kept_C)


def constant_length(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC, max_length: int) -> FloatC:
    """1 / (completions counted * max_length): the sum over tokens divided by a constant, so that the length of a
    completion cannot change the weight of its tokens (Dr. GRPO, Liu et al., arXiv 2503.20783).
    Raises as `token_mean` does, and for a completion longer than max_length."""
    _check(lengths_C, kept_C, counted_C)
    if max_length < 1 or bool((lengths_C > max_length).any()):
        raise ValueError(
            f"constant_length divides by max_length = {max_length}, but a completion is longer (or it is < 1)"
        )
    return _weights(torch.full_like(lengths_C, max_length), counted_C.sum(), kept_C)


def _weights(own_C: Tensor, shared: Tensor, kept_C: Tensor) -> Tensor:
    return kept_C.float() / (own_C * shared.clamp(min=1))


def _check(lengths_C: Tensor, kept_C: Tensor, counted_C: Tensor) -> None:
    require_vector(lengths_C=lengths_C, kept_C=kept_C, counted_C=counted_C)
    if bool((lengths_C < 1).any()):
        raise ValueError("every completion has at least one token, but lengths_C has one below 1")
    if bool((kept_C & ~counted_C).any()):
        raise ValueError("a completion that is kept in the objective must be counted in its normalizer")
