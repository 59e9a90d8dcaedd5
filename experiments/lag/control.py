"""Controls: what a run does while its sampler is far from its policy.

fixed         nothing: the learning rate stays
kl_root       the rate is multiplied by sqrt(min(1, TARGET / KL))
kl_linear     the rate is multiplied by min(1, TARGET / KL)
kl_feedback   kl_root, times a scale <= 1 that follows log(TARGET / KL) slowly
ess_root      the rate is multiplied by the root of the effective sample size (arXiv 2602.17616)
sync_at_kl    with a sawtooth: the sampler also gets new weights after an update with KL > TARGET

KL estimates KL(alpha || pi) in nats per token, over the tokens that the update learns from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Control = Literal["fixed", "kl_root", "kl_linear", "kl_feedback", "ess_root", "sync_at_kl"]
CONTROLS: tuple[Control, ...] = get_args(Control)
TARGET = 0.05
"""nats per token"""
SHORTEST_TIME = 8
"""Updates over which feedback acts, at least. With a longer lag it is the lag: earlier than that a
change of the rate does not show in the KL.
"""
LARGEST_ERROR = 2.0
"""of log(TARGET / KL), so that a single update moves the scale little"""
SMALLEST_LOG_SCALE = -9.0


class RateControl:
    """The factors of the learning rates of stacked runs, each with its own control."""

    def __init__(self, controls: Sequence[Control], lag: int):
        self._controls = controls
        self._time = max(SHORTEST_TIME, lag)
        self._log_scale = torch.zeros(len(controls))

    def factors(self, kl: Tensor, ess: Tensor) -> Tensor:
        """The factor of each run's rate at this update, [S]; kl and ess [S]."""
        # A KL that is not finite counts as infinite.
        ratio = torch.where(kl.isfinite(), TARGET / kl.clamp(min=1e-9), 1e-9)
        error = ratio.log().clamp(-LARGEST_ERROR, LARGEST_ERROR)
        log_scale = self._log_scale + error / (2 * self._time)
        self._log_scale = log_scale.clamp(SMALLEST_LOG_SCALE, 0.0)
        linear = ratio.clamp(max=1.0)
        by_control = {
            "kl_root": linear.sqrt(),
            "kl_linear": linear,
            "kl_feedback": self._log_scale.exp() * linear.sqrt(),
            "ess_root": ess.sqrt(),
        }
        ones = torch.ones_like(kl)
        columns = [by_control.get(control, ones)[s] for s, control in enumerate(self._controls)]
        return torch.stack(columns)
