"""Weights packed into panels, in the order in which the C kernels multiply bfloat16 by them, and who reads which.

The forward products of the trainer, of α and of π_ref are all ours (products.c): one order of sums, whatever rows are
computed together. `OwnPanels` packs the weights of one model again when they have changed, and lends the panels to
copies of the same version, which read `BorrowedPanels`. With adapters (LoRA) the weights are frozen: one `OwnPanels`
serves all versions, and each model has its own adapters with them, `AdaptedPanels`. A linear layer has an adapter if
it has parameters `lora_A` [r, k] and `lora_B` [n, r] and a number `scale`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lagrpo.cpu.kernels import linear
from lagrpo.cpu.library import call, isa_level

logger = logging.getLogger("lagrpo")

BY_VECTORS, BY_TILES = 1, 2  # products.c's ways to compute
CHECKED = ((1, 5, 2), (3, 49, 30), (17, 33, 576), (33, 97, 1030))
"""Rows, outputs and inputs of the products that are compared with their plain form before any other is computed."""
RANK = 6  # of the adapters in that comparison


def has_adapter(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and isinstance(
        getattr(module, "lora_A", None), nn.Parameter
    )


def joined(layer: Any) -> list[list[Any]]:
    """The linear layers of a decoder layer, those with the same input together."""
    a, mlp = layer.self_attn, layer.mlp
    return [
        [a.q_proj, a.k_proj, a.v_proj],
        [a.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


# ---- one product ----


def _room(n: int, k: int) -> Tensor:
    """Memory for packed weights [n, k]."""
    return torch.zeros(call("pack_bytes", n, k), dtype=torch.uint8, device="cpu")


class Panels:
    """Linear layers with the same input [rows, k], k even, as one product: y [rows, n] with the outputs of the
    layers side by side. A row's numbers depend on that row alone: see products.c."""

    rank = 0
    _down: Tensor | None = None
    _up: Tensor | None = None

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths = [m.out_features for m in layers]
        self.n, self.k = sum(self.widths), layers[0].in_features
        if self.k % 2:
            raise ValueError(
                f"a layer with {self.k} inputs cannot be packed: bfloat16 pairs need an even number"
            )
        width, biased = call("panel_width"), any(m.bias is not None for m in layers)
        self.packed = _room(self.n, self.k)
        self.bias = (
            torch.zeros(-(-self.n // width) * width, device="cpu", dtype=torch.float32)
            if biased
            else None
        )
        self.fill(layers)

    @torch.no_grad()
    def fill(self, layers: Sequence[nn.Linear]) -> None:
        """Replace the weights [out, k] and biases by these layers'."""
        first = 0
        for layer in layers:
            call(
                "pack",
                first,
                layer.out_features,
                self.k,
                layer.weight.bfloat16().contiguous(),
                self.packed,
            )
            if self.bias is not None:
                self.bias[first : first + layer.out_features] = (
                    0 if layer.bias is None else layer.bias
                )
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
        return self.rank, self.packed, self.bias, self._down, self._up

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, k] -> [rows, n], in `out` if it is given."""
        return linear(x, self.n, self.fields, out)


class LowRank(Panels):
    """Panels of linear layers with the same input, and of their adapters: one sum over the inputs and the rank. All
    their A are one product [rank, k], all their s B the blocks of another [n, rank]. `rank` is 0 while all B are 0."""

    def __init__(self, base: Panels, layers: Sequence[Any]) -> None:
        self.widths, self.n, self.k, self.packed, self.bias = (
            base.widths,
            base.n,
            base.k,
            base.packed,
            base.bias,
        )
        self._layers = layers
        ranks = sum(m.lora_A.shape[0] for m in layers if has_adapter(m))
        self._even = ranks + ranks % 2  # pairs of bfloat16
        self._down, self._up = _room(self._even, self.k), _room(self.n, self._even)
        self.fill_adapters()

    @torch.no_grad()
    def fill_adapters(self) -> None:
        """Take over the adapters as they are now."""
        weight = self._layers[0].weight
        down, up = weight.new_zeros(self._even, self.k), weight.new_zeros(self.n, self._even)
        first, output = 0, 0
        for m in self._layers:
            if has_adapter(m):
                last = first + m.lora_A.shape[0]
                down[first:last] = m.lora_A
                up[output : output + m.out_features, first:last] = m.lora_B * m.scale
                first = last
            output += m.out_features
        self.rank = self._even if bool(up.any()) else 0
        call("pack", 0, self._even, self.k, down, self._down)
        call("pack", 0, self.n, self._even, up, self._up)


# ---- a model's products ----


class DecoderPanels:
    """The linear layers of a decoder, and its head. `layers` has the four products of each layer, as `joined`."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self.layers = [[Panels(group) for group in joined(layer)] for layer in decoder.layers]
        self.head = Panels([head])
        self.borrowers: set[int] = set()  # who reads them besides the model that they were made for

    def fill(self, decoder: Any, head: nn.Linear) -> None:
        """Take over other weights, in the same memory: new memory each time would fragment the heap."""
        for panels, group in self._pairs(decoder, head):
            panels.fill(group)

    def weights(self, decoder: Any, head: nn.Linear, turn: int | None = None) -> dict[int, Tensor]:
        """The weights as they are here, by the ids of the parameters of `decoder` and `head` that they stand for; with
        a `turn` those of one layer, the next one at each turn."""
        start = None if turn is None else 4 * (turn % len(self.layers))
        pairs = islice(self._pairs(decoder, head), start, None if start is None else start + 4)
        found = ((group, panels.weights()) for panels, group in pairs)
        return {
            id(m.weight): weight
            for group, weights in found
            for m, weight in zip(group, weights, strict=True)
        }

    def _pairs(self, decoder: Any, head: nn.Linear) -> Iterator[tuple[Panels, list[nn.Linear]]]:
        groups = chain(*map(joined, decoder.layers), [[head]])
        return zip(chain(*self.layers, [self.head]), groups, strict=True)


class OwnPanels:
    """The panels of one model, lent to copies of the same version."""

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self._decoder, self._head = decoder, head
        layers = [*chain.from_iterable(chain(*map(joined, decoder.layers))), head]
        self._parameters = [p for m in layers for p in (m.weight, m.bias) if p is not None]
        self._panels: DecoderPanels | None = None
        self._spare: DecoderPanels | None = None  # which no copy reads
        self._packed: list[tuple[int, int]] | None = (
            None  # the state of the parameters that is in the panels
        )

    def current(self) -> DecoderPanels:
        """The panels of the weights as they are now."""
        now = _state(self._parameters)
        if self._panels is None or now != self._packed:
            if self._panels is None or self._panels.borrowers:
                self._panels, self._spare = (
                    self._spare or DecoderPanels(self._decoder, self._head),
                    None,
                )
            self._packed = None
            self._panels.fill(self._decoder, self._head)
            self._packed = now
        return self._panels

    def lend(self, borrower: object) -> DecoderPanels:
        """The current panels, which keep their weights until they are given back."""
        panels = self.current()
        panels.borrowers.add(id(borrower))
        return panels

    def give_back(self, panels: DecoderPanels, borrower: object) -> None:
        """`borrower` no longer reads these panels."""
        panels.borrowers.discard(id(borrower))
        if panels is not self._panels and not panels.borrowers:
            self._spare = panels

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """Whether these tensors are this model's own weights."""
        return {w.data_ptr() for w in weights} <= {p.data_ptr() for p in self._parameters}


class BorrowedPanels:
    """The panels of a copy without linear weights: the lender's while the copy has its weights, else its own."""

    def __init__(self, lender: OwnPanels, decoder: Any, head: nn.Linear) -> None:
        self._lender, self._decoder, self._head = lender, decoder, head
        self._panels, self._lent = lender.lend(self), True

    def current(self) -> DecoderPanels:
        return self._panels

    def are_current(self) -> bool:
        """Whether the copy reads the very panels by which the lender computes now."""
        return self._lent and self._panels is self._lender.current()

    def weights(self, turn: int | None = None) -> dict[int, Tensor]:
        """The weights that the copy reads, each by the id of the (empty) parameter that it stands for; with a `turn`
        those of one layer, the next one at each turn."""
        return self._panels.weights(self._decoder, self._head, turn)

    @torch.no_grad()
    def load(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Read these weights from now on, each under the (empty) parameter that it stands for."""
        owns = self._lender.owns([*weights.values()])
        if self._lent or owns:
            self._lender.give_back(self._panels, self)
        if owns:
            self._panels, self._lent = self._lender.lend(self), True
            return
        for parameter, weight in weights.items():
            parameter.data = weight.to(parameter.dtype)  # no copy: only to be packed
        if self._lent:
            self._panels, self._lent = DecoderPanels(self._decoder, self._head), False
        else:
            self._panels.fill(self._decoder, self._head)
        for parameter in weights:
            parameter.data = parameter.new_empty(0)


class AdaptedDecoder(NamedTuple):
    """`DecoderPanels` of a model with adapters, as these are now."""

    layers: list[list[LowRank]]
    head: Panels


class AdaptedPanels:
    """The panels of frozen weights, `base`, which all copies of a model share, and this copy's own adapters."""

    def __init__(self, base: OwnPanels, decoder: Any) -> None:
        self.base, self._decoder = base, decoder
        self._parameters = [
            p for m in decoder.modules() if has_adapter(m) for p in (m.lora_A, m.lora_B)
        ]
        self._panels: AdaptedDecoder | None = None
        self._packed: list[
            tuple[int, int]
        ] = []  # the state of the parameters that is in the panels

    def current(self) -> AdaptedDecoder:
        """With the adapters as they are now."""
        now = _state(self._parameters)
        if self._panels is None:
            base = self.base.current()
            pairs = zip(base.layers, map(joined, self._decoder.layers), strict=True)
            layers = [
                [LowRank(*both) for both in zip(four, groups, strict=True)]
                for four, groups in pairs
            ]
            self._panels = AdaptedDecoder(layers, base.head)
        elif now != self._packed:
            for low_rank in chain.from_iterable(self._panels.layers):
                low_rank.fill_adapters()
            self._panels = AdaptedDecoder(
                self._panels.layers, self._panels.head
            )  # a new one: ranks may have changed
        self._packed = now
        return self._panels


def _state(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in parameters]


# ---- which instructions compute products ----


@cache
def chosen_products() -> str | None:
    """Let the library compute products by the first way that this processor has and that is right here: once for this
    process, before any product. Returns the name of that way, or None if there is none."""
    tiles = "AMX emulated in C" if isa_level() == "emulated_tiles" else "AMX"
    ways = (
        (BY_TILES, tiles),
        (BY_VECTORS, "AVX512-BF16" if call("has_dot_products") else "vectors"),
    )
    for way, name in ways:
        if not call("products_by", way):
            continue
        if products_are_right():
            return name
        logger.warning(
            "matrix products with %s are wrong on this processor, so lagrpo does not use them", name
        )
    return None


@torch.no_grad()
def products_are_right() -> bool:
    """Compare products, to the bit, with sums number after number (products.c), in a few milliseconds: of linear
    layers, and of the same with an adapter, whose rank stands behind k, filled up to a whole step of any
    instruction."""
    numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, device="cpu", dtype=torch.float32)

    for m, n, k in CHECKED:
        x, layer = (
            normal(m, k).bfloat16(),
            nn.Linear(k, n, device="meta").to_empty(device="cpu").bfloat16(),
        )
        for parameter in (layer.weight, layer.bias):
            parameter.copy_(normal(*parameter.shape))
        panels = Panels([layer])
        if not torch.equal(panels(x), _plain(x, layer.weight, layer.bias)):
            return False
        adapter: Any = layer
        adapter.lora_A, adapter.lora_B = (
            nn.Parameter(normal(*size).bfloat16()) for size in ((RANK, k), (n, RANK))
        )
        adapter.scale, gap = 2.0, x.new_zeros(1, -k % 32)
        wide = torch.cat([x, gap.expand(m, -1), _plain(x, adapter.lora_A)], 1)
        weights = torch.cat([layer.weight, gap.expand(n, -1), adapter.lora_B * 2], 1)
        if not torch.equal(LowRank(panels, [adapter])(x), _plain(wide, weights, layer.bias)):
            return False
    return True


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, k] times [n, k] -> [rows, n], number after number."""
    y = x.new_empty(len(x), len(weight))
    call(
        "plain_product", *y.shape, x.shape[1], x, weight, None if bias is None else bias.float(), y
    )
    return y
