"""Controls: what a run does while its sampler is far from its policy.

fixed         nothing: the learning rate stays
kl_root       the rate is multiplied by sqrt(min(1, TARGET / KL))
kl_linear     the rate is multiplied by min(1, TARGET / KL)
kl_feedback   optimizer.scale_lr_by_kl: kl_root, times a scale that follows TARGET / KL slowly
ess_root      the rate is multiplied by the root of the effective sample size (arXiv 2602.17616)
sync_at_kl    with a sawtooth: the sampler also gets new weights after an update with KL > TARGET

KL estimates KL(alpha || pi) in nats per token, over the tokens that the update learns from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lagrpo.settings.lag_table import LARGEST_KL
from lagrpo.training.kl_rate import RateByKl

Control = Literal["fixed", "kl_root", "kl_linear", "kl_feedback", "ess_root", "sync_at_kl"]
CONTROLS: tuple[Control, ...] = get_args(Control)
TARGET = LARGEST_KL
"""nats per token"""
KL_OF_NOT_FINITE = 1e9


class RateControl:
    """The factors of the learning rates of stacked runs, each with its own control."""

    def __init__(self, controls: Sequence[Control], lag: int):
        self._controls = controls
        self._feedback = [RateByKl(TARGET, lag) for _ in controls]

    def factors(self, kl: Tensor, ess: Tensor) -> Tensor:
        """The factor of each run's rate at this update, [S]; kl and ess [S]."""
        kl = torch.where(kl.isfinite(), kl, KL_OF_NOT_FINITE)
        linear = (TARGET / kl.clamp(min=1e-9)).clamp(max=1.0)
        feedback = [
            rate.next_factor(float(kl_of_run))
            for rate, kl_of_run in zip(self._feedback, kl, strict=True)
        ]
        ones = torch.ones_like(kl)
        by_control: dict[Control, Tensor] = {
            "fixed": ones,
            "kl_root": linear.sqrt(),
            "kl_linear": linear,
            "kl_feedback": torch.tensor(feedback),
            "ess_root": ess.sqrt(),
            "sync_at_kl": ones,
        }
        columns = [by_control[control][s] for s, control in enumerate(self._controls)]
        return torch.stack(columns)
