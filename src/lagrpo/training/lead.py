"""Rank 0's side of the work of several ranks: a learner and samplers that the loop uses like those of one process.

Each call is a command that all ranks carry out (training/shares.py, training/follow.py). The order of results is that
of the ranks, whoever is done first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lagrpo.policy.batch import Batch, FreshMicroBatch, MicroBatch
from lagrpo.policy.learner import Learner
from lagrpo.policy.model import Policy
from lagrpo.policy.replica import Replica
from lagrpo.ranks.world import World
from lagrpo.sampling.base import Item, Request
from lagrpo.sampling.local import LocalSampler
from lagrpo.training.shares import Share, Sums, add_up
from lagrpo.types import Group


class LeadLearner(Learner):
    """The learner of rank 0, which has every rank learn from its rows. Masters and moments are sharded over all of
    them."""

    def __init__(self, world: World, *of_learner: Any) -> None:
        super().__init__(*of_learner, ranks=world.ranks)
        self.world, self.share = world, Share(self, world.rank, world.size)

    def pack(self, batch: Batch, tokens: int) -> list[FreshMicroBatch]:
        self.world.lead("packing", lambda: self.share.pack(batch, tokens), (batch, tokens))
        return self.share.rows

    def score(self, micro_batches: Sequence[FreshMicroBatch]) -> list[Tensor]:
        members = [micro.members for micro in micro_batches]
        found = self.world.lead("scoring", lambda: self.share.score(members), members)
        by_number = {n: logp_T for of_rank in found for n, logp_T in of_rank.items()}
        return [by_number[n].to(self.policy.device) for n in range(len(members))]

    def first_step(
        self, fresh: Sequence[FreshMicroBatch], in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        found = self.world.lead("learning", self.share.first)
        logp_k = {
            n: logp_T
            for own, (of_rank, _) in zip(self.share.of_ranks, found, strict=True)
            for n, logp_T in zip(own, of_rank, strict=True)
        }
        rows = [row.scored_by(logp_k[n].to(self.policy.device)) for n, row in enumerate(fresh)]
        return rows, add_up([sums for _, sums in found]) | self._update_all(in_objective)

    def step(self, micro_batches: Sequence[MicroBatch], in_objective: bool = True) -> dict[str, float]:
        return add_up(self.world.lead("learning again", self.share.step)) | self._update_all(in_objective)

    def _update_all(self, in_objective: bool) -> Sums:
        return self.world.lead("updating", self.share.update)[0] if in_objective else {}

    def end_stage(self, reset_optimizer: bool) -> None:
        own = super().end_stage
        self.world.lead("ending the stage", lambda: own(reset_optimizer), reset_optimizer)

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        own = super().load_state
        self.world.lead("loading a checkpoint", lambda: own(state, version), (state, version))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        own = super().load_weights
        self.world.lead("loading weights", lambda: own(weights, version), (weights, version))

    def load_reference(self) -> None:
        self.world.lead("loading the reference", super().load_reference)


class LeadSampler:
    """The in-process samplers of all ranks, as rank 0 calls them; `own` is rank 0's. Every rank has all weights, and
    samples its share of the groups. `name` tells the run's sampler from the evaluations'."""

    spans = False

    def __init__(self, world: World, own: LocalSampler, name: str) -> None:
        self.world, self.own, self.name = world, own, name
        self.servers = tuple(f"the in-process sampler of rank {rank}" for rank in range(world.size))

    @property
    def policy(self) -> Policy | Replica:
        return self.own.policy

    @property
    def version(self) -> int:
        return self.own.version

    def describe_versions(self) -> str:
        return self.own.describe_versions()

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """The weights are π's, which every rank has."""
        return self.world.lead("weight sync", lambda: self.own.sync_weights(weights, version), version)[0]

    def served(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.own.served()

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """All groups at once, when the first is taken: while this rank learned, the others would have to."""
        found = self.world.lead(self.name, lambda: sample_share(self.own, self.world, requests, G), (list(requests), G))
        yield from (item for of_rank in found for item in of_rank)

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        asked = number, list(requests), G, max_tokens
        return self.world.lead("parity check", lambda: generate_on(self.own, self.world.rank, *asked), asked)[number]

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        found = self.world.lead("parity scores", lambda: self.own.scores(items), list(items))
        return [scores for of_rank in found for scores in of_rank]

    def rest(self) -> None:
        self.own.rest()

    def read(self) -> Mapping[str, float]:
        return self.own.read()

    def close(self) -> None:
        self.own.close()


def sample_share(
    sampler: LocalSampler, world: World, requests: Sequence[Request], G: int
) -> list[tuple[Request, Group]]:
    """The groups of every R-th request, from this rank's on; fewer where rank 0 wants no more."""
    sampler.stopped = world.wants_no_more
    return list(sampler.sample(requests[world.rank :: world.size], G))


def generate_on(
    sampler: LocalSampler, rank: int, number: int, requests: Sequence[Request], G: int, max_tokens: int
) -> list[Group]:
    """What rank `number` generates for the parity check; nothing on the others."""
    return sampler.generate_on_server(0, requests, G, max_tokens) if rank == number else []
