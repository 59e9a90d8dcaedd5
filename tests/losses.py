"""Inputs of losses, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, without_gradient
from lagrpo.core.objective import Recipe


def inputs(
    logp: Any,
    rollout: Any = None,
    old: Any = None,
    ref: Any = None,
    A: Any = 1.0,
    completion: Any = None,
    group: Any = None,
    **others: Any,
) -> LossInputs:
    """LossInputs from lists or tensors of log-probs. Each token is a completion unless `completion`
    says otherwise; A is the advantage of all completions or of each."""
    logp, rollout, old, ref = (
        None if x is None else torch.as_tensor(x) for x in (logp, rollout, old, ref)
    )
    completion = torch.arange(len(logp)) if completion is None else torch.as_tensor(completion)
    C = int(completion.max()) + 1
    advantages = torch.as_tensor(A, dtype=logp.dtype)
    if advantages.dim() == 0:
        advantages = advantages.expand(C)
    return LossInputs(
        logp=logp,
        rollout_logp=rollout,
        old_logp=old,
        ref_logp=ref,
        completion=completion,
        advantages=advantages,
        group=torch.as_tensor(group if group is not None else [0] * C),
        **others,
    )


def at_ratios(ratios: Sequence[float], A: Any = 1.0, **others: Any) -> LossInputs:
    """Tokens, each a completion, with these ratios pi/alpha, in float64; log pi has a gradient."""
    log_ratio_T = torch.tensor(ratios, dtype=torch.float64).log()
    alpha = torch.full_like(log_ratio_T, -3.0)
    return inputs((alpha + log_ratio_T).requires_grad_(), alpha, A=A, **others)


def random_inputs(C: int = 7, seed: int = 0) -> tuple[Tensor, Any]:
    """Lengths of 1 to 9 tokens, and completions with random log-probs below 0, in float64, in two
    groups, the first of three."""
    generator = torch.Generator().manual_seed(seed)
    lengths_C = torch.randint(1, 10, (C,), generator=generator)
    T = int(lengths_C.sum())
    alpha, *noise = torch.randn(4, T, generator=generator, dtype=torch.float64)
    alpha = -1.5 - alpha.abs()
    advantages = torch.randn(C, generator=generator, dtype=torch.float64)
    logp, old, ref = (alpha + scale * x for scale, x in zip((0.3, 0.2, 0.4), noise, strict=True))
    x = LossInputs(
        logp=logp.requires_grad_(),
        rollout_logp=alpha,
        old_logp=old,
        ref_logp=ref,
        completion=torch.arange(C).repeat_interleave(lengths_C),
        advantages=advantages,
        group=(torch.arange(C) >= 3).long(),
        staleness=torch.randint(0, 6, (T,), generator=generator),
        entropy=torch.rand(T, generator=generator, dtype=torch.float64),
        finished=torch.arange(C) % 3 != 1,
    )
    return lengths_C, x


def with_statistics(recipe: Recipe, x: LossInputs) -> LossInputs:
    """The same inputs, with the statistics that the recipe collects if they are the whole step."""
    return replace(x, step=recipe.collect(without_gradient(x)))


def gradient_of(value: Tensor, x: LossInputs) -> Tensor:
    return torch.autograd.grad(value, x.logp, retain_graph=True)[0]
