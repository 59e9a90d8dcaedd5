"""Replica: a copy of the policy for sampling (α) or for the KL term (π_ref). It loads versions and computes by them.

A decoding step does little else than read every weight, so how they lie decides its time. Where the C kernels compute
all matrix products (`Model.exact`), the replica has panels in place of the weights of linear layers, and while it holds
the version of the policy that learns, both read the same ones (backends/cpu/panels.py). Elsewhere it is a plain copy.
With adapters only these are copied, everywhere: all else is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lagrpo.backends.cpu.panels import BorrowedPanels
from lagrpo.model.chat import Chat
from lagrpo.model.model import Model, Packed, Policy, Weights, check_weights, weights_of


class PackedWeights:
    """A version whose linear layers lie in `panels`, the others (embeddings, head, norms, biases, buffers) in `lm`."""

    def __init__(self, origin: Weights, lm: Any, panels: Any) -> None:
        self.version = origin.version
        self._shapes, self._own, self._panels = origin.shapes(), Weights(lm, origin.version), panels
        self._empty = {name: p for name, p in lm.named_parameters() if self._shapes[name] != p.shape}

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by name, as `Weights.items` gives them."""
        packed = self._panels.weights()
        for name, tensor in self._own.items():
            yield name, packed[id(self._empty[name])] if name in self._empty else tensor

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy what lies in the model, and have the rest packed, or lent where it is the lender's own. Raise ValueError
        for names or shapes that are not this model's."""
        check_weights(weights, self._shapes, version)
        for name, tensor in self._own.items():
            if name not in self._empty:
                tensor.copy_(weights[name])
        self._panels.load({parameter: weights[name] for name, parameter in self._empty.items()})
        self.version = version


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A copy of a policy: it loads versions, computes hidden states, logits and log-probs, and decodes."""

    weights: Weights | PackedWeights
    model: Model
    chat: Chat
    tau: float

    @property
    def version(self) -> int:
        return self.weights.version

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over π_version. Raises ValueError for names or shapes that are not this model's."""
        self.weights.load(weights, version)

    def logp(self, packed: Packed) -> Tensor:
        return self.model(packed, self.tau)


def replica(policy: Policy) -> Replica:
    """A copy of the policy with the same weights, for its backend and at its tau."""
    backend = policy.model.backend
    lm, panels = backend.copy(policy.model)
    lacking = isinstance(panels, BorrowedPanels)
    weights = PackedWeights(policy.weights, lm, panels) if lacking else weights_of(lm, policy.version)
    return Replica(weights, Model(lm, backend, panels), policy.chat, policy.tau)
