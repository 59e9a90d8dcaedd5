"""The interface of rollout engines.

An engine is in this process (local.py), samples from servers (vllm/engine.py), or is the user's. An
engine says what it can do, so no code depends on which engine it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lagrpo.model.model import Policy
from lagrpo.tasks.episodes import Episodes
from lagrpo.types import Group, Request

if TYPE_CHECKING:
    from lagrpo.rollout.sync_check import Agreement

# The token ids of a prompt, and the token ids of a completion.
Item = tuple[Sequence[int], Sequence[int]]


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


class EngineDefaults(Protocol):
    """What an engine may say of itself. An engine of the user's has these defaults."""

    computes_as_trainer: bool = False
    """True if it computes in this process as the trainer does: log α of tokens of π_k is log π_k,
    up to the rounding that the weight check measures"""

    samples_on_every_rank: bool = True
    """True if each rank has an engine, which gets its share of the prompts; False if rank 0 gets
    them all"""

    evaluates: bool = False
    """True if evaluations sample from this engine, by `temporary_weights`. Otherwise lagrpo samples
    them from the trainer's policy in its own process."""

    def temporary_weights(
        self, weights: Mapping[str, Tensor], version: int, *, restore_afterwards: bool
    ) -> AbstractContextManager[None]:
        """Returns a context in which the engine has π_version, for an evaluation.

        With `restore_afterwards`, it has the weights of the last sync again afterwards. Without it
        π_version counts as synced.
        """
        raise TypeError(f"{type(self).__name__} evaluates, but has no temporary_weights")

    def weight_check(
        self: RolloutEngine, policy: Policy, requests: Sequence[Request]
    ) -> WeightCheck:
        """Returns the check after each weight sync. It may compare on these prompts.

        Raises WeightSyncError if the engine computes something else than the policy.
        """
        return VersionCheck(self)

    def before_learning(self) -> None:
        """Frees what the trainer may need. No token is sampled before the next weight sync."""

    def free_idle_memory(self) -> bool:
        """Frees what is kept for later batches, and keeps nothing from now on: memory is short.

        Returns False if nothing was kept.
        """
        return False

    def in_flight(self) -> Sequence[Request]:
        """Returns the groups that have begun and were not yielded, in the order of their begin.

        A checkpoint has them if completions go on after weight syncs. By default there are none,
        and a resumed run samples the groups again.
        """
        return ()

    def keep_logs(self, run: Path) -> None:
        """Moves the logs of what the engine started into the directory of a run."""


class RolloutEngine(EngineDefaults, Protocol):
    """A rollout engine: it generates with the weights of the last weight sync.

    For a request it gives one group of G completions. A completion of t tokens has

        token_ids      int64 [t]
        rollout_logp   float32 [t], nats, at the sampling temperature; NaN for tokens of a reply
        versions       int64 [t], the version of the weights that sampled each token
        sampled        bool [t], False for tokens of a reply

    Weights are tensors by parameter name, each in the shape that the model has; with adapters, they
    are the adapters' alone.
    """

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with."""
        ...

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        """Loads π_version. Returns the cost as metrics by name, such as seconds.

        With schedule.max_staleness completions in flight continue with the new weights.
        """
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
        """Returns counts since the last call, which are added over the ranks."""
        ...

    def close(self) -> None:
        """Ends the processes and connections that the engine started."""
        ...


class WeightCheck(Protocol):
    """The check after each weight sync: the engine must have the policy's weights."""

    @property
    def agreement(self) -> Agreement | None:
        """The agreement of trainer and engine at the start of a run, if it was measured."""
        ...

    def __call__(self, policy: Policy) -> Mapping[str, float]:
        """Returns metrics. Raises WeightSyncError for other weights."""
        ...


class WeightSyncError(RuntimeError):
    """The sampler does not have the weights of the policy."""


class VersionCheck:
    """The weight check of an engine without another one: it looks at the version alone."""

    agreement = None

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def __call__(self, policy: Policy) -> Mapping[str, float]:
        check_version(policy, self.engine.version)
        return {}


def check_version(policy: Policy, version: int) -> None:
    """Raises WeightSyncError unless `version`, which the engine reports, is the policy's."""
    if version != policy.version:
        raise WeightSyncError(
            f"version {policy.version} was synced, but the sampler reports {version}"
        )
