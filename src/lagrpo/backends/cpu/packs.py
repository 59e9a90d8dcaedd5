"""Weights in the order of the kernels' matrix products, and who computes with them.

On a CPU in bfloat16 the forward products of the learner, of the sampler and of π_ref are all ours
(products.c): one order of sums, whatever lies beside a row. They read packed weights. `Packing` keeps
the packs of one model: packs them again when the weights have changed, and lends them to copies that hold the same
version, so that right after a weight sync one packed copy serves π and α. `Borrowed` is what such a copy reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends.cpu.panels import Panels


@dataclass(frozen=True, slots=True)
class LayerPanels:
    """A decoder layer's linear layers, those with the same input as one product."""

    qkv: Panels
    output: Panels
    gate_up: Panels
    down: Panels


def joined(layer: Any) -> list[list[nn.Linear]]:
    """The linear layers of a decoder layer, those with the same input together, in the order of LayerPanels."""
    a, mlp = layer.self_attn, layer.mlp
    return [[a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


class Packs:
    """All weights of a decoder's linear layers and of its head, packed."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self.layers = [LayerPanels(*map(Panels, joined(layer))) for layer in decoder.layers]
        self.head = Panels([head])
        self.borrowers: set[int] = set()  # who reads them beside the model whose packs these are

    def fill(self, decoder: Any, head: nn.Linear) -> None:
        """Take over other weights in the place of those before: new memory each time would tear the heap."""
        for panels, layer in zip(self.layers, decoder.layers, strict=True):
            parts = (panels.qkv, panels.output, panels.gate_up, panels.down)
            for part, layers in zip(parts, joined(layer), strict=True):
                part.fill(layers)
        self.head.fill([head])


class Packing:
    """The packs of one model, lent to copies of the same version."""

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
        """Whether these tensors are this model's own weights."""
        return {w.data_ptr() for w in weights} <= {p.data_ptr() for p in self._parameters}

    def _vacant(self) -> Packs:
        """Packs that nobody else reads."""
        if self._packs is not None and not self._packs.borrowers:
            return self._packs
        spare, self._spare = self._spare, None
        return spare or Packs(self._decoder, self._head)


class Borrowed:
    """The packs of a copy whose linear layers have no weights: the packs of `lender` where the copy was
    given that model's weights, else packs of its own."""

    def __init__(self, lender: Packing, decoder: Any, head: nn.Linear) -> None:
        self._lender, self._decoder, self._head = lender, decoder, head
        self._packs, self._lent = lender.lend(self), True

    def current(self) -> Packs:
        return self._packs

    @torch.no_grad()
    def load(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Read these weights from now on, each under the (empty) parameter that it stands for."""
        if self._lender.owns([*weights.values()]):
            self._lender.give_back(self._packs, self)
            self._packs, self._lent = self._lender.lend(self), True
            return
        for parameter, weight in weights.items():
            parameter.data = weight.to(parameter.dtype)  # no copy: only to be packed
        if self._lent:
            self._lender.give_back(self._packs, self)
            self._packs, self._lent = Packs(self._decoder, self._head), False
        else:
            self._packs.fill(self._decoder, self._head)
        for parameter in weights:
            parameter.data = parameter.new_empty(0)
