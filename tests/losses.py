"""Inputs of losses, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs


def inputs(logp: Any, rollout: Any = None, old: Any = None, ref: Any = None, A: Any = 1.0,
           completion: Any = None, group: Any = None) -> LossInputs:  # fmt: skip
    """LossInputs from lists or tensors of log-probs. Each token is a completion unless `completion` says otherwise; A
    is the advantage of all completions or of each."""
    logp, rollout, old, ref = (
        None if x is None else torch.as_tensor(x) for x in (logp, rollout, old, ref)
    )
    completion = torch.arange(len(logp)) if completion is None else torch.as_tensor(completion)
    C = int(completion.max()) + 1
    advantages = (
        torch.as_tensor(A, dtype=logp.dtype).expand(C)
        if not isinstance(A, Sequence)
        else torch.tensor(A)
    )
    return LossInputs(
        logp,
        rollout,
        old,
        ref,
        completion,
        advantages.to(logp.dtype),
        torch.as_tensor(group if group is not None else [0] * C),
    )


def random_inputs(C: int = 7, seed: int = 0) -> tuple[Tensor, Any]:
    """Lengths of 1 to 9 tokens, and completions with random log-probs in float64 in two groups, the first of three."""
    generator = torch.Generator().manual_seed(seed)
    lengths_C = torch.randint(1, 10, (C,), generator=generator)
    alpha, *noise = torch.randn(4, int(lengths_C.sum()), generator=generator, dtype=torch.float64)
    advantages = torch.randn(C, generator=generator, dtype=torch.float64)
    logp, old, ref = (alpha + scale * x for scale, x in zip((0.3, 0.2, 0.4), noise, strict=True))
    completion = torch.arange(C).repeat_interleave(lengths_C)
    return lengths_C, LossInputs(
        logp.requires_grad_(),
        alpha,
        old,
        ref,
        completion,
        advantages,
        (torch.arange(C) >= 3).long(),
    )


def gradient_of(value: Tensor, x: LossInputs) -> Tensor:
    return torch.autograd.grad(value, x.logp)[0]
