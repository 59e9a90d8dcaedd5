"""From scored groups to what the trainer steps on: advantages, weights, packed rows.

Only scored completions take part, and of them only sampled tokens. A masked group (its rewards are all equal) leaves
the objective before any forward pass. Weights carry the normalizer of the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, zero_variance
from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Recipe
from lagrpo.model.model import Packed
from lagrpo.rng import uniforms
from lagrpo.training.ranks import Ranks
from lagrpo.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Batch:
    """The scored completions of a batch, in order of group and completion."""

    groups: tuple[Group, ...]
    member_C: tuple[tuple[int, int], ...]  # group, and index in the group
    advantage_C: Tensor
    lengths_C: Tensor  # sampled tokens
    weight_C: Tensor  # in the objective; 0: masked

    @property
    def in_objective(self) -> bool:
        """Whether any completion is in the objective; without one there is nothing to update for."""
        return bool((self.weight_C != 0).any())

    def has_logp_alpha(self) -> Tensor:
        """Whether log α of every sampled token of a completion is known, bool [C]."""
        return torch.tensor(
            [self.completion(c).has_logp for c in range(len(self.member_C))], dtype=torch.bool
        )

    def completion(self, c: int) -> Completion:
        group, index = self.member_C[c]
        return self.groups[group].completions[index]


def has_zero_variance(group: Group) -> bool:
    """True if all rewards of a group are equal, or it has none."""
    return len(set(group.rewards)) < 2


def assemble(groups: Sequence[Group], recipe: Recipe, max_tokens: int, seed: int, b: int) -> Batch:
    """Lines 12-13 of Algorithm 1: A_α (Eq. 2) from the scored completions of each group, then the weights over the
    batch. `max_tokens` is the limit of a completion."""
    members: list[tuple[int, int]] = []
    rewards: list[float] = []
    lengths: list[int] = []
    uniform_of_groups: list[Tensor] = []
    for g, group in enumerate(groups):
        scored = [
            j for j, c in enumerate(group.completions) if c.outcome and c.outcome.kind == "scored"
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
    advantage_C = recipe.advantages(x, max_tokens).float()
    weight_C = recipe.weights(lengths_C, zero_variance(x.rewards, x.group), max_tokens)
    return Batch(tuple(groups), tuple(members), advantage_C, lengths_C, weight_C)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole completions packed into one row, with what the objective reads of them besides log π: flat over their
    sampled tokens [T] and per completion [C]."""

    packed: Packed
    members: tuple[int, ...]
    """their places among the completions of the batch"""
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
        return replace(self, old_logp_T=old_logp_T, entropy_T=entropy_T)

    def loss_inputs(
        self, logp_T: Tensor, version: int, step: Mapping[str, Tensor] | None = None
    ) -> LossInputs:
        """The inputs of the objective if π_version gives the tokens these log-probs. `step` has the statistics of the
        whole step."""
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
    whole_groups: bool = False,
    skip_zero_advantage: bool = False,
    ranks: Ranks | None = None,
) -> list[MicroBatch]:
    """Completions with a weight, packed group by group into rows of at most `tokens` tokens; a longer completion has a
    row to itself. A group that does not fit is cut, or with `whole_groups` has a longer row. `skip_zero_advantage`
    leaves completions without a gradient out; they still count in the weights of the others. Each of several `ranks`
    gets as many rows of about the same cost."""
    return _pack_rows(
        batch, _computed(batch, skip_zero_advantage), tokens, device, ranks, whole_groups
    )


def left_out(
    batch: Batch,
    tokens: int,
    device: torch.device | str = "cpu",
    skip_zero_advantage: bool = False,
    ranks: Ranks | None = None,
) -> list[MicroBatch]:
    """The scored completions with a known log α that `micro_batches` leaves out, for metrics."""
    return _pack_rows(
        batch,
        batch.has_logp_alpha() & ~_computed(batch, skip_zero_advantage),
        tokens,
        device,
        ranks,
    )


def _computed(batch: Batch, skip_zero_advantage: bool) -> Tensor:
    """Whether an update computes a completion [C]."""
    return (batch.weight_C != 0) & ~(skip_zero_advantage & (batch.advantage_C == 0))


