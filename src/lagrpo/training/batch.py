"""From scored groups to the rows that the trainer steps on: advantages, weights, packed rows.

Only scored completions take part, and of them only sampled tokens. `weight_C` carries the
normalizer of the whole batch, so the losses of micro-batches and ranks only have to be added.

A group of one scored completion counts as a group of equal rewards: its advantage is 0.

A group whose rewards are all equal may have been replaced before (`replace_zero_variance` in
loop.py). If it was not:

- A recipe that masks such groups (`mask_zero_variance`) gives their completions weight 0. They
  leave the objective before any forward pass; `masked_count` decides whether the normalizer counts
  them.
- Any other recipe counts them. An update leaves out completions with advantage 0 if these have no
  gradient in the recipe (`skips_zero_advantage`).
"""

# Some methods of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, zero_variance
from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Recipe
from lagrpo.distributed.ranks import Ranks
from lagrpo.model.model import Packed
from lagrpo.rng import uniforms
from lagrpo.training.tensors import to_ints
from lagrpo.types import Completion, Group, OutcomeKind


@dataclass(frozen=True, slots=True)
class Batch:
    """The scored completions of a batch, in order of group and completion."""

    groups: tuple[Group, ...]
    member_C: tuple[tuple[int, int], ...]  # group, and index in the group
    advantage_C: Tensor
    lengths_C: Tensor  # sampled tokens
    weight_C: Tensor  # in the objective; 0: masked
    has_logp_C: Tensor = field(init=False)  # bool: log α of every sampled token is known

    def __post_init__(self) -> None:
        has_logp = [self.completion(c).has_logp for c in range(len(self.member_C))]
        object.__setattr__(self, "has_logp_C", torch.tensor(has_logp, dtype=torch.bool))

    @property
    def in_objective(self) -> bool:
        """True if any completion has a weight; without one there is no update.

        Completions with advantage 0 count: a gradient that is known to be zero is still an update,
        because AdamW moves on by its moments.
        """
        return bool((self.weight_C != 0).any())

    def completion(self, c: int) -> Completion:
        """Returns the completion with the index c in C."""
        group, index = self.member_C[c]
        return self.groups[group].completions[index]


def has_zero_variance(group: Group) -> bool:
    """True if all rewards of a group are equal, or it has fewer than two."""
    return len(set(group.rewards)) < 2


