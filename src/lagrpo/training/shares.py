"""The work of several ranks on one batch: which rank learns from which rows and samples which groups.

Every rank has the same code here: rank 0 for its own share, the others for what rank 0 announces (training/lead.py has
rank 0's side). Rows of one batch are summed under one normalizer, so the gradient does not depend on who has which row;
random numbers have addresses, so neither do the completions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lagrpo.policy.batch import Batch, FreshMicroBatch, MicroBatch, micro_batches, row_of
from lagrpo.policy.learner import Learner

Sums = dict[str, float]


def divide(costs: Sequence[int], size: int) -> list[list[int]]:
    """Items, by their numbers, over `size` ranks: largest first, each to the rank that has least.

    >>> divide([5, 3, 3, 1], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    sums = [0] * size
    for n in sorted(range(len(costs)), key=lambda n: -costs[n]):
        least = sums.index(min(sums))
        shares[least].append(n)
        sums[least] += costs[n]
    return shares


def add_up(of_ranks: Sequence[Mapping[str, float]]) -> Sums:
    """The sums of all ranks, in their order; of `max_abs_log_ratio` the largest.

    >>> add_up([{"loss": 1.0, "max_abs_log_ratio": 2.0}, {"loss": 0.5, "max_abs_log_ratio": 1.0}])
    {'loss': 1.5, 'max_abs_log_ratio': 2.0}
    """
    total: defaultdict[str, float] = defaultdict(float)
    for sums in of_ranks:
        for name, value in sums.items():
            total[name] = max(total[name], value) if name == "max_abs_log_ratio" else total[name] + value
    return dict(total)


class Share:
    """What rank `rank` of `size` does with a batch; `learner` is its own."""

    def __init__(self, learner: Learner, rank: int, size: int) -> None:
        self.learner, self.rank, self.size = learner, rank, size
        self.batch: Batch | None = None
        self.rows: list[FreshMicroBatch] = []
        """of the whole batch"""
        self.of_ranks: list[list[int]] = []
        """the rows of each rank, by their numbers"""
        self.scored: list[MicroBatch] = []
        """this rank's rows, with log π_k"""

    @property
    def own(self) -> list[int]:
        return self.of_ranks[self.rank]

    def pack(self, batch: Batch, tokens: int) -> None:
        """Pack the batch into at least as many rows as there are ranks, and divide them. Gradients of a batch that was
        broken off go."""
        learner, recipe = self.learner, self.learner.recipe
        learner.discard()
        limits = learner.policy.device, recipe.needs_whole_groups, recipe.silent
        rows = micro_batches(batch, tokens, *limits)
        if (budget := -(-sum(map(cost, rows)) // self.size)) < tokens:
            rows = micro_batches(batch, budget, *limits)
        self.batch, self.rows, self.of_ranks = batch, rows, divide([cost(row) for row in rows], self.size)
        if learner.reference is not None and recipe.needs_pi_ref:
            with torch.no_grad():
                for n in self.own:
                    rows[n] = replace(rows[n], logp_ref_T=learner.reference.logp(rows[n].packed))

    def first(self) -> tuple[list[Tensor], Sums]:
        """Forward and backward of this rank's rows: log π_k of each, and the sums."""
        self.scored, sums = self.learner.accumulate_first([self.rows[n] for n in self.own])
        return [row.logp_k_T.cpu() for row in self.scored], sums

    def step(self) -> Sums:
        """Forward and backward once more: the sums."""
        return self.learner.accumulate(self.scored)

    def update(self) -> Sums:
        """One optimizer update, all ranks together: its metrics, the same on every rank."""
        return self.learner.update(self.scored)

    def score(self, members: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """log π of rows of the batch as the policy is now. A row is named by its completions; of all of them, by their
        numbers, those that are this rank's."""
        assert self.batch is not None
        lengths = self.batch.lengths_C.tolist()
        own = divide([sum(lengths[c] for c in row) for row in members], self.size)[self.rank]
        device = self.learner.policy.device
        found = self.learner.score([row_of(self.batch, members[n], device) for n in own])
        return {n: logp_T.cpu() for n, logp_T in zip(own, found, strict=True)}


def cost(row: FreshMicroBatch) -> int:
    """Tokens that go through the model."""
    return len(row.packed.input_ids)
