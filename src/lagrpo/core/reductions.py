"""Reductions: from the lengths of all completions of a batch to one weight per completion, such that

    loss = - sum over tokens t of  weight_C[completion_T[t]] * value_T[t].

The weights hold the normalizer, which belongs to the whole optimizer step. Splitting the batch into micro-batches
splits a sum: it cannot change the gradient.

`lengths_C` counts completion tokens. `kept_C` says which completions are in the objective; the others have weight 0.
`counted_C` says which completions enter the normalizer: `kept_C` itself (masked tokens do not count, the default of
every recipe) or all of them (masked tokens count). With nothing to count all weights are 0. All functions raise
ValueError on shapes, for empty completions, and for a completion that is kept but not counted.
"""

import torch
from torch import Tensor

from lagrpo.core.shapes import BoolC, FloatC, IntC, require_vector


def token_mean(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC) -> FloatC:
    """1 / (tokens counted): the mean over the tokens of the batch, long completions weighing more
    (DAPO, Yu et al., arXiv 2503.14476, Eq. 8)."""
    return _weights(lengths_C, kept_C, counted_C, torch.ones_like(lengths_C), units_C=lengths_C)


def sequence_mean(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC) -> FloatC:
    """1 / (completions counted * own length): the mean over completions of the mean over their tokens
    (GRPO as published, Shao et al., arXiv 2402.03300, Eq. 3)."""
    return _weights(lengths_C, kept_C, counted_C, lengths_C)


def sequence_sum(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC) -> FloatC:
    """1 / (completions counted): the mean over completions of the *sum* over their tokens, the policy gradient of a
    whole completion (RLOO, Ahmadian et al., arXiv 2402.14740)."""
    return _weights(lengths_C, kept_C, counted_C, torch.ones_like(lengths_C))


def constant_length(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC, max_length: int) -> FloatC:
    """1 / (completions counted * max_length): the sum over tokens divided by a constant, so that the length of a
    completion cannot change the weight of its tokens (Dr. GRPO, Liu et al., arXiv 2503.20783). Raises ValueError also
    for a completion longer than max_length."""
    if max_length < 1 or bool((lengths_C > max_length).any()):
        wrong = "but a completion is longer (or it is < 1)"
        raise ValueError(f"constant_length divides by max_length = {max_length}, {wrong}")
    return _weights(lengths_C, kept_C, counted_C, torch.full_like(lengths_C, max_length))


def _weights(lengths_C: IntC, kept_C: BoolC, counted_C: BoolC, own_C: Tensor, units_C: Tensor | int = 1) -> Tensor:
    """1 / (own * sum of the units counted) for the completions that are kept."""
    require_vector(lengths_C=lengths_C, kept_C=kept_C, counted_C=counted_C)
    if bool((lengths_C < 1).any()):
        raise ValueError("every completion has at least one token, but lengths_C has one below 1")
    if bool((kept_C & ~counted_C).any()):
        raise ValueError("a completion that is kept in the objective must be counted in its normalizer")
    return kept_C.float() / (own_C * (units_C * counted_C).sum().clamp(min=1))