def assemble(groups: Sequence[Group], recipe: Recipe, max_tokens: int, seed: int, b: int) -> Batch:
    """Returns the batch of these groups: lines 12-13 of Algorithm 1.

    First A_α (Eq. 2) from the scored completions of each group, then the weights over the batch.
    `max_tokens` is the limit of a completion.
    """
    members: list[tuple[int, int]] = []
    rewards: list[float] = []
    lengths: list[int] = []
    uniform_of_groups: list[Tensor] = []
    for g, group in enumerate(groups):
        scored = [
            j
            for j, c in enumerate(group.completions)
            if c.outcome and c.outcome.kind == OutcomeKind.SCORED
        ]
        members += [(g, j) for j in scored]
        rewards += group.rewards
        lengths += [group.completions[j].length for j in scored]
        uniform_of_groups.append(torch.from_numpy(uniforms(len(scored), seed, "advantage", b, g)))
    lengths_C = torch.tensor(lengths, dtype=torch.long)
    if not members:
        return Batch(tuple(groups), (), torch.empty(0), lengths_C, torch.empty(0))
    x = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor([g for g, _ in members]),
        lengths=lengths_C,
        uniform=torch.cat(uniform_of_groups),
    )
    # Statistics of a group are float64; a loss takes advantages in the dtype of log-probs.
    advantage_C = recipe.advantages(x, max_tokens).float()
    # Here the loss gets its normalizer: core/reductions.py, over the completions of all ranks.
    weight_C = recipe.weights(lengths_C, zero_variance(x.rewards, x.group), max_tokens)
    return Batch(tuple(groups), tuple(members), advantage_C, lengths_C, weight_C)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole completions packed into one row, with all that the objective reads but log π.

    Tensors are flat over the sampled tokens [T], or per completion [C].
    """

    packed: Packed
    members: tuple[int, ...]
    """their indices among the completions of the batch"""
    rollout_logp_T: Tensor | None
    """log α; None if a file brought the completions without log-probs"""
    version_T: Tensor
    """the policy version that sampled the token; -1 in completions of a file"""
    completion_T: Tensor
    advantage_C: Tensor
    weight_C: Tensor
    group_C: Tensor
    """the number of the group in the batch"""
    finished_C: Tensor
    batch: Batch
    ref_logp_T: Tensor | None = None
    """log π_ref; None if the objective does not read it"""
    old_logp_T: Tensor | None = None
    """log π_k; None before the first update on the batch, at which π is π_k"""
    entropy_T: Tensor | None = None
    """of the distribution of π_k that each token was sampled from, nats; None: unknown"""

    def with_logprobs(self, old_logp_T: Tensor, entropy_T: Tensor | None = None) -> MicroBatch:
        """Returns the row with log π_k and the entropy of π_k."""
        return replace(self, old_logp_T=old_logp_T, entropy_T=entropy_T)

    def seen_by_reference(self) -> MicroBatch:
        """Returns the row with the prompts that the reference sees; itself if they are the same.

        The completions, and the order of their tokens, stay as they are.
        """
        if not any(group.prompt.reference_token_ids for group in self.batch.groups):
            return self
        pieces = [
            list(piece)
            for _, piece in groupby(self.members, key=lambda c: self.batch.member_C[c][0])
        ]
        packed = _pack_tokens(self.batch, pieces, self.weight_C.device, for_reference=True)
        return replace(self, packed=packed)

    def loss_inputs(
        self, logp_T: Tensor, version: int, step: Mapping[str, Tensor] | None = None
    ) -> LossInputs:
        """Returns the inputs of the objective if π_version gives the tokens these log-probs.

        `step` has the statistics of the whole step.
        """
        is_version_known = bool((self.version_T >= 0).all())
        return LossInputs(
            logp=logp_T,
            rollout_logp=self.rollout_logp_T,
            old_logp=logp_T.detach() if self.old_logp_T is None else self.old_logp_T,
            ref_logp=self.ref_logp_T,
            completion=self.completion_T,
            advantages=self.advantage_C,
            group=self.group_C,
            staleness=version - self.version_T if is_version_known else None,
            entropy=self.entropy_T,
            finished=self.finished_C,
            step=step or {},
        )


def micro_batches(
    batch: Batch,
    tokens: int,
    device: torch.device | str = "cpu",
    *,
    whole_groups: bool = False,
    skip_zero_advantage: bool = False,
    ranks: Ranks | None = None,
) -> list[MicroBatch]:
    """Returns completions with a weight, packed by group into rows of at most `tokens` tokens.

    A longer completion has a row to itself. A group that does not fit is cut, or with
    `whole_groups` has a longer row. `skip_zero_advantage` leaves completions without a gradient
    out; they still count in the weights of the others. Several `ranks` get about the same number of
    rows, of about the same cost.
    """
    return _pack_rows(
        batch,
        _computed(batch, skip_zero_advantage=skip_zero_advantage),
        tokens,
        device,
        ranks,
        whole_groups=whole_groups,
    )


def left_out(
    batch: Batch,
    tokens: int,
    device: torch.device | str = "cpu",
    *,
    skip_zero_advantage: bool = False,
    ranks: Ranks | None = None,
) -> list[MicroBatch]:
    """Returns the scored completions that `micro_batches` leaves out, packed, for metrics.

    Completions without a known log α are not among them.
    """
    return _pack_rows(
        batch,
        batch.has_logp_C & ~_computed(batch, skip_zero_advantage=skip_zero_advantage),
        tokens,
        device,
        ranks,
    )


def _computed(batch: Batch, *, skip_zero_advantage: bool) -> Tensor:
    """Returns True for completions that an update computes, bool [C]."""
    return (batch.weight_C != 0) & ~(skip_zero_advantage & (batch.advantage_C == 0))


def _pack_rows(
    batch: Batch,
    wanted_C: Tensor,
    tokens: int,
    device: torch.device | str,
    ranks: Ranks | None,
    *,
    whole_groups: bool = False,
) -> list[MicroBatch]:
    """Packs the wanted completions into this rank's rows."""
    ranks = ranks or Ranks()
    if ranks.size > 1:  # no piece is larger than a rank's even share
        total = sum(_cost(batch, piece) for piece in _pieces(batch, wanted_C, sys.maxsize))
        tokens_per_rank = -(-total // ranks.size)  # rounded up
        tokens = min(tokens, tokens_per_rank)
    pieces = _pieces(batch, wanted_C, sys.maxsize if whole_groups else tokens)
    rows: list[list[list[int]]] = []
    # Either all completions of a row have log α, or the row has no log α at all.
    for is_known in (True, False):
        alike = [piece for piece in pieces if bool(batch.has_logp_C[piece].all()) == is_known]
        costs = [_cost(batch, piece) for piece in alike]
        for indices in balanced(costs, tokens, ranks.size):
            rows.append([alike[index] for index in indices])
    return [_pack(batch, row, device) for row in ranks.share(rows)]


def balanced(costs: Sequence[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Distributes items over few rows of at most `budget` and about the same cost.

    Returns the rows as lists of indices.

    An item beyond the budget has a row to itself. First fit decides the number of rows, rounded up
    to a multiple of `ranks`. Then each item goes, largest first, into the row that has least; if
    that exceeds the budget, the rows of first fit stay.
    """

    def cost(row: list[int]) -> int:
        return sum(costs[index] for index in row)

    largest_first = sorted(range(len(costs)), key=lambda index: -costs[index])
    first_fit: list[list[int]] = []
    for index in largest_first:
        for row in first_fit:
            if cost(row) + costs[index] <= budget:
                row.append(index)
                break
        else:
            first_fit.append([index])

    row_count = len(first_fit) + -len(first_fit) % ranks  # up to a multiple of `ranks`
    even: list[list[int]] = [[] for _ in range(row_count)]
    for index in largest_first:
        min(even, key=cost).append(index)
    even_fits = all(len(row) <= 1 or cost(row) <= budget for row in even)
    rows = even if even_fits else first_fit
    return [row for row in rows if row]


def _cost(batch: Batch, piece: list[int]) -> int:
    """Returns the number of tokens of a piece that go through the model.

    These are its prompt once, and its completions without their last token.
    """
    prompt = batch.groups[batch.member_C[piece[0]][0]].prompt
    return len(prompt.token_ids) + sum(len(batch.completion(c).token_ids) - 1 for c in piece)


def _pieces(batch: Batch, wanted_C: Tensor, tokens: int) -> list[list[int]]:
    """Returns runs of completions of one group, each within the budget if that is possible."""
    pieces: list[list[int]] = []
    for c in to_ints(wanted_C.nonzero().flatten()):
        last = pieces[-1] if pieces else None
        if last is None:
            pieces.append([c])
            continue
        is_same_group = batch.member_C[last[0]][0] == batch.member_C[c][0]
        if is_same_group and _cost(batch, [*last, c]) <= tokens:
            last.append(c)
        else:
            pieces.append([c])
    return pieces


def _pack(batch: Batch, pieces: list[list[int]], device: torch.device | str) -> MicroBatch:
    members = [c for piece in pieces for c in piece]
    completions = [batch.completion(c) for c in members]
    is_sampled_T = torch.cat([c.sampled for c in completions])
    rollout_logp_T = None
    if bool(batch.has_logp_C[members].all()):
        rollout_logp_T = torch.cat([c.rollout_logp for c in completions])[is_sampled_T].to(device)
    versions = torch.cat([c.versions for c in completions])
    return MicroBatch(
        packed=_pack_tokens(batch, pieces, device),
        members=tuple(members),
        rollout_logp_T=rollout_logp_T,
        version_T=versions[is_sampled_T].to(device),
        completion_T=torch.arange(len(members))
        .repeat_interleave(batch.lengths_C[members])
        .to(device),
        advantage_C=batch.advantage_C[members].to(device),
        weight_C=batch.weight_C[members].to(device),
        group_C=torch.tensor([batch.member_C[c][0] for c in members]).to(device),
        finished_C=torch.tensor([c.finished for c in completions]).to(device),
        batch=batch,
    )


def _pack_tokens(
    batch: Batch,
    pieces: list[list[int]],
    device: torch.device | str,
    *,
    for_reference: bool = False,
) -> Packed:
    """Packs the tokens of completions behind their prompts.

    With `for_reference` the prompts are the ones that the reference sees.
    """
    groups: list[tuple[tuple[int, ...], list[Tensor]]] = []
    is_sampled: list[Tensor] = []
    for piece in pieces:
        prompt = batch.groups[batch.member_C[piece[0]][0]].prompt
        prompt_ids = prompt.token_ids
        if for_reference and prompt.reference_token_ids:
            prompt_ids = prompt.reference_token_ids
        groups.append((prompt_ids, [batch.completion(c).token_ids for c in piece]))
        is_sampled += [batch.completion(c).sampled for c in piece]
    row = Packed.build(groups, device)
    # Tokens that were not sampled stay as context: the model reads them, and no number of the
    # objective covers them.
    is_kept_T = torch.cat(is_sampled).to(device)
    layout = replace(row.layout, logit_rows=row.layout.logit_rows[is_kept_T])
    return replace(row, layout=layout, token_ids=row.token_ids[is_kept_T])
