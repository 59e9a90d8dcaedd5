"""Inputs of losses, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, without_gradient
from lagrpo.core.objective import Recipe

Numbers = Tensor | Sequence[float]


def inputs(
    logp: Numbers,
    rollout: Numbers | None = None,
    old: Numbers | None = None,
    ref: Numbers | None = None,
    A: Numbers | float = 1.0,
    completion: Numbers | None = None,
    group: Numbers | None = None,
    **others: Any,
) -> LossInputs:
    """LossInputs from lists or tensors of log-probs of T tokens.

    Each token is a completion unless `completion` [T] says otherwise. A is the advantage of all
    completions or of each, [C]. All completions are one group unless `group` [C] says otherwise.
    """
    logp_T = torch.as_tensor(logp)
    completion_T = torch.arange(len(logp_T)) if completion is None else torch.as_tensor(completion)
    C = int(completion_T.max()) + 1
    advantages = torch.as_tensor(A, dtype=logp_T.dtype)
    if advantages.dim() == 0:
        advantages = advantages.expand(C)
    return LossInputs(
        logp=logp_T,
        rollout_logp=_as_tensor(rollout),
        old_logp=_as_tensor(old),
        ref_logp=_as_tensor(ref),
        completion=completion_T,
        advantages=advantages,
        group=torch.as_tensor(group if group is not None else [0] * C),
        **others,
    )


def _as_tensor(numbers: Numbers | None) -> Tensor | None:
    return None if numbers is None else torch.as_tensor(numbers)


def at_ratios(ratios: Sequence[float], A: Numbers | float = 1.0, **others: Any) -> LossInputs:
    """Tokens, each a completion, with these ratios pi/alpha, in float64; log pi has a gradient."""
    log_ratio_T = torch.tensor(ratios, dtype=torch.float64).log()
    # Any log-prob that leaves pi below 1 at every ratio up to e^3.
    alpha = torch.full_like(log_ratio_T, -3.0)
    return inputs((alpha + log_ratio_T).requires_grad_(), alpha, A=A, **others)


def random_inputs(C: int = 7, seed: int = 0) -> tuple[Tensor, Any]:
    """Lengths of 1 to 9 tokens, and LossInputs with random log-probs below 0, in float64, in two
    groups, the first of three. Any, because all fields are set that LossInputs may leave out."""
    generator = torch.Generator().manual_seed(seed)
    lengths_C = torch.randint(1, 10, (C,), generator=generator)
    T = int(lengths_C.sum())
    noise = torch.randn(4, T, generator=generator, dtype=torch.float64)
    # Log-ratios of some tenths, so that a clip of .2 acts on some tokens and not on others.
    alpha_T = -1.5 - noise[0].abs()
    logp_T = alpha_T + 0.3 * noise[1]
    old_T = alpha_T + 0.2 * noise[2]
    ref_T = alpha_T + 0.4 * noise[3]
    advantages = torch.randn(C, generator=generator, dtype=torch.float64)
    x = LossInputs(
        logp=logp_T.requires_grad_(),
        rollout_logp=alpha_T,
        old_logp=old_T,
        ref_logp=ref_T,
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