def _pack_rows(
    batch: Batch,
    wanted_C: Tensor,
    tokens: int,
    device: torch.device | str,
    ranks: Ranks | None,
    whole_groups: bool = False,
) -> list[MicroBatch]:
    rows, known_C, ranks = list[list[list[int]]](), batch.has_logp_alpha(), ranks or Ranks()
    if ranks.size > 1:  # no piece is larger than a rank's even share
        total = sum(_cost(batch, piece) for piece in _pieces(batch, wanted_C, sys.maxsize))
        tokens = min(tokens, -(-total // ranks.size))
    pieces = _pieces(batch, wanted_C, sys.maxsize if whole_groups else tokens)
    for known in (True, False):  # a row's completions all have log α, or some lack it
        alike = [piece for piece in pieces if bool(known_C[piece].all()) == known]
        costs = [_cost(batch, piece) for piece in alike]
        rows += [[alike[n] for n in row] for row in balanced(costs, tokens, ranks.size)]
    return [_pack(batch, row, known_C, device) for row in ranks.share(rows)]


def balanced(costs: Sequence[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Items, by their numbers, in few rows of at most `budget` and about the same cost; an item beyond the budget has a
    row to itself. First fit decides the number of rows, rounded up to as many for each of the `ranks`; then, if
    the budget allows it, each item goes into the row that has least, largest first."""

    def cost(row: list[int]) -> int:
        return sum(costs[n] for n in row)

    order = sorted(range(len(costs)), key=lambda n: -costs[n])
    first_fit: list[list[int]] = []
    for n in order:
        if (
            home := next((row for row in first_fit if cost(row) + costs[n] <= budget), None)
        ) is None:
            first_fit.append([n])
        else:
            home.append(n)
    least: list[list[int]] = [[] for _ in range(len(first_fit) + -len(first_fit) % ranks)]
    for n in order:
        min(least, key=cost).append(n)
    fits = all(len(row) <= 1 or cost(row) <= budget for row in least)
    return [row for row in (least if fits else first_fit) if row]


def _cost(batch: Batch, piece: list[int]) -> int:
    """Tokens that a piece puts through the model: its prompt once, its completions without their last token."""
    prompt = batch.groups[batch.member_C[piece[0]][0]].prompt
    return len(prompt.token_ids) + sum(len(batch.completion(c).token_ids) - 1 for c in piece)


def _pieces(batch: Batch, wanted_C: Tensor, tokens: int) -> list[list[int]]:
    """Runs of completions of one group, each within the budget if that is possible."""
    pieces: list[list[int]] = []
    for c in wanted_C.nonzero().flatten().tolist():
        last = pieces[-1] if pieces else None
        if (
            last
            and batch.member_C[last[0]][0] == batch.member_C[c][0]
            and _cost(batch, [*last, c]) <= tokens
        ):
            last.append(c)
        else:
            pieces.append([c])
    return pieces


def _pack(
    batch: Batch, pieces: list[list[int]], known_C: Tensor, device: torch.device | str
) -> MicroBatch:
    members = [c for piece in pieces for c in piece]
    completions = [batch.completion(c) for c in members]
    groups = []
    for piece in pieces:
        prompt = batch.groups[batch.member_C[piece[0]][0]].prompt
        groups.append((prompt.token_ids, [batch.completion(c).token_ids for c in piece]))
    row = Packed.build(groups, device)
    # Tokens that were not sampled stay as context: the model reads them, no number of the objective covers them.
    is_sampled_T = torch.cat([c.sampled for c in completions])
    is_kept = is_sampled_T.to(device)
    layout = replace(row.layout, logit_rows=row.layout.logit_rows[is_kept])
    rollout_logp_T = None
    if bool(known_C[members].all()):
        rollout_logp_T = torch.cat([c.logp_alpha for c in completions])[is_sampled_T].to(device)
    versions = torch.cat([c.versions for c in completions])
    return MicroBatch(
        packed=replace(row, layout=layout, token_ids=row.token_ids[is_kept]),
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
