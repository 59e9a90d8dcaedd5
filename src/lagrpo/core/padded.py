"""Padded tensors of other trainers, a row per completion, as the flat inputs of an objective.

C   completions of the micro-batch
L   tokens of the longest one
T   tokens that the policy sampled: the True ones of the mask [C, L], row by row
"""

from __future__ import annotations

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs


def flatten(
    logp: Tensor,
    mask: Tensor,
    advantages_C: Tensor,
    *,
    rollout_logp: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    staleness: Tensor | None = None,
    entropy: Tensor | None = None,
    group_C: Tensor | None = None,
    finished_C: Tensor | None = None,
) -> LossInputs:
    """The inputs of an objective: numbers of tokens are [C, L] here, the mask is bool [C, L]."""

    def at_tokens(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[mask]

    rows_C = torch.arange(len(mask), device=mask.device)
    return LossInputs(
        logp=logp[mask],
        rollout_logp=at_tokens(rollout_logp),
        old_logp=at_tokens(old_logp),
        ref_logp=at_tokens(ref_logp),
        completion=rows_C.unsqueeze(1).expand_as(mask)[mask],
        advantages=advantages_C,
        group=group_C,
        staleness=at_tokens(staleness),
        entropy=at_tokens(entropy),
        finished=finished_C,
    )


def pad(values_T: Tensor, mask: Tensor) -> Tensor:
    """Values of tokens as [C, L], 0 elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=values_T.dtype, device=values_T.device)
    return zeros.masked_scatter(mask, values_T)
