"""Evaluations by the servers of a run: its sampler's, with temperature, limits and random numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lagrpo.rollout.base import Manner, Request
from lagrpo.rollout.vllm.generation import Dispatcher
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.rollout.vllm.server import Server
from lagrpo.types import Group


class VllmEvaluator:
    """Samples evaluations by the weights that the servers of `sampler` have at the time (`VllmSampler.lent`)."""

    def __init__(self, sampler: VllmSampler) -> None:
        self.sampler, self._generation = sampler, sampler.generation
        self._dispatcher = Dispatcher(sampler.fleet, self._generate)

    def adopt(self, manner: Manner) -> None:
        """Sample so from now on. Only while nothing is being sampled."""
        own = {"tau": manner.tau, "max_tokens": manner.max_tokens, "purpose": manner.purpose}
        self._generation = replace(self.sampler.generation, **own)

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        return self._dispatcher.submit(requests, G, each=max(1, self._generation.max_num_seqs // G))

    def rest(self) -> None:
        """The servers have memory of their own."""

    def _generate(self, server: Server, request: Request, G: int) -> Group:
        with self.sampler.weights.using() as label:
            return self._generation.generate(server, request, G, self.sampler.fleet.served, label)
