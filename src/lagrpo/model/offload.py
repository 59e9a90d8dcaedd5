"""AdamW's moments in the memory of the host: they visit the device of their masters in an update, one weight at a time.

On the device there is then room for two moments of the largest weight, and not of all. The updates are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostMoments:
    """The moments of an optimizer of these parameters, wherever these are."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def step(self) -> None:
        """One step of the optimizer along the gradients of the parameters."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                self._step(parameter, gradient)

    def _step(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The step of one parameter; the others have no gradient, so that the optimizer passes them over."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        kept = {name: state[name] for name in MOMENTS if name in state}
        for name, moment in kept.items():
            state[name] = moment.to(parameter.device)
        parameter.grad = gradient
        self._optimizer.step()
        parameter.grad = None
        for name in MOMENTS:
            state[name] = kept[name].copy_(state[name]) if name in kept else on_host(state[name], parameter.device)


def on_host(tensor: Tensor, of: torch.device) -> Tensor:
    """A copy in the host's memory, locked there where a GPU `of` it is to fetch it."""
    kept = torch.empty_like(tensor, device="cpu", pin_memory=of.type == "cuda")
    return kept.copy_(tensor)
