"""The interfaces of rollout engines and evaluators, and the requests that they get.

An engine is in this process (local.py), samples from servers (vllm/engine.py), or is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lagrpo.rollout.episodes import Episodes
from lagrpo.types import Group, Prompt

# The token ids of a prompt, and the token ids of a completion.
Item = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Request:
    """G completions of a prompt for a batch.

    `epoch` is the pass over the split that the prompt comes from. Where two passes meet, a batch
    can hold a prompt twice.
    """

    batch: int
    epoch: int
    prompt: Prompt  # tokenized

    @property
    def address(self) -> tuple[int, int, int]:
        """The key of the group's random numbers, within a seed and a purpose."""
        return self.batch, self.epoch, self.prompt.key


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters with which training or an evaluation samples.

    - `purpose`: "sample", "evaluate" …; a part of the key of every random number
    - `tau`: the temperature
    - `max_tokens`: the most tokens that the policy samples for a completion
    - `episodes`: the environment that completions talk to; None for completions of one turn
    - `top_p`: the share of the probability that is sampled from, in evaluations; log-probs are
      under the distribution that was sampled from
    - `stop`: texts that end a completion, or a turn of one; the token that completes a text is the
      last one
    """

    purpose: str
    tau: float
    max_tokens: int
    episodes: Episodes | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest completion, with the environment's replies."""
        if self.episodes is None:
            return self.max_tokens
        return self.max_tokens + self.episodes.replied


class RolloutEngine(Protocol):
    """A rollout engine: it generates with the weights of the last weight sync.

    For a request it gives one group of G completions. A completion of t tokens has

        token_ids    int64 [t]
        logp_alpha   float32 [t], nats, at the sampling temperature; NaN for tokens of a reply
        versions     int64 [t], the version of the weights that sampled each token
        sampled      bool [t], False for tokens of a reply

    Weights are tensors by parameter name, each in the shape that the model has; with adapters, they
    are the adapters' alone.
    """

    @property
    def syncs_in_flight(self) -> bool:
        """True if weights may be synced while completions are in flight."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with."""
        ...

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """Loads π_version. Returns the cost as metrics by name, such as seconds."""
        ...

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        """Returns the version of the last sync and its weights."""
        ...

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams, /
    ) -> Iterator[tuple[Request, Group]]:
        """Yields one group for each request, in the order in which groups end."""
        ...

    def pop_metrics(self) -> Mapping[str, float]:
        """Returns the metrics since the last call."""
        ...

    def close(self) -> None:
        """Ends the processes and connections that the engine started."""
        ...


class Evaluator(Protocol):
    """The part of an engine that evaluations need.

    It is an engine in this process on the trainer's own weights, or with vLLM the engine that
    training samples from, which gets the policy for as long as an evaluation takes.
    """

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams, /
    ) -> Iterator[tuple[Request, Group]]:
        """Yields one group of G completions for each request, in the order in which groups end.

        The completions have the tensors that `RolloutEngine` names, and no outcome unless their
        environment gave one.
        """
        ...
