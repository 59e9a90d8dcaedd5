"""Advantages of single tokens from a teacher: functions of `LossInputs` that give [T].

A recipe adds them, as numbers, to the advantage of the token's completion. With the advantage
`zero` the policy learns from the teacher alone: on-policy distillation.

The teacher is pi_ref. d = log student - log pi_ref is the difference at the sampled token, where
`student` is the policy that it is taken from: pi now, or alpha as it was recorded. A token gets
its d alone, and none of later tokens. tests/core/test_enumeration.py has the gradients
that they lead to on stale samples.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, TokenFunction, alpha, pi, pi_ref
from lagrpo.core.pieces import NonNegative
from lagrpo.core.ratios import limit, total


def reverse_kl(
    x: LossInputs, *, student: TokenFunction = pi, strength: NonNegative = 1.0
) -> Tensor:
    """-strength d: a reward whose policy gradient is the gradient of -KL(student || pi_ref)."""
    return -strength * (student(x) - pi_ref(x))


def reverse_kl_by_drift(
    x: LossInputs, *, student: TokenFunction = alpha, gamma: NonNegative = 0.5
) -> Tensor:
    """-(1 + gamma (1 - F)) d, F the share of the completion's |d| that lies before the token.

    IW-OPD (arXiv 2606.22600, Algorithm 1). The tokens of a completion stand side by side, in order.
    """
    d_T = student(x) - pi_ref(x)
    # In float64, because the sum runs over the whole micro-batch.
    size_T = d_T.abs().double()
    before_T = size_T.cumsum(0) - size_T
    # It never falls, so the first token of a completion has its smallest value.
    begin_C = before_T.new_full((len(x.advantages),), inf)
    begin_C = begin_C.scatter_reduce(0, x.completion, before_T, "amin")
    total_T = total(size_T, x.completion).clamp(min=1e-8)
    share_T = (before_T - begin_C[x.completion]) / total_T
    return -(1 + gamma * (1 - share_T)).to(d_T.dtype) * d_T


def forward_kl(
    x: LossInputs, *, student: TokenFunction = pi, strength: NonNegative = 1.0
) -> Tensor:
    """strength (pi_ref/student - 1): with the weight rho it estimates -grad KL(pi_ref || pi).

    The term -1 has no expected gradient, and makes the gradient 0 where student = pi_ref.
    """
    return strength * torch.expm1(limit(pi_ref(x) - student(x)))
