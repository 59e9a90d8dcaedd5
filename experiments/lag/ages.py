"""Schedules of staleness: updates between the policy that samples and the policy that learns.

constant    a queue of batches: each update learns from the batch sampled `lag` updates ago, as an
            asynchronous pipeline does
sawtooth    the sampler gets new weights every lag + 1 updates, so ages rise from 0 to lag and fall
            back to 0
mixed       each group of an update has an age of its own, uniform on 0 .. lag: a buffer of the last
            batches
by_length   the ages of mixed, but the longest of an update's groups has the largest of them, and so
            on down to the shortest: groups are learned from in the order in which they end
in_order    completions go on across updates, and batches are learned from in order, as with
            schedule.max_staleness: lag + 1 batches are in flight, there are rows for all of them,
            and in each update the longest possible completion gets a share of 1 / (lag + 1) of its
            tokens. So its first token is `lag` updates old when it is learned from, its last one 0;
            a shorter one ends earlier, and waits

Before update `lag` there is no policy that old. The initial one samples instead, so the age is at
most the number of updates made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Kind = Literal["constant", "sawtooth", "mixed", "by_length", "in_order"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kind of staleness and its largest age."""

    kind: Kind
    lag: int

    @property
    def keeps_batches(self) -> int:
        """The number of latest batches that updates take groups from; 0 if they sample."""
        return 0 if self.kind in ("sawtooth", "in_order") else self.lag + 1

    def ages(self, update: int, groups: int, random: np.random.Generator) -> Tensor:
        """The age of each group of an update that learns from kept batches, in batches, [groups].

        A batch from before update 0 is one of the initial policy.
        """
        if self.kind == "constant":
            return torch.full((groups,), self.lag)
        ages = torch.from_numpy(random.integers(0, self.lag + 1, groups))
        # The groups of a batch are in the order of their lengths then (train.by_length).
        return ages.sort().values if self.kind == "by_length" else ages

    def ages_of_tokens(self, length: int) -> Tensor:
        """The age of each token of a completion in flight, in updates, [length]."""
        return self.lag - (self.lag + 1) * torch.arange(length) // length


class SawtoothSyncs:
    """The weight syncs of S stacked runs with a sawtooth.

    `may_sync_early` [S]: runs that also sync after an update that was far from the sampler.
    """

    def __init__(self, lag: int, may_sync_early: Tensor):
        self._lag = lag
        self._may_sync_early = may_sync_early
        # The first update begins with a sync.
        self._next_age = torch.full(may_sync_early.shape, lag + 1)

    def next(self, was_far: Tensor) -> tuple[Tensor, Tensor]:
        """True for the runs that sync before this update, and the age of their samples, both [S].

        was_far [S]: the update before was far from the sampler.
        """
        syncs = (self._next_age > self._lag) | (was_far & self._may_sync_early)
        age = torch.where(syncs, 0, self._next_age)
        self._next_age = age + 1
        return syncs, age
