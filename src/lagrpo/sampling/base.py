"""The Sampler protocol: what the loop asks of whatever generates the completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lagrpo.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Request:
    """G completions of `prompt` (tokenized) for batch `batch`, the prompt coming from epoch `epoch` of its split. A
    prompt can stand in one batch twice where two epochs meet, so the epoch is part of the address of its random
    numbers."""

    batch: int
    epoch: int
    prompt: Prompt

    @property
    def address(self) -> tuple[int, int, int]:
        """Where the samples of this group come from, within a seed and a purpose."""
        return self.batch, self.epoch, self.prompt.key


class Sampler(Protocol):
    """Generates completions from the policy that was synced last, and stamps its version on every token."""

    @property
    def version(self) -> int:
        """The version of the weights that new tokens are sampled from."""
        ...

    @property
    def spans(self) -> bool:
        """Whether a weight sync may come while completions are under way."""
        ...

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """Load π_version; what it cost, as metrics. Raises RuntimeError while completions of the
        previous version are under way, unless it `spans`."""
        ...

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """One group for each request, each as soon as its last completion has ended (in whatever order). A sampler that
        works by itself begins at once, another one when the first group is taken."""
        ...

    def score(self, prompt_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        """log α(token | …) of given completion tokens int64 [t] under the served weights: float32 [t], nats."""
        ...

    def rest(self) -> None:
        """The learner is about to compute: give back the memory that only sampling needs."""
        ...

    def read(self) -> Mapping[str, float]:
        """Metrics since the last call."""
        ...

    def close(self) -> None:
        """End whatever the sampler started."""
        ...
