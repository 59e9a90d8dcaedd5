"""From scored groups to what the trainer steps on: advantages, weights, packed rows.

Only scored completions take part, and of them only sampled tokens: T, lengths and sums count no others. A masked group
(its rewards are all equal, and the recipe masks such groups) leaves the objective before any forward pass. Weights
carry the normalizer of the whole batch, so the split into micro-batches cannot change the gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress

import torch
from torch import Tensor

from lagrpo.core.advantages import zero_variance
from lagrpo.core.losses import LossInputs
from lagrpo.core.objective import Recipe
from lagrpo.model.model import Packed
from lagrpo.rng import uniforms
from lagrpo.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Batch:
    """The scored completions of a batch, in order of group and completion."""

    groups: tuple[Group, ...]
    member_C: tuple[tuple[int, int], ...]  # group, and index in the group
    advantage_C: Tensor
    zero_variance_C: Tensor
    lengths_C: Tensor  # sampled tokens
    weight_C: Tensor  # in the objective; 0: masked

    @property
    def in_objective(self) -> bool:
        """Whether any completion is in the objective; without one there is nothing to update for."""
        return bool((self.weight_C != 0).any())

    def completion(self, c: int) -> Completion:
        group, index = self.member_C[c]
        return self.groups[group].completions[index]


def has_zero_variance(group: Group) -> bool:
    """Whether all rewards of a group are equal, or it has none."""
    return len(set(group.rewards)) < 2


def assemble(groups: Sequence[Group], recipe: Recipe, max_tokens: int, seed: int, b: int) -> Batch:
    """Lines 12-13 of Algorithm 1: A_α (Eq. 2) from the scored completions of each group, then the weights over the
    batch. `max_tokens` is the limit of a completion; random numbers are keyed by (seed, b, group)."""
    member: list[tuple[int, int]] = []
    advantages, flat = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
    lengths = [torch.empty(0, dtype=torch.long)]
    for g, group in enumerate(groups):
        scored = [(g, j) for j, c in enumerate(group.completions) if c.outcome and c.outcome.kind == "scored"]
        if not scored:
            continue
        rewards_G = torch.tensor(group.rewards, dtype=torch.float64)
        lengths_G = torch.tensor([c.length for c in group.scored])
        uniform_G = torch.from_numpy(uniforms(len(scored), seed, "advantage", b, g))
        member += scored
        advantages.append(recipe.advantages(rewards_G, lengths_G, max_tokens, uniform_G).float())
        flat.append(zero_variance(rewards_G).expand(len(scored)))
        lengths.append(lengths_G)
    lengths_C, zero_variance_C = torch.cat(lengths), torch.cat(flat)
    weight_C = recipe.weights(lengths_C, zero_variance_C, max_tokens) if member else torch.empty(0)
    return Batch(tuple(groups), tuple(member), torch.cat(advantages), zero_variance_C, lengths_C, weight_C)


@dataclass(frozen=True, slots=True)
class FreshMicroBatch:
    """Whole completions packed into one row, with what the objective reads of them before log π_k is known: flat over
    their sampled tokens [T] and per completion [C]."""

    packed: Packed
    members: tuple[int, ...]  # their places among the completions of the batch
    logp_alpha_T: Tensor | None  # None if a file brought them without log-probs
    logp_ref_T: Tensor | None  # None if the objective has no KL term
    completion_T: Tensor
    advantage_C: Tensor
    weight_C: Tensor
    group_C: Tensor  # the number of the group
    batch: Batch

    def name(self, c: int) -> str:
        """The c-th completion of the row as the rollouts have it (columns `completion` and `prompt_id`), both from
        0."""
        group, number = self.batch.member_C[self.members[c]]
        return f"completion {number} of prompt {self.batch.groups[group].prompt.key}"

    def with_logprobs(self, logp_k_T: Tensor, entropy_T: Tensor | None = None) -> MicroBatch:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return MicroBatch(**own, logp_k_T=logp_k_T, entropy_T=entropy_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(FreshMicroBatch):
    """A micro-batch with everything that the objective reads besides log π."""

    logp_k_T: Tensor
    entropy_T: Tensor | None = None
    """of the distribution of π_k that each token was sampled from, nats; None if it was not measured"""

    def loss_inputs(self, logp_T: Tensor) -> LossInputs:
        """What the objective reads if π gives the tokens these log-probs."""
        return LossInputs(
            logp_T, self.logp_alpha_T, self.logp_k_T, self.logp_ref_T, self.completion_T, self.advantage_C, self.group_C
        )


def micro_batches(
    batch: Batch, tokens: int, device: torch.device | str = "cpu", whole_groups: bool = False,
    skip_zero_advantage: bool = False, reference: Callable[[Packed], Tensor] | None = None, ranks: int = 1,
) -> list[FreshMicroBatch]:  # fmt: skip
    """Completions with a weight, packed group by group into rows of at most `tokens` tokens; a single longer completion
    has a row of its own. A group that does not fit is cut, and its prompt is computed once per piece; with
    `whole_groups`, for objectives that compare the completions of a group, it has a longer row. `skip_zero_advantage`,
    if an advantage of 0 has no gradient, leaves those completions out; they still count in the weights of the others.
    `reference` gives log π_ref of a packed row. For several `ranks` there are rows of about the same cost for each."""
    wanted_C = (batch.weight_C != 0) & ~(skip_zero_advantage & (batch.advantage_C == 0))
    rows = _rows(batch, wanted_C, tokens, device, whole_groups, ranks)
    if reference is None:
        return rows
    with torch.no_grad():
        return [replace(row, logp_ref_T=reference(row.packed)) for row in rows]


def left_out(
    batch: Batch, rows: Sequence[FreshMicroBatch], tokens: int, device: torch.device | str = "cpu"
) -> list[FreshMicroBatch]:
    """The scored completions with a known log α that no row has: unbiased metrics of the lag need them."""
    wanted_C = torch.tensor([knows_alpha(batch, [c]) for c in range(len(batch.member_C))], dtype=torch.bool)
    wanted_C[[c for micro in rows for c in micro.members]] = False
    return _rows(batch, wanted_C, tokens, device)


def _rows(
    batch: Batch, wanted_C: Tensor, tokens: int, device: torch.device | str, whole_groups: bool = False, ranks: int = 1
) -> list[FreshMicroBatch]:
    pieces = _pieces(batch, wanted_C.tolist(), tokens if not whole_groups else sys.maxsize)
    rows: list[list[list[int]]] = []
    for known in (True, False):  # a row's completions all have log α, or none of them
        alike = [piece for piece in pieces if knows_alpha(batch, piece) == known]
        found = [[alike[n] for n in row] for row in balanced([_cost(batch, piece) for piece in alike], tokens)]
        rows += _evened(batch, found, ranks, not whole_groups) if ranks > 1 else found
    return [_pack(batch, row, device) for row in rows]


def _evened(batch: Batch, rows: list[list[list[int]]], ranks: int, cut: bool) -> list[list[list[int]]]:
    """As many rows for each rank, of about the same cost: a piece, or its last completions if it may be `cut`, moves
    from the largest row to the smallest while that makes the larger of the two smaller by more than a fiftieth."""
    rows = rows + [[] for _ in range(-len(rows) % ranks)]
    costs = [sum(_cost(batch, piece) for piece in row) for row in rows]
    while rows:
        most, least = costs.index(max(costs)), costs.index(min(costs))
        moves = (
            (max(costs[most] - whole + stay, costs[least] + go), number, kept, stay - whole, go)
            for number, piece in enumerate(rows[most])
            for whole in [_cost(batch, piece)]
            for kept, stay, go in _cuts(batch, piece, cut)
        )
        larger, number, kept, less, more = min(moves, default=(costs[most], 0, 0, 0, 0))
        if larger >= 0.98 * costs[most]:
            break
        piece = rows[most].pop(number)
        rows[most] += [piece[:kept]] if kept else []
        rows[least].append(piece[kept:])
        costs[most], costs[least] = costs[most] + less, costs[least] + more
    return [row for row in rows if row]


def _cuts(batch: Batch, piece: list[int], cut: bool) -> Iterator[tuple[int, int, int]]:
    """The ways to divide a piece: how many completions stay, what these cost, what the others cost; first none stay."""
    whole = _cost(batch, piece)
    yield 0, 0, whole
    prompt = len(batch.groups[batch.member_C[piece[0]][0]].prompt.token_ids)
    stay = prompt
    for kept, c in enumerate(piece[:-1] if cut else [], start=1):
        stay += len(batch.completion(c).token_ids) - 1
        yield kept, stay, whole - stay + prompt


def balanced(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Items, by their numbers, in few rows of at most `budget` each and of about the same cost, largest first; an item
    beyond the budget has a row to itself. First fit decides the number of rows; then, if the budget allows it, each
    item goes into the row that has least."""

    def cost(row: list[int]) -> int:
        return sum(costs[n] for n in row)

    order = sorted(range(len(costs)), key=lambda n: -costs[n])
    first_fit: list[list[int]] = []
    for n in order:
        if (home := next((row for row in first_fit if cost(row) + costs[n] <= budget), None)) is None:
            first_fit.append([n])
        else:
            home.append(n)
    least: list[list[int]] = [[] for _ in first_fit]
    for n in order:
        min(least, key=cost).append(n)
    return least if all(len(row) == 1 or cost(row) <= budget for row in least) else first_fit


