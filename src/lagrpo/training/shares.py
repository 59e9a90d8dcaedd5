"""The work of several ranks on one batch: which rank learns from which rows and samples which groups.

Every rank has the same code here: rank 0 for its own share, the others for what rank 0 announces (training/lead.py has
rank 0's side). Rows of one batch are summed under one normalizer, so the gradient does not depend on who has which row;
random numbers have addresses, so neither do the completions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from lagrpo.model.batch import Batch, FreshMicroBatch, MicroBatch, micro_batches, row_of
from lagrpo.model.learner import Learner
from lagrpo.model.model import Policy
from lagrpo.ranks.world import World

T = TypeVar("T")
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

    def __init__(self, learner: Learner, world: World) -> None:
        self.learner, self.rank, self.size = learner, world.rank, world.size
        self._world, self._in_step = world, world.in_step if learner.in_step else at_own_pace
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
        """Pack the batch into rows for all ranks, and divide them. Gradients of a batch that was broken off go."""
        learner, recipe = self.learner, self.learner.recipe
        learner.discard()
        how = recipe.needs_whole_groups, recipe.silent
        rows = micro_batches(batch, tokens, learner.policy.device, *how, ranks=self.size)
        self.batch, self.rows, self.of_ranks = batch, rows, divide([cost(row) for row in rows], self.size)
        if (reference := learner.reference) is not None and recipe.needs_pi_ref:
            own = [rows[n] for n in self.own]
            found = self._in_step(lambda: learner.score(own, self._passes(self.of_ranks), reference))
            for n, logp_T in zip(self.own, found, strict=True):
                rows[n] = replace(rows[n], logp_ref_T=logp_T)

    def first(self) -> tuple[list[tuple[Tensor, Tensor | None]], Sums]:
        """Forward and backward of this rank's rows: log π_k and entropy of each, and the sums."""
        fresh, passes = [self.rows[n] for n in self.own], self._passes(self.of_ranks)
        self.scored, sums = self._in_step(lambda: self.learner.accumulate_first(fresh, passes))
        return [(row.logp_k_T.cpu(), _on_cpu(row.entropy_T)) for row in self.scored], sums

    def step(self) -> Sums:
        """Forward and backward once more: the sums."""
        return self._in_step(lambda: self.learner.accumulate(self.scored, self._passes(self.of_ranks)))

    def update(self) -> Sums:
        """One optimizer update, all ranks together: its metrics, the same on every rank."""
        return self._world.in_step(lambda: self.learner.update(self.scored))

    def score(self, members: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """log π of rows of the batch as the policy is now. A row is named by its completions; of all of them, by their
        numbers, those that are this rank's."""
        assert self.batch is not None
        lengths = self.batch.lengths_C.tolist()
        of_ranks = divide([sum(lengths[c] for c in row) for row in members], self.size)
        own, device = of_ranks[self.rank], self.learner.policy.device
        rows = [row_of(self.batch, members[n], device) for n in own]
        found = self._in_step(lambda: self.learner.score(rows, self._passes(of_ranks)))
        return {n: logp_T.cpu() for n, logp_T in zip(own, found, strict=True)}

    def idle(self) -> None:
        """A pass beside the one that rank 0 makes for itself."""
        self._in_step(lambda: self.learner.score((), 1))

    def give(self, whose: str) -> None:
        """This rank's part in gathering the weights of the policy, or of the reference, on rank 0."""
        learner, of = self.learner, self.learner.reference if whose == "reference" else self.learner.policy
        assert of is not None
        assert learner.in_step
        weights = of.all_weights if isinstance(of, Policy) else of.weights
        self._in_step(lambda: [tensor.shape for _, tensor in weights.items()])

    def _passes(self, of_ranks: Sequence[Sequence[int]]) -> int:
        """How many passes through the model it takes where all ranks make them in step; 0: each makes its own."""
        return max(map(len, of_ranks)) if self.learner.in_step else 0


def _on_cpu(values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T.cpu()


def at_own_pace(call: Callable[[], T]) -> T:
    """The call of a rank that waits for no other."""
    return call()


def cost(row: FreshMicroBatch) -> int:
    """Tokens that go through the model."""
    return len(row.packed.input_ids)
