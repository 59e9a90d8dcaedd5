"""Weights in the order of the kernels' matrix products, and who computes with them.

On a CPU in bfloat16 the forward products of the learner, of the sampler and of π_ref are all ours
(lagrpo.backends.cpu.kernels): one order of sums, whatever lies beside a row. They read packed weights. `Packing` keeps
the packs of one policy: packs them again when the policy's weights have changed, and lends them to policies that hold
the same version, so that right after a weight sync one packed copy serves π and α.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lagrpo.backends.cpu import kernels


@dataclass(frozen=True, slots=True)
class LayerPanels:
    """A decoder layer's linear layers, those with the same input as one product."""

    qkv: kernels.Panels
    output: kernels.Panels
    gate_up: kernels.Panels
    down: kernels.Panels


def joined(layer: Any) -> list[list[nn.Linear]]:
    """The linear layers of a decoder layer, those with the same input together, in the order of LayerPanels."""
    a, mlp = layer.self_attn, layer.mlp
    return [[a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


class Packs:
    """All weights of a decoder's linear layers and of its head, packed."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self.layers = [LayerPanels(*map(kernels.Panels, joined(layer))) for layer in decoder.layers]
        self.head = kernels.Panels([head])
        self.borrowers: set[int] = set()  # who reads them beside the policy whose packs these are

    def fill(self, decoder: Any, head: nn.Linear) -> None:
        """Take over other weights in the place of those before: new memory each time would tear the heap."""
        for panels, layer in zip(self.layers, decoder.layers, strict=True):
            parts = (panels.qkv, panels.output, panels.gate_up, panels.down)
            for part, layers in zip(parts, joined(layer), strict=True):
                part.fill(layers)
        self.head.fill([head])


class Packing:
    """The packs of one policy, lent to others of the same version."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self._decoder, self._head = decoder, head
        layers = [m for layer in decoder.layers for group in joined(layer) for m in group] + [head]
        self._parameters = [p for m in layers for p in (m.weight, m.bias) if p is not None]
        self._packs: Packs | None = None
        self._spare: Packs | None = None
        self._packed: list[tuple[int, int]] | None = None  # the state of the parameters that is in the packs

    def current(self) -> Packs:
        """The packs of the weights as they are now."""
        now = [(p.data_ptr(), p._version) for p in self._parameters]
        if self._packs is None or now != self._packed:
            self._packs, self._packed = self._vacant(), None
            self._packs.fill(self._decoder, self._head)
            self._packed = now
        return self._packs

    def lend(self, borrower: object) -> Packs:
        """The current packs, which keep their weights until they are given back."""
        packs = self.current()
        packs.borrowers.add(id(borrower))
        return packs

    def give_back(self, packs: Packs, borrower: object) -> None:
        """`borrower` reads these packs no more; nothing happens where it did not."""
        packs.borrowers.discard(id(borrower))
        if packs is not self._packs and not packs.borrowers:
            self._spare = packs

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """Whether these tensors are this policy's own weights."""
        return {w.data_ptr() for w in weights} <= {p.data_ptr() for p in self._parameters}

    def _vacant(self) -> Packs:
        """Packs that nobody else reads."""
        if self._packs is not None and not self._packs.borrowers:
            return self._packs
        spare, self._spare = self._spare, None
        return spare or Packs(self._decoder, self._head)