def knows_alpha(batch: Batch, piece: Sequence[int]) -> bool:
    """Whether log α of every sampled token of these completions is known."""
    return not any(bool((c.logp_alpha.isnan() & c.sampled).any()) for c in map(batch.completion, piece))


def _cost(batch: Batch, piece: list[int]) -> int:
    """Tokens that a piece puts through the model: its prompt once, its completions without their last token."""
    prompt = batch.groups[batch.member_C[piece[0]][0]].prompt
    return len(prompt.token_ids) + sum(len(batch.completion(c).token_ids) - 1 for c in piece)


def _pieces(batch: Batch, wanted_C: Sequence[bool], tokens: int) -> list[list[int]]:
    """Runs of completions of one group, each within the budget if that is possible."""
    pieces: list[list[int]] = []
    for c in compress(range(len(batch.member_C)), wanted_C):
        last = pieces[-1] if pieces else None
        if last and batch.member_C[last[0]][0] == batch.member_C[c][0] and _cost(batch, [*last, c]) <= tokens:
            last.append(c)
        else:
            pieces.append([c])
    return pieces


def _pack(batch: Batch, pieces: list[list[int]], device: torch.device | str) -> FreshMicroBatch:
    members = [c for piece in pieces for c in piece]
    completions = [batch.completion(c) for c in members]
    prompts = [batch.groups[batch.member_C[piece[0]][0]].prompt.token_ids for piece in pieces]
    groups = [(p, [batch.completion(c).token_ids for c in piece]) for p, piece in zip(prompts, pieces, strict=True)]
    sampled, known = torch.cat([c.sampled for c in completions]), knows_alpha(batch, members)
    row, kept = Packed.build(groups, device), sampled.to(device)
    layout = replace(row.layout, logit_rows=row.layout.logit_rows[kept])  # tokens not sampled stay as context
    return FreshMicroBatch(
        packed=replace(row, layout=layout, token_ids=row.token_ids[kept]), members=tuple(members),
        logp_alpha_T=torch.cat([c.logp_alpha for c in completions])[sampled].to(device) if known else None,
        logp_ref_T=None, completion_T=torch.arange(len(members)).repeat_interleave(batch.lengths_C[members]).to(device),
        advantage_C=batch.advantage_C[members].to(device), weight_C=batch.weight_C[members].to(device),
        group_C=torch.tensor([batch.member_C[c][0] for c in members]).to(device), batch=batch,
    )  # fmt: skip
