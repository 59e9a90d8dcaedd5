"""Reductions: from the lengths of all completions of a batch to one weight per completion.

    loss = - sum over tokens t of  weight_C[completion_T[t]] * value_T[t]

The weights hold the normalizer of the whole optimizer step, so splitting the batch into
micro-batches splits a sum.

    lengths_C    sampled tokens of each completion, at least 1
    counted_C    True for the completions that enter the normalizer
    max_length   the most tokens that a completion may have
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(lengths_C: Tensor, counted_C: Tensor, max_length: int) -> Tensor:
    """1 / (tokens counted): the mean over the tokens of the batch.

    Long completions weigh more (DAPO, arXiv 2503.14476, Eq. 8).
    """
    return 1 / (torch.ones_like(lengths_C) * _at_least_1(lengths_C * counted_C))


def sequence_mean(lengths_C: Tensor, counted_C: Tensor, max_length: int) -> Tensor:
    """1 / (completions counted * own length): the mean over completions of their token means.

    GRPO as published (arXiv 2402.03300, Eq. 3).
    """
    return 1 / (lengths_C * _at_least_1(counted_C))


def sequence_sum(lengths_C: Tensor, counted_C: Tensor, max_length: int) -> Tensor:
    """1 / (completions counted): the mean over completions of the *sum* over their tokens.

    It is the policy gradient of a whole completion (RLOO, arXiv 2402.14740).
    """
    return 1 / (torch.ones_like(lengths_C) * _at_least_1(counted_C))


def constant_length(lengths_C: Tensor, counted_C: Tensor, max_length: int) -> Tensor:
    """1 / (completions counted * max_length): the sum over tokens over a constant.

    The length of a completion cannot change the weight of its tokens (Dr. GRPO, arXiv 2503.20783).
    """
    return 1 / (torch.full_like(lengths_C, max_length) * _at_least_1(counted_C))


def _at_least_1(counts_C: Tensor) -> Tensor:
    """The sum, but 1 if nothing is counted: the weights of an empty batch stay finite."""
    return counts_C.sum().clamp(min=1)
