"""What the training loop asks of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lagrpo.rollout.episodes import Episodes
from lagrpo.types import Group, Prompt

Item = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt, and of a completion


@dataclass(frozen=True, slots=True)
class Request:
    """G completions of a prompt for a batch."""

    batch: int
    epoch: int  # pass over the split that the prompt comes from: when two meet, a batch can hold a prompt twice
    prompt: Prompt  # tokenized

    @property
    def address(self) -> tuple[int, int, int]:
        """The key of the group's random numbers, within a seed and a purpose."""
        return self.batch, self.epoch, self.prompt.key


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an evaluation samples."""

    purpose: str  # part of the key of every random number: an evaluation does not repeat those of training
    tau: float
    max_tokens: int  # of a completion
    episodes: Episodes | None = None  # what completions talk to; None: one turn


class Sampler(Protocol):
    """Generates completions with the weights of the last sync, and stamps their version on every token. In this process
    (local.py), or by vLLM servers (vllm/engine.py)."""

    spans: bool  # whether weights may be synced while completions are in flight

    @property
    def version(self) -> int: ...  # of the weights that generate new tokens; -1 or another if servers disagree
    def describe_versions(self) -> str: ...  # what every server reports, for the user
    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]: ...  # of the last weight sync, on any device
    def free_cache(self) -> None: ...  # give back memory that only generating needs: the trainer is about to compute
    def pop_metrics(self) -> Mapping[str, float]: ...  # since the last call
    def close(self) -> None: ...  # end whatever the sampler started

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """Load π_version and return the cost as metrics. Raises RuntimeError while groups are open, unless `spans`."""
        ...

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """One group for each request, as they end. Servers start at once, this process when the first is taken."""
        ...
