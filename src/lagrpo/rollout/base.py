"""What a rollout engine gets. An engine (local.py in this process, or vllm/engine.py) generates with the weights of the
last sync and stamps their version on every token:

    sync_weights(weights, version)   load π_version; returns the cost as metrics
    sample(requests, G, params)      one group for each request, as they end; evaluations have their own params
    version, current_weights()       of the last sync
    syncs_in_flight                            whether weights may be synced while completions are in flight
    pop_metrics(), close()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lagrpo.rollout.episodes import Episodes
from lagrpo.types import Prompt

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
    """How training or an evaluation samples."""

    purpose: str  # "sample", "evaluate" …: part of the key of every random number
    tau: float
    max_tokens: int  # of a completion
    episodes: Episodes | None = None  # what completions talk to; None: one turn

    @property
    def longest(self) -> int:
        """Tokens of the longest completion, with what its environment says."""
        return self.max_tokens + (self.episodes.replied if self.episodes is not None else 0)
