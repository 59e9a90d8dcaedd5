"""What the loop and the log-prob parity check ask of a sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lagrpo.types import Group, Prompt

Item = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt, and of a completion


@dataclass(frozen=True, slots=True)
class Request:
    """G completions of a prompt for a batch."""

    batch: int
    epoch: int
    """Pass over the split that the prompt comes from: where two epochs meet, a batch can hold a prompt twice."""
    prompt: Prompt
    """Tokenized."""

    @property
    def address(self) -> tuple[int, int, int]:
        """The address of the group's random numbers, within a seed and a purpose."""
        return self.batch, self.epoch, self.prompt.key


@dataclass(frozen=True, slots=True)
class Manner:
    """How an evaluation samples."""

    purpose: str
    """Part of the address of every random number, so that an evaluation does not repeat those of training."""
    tau: float
    max_tokens: int
    """Longest completion."""
    environment: str | None = None
    """Name of the environments that completions talk to; None: completions have one turn."""


class Sampler(Protocol):
    """Generates completions with the weights of the last sync, and stamps their version on every token."""

    @property
    def version(self) -> int:
        """The version of the weights that generate new tokens."""
        ...

    @property
    def spans(self) -> bool:
        """Whether weights may be synced while completions are under way."""
        ...

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """Load π_version and return the cost as metrics. Raises RuntimeError while groups are open, unless `spans`."""
        ...

    def served(self) -> tuple[int, Mapping[str, Tensor]]:
        """The version of the last weight sync and its weights by name, on any device."""
        ...

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """One group for each request, as they end. Servers start at once, this process when the first is taken."""
        ...

    def rest(self) -> None:
        """Give back the memory that only generating needs: the learner is about to compute."""

    def read(self) -> Mapping[str, float]:
        """Metrics since the last call."""
        ...

    def close(self) -> None:
        """End whatever the sampler started."""


class Checkable(Protocol):
    """What the log-prob parity check asks of a sampler, server by server; an in-process sampler is one server."""

    @property
    def version(self) -> int:
        """The version that all servers report; any other number if they disagree."""
        ...

    @property
    def servers(self) -> Sequence[Any]:
        """Each has a name, `str(server)`."""
        ...

    def describe_versions(self) -> str:
        """What every server reports, for the user."""
        ...

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        """Groups by server `number`, in the order of the requests, of at most `max_tokens` tokens a completion."""
        ...

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        """log-probs of given tokens at temperature 1, nats: [server][item][token]."""
        ...
