"""Weights packed into panels, in the order in which the C kernels multiply bfloat16 by them, and who reads which.

The forward products of the learner, of the sampler and of π_ref are all ours (products.c): one order of sums, whatever
lies beside a row. `OwnPanels` keeps the panels of one model: it packs them again when the weights have changed, and
lends them to copies that hold the same version, so that right after a weight sync the same panels serve π and α.
`BorrowedPanels` is what such a copy reads. With adapters the weights are frozen: one `OwnPanels` serves all versions,
and each model has its own adapters beside them, `AdaptedPanels`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends.adapters import AdaptedLinear, adapted
from lagrpo.backends.cpu import kernels
from lagrpo.backends.cpu.build import isa_level
from lagrpo.backends.cpu.library import call

logger = logging.getLogger("lagrpo")

BY_VECTORS, BY_TILES = 1, 2  # products.c's ways to compute
CHECKED = ((1, 5, 2), (3, 49, 30), (17, 33, 576), (33, 97, 1030))
"""Rows, outputs and inputs of the products that are compared with their plain form before any other is computed."""
RANK = 6  # of the adapters that are compared so


class Panels:
    """Linear layers with the same input [rows, k], k even, as one product: y [rows, n] with the outputs of the
    layers side by side. A row's numbers depend on that row alone: see products.c."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths, self.rank = [m.out_features for m in layers], 0
        self.n, self.k = sum(self.widths), layers[0].in_features
        if self.k % 2:
            raise ValueError(f"a product of {self.k} inputs cannot be packed: pairs of bfloat16 need an even number")
        self.packed = torch.zeros(call("pack_bytes", self.n, self.k), dtype=torch.uint8, device="cpu")
        width = call("panel_width")
        biased = any(m.bias is not None for m in layers)
        self.bias = torch.zeros(-(-self.n // width) * width, device="cpu", dtype=torch.float32) if biased else None
        self.fill(layers)

    @torch.no_grad()
    def fill(self, layers: Sequence[nn.Linear]) -> None:
        """Replace the weights [out, k] and biases by these layers'."""
        first = 0
        for layer in layers:
            call("pack", first, layer.out_features, self.k, layer.weight.bfloat16().contiguous(), self.packed)
            if self.bias is not None:
                self.bias[first : first + layer.out_features] = 0 if layer.bias is None else layer.bias
            first += layer.out_features

    def weights(self) -> list[Tensor]:
        """The weights of the layers as they are here: bfloat16 [out, k] each."""
        width, pairs = call("panel_width"), self.k // 2
        of_panels = self.packed.view(torch.int32).view(-(-self.n // width), -1)[:, : pairs * width]
        rows = of_panels.view(-1, pairs, width).transpose(1, 2).reshape(-1)[: self.n * pairs]
        return list(rows.clone().view(torch.bfloat16).view(self.n, self.k).split(self.widths))

    @property
    def fields(self) -> tuple[Tensor | int | None, ...]:
        """As kernels.h's Linear has them."""
        return 0, self.packed, self.bias, None, None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, k] -> [rows, n], in `out` where it is given."""
        y = x.new_empty(len(x), self.n) if out is None else out
        call("product", len(x), self.n, self.k, x.contiguous(), self.packed, self.bias, y)
        return y


def joined(layer: Any) -> list[list[nn.Linear]]:
    """The linear layers of a decoder layer, those with the same input together."""
    a, mlp = layer.self_attn, layer.mlp
    return [[a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


class DecoderPanels:
    """The linear layers of a decoder, and its head. `layers` has the four products of each layer, as `joined`."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self.layers = [[Panels(group) for group in joined(layer)] for layer in decoder.layers]
        self.head = Panels([head])
        self.borrowers: set[int] = set()  # who reads them beside the model that they were made for

    def fill(self, decoder: Any, head: nn.Linear) -> None:
        """Take over other weights in the place of those before: new memory each time would tear the heap."""
        groups = chain(*map(joined, decoder.layers), [[head]])
        for panels, group in zip(chain(*self.layers, [self.head]), groups, strict=True):
            panels.fill(group)

    def weights(self, decoder: Any, head: nn.Linear) -> dict[int, Tensor]:
        """The weights as they are here, each under the id of the parameter of `decoder` and `head` in its place."""
        groups = chain(*map(joined, decoder.layers), [[head]])
        pairs = zip(groups, chain(*self.layers, [self.head]), strict=True)
        return {id(m.weight): w for group, panels in pairs for m, w in zip(group, panels.weights(), strict=True)}


class OwnPanels:
    """The panels of one model, lent to copies of the same version."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self._decoder, self._head = decoder, head
        layers = [*chain.from_iterable(chain(*map(joined, decoder.layers))), head]
        self._parameters = [p for m in layers for p in (m.weight, m.bias) if p is not None]
        self._panels: DecoderPanels | None = None
        self._spare: DecoderPanels | None = None
        self._packed: list[tuple[int, int]] | None = None  # the state of the parameters that is in the panels

    def current(self) -> DecoderPanels:
        """The panels of the weights as they are now."""
        now = [(p.data_ptr(), p._version) for p in self._parameters]
        if self._panels is None or now != self._packed:
            self._panels, self._packed = self._vacant(), None
            self._panels.fill(self._decoder, self._head)
            self._packed = now
        return self._panels

    def lend(self, borrower: object) -> DecoderPanels:
        """The current panels, which keep their weights until they are given back."""
        panels = self.current()
        panels.borrowers.add(id(borrower))
        return panels

    def give_back(self, panels: DecoderPanels, borrower: object) -> None:
        """`borrower` reads these panels no more."""
        panels.borrowers.discard(id(borrower))
        if panels is not self._panels and not panels.borrowers:
            self._spare = panels

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """Whether these tensors are this model's own weights."""
        return {w.data_ptr() for w in weights} <= {p.data_ptr() for p in self._parameters}

    def _vacant(self) -> DecoderPanels:
        """Panels that nobody else reads."""
        if self._panels is not None and not self._panels.borrowers:
            return self._panels
        spare, self._spare = self._spare, None
        return spare or DecoderPanels(self._decoder, self._head)


class BorrowedPanels:
    """The panels of a copy without linear weights: the lender's while the copy has its weights, else its own."""

    def __init__(self, lender: OwnPanels, decoder: Any, head: nn.Linear) -> None:
        self._lender, self._decoder, self._head = lender, decoder, head
        self._panels, self._lent = lender.lend(self), True

    def current(self) -> DecoderPanels:
        return self._panels

    def weights(self) -> dict[int, Tensor]:
        """The weights that are read, each under the id of the (empty) parameter that it stands for."""
        return self._panels.weights(self._decoder, self._head)

    @torch.no_grad()
    def load(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Read these weights from now on, each under the (empty) parameter that it stands for."""
        if self._lender.owns([*weights.values()]):
            self._lender.give_back(self._panels, self)
            self._panels, self._lent = self._lender.lend(self), True
            return
        for parameter, weight in weights.items():
            parameter.data = weight.to(parameter.dtype)  # no copy: only to be packed
        if self._lent:
            self._lender.give_back(self._panels, self)
            self._panels, self._lent = DecoderPanels(self._decoder, self._head), False
        else:
            self._panels.fill(self._decoder, self._head)
        for parameter in weights:
            parameter.data = parameter.new_empty(0)


class LowRank:
    """Panels of linear layers with the same input, and of their adapters: one sum over the inputs and the rank. All
    their A are one product [rank, k], all their s B the blocks of another [n, rank]. Adapters whose B are 0 are left
    out: then `rank` is 0."""

    def __init__(self, panels: Panels, layers: Sequence[nn.Linear]) -> None:
        self.widths, self.n, self.k = panels.widths, panels.n, panels.k
        self._panels, self._layers = panels, layers
        ranks = [m.lora_A.shape[0] if isinstance(m, AdaptedLinear) else 0 for m in layers]
        self._even = sum(ranks) + sum(ranks) % 2  # pairs of bfloat16
        self._down, self._up = (
            torch.zeros(call("pack_bytes", *size), dtype=torch.uint8, device="cpu")
            for size in ((self._even, self.k), (self.n, self._even))
        )
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Take over the adapters as they are now."""
        weight = self._layers[0].weight
        down, up = weight.new_zeros(self._even, self.k), weight.new_zeros(self.n, self._even)
        first, output = 0, 0
        for m in self._layers:
            if isinstance(m, AdaptedLinear):
                last = first + m.lora_A.shape[0]
                down[first:last] = m.lora_A
                up[output : output + m.out_features, first:last] = m.lora_B * m.scale
                first = last
            output += m.out_features
        self.rank = self._even if bool(up.any()) else 0
        call("pack", 0, self._even, self.k, down, self._down)
        call("pack", 0, self.n, self._even, up, self._up)

    @property
    def fields(self) -> tuple[Tensor | int | None, ...]:
        """As kernels.h's Linear has them."""
        return self.rank, self._panels.packed, self._panels.bias, self._down, self._up

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, k] -> [rows, n], in `out` where it is given."""
        y = x.new_empty(len(x), self.n) if out is None else out
        kernels.linear(x.contiguous(), self.n, self.fields, y)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedDecoder:
    """`DecoderPanels` of a model with adapters, as these are now."""

    layers: list[list[LowRank]]
    head: Panels


class AdaptedPanels:
    """The panels of frozen weights, `base`, which all copies of a model share, and this copy's own adapters."""

    def __init__(self, base: OwnPanels, decoder: Any) -> None:
        self.base, self._decoder = base, decoder
        self._parameters = [p for m in adapted(decoder).values() for p in (m.lora_A, m.lora_B)]
        self._panels: AdaptedDecoder | None = None
        self._packed: list[tuple[int, int]] = []  # the state of the parameters that is in the panels

    def current(self) -> AdaptedDecoder:
        """With the adapters as they are now."""
        now = [(p.data_ptr(), p._version) for p in self._parameters]
        if self._panels is None:
            base = self.base.current()
            pairs = zip(base.layers, map(joined, self._decoder.layers), strict=True)
            layers = [[LowRank(*both) for both in zip(four, groups, strict=True)] for four, groups in pairs]
            self._panels = AdaptedDecoder(layers, base.head)
        elif now != self._packed:
            for low_rank in chain.from_iterable(self._panels.layers):
                low_rank.fill()
            self._panels = AdaptedDecoder(self._panels.layers, self._panels.head)  # another one: ranks may have changed
        self._packed = now
        return self._panels


def choose_products() -> str | None:
    """Let the library compute products by the first of its ways that this processor has and that is right here. Returns
    the name of that way, or None where there is none."""
    tiles = "AMX emulated in C" if isa_level() == "emulated_tiles" else "AMX"
    ways = ((BY_TILES, tiles), (BY_VECTORS, "AVX512-BF16" if call("has_dot_products") else "vectors"))
    for way, name in ways:
        if not call("products_by", way):
            continue
        if products_are_right():
            return name
        logger.warning("matrix products by %s give wrong numbers on this processor and are not used", name)
    return None


chosen_products = cache(choose_products)  # once for this process, before any product is computed


@torch.no_grad()
def products_are_right() -> bool:
    """Compare products, to the bit, with sums number after number (products.c), in a few milliseconds."""
    numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, device="cpu", dtype=torch.float32)

    for m, n, k in CHECKED:
        x, layer = normal(m, k).bfloat16(), nn.Linear(k, n, device="meta").to_empty(device="cpu").bfloat16()
        layer.weight.copy_(normal(n, k))
        layer.bias.copy_(normal(n))
        plain = x.new_empty(m, n)
        call("plain_product", m, n, k, x, layer.weight, layer.bias.float(), plain)
        panels = Panels([layer])
        if not torch.equal(panels(x), plain) or not _low_rank_is_right(panels, layer, x, normal):
            return False
    return True


def _low_rank_is_right(panels: Panels, layer: nn.Linear, x: Tensor, normal: Callable[..., Tensor]) -> bool:
    """The same for a layer with an adapter: a product with k, filled up to a whole step of any instruction, and the
    rank side by side."""
    with_adapter, (n, k) = AdaptedLinear(layer, RANK, 2.0), layer.weight.shape
    with_adapter.lora_A.copy_(normal(RANK, k))
    with_adapter.lora_B.copy_(normal(n, RANK))
    low, gap = x.new_empty(len(x), RANK), x.new_zeros(1, -k % 32)
    call("plain_product", len(x), RANK, k, x, with_adapter.lora_A, None, low)
    wide = torch.cat([x, gap.expand(len(x), -1), low], 1)
    weights = torch.cat([layer.weight, gap.expand(n, -1), with_adapter.lora_B * 2], 1)
    plain = x.new_empty(len(x), n)
    call("plain_product", len(x), n, wide.shape[1], wide, weights, layer.bias.float(), plain)
    return torch.equal(LowRank(panels, [with_adapter])(x), plain)
