"""Nucleus sampling (top-p), for evaluations.

Training never samples so: the trainer learns from the whole distribution.
"""

from __future__ import annotations

import math

from torch import Tensor

CANDIDATES = 512
"""Tokens that are sorted at first. Nearly always the nucleus is smaller, and sorting all of a large
vocabulary at each step takes longer than the model."""


def keep_nucleus(logits: Tensor, tau: float, top_p: float) -> Tensor:
    """Returns the logits [R, V] with -inf outside of the nucleus of softmax(logits / tau).

    The nucleus is the smallest set of the most probable tokens whose probabilities sum to at least
    `top_p`. Tokens as probable as its last one belong to it, too, so that it does not depend on the
    order of equal ones. Source: Holtzman et al., arXiv 1904.09751.
    """
    if top_p >= 1:
        return logits
    probabilities = (logits.float() / tau).softmax(-1)  # [R, V]
    vocabulary = logits.shape[-1]
    threshold = _smallest_in_nucleus(probabilities, min(CANDIDATES, vocabulary), top_p)
    if threshold is None:
        threshold = _smallest_in_nucleus(probabilities, vocabulary, top_p)
        assert threshold is not None
    return logits.masked_fill(probabilities < threshold, -math.inf)


def _smallest_in_nucleus(probabilities: Tensor, candidates: int, top_p: float) -> Tensor | None:
    """Returns the probability [R, 1] of the last token of each nucleus.

    None if a nucleus has more tokens than `candidates`, and there are more.
    """
    largest = probabilities.topk(candidates, dim=-1).values  # [R, candidates], falling
    sums = largest.double().cumsum(-1)
    if candidates < probabilities.shape[-1] and bool((sums[:, -1] < top_p).any()):
        return None
    # A token is in the nucleus if the more probable ones before it do not reach top_p.
    is_inside = (sums - largest) < top_p
    last = is_inside.sum(-1, keepdim=True) - 1  # int64 [R, 1]: the first is always inside
    return largest.gather(-1, last)
