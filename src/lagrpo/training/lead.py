"""Rank 0's side of the work of several ranks: a learner and samplers that the loop uses like those of one process.

Each call is a command that all ranks carry out (training/shares.py, training/follow.py). The order of results is that
of the ranks, whoever is done first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lagrpo.interrupts import whole
from lagrpo.model.adapter_files import save_adapter
from lagrpo.model.batch import Batch, FreshMicroBatch, MicroBatch
from lagrpo.model.layered import LayeredWeights, forget_whole
from lagrpo.model.learner import Learner
from lagrpo.model.lora import save_merged
from lagrpo.model.model import AdapterWeights, Packed, Policy, Weights
from lagrpo.model.replica import Replica
from lagrpo.ranks.world import World
from lagrpo.rollout.base import Item, Manner, Request
from lagrpo.rollout.local import BorrowingSampler, LocalSampler
from lagrpo.training.shares import Share, Sums, add_up
from lagrpo.types import Group


class GatheredWeights(Mapping[str, Tensor]):
    """Weights whose shards all ranks have, as rank 0 reads them: gathered into its host's memory, all at once, when one
    is asked for and the version is another than before. Nothing is sent on before all is there. `counted` are weights
    that have the version."""

    def __init__(self, world: World, own: LayeredWeights, whose: str, counted: Weights) -> None:
        self._world, self._own, self._whose, self._counted = world, own, whose, counted
        self._found: tuple[int, dict[str, Tensor]] = (-1, {})

    @property
    def version(self) -> int:
        return self._counted.version

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, name: str) -> Tensor:
        version, found = self._found
        if version != self.version:
            self.forget()
            found = lead_whole(self._world, "gathering weights", self._gather, self._whose)[0]
            self._found = self.version, found
        return found[name]

    def forget(self) -> None:
        """Weights of the same version may be others from now on; and the memory goes back."""
        self._found = (-1, {})

    def _gather(self) -> dict[str, Tensor]:
        return self._world.in_step(lambda: {name: tensor.to("cpu", copy=True) for name, tensor in self._own.items()})


@dataclass(frozen=True, slots=True, eq=False)
class LeadPolicy(Policy):
    """The policy of a learner whose layers are sharded, as rank 0 uses it: every pass has all ranks in step."""

    weights: Weights | GatheredWeights  # pyright: ignore[reportIncompatibleVariableOverride]
    """all of them, or those of its adapters, which are whole"""
    everything: GatheredWeights
    world: World
    skeleton: Any
    """the model of transformers without its numbers"""

    @property
    def all_weights(self) -> Mapping[str, Tensor]:
        return self.everything

    def logp(self, packed: Packed, entropy_T: Tensor | None = None, tau: float | None = None) -> Tensor:
        tau = self.tau if tau is None else tau

        def score() -> Tensor:
            logp_T = self.model(packed, tau, entropy_T)
            forget_whole(self.model)
            return logp_T

        return lead_whole(self.world, "scoring a row", lambda: self.world.in_step(score))[0]

    def save(self, directory: Path) -> None:
        if isinstance(self.weights, AdapterWeights):
            save_adapter(self.skeleton, self.weights, directory)
        else:
            self.skeleton.save_pretrained(directory, state_dict=dict(self.weights))
        self.chat.save(directory)

    def save_merged(self, directory: Path) -> None:
        save_merged(self.skeleton, directory, dict(self.everything))
        self.everything.forget()
        self.chat.save(directory)


@dataclass(frozen=True, slots=True)
class LeadReference:
    """π_ref of a learner whose layers are sharded, as rank 0 reads it."""

    weights: GatheredWeights

    @property
    def version(self) -> int:
        return self.weights.version


class LeadLearner:
    """The learner of rank 0, as the loop uses one: it has every rank learn from its rows. `own` is rank 0's part."""

    def __init__(self, world: World, own: Learner, skeleton: Any = None) -> None:
        self.world, self.own, self.share = world, own, Share(own, world)
        self.recipe, self.synced = own.recipe, own.synced
        self.policy: Policy = own.policy
        self.reference: Replica | LeadReference | None = own.reference
        if isinstance(own.policy.all_weights, LayeredWeights):
            policy = own.policy
            everything = GatheredWeights(world, own.policy.all_weights, "policy", policy.weights)
            weights = policy.weights if isinstance(policy.weights, AdapterWeights) else everything
            self.policy = LeadPolicy(weights, policy.model, policy.chat, policy.tau, everything, world, skeleton)
        if own.reference is not None and isinstance(own.reference.weights, LayeredWeights):
            self.reference = LeadReference(
                GatheredWeights(world, own.reference.weights, "reference", own.reference.weights)
            )

    def _lead(self, name: str, own: Callable[[], Any], payload: Any = None) -> list[Any]:
        """As World.lead; where the ranks go in step, nothing interrupts rank 0 either."""
        with whole() if self.own.in_step else nullcontext():
            return self.world.lead(name, own, payload)

    def pack(self, batch: Batch, tokens: int) -> list[FreshMicroBatch]:
        self._lead("packing", lambda: self.share.pack(batch, tokens), (batch, tokens))
        return self.share.rows

    def score(self, micro_batches: Sequence[FreshMicroBatch]) -> list[Tensor]:
        members = [micro.members for micro in micro_batches]
        found = self._lead("scoring", lambda: self.share.score(members), members)
        by_number = {n: logp_T for of_rank in found for n, logp_T in of_rank.items()}
        return [by_number[n].to(self.policy.device) for n in range(len(members))]

    def first_step(
        self, fresh: Sequence[FreshMicroBatch], in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        found = self._lead("learning", self.share.first)
        scores = {
            n: scores
            for own, (of_rank, _) in zip(self.share.of_ranks, found, strict=True)
            for n, scores in zip(own, of_rank, strict=True)
        }
        rows = [row.scored_by(scores[n][0].to(self.policy.device), scores[n][1]) for n, row in enumerate(fresh)]
        return rows, add_up([sums for _, sums in found]) | self._update_all(in_objective)

    def step(self, micro_batches: Sequence[MicroBatch], in_objective: bool = True) -> dict[str, float]:
        return add_up(self._lead("learning again", self.share.step)) | self._update_all(in_objective)

    def _update_all(self, in_objective: bool) -> Sums:
        return lead_whole(self.world, "updating", self.share.update)[0] if in_objective else {}

    def end_stage(self, reset_optimizer: bool) -> None:
        lead_whole(self.world, "ending the stage", lambda: self.own.end_stage(reset_optimizer), reset_optimizer)

    def state(self) -> dict[str, Tensor]:
        """What rank 0 has of it."""
        return self.own.state()

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        own = partial(self.own.load_state, state, version)
        lead_whole(self.world, "loading a checkpoint", lambda: self.world.in_step(own), (state, version))
        self._forget()

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        lead_whole(self.world, "loading weights", lambda: self.own.load_weights(weights, version), (weights, version))
        self._forget()

    def load_reference(self) -> None:
        lead_whole(self.world, "loading the reference", self.own.load_reference)

    def on_sync(self) -> dict[str, float]:
        return self.synced.metrics(self.policy.weights)

    def _forget(self) -> None:
        if isinstance(self.policy, LeadPolicy):
            self.policy.everything.forget()


class LeadSampler:
    """The in-process samplers of all ranks, as rank 0 calls them; `own` is rank 0's, `learner` rank 0's part of the
    learner. Every sampler has all weights, and samples its share of the groups. `name` tells the run's sampler from the
    evaluations'."""

    spans = False

    def __init__(self, world: World, own: LocalSampler, name: str, learner: Learner) -> None:
        self.world, self.own, self.name, self.learner = world, own, name, learner
        self.servers = tuple(f"the in-process sampler of rank {rank}" for rank in range(world.size))

    @property
    def policy(self) -> Policy | Replica:
        return self.own.policy

    @property
    def version(self) -> int:
        return self.own.version

    def adopt(self, manner: Manner) -> None:
        if manner != self.own.manner:
            self.world.lead("adopting a manner", lambda: self.own.adopt(manner), manner)

    def describe_versions(self) -> str:
        return self.own.describe_versions()

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """The weights are π's, which the ranks have: each takes them from its own learner."""
        sync = partial(sync_own, self.own, self.learner, self.world, version)
        return lead_whole(self.world, "weight sync", sync, version)[0]

    def served(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.own.served()

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """All groups at once, when the first is taken: while this rank learned, the others would have to."""
        if isinstance(self.own, BorrowingSampler):
            lead_whole(self.world, "gathering for an evaluation", self.own.borrow)
        found = self.world.lead(self.name, lambda: sample_share(self.own, self.world, requests, G), (list(requests), G))
        yield from (item for of_rank in found for item in of_rank)

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        asked = number, list(requests), G, max_tokens
        return self.world.lead("parity check", lambda: generate_on(self.own, self.world.rank, *asked), asked)[number]

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        found = self.world.lead("parity scores", lambda: self.own.scores(items), list(items))
        return [scores for of_rank in found for scores in of_rank]

    def rest(self) -> None:
        if isinstance(self.own, BorrowingSampler):
            lead_whole(self.world, "ending an evaluation", self.own.rest)
        else:
            self.own.rest()

    def read(self) -> Mapping[str, float]:
        return self.own.read()

    def close(self) -> None:
        self.own.close()


def lead_whole(world: World, name: str, own: Callable[[], Any], payload: Any = None) -> list[Any]:
    """As World.lead, for what no rank may do without the others: no interruption comes between."""
    with whole():
        return world.lead(name, own, payload)


def sync_own(sampler: LocalSampler, learner: Learner, world: World, version: int) -> Mapping[str, float]:
    """This rank's learner's weights into its sampler; from sharded layers with the other ranks in step."""
    sync = partial(sampler.sync_weights, learner.policy.weights, version)
    return world.in_step(sync) if learner.in_step else sync()


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
