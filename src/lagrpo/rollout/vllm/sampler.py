"""The Sampler over vLLM servers, put together from its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal

from torch import Tensor

from lagrpo.interrupts import whole
from lagrpo.rollout.base import Item, Request
from lagrpo.rollout.episodes import Episodes
from lagrpo.rollout.vllm.conversing import converse
from lagrpo.rollout.vllm.fleet import Fleet, Member
from lagrpo.rollout.vllm.generation import Dispatcher, Generation
from lagrpo.rollout.vllm.server import Server, concerning
from lagrpo.rollout.vllm.weights import WeightSync
from lagrpo.rollout.vllm.wire import Parcel
from lagrpo.types import Group

InFlight = Literal["finish", "span", "regenerate"]


class VllmSampler:
    """Sampler over the servers of a fleet. `in_flight` says what a weight sync does with completions under way:
    `finish` allows none, `span` lets them go on with the new weights (their tokens then have several versions; with
    adapters, with the one that they began with), `regenerate` generates their groups again."""

    def __init__(
        self, fleet: Fleet, generation: Generation, weights: WeightSync, in_flight: InFlight = "finish"
    ) -> None:
        self.fleet, self.generation, self.weights, self.in_flight = fleet, generation, weights, in_flight
        self.servers, self.spans = fleet.servers, in_flight != "finish"
        self.episodes: Episodes | None = None
        """set where completions talk to an environment"""
        self._dispatcher = Dispatcher(fleet, self._generate)
        self._own: Parcel | None = None  # the weights of the last sync, while the servers have others for an evaluation

    @property
    def version(self) -> int:
        """The version that all servers report; -1 if one reports weights of another run or version."""
        labels = {self.fleet.ask(member, Server.version) for member in self.fleet.members}
        versions = {self.fleet.served.version_of(label) for label in labels}
        return versions.pop() if len(versions) == 1 else -1

    def describe_versions(self) -> str:
        labels = [self.fleet.ask(member, Server.version) for member in self.fleet.members]
        return ", ".join(f"{server}: {label!r}" for server, label in zip(self.servers, labels, strict=True))

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
        """π_version into all servers; what it cost: bytes, seconds of writing and of having the servers paused.

        Raises:
            RuntimeError: completions of the previous version are under way, and in_flight is `finish`.
            SamplerError: the weights could not be written, are of another model, were refused (then the servers go on
                with the version they had), or got stuck on the way (then the servers are left paused).
        """
        if self._dispatcher.open and not self.spans:
            raise RuntimeError(f"version {version} was to be synced while {self._dispatcher.open} groups are open")
        started = time.perf_counter()
        parcel = self.weights.pack(weights, version)
        written = time.perf_counter()
        abort = self.in_flight == "regenerate"
        halts = abort or self.weights.pauses
        with self._dispatcher.halt(abort) if halts else nullcontext():
            paused = time.perf_counter()
            self.weights.load(parcel)
        seconds = time.perf_counter() - paused if halts else 0.0
        self.weights.forget_before(version)
        return {"sync_bytes": parcel.size, "seconds_writing": written - started, "seconds_paused": seconds}

    @contextmanager
    def lent(self, weights: Mapping[str, Tensor], version: int, back: bool) -> Iterator[None]:
        """Inside, the servers have π_version, for an evaluation; no completion may be under way. Behind it they have
        the weights of the last sync again if `back` says so. Raises as `sync_weights` does."""
        served = self.fleet.served
        before, scores = served.parcel, served.scores
        if served.version == version:
            yield
            return
        parcel, self._own = self.weights.pack(weights, version), before if back else None
        try:
            with self._dispatcher.halt(abort=False):
                self.weights.load(parcel)
            yield
        finally:
            with whole():
                if self._own is not None and not self.fleet.broken:
                    with self._dispatcher.halt(abort=False):
                        self.weights.restore(self._own)
                    served.scores = scores
                self._own = None
        self.weights.forget_before(served.version)

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        self.fleet.turns = self.episodes.limits.turns if self.episodes is not None else 1
        return self._dispatcher.submit(requests, G, each=max(1, self.generation.max_num_seqs // G))

    def served(self) -> tuple[int, Mapping[str, Tensor]]:
        """As they were sent: in the dtype of the servers. Raises ValueError before the first sync."""
        if (parcel := self._own or self.fleet.served.parcel) is None:
            raise ValueError("no weights have been synced yet")
        return self.fleet.served.version_of(parcel.label), self.weights.read(parcel)

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        """log-probs at temperature 1 by every server: [server][item][token], nats. They are kept: a server that is
        brought back has to give them again."""
        with ThreadPoolExecutor(len(items)) as pool:
            found = [list(pool.map(partial(self._score, member), items)) for member in self.fleet.members]
        self.fleet.served.scores = list(zip(items, found[0], strict=True))
        return found

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        """Groups by one server, in the order of the requests, for the parity check."""
        ask = partial(self.fleet.ask, self.fleet.members[number])
        return [ask(partial(self._generate, request=request, G=G, longest=max_tokens)) for request in requests]

    def rest(self) -> None:
        """The servers have memory of their own."""

    def read(self) -> dict[str, float]:
        """Since the last call: how often a server was brought back, how many groups were generated again, and for how
        many seconds there was something to generate."""
        with self.fleet.changed:
            recoveries, self.fleet.recoveries = self.fleet.recoveries, 0
        return {"recoveries": recoveries, **self._dispatcher.read()}

    def close(self) -> None:
        """End the threads, the servers that are ours, and what lies in the shared directory."""
        self.fleet.close()
        self.weights.close()

    def _score(self, member: Member, item: Item) -> list[float]:
        def score(server: Server) -> list[float]:
            with concerning(f"the parity check of version {self.fleet.served.version}"):
                return server.score(*item)

        return self.fleet.ask(member, score)

    def _generate(self, server: Server, request: Request, G: int, longest: int | None = None) -> Group:
        if self.episodes is None or longest is not None:  # the parity check's completions have one turn
            with self.weights.using() as label:
                return self.generation.generate(server, request, G, self.fleet.served, label, longest)
        return converse(self.generation, self.episodes, server, request, G, self.fleet.served, self.weights.using)
