"""Schedules of staleness: updates between the policy that samples and the policy that learns.

constant    a queue of batches: each update learns from the batch sampled `lag` updates ago, as an
            asynchronous pipeline does
sawtooth    the sampler gets new weights every lag + 1 updates, so ages rise from 0 to lag and fall
            back to 0
mixed       each group of an update has an age of its own, uniform on 0 .. lag: a buffer of the last
            batches

Before update `lag` of a constant or mixed schedule there is no batch that old. The initial policy
samples instead, so the age is at most the number of updates made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Kind = Literal["constant", "sawtooth", "mixed"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kind of staleness and its largest age."""

    kind: Kind
    lag: int

    @property
    def keeps_batches(self) -> int:
        """The number of latest batches that updates take groups from; 0 if they sample."""
        return 0 if self.kind == "sawtooth" else self.lag + 1

    def ages(self, update: int, groups: int, random: np.random.Generator) -> Tensor:
        """The age of each group of an update (counted from 0) in batches, [groups].

        A batch from before update 0 is one of the initial policy.
        """
        if self.kind == "sawtooth":
            return torch.full((groups,), update % (self.lag + 1))
        if self.kind == "constant":
            return torch.full((groups,), self.lag)
        return torch.from_numpy(random.integers(0, self.lag + 1, groups))
