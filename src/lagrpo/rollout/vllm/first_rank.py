"""The vLLM engine of a run of several ranks: rank 0 has it, and all ranks call it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from lagrpo.distributed.ranks import Ranks
from lagrpo.model.model import Policy
from lagrpo.rollout.base import EngineDefaults, Item, SamplingParams
from lagrpo.rollout.sync_check import ServerCheck
from lagrpo.rollout.vllm.engine import VllmEngine
from lagrpo.types import Group, Request


class FirstRankSampler(EngineDefaults):
    """The vLLM engine of rank 0, as all ranks call it.

    Rank 0 alone has requests, and the engine; `engine` is None on the others. Collective, but for
    `sample`, `pop_metrics`, `keep_logs` and `close`.
    """

    samples_on_every_rank = False
    evaluates = True

    def __init__(self, ranks: Ranks, engine: VllmEngine | None) -> None:
        self.ranks = ranks
        self._engine = engine
        self.dtype = ranks.on_rank0(lambda: self.engine.weights.dtype)

    @property
    def engine(self) -> VllmEngine:
        """The engine, on rank 0."""
        assert self._engine is not None, "only rank 0 has the engine"
        return self._engine

    @property
    def version(self) -> int:
        return self.ranks.on_rank0(lambda: self.engine.version)

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        self._pack(weights, version)
        return self.ranks.on_rank0(lambda: self.engine.sync_weights(weights, version))

    @contextmanager
    def temporary_weights(
        self, weights: Mapping[str, Tensor], version: int, *, restore_afterwards: bool
    ) -> Generator[None]:
        self._pack(weights, version)
        with ExitStack() as stack:
            self.ranks.on_rank0(
                lambda: stack.enter_context(
                    self.engine.temporary_weights(
                        weights, version, restore_afterwards=restore_afterwards
                    )
                )
            )
            yield

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        """Returns the version of the last sync, and on rank 0 its weights."""
        version = -1
        weights: Mapping[str, Tensor] = {}
        if self.ranks.is_first:
            version, weights = self.engine.current_weights()
        return self.ranks.on_rank0(lambda: version), weights

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[Request, Group]]:
        if not self.ranks.is_first:
            return iter(())
        return self.engine.sample(requests, G, params)

    def in_flight(self) -> Sequence[Request]:
        return self.engine.in_flight() if self.ranks.is_first else ()

    def generate_on_servers(
        self, requests: Sequence[Request], G: int, max_tokens: int
    ) -> dict[str, list[Group]]:
        return self.ranks.on_rank0(lambda: self.engine.generate_on_servers(requests, G, max_tokens))

    def get_logprobs(self, items: Sequence[Item]) -> dict[str, list[list[float]]]:
        return self.ranks.on_rank0(lambda: self.engine.get_logprobs(items))

    def pop_metrics(self) -> Mapping[str, float]:
        return self.engine.pop_metrics() if self.ranks.is_first else {}

    def close(self) -> None:
        if self.ranks.is_first:
            self.engine.close()

    def weight_check(self, policy: Policy, requests: Sequence[Request]) -> ServerCheck:
        return ServerCheck(self, requests, self.dtype)

    def keep_logs(self, run: Path) -> None:
        if self.ranks.is_first:
            self.engine.keep_logs(run)

    def _pack(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Lets rank 0 write sharded weights as all ranks gather them, one after the other.

        The engine then has this version, and reads no weights.
        """
        if self.ranks.mesh is None:
            return
        gathered = iter(weights.items())

        def pack_gathered() -> None:
            try:
                self.engine.weights.pack(gathered, version)
            finally:
                # The other ranks gather all of them, also if rank 0 has this version or no space.
                exhaust(gathered)

        if not self.ranks.is_first:
            exhaust(gathered)
        self.ranks.on_rank0(pack_gathered)


def exhaust(items: Iterator[object]) -> None:
    """Reads all items, and drops each at once."""
    deque(items, maxlen=0)
