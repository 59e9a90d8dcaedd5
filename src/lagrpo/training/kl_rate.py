"""A learning rate that falls while the sampler is far from the policy: optimizer.scale_lr_by_kl."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SHORTEST_TIME = 8
"""Updates over which the scale acts, at least. With staler samples it is their staleness: before
that a change of the rate does not show in the KL.
"""
LARGEST_ERROR = 2.0
"""of log(target / KL): a single update moves the scale little"""
SMALLEST_LOG_SCALE = -9.0
SMALLEST_KL = 1e-9
"""nats per token"""


@dataclass
class RateByKl:
    """The factor of the learning rate of each update, at most 1.

    With c = log(target / KL), it is s e^(min(0, c) / 2) for a scale s <= 1 that starts at 1 and is
    multiplied by e^(c' / (2 time)) before each update, c' being c within ±LARGEST_ERROR. KL is the
    estimate of KL(alpha || pi) per token of the update, nats.
    """

    target: float
    """nats per token"""
    staleness: int
    """of the oldest samples, updates"""
    log_scale: float = 0.0

    def next_factor(self, kl: float) -> float:
        """The factor of the next update, whose samples have this KL. Moves the scale."""
        distance = math.log(self.target / max(kl, SMALLEST_KL))
        error = min(max(distance, -LARGEST_ERROR), LARGEST_ERROR)
        moved = self.log_scale + error / (2 * max(SHORTEST_TIME, self.staleness))
        self.log_scale = min(max(moved, SMALLEST_LOG_SCALE), 0.0)
        return math.exp(self.log_scale + min(0.0, distance) / 2)

    def state(self) -> Tensor:
        """The scale, for a checkpoint."""
        return torch.tensor(self.log_scale, dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Loads what `state` returned."""
        self.log_scale = float(state)
