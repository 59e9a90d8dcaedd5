"""Which completion makes a gradient infinite. Asked when the sum over all of them is, before the run ends: a pass of
each completion alone, since in a common row a NaN spreads to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lagrpo.model.batch import FreshMicroBatch, MicroBatch
from lagrpo.model.layered import InStep, idle_row
from lagrpo.model.model import Policy
from lagrpo.objective.compose import Recipe


def name(row: FreshMicroBatch, c: int) -> str:
    """The c-th completion of a row as the rollouts have it: its number in its group, its prompt.

    Both count from 0, as the columns `completion` and `prompt_key` do."""
    group, number = row.batch.member_C[row.members[c]]
    return f"completion {number} of prompt {row.batch.groups[group].prompt.key}"


def find_culprit(policy: Policy, recipe: Recipe, rows: Sequence[MicroBatch]) -> tuple[float, str]:
    """The completion whose own gradient is not finite, else the one whose is largest, with its numbers; first the norm
    of that gradient, infinite where it is not finite, and -1 where there are no rows."""
    found = Culprit()
    for row in rows:
        logp_T, pull_T = _pull(policy, recipe, row)
        for c in range(len(row.members)):
            found.look(row, c, logp_T, _norm(policy, row, c, pull_T[row.completion_T == c]))
    return found.size, found.said


def find_in_step(
    policy: Policy, recipe: Recipe, rows: Sequence[MicroBatch], masters: InStep, ranks: dist.ProcessGroup
) -> tuple[float, str]:
    """The same of this rank's rows where the layers are sharded: each rank's completions in turn, all others idle
    beside it. Collective."""
    found, counts = Culprit(), [[0]] * ranks.size()
    dist.all_gather_object(counts, [len(row.members) for row in rows], group=ranks)
    for rank, of_rank in enumerate(counts):
        for n, members in enumerate(of_rank):
            row = rows[n] if rank == ranks.rank() else None
            masters.begin_pass(last=True)
            logp_T, pull_T = _pull(policy, recipe, row) if row is not None else _idle(policy, learns=False)
            for c in range(members):
                if row is not None:
                    policy.logp(row.alone(c)).backward(pull_T[row.completion_T == c])
                else:
                    _idle(policy, learns=True)
                masters.collect()
                norm = masters.norm().item()
                masters.discard()
                if row is not None:
                    found.look(row, c, logp_T, norm)
    return found.size, found.said


class Culprit:
    """The largest of the completions that were looked at: the size of its gradient, and what there is to say of it."""

    def __init__(self) -> None:
        self.size, self.said = -1.0, "none of its completions"

    def look(self, row: MicroBatch, c: int, logp_T: Tensor, norm: float) -> None:
        if (size := norm if math.isfinite(norm) else math.inf) > self.size:
            numbers = _numbers(row, c, logp_T, row.completion_T == c)
            self.size, self.said = size, f"{name(row, c)}, alone {norm:g} ({numbers})"


def _idle(policy: Policy, learns: bool) -> tuple[Tensor, Tensor]:
    with torch.set_grad_enabled(learns):
        logp_T = policy.logp(idle_row(policy.device))
    if learns:
        (0 * logp_T).sum().backward()
    return logp_T.detach(), torch.zeros_like(logp_T)


def _pull(policy: Policy, recipe: Recipe, row: MicroBatch) -> tuple[Tensor, Tensor]:
    """log π of the tokens of a row, and the derivative of the loss by each of them."""
    with torch.no_grad():
        logp_T = policy.logp(row.packed)
    (pull_T,) = torch.autograd.grad(recipe.loss(row.terms(logp_T.requires_grad_()), row.weight_C)[0], logp_T)
    return logp_T.detach(), pull_T


def _norm(policy: Policy, row: FreshMicroBatch, c: int, pull_T: Tensor) -> float:
    """The norm of the gradient of one completion alone."""
    parameters = [p for p in policy.model.lm.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(policy.logp(row.alone(c)), parameters, pull_T, allow_unused=True)
    return torch.nn.utils.get_total_norm([g.float() for g in gradients if g is not None]).item()


def _numbers(row: MicroBatch, c: int, logp_T: Tensor, own_T: Tensor) -> str:
    lowest, advantage = float(logp_T[own_T].min()), float(row.advantage_C[c])
    said = f"{int(own_T.sum())} tokens, advantage {advantage:g}, weight {float(row.weight_C[c]):g}, log pi of a token"
    said += f" at least {lowest:g}"
    if row.logp_alpha_T is not None:
        gap_T = (logp_T - row.logp_alpha_T)[own_T]
        said += f", log pi/alpha {float(gap_T.min()):g} to {float(gap_T.max()):g}"
    return said
