"""Packed weights: panels, in the order in which the C kernels multiply bfloat16 by them.

The kernels compute the forward products of the trainer, of α and of π_ref (products.c) in one order
of sums, whatever rows are computed together. Three classes say where a model's panels come from:

- `OwnPanels` packs the weights of one model, again when they have changed, and lends the panels to
  copies of the same version.
- `BorrowedPanels` are what such a copy reads.
- `AdaptedPanels` are for LoRA, whose weights are frozen: one `OwnPanels` serves all versions, and
  each model adds its own adapters.

A linear layer has an adapter if it has parameters `lora_A` [r, k] and `lora_B` [n, r], and a number
`scale`.

Shapes: rows of inputs; k inputs, n outputs, r rank of an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from lagrpo.cpu.kernels import LinearWeights, linear
from lagrpo.cpu.library import call, isa_level

logger = logging.getLogger("lagrpo")

# The ways of products.c to compute.
BY_VECTORS = 1
BY_TILES = 2
# Rows, outputs and inputs of the products that are compared with their plain form before any other
# product is computed: fewer and more rows than a tile, a panel that is not full, a sum in parts.
CHECKED = ((1, 5, 2), (3, 49, 30), (17, 33, 576), (33, 97, 1030))
# The rank of the adapters in that comparison.
CHECKED_RANK = 6
# A step of any instruction multiplies at most this many numbers of k: products.h's DEPTH.
DEPTH = 32


class Adapter(Protocol):
    """A linear layer with an adapter of rank r: y = W x + b + scale B (A x)."""

    lora_A: nn.Parameter  # [r, k]
    lora_B: nn.Parameter  # [n, r]
    scale: float


def has_adapter(module: nn.Module) -> TypeGuard[Adapter]:
    """True for a linear layer that has an adapter."""
    return isinstance(module, nn.Linear) and isinstance(
        getattr(module, "lora_A", None), nn.Parameter
    )


def joined(layer: Any) -> list[list[nn.Linear]]:
    """Returns the linear layers of a decoder layer: four groups of layers with the same input."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


# One product


def _room(n: int, k: int) -> Tensor:
    """Returns memory for packed weights [n, k].

    It is zeros, as products.c expects them beyond n and k.
    """
    return torch.zeros(call("pack_bytes", n, k), dtype=torch.uint8, device="cpu")


class Panels:
    """Linear layers with the same input [rows, k], k even, as one product.

    Its output [rows, n] has the outputs of the layers side by side. A row's numbers depend on that
    row alone: see products.c.
    """

    rank = 0
    _down: Tensor | None = None
    _up: Tensor | None = None

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths = [layer.out_features for layer in layers]
        self.n = sum(self.widths)
        self.k = layers[0].in_features
        if self.k % 2:
            raise ValueError(
                f"a layer with {self.k} inputs cannot be packed: bfloat16 pairs need an even number"
            )
        self.packed = _room(self.n, self.k)
        self.bias: Tensor | None = None
        if any(layer.bias is not None for layer in layers):
            # The kernels add whole panels.
            width = call("panel_width")
            num_panels = -(-self.n // width)
            self.bias = torch.zeros(num_panels * width, dtype=torch.float32, device="cpu")
        self.fill(layers)

    @torch.no_grad()
    def fill(self, layers: Sequence[nn.Linear]) -> None:
        """Replaces the weights [out, k] and biases [out] by the ones of `layers`."""
        first = 0
        for layer in layers:
            weight = layer.weight.bfloat16().contiguous()
            call("pack", first, layer.out_features, self.k, weight, self.packed)
            if self.bias is not None:
                bias = 0 if layer.bias is None else layer.bias
                self.bias[first : first + layer.out_features] = bias
            first += layer.out_features

    def weights(self) -> list[Tensor]:
        """Returns copies of the packed weights of the layers: bfloat16 [out, k] each."""
        width = call("panel_width")
        num_panels = -(-self.n // width)
        num_pairs = self.k // 2
        # An int32 is a pair of bfloat16. A panel has zeros behind its pairs.
        panels = self.packed.view(torch.int32).view(num_panels, -1)[:, : num_pairs * width]
        panels = panels.view(num_panels, num_pairs, width)
        pairs = panels.transpose(1, 2).reshape(-1)  # [num_panels * width * num_pairs]
        # The last panel has zeros behind its rows.
        pairs = pairs[: self.n * num_pairs].clone()
        return list(pairs.view(torch.bfloat16).view(self.n, self.k).split(self.widths))

    @property
    def fields(self) -> LinearWeights:
        """The weights as the kernels take them."""
        return LinearWeights(self.rank, self.packed, self.bias, self._down, self._up)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Computes the product of x [rows, k]: [rows, n], in `out` if it is given."""
        return linear(x, self.n, self.fields, out)


class LowRank(Panels):
    """Panels of linear layers with the same input, and their adapters.

    An output is one sum, over the inputs and then over the rank. All A of the layers are one
    product `down` [rank, k]; all s B are blocks of another one, `up` [n, rank]. `rank` is 0 while
    all B are 0: then the product is the base's, to the bit.
    """

    def __init__(self, base: Panels, layers: Sequence[nn.Linear]) -> None:
        self.widths = base.widths
        self.n = base.n
        self.k = base.k
        self.packed = base.packed
        self.bias = base.bias
        self._layers = layers
        total_rank = 0
        for layer in layers:
            if has_adapter(layer):
                total_rank += len(layer.lora_A)
        # The kernels multiply pairs of bfloat16.
        self._even_rank = total_rank + total_rank % 2
        self._down = _room(self._even_rank, self.k)
        self._up = _room(self.n, self._even_rank)
        self.fill_adapters()

    @torch.no_grad()
    def fill_adapters(self) -> None:
        """Packs the adapters as they are now."""
        weight = self._layers[0].weight
        down = weight.new_zeros(self._even_rank, self.k)
        up = weight.new_zeros(self.n, self._even_rank)
        first_rank = 0
        first_output = 0
        for layer in self._layers:
            stop_output = first_output + layer.out_features
            if has_adapter(layer):
                stop_rank = first_rank + len(layer.lora_A)
                down[first_rank:stop_rank] = layer.lora_A
                up[first_output:stop_output, first_rank:stop_rank] = layer.lora_B * layer.scale
                first_rank = stop_rank
            first_output = stop_output
        self.rank = self._even_rank if bool(up.any()) else 0
        call("pack", 0, self._even_rank, self.k, down, self._down)
        call("pack", 0, self.n, self._even_rank, up, self._up)


# A model's products


class DecoderPanels:
    """The linear layers of a decoder, and its head.

    `layers` has the four products of each layer, as `joined`. `borrowers` are the ids of the copies
    that read these panels besides the model that they were made for.
    """

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self.layers = [[Panels(group) for group in joined(layer)] for layer in decoder.layers]
        self.head = Panels([head])
        self.borrowers: set[int] = set()

    def fill(self, decoder: Any, head: nn.Linear) -> None:
        """Packs other weights in the same memory: new memory each time would fragment the heap."""
        for panels_of_layer, layer in zip(self.layers, decoder.layers, strict=True):
            for panels, group in zip(panels_of_layer, joined(layer), strict=True):
                panels.fill(group)
        self.head.fill([head])

    def weights(
        self, decoder: Any, head: nn.Linear, version: int | None = None
    ) -> dict[int, Tensor]:
        """Returns the packed weights by the ids of the parameters that they stand for.

        The parameters are the ones of `decoder` and `head`. With a `version` there are the weights
        of one layer only, the next one at each version.
        """
        products: list[tuple[Panels, list[nn.Linear]]] = []
        for panels_of_layer, layer in zip(self.layers, decoder.layers, strict=True):
            products += zip(panels_of_layer, joined(layer), strict=True)
        products.append((self.head, [head]))
        if version is not None:
            start = 4 * (version % len(self.layers))
            products = products[start : start + 4]

        weights: dict[int, Tensor] = {}
        for panels, group in products:
            for linear_layer, weight in zip(group, panels.weights(), strict=True):
                weights[id(linear_layer.weight)] = weight
        return weights


# The addresses of parameters, and how often each has been changed in place.
State = list[tuple[int, int]]


def _state(parameters: Sequence[Tensor]) -> State:
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]


class OwnPanels:
    """The panels of one model, lent to copies of the same version.

    Lent panels keep their weights: if the model's weights change, it packs them into other panels.
    """

    def __init__(self, decoder: Any, head: nn.Linear) -> None:
        self._decoder = decoder
        self._head = head
        self._parameters: list[Tensor] = []
        groups = chain.from_iterable(joined(layer) for layer in decoder.layers)
        for layer in [*chain.from_iterable(groups), head]:
            self._parameters.append(layer.weight)
            if layer.bias is not None:
                self._parameters.append(layer.bias)
        self._panels: DecoderPanels | None = None
        # Panels that no copy reads.
        self._spare: DecoderPanels | None = None
        # The state of the parameters that `_panels` has.
        self._packed: State | None = None

    def current(self) -> DecoderPanels:
        """Returns the panels of the weights as they are now."""
        state = _state(self._parameters)
        if self._panels is not None and state == self._packed:
            return self._panels
        if self._panels is None or self._panels.borrowers:
            self._panels = self._spare or DecoderPanels(self._decoder, self._head)
            self._spare = None
        # If packing fails, the panels have no state.
        self._packed = None
        self._panels.fill(self._decoder, self._head)
        self._packed = state
        return self._panels

    def lend(self, borrower: object) -> DecoderPanels:
        """Returns the current panels, which keep their weights until they are given back."""
        panels = self.current()
        panels.borrowers.add(id(borrower))
        return panels

    def give_back(self, panels: DecoderPanels, borrower: object) -> None:
        """Ends what `lend` began: `borrower` no longer reads these panels."""
        panels.borrowers.discard(id(borrower))
        if panels is not self._panels and not panels.borrowers:
            self._spare = panels

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """True if all these tensors are this model's own weights."""
        own_addresses = {parameter.data_ptr() for parameter in self._parameters}
        return {weight.data_ptr() for weight in weights} <= own_addresses


class BorrowedPanels:
    """The panels of a copy whose linear layers have empty weights.

    They are the lender's while the copy has the lender's weights, else the copy's own.
    """

    def __init__(self, lender: OwnPanels, decoder: Any, head: nn.Linear) -> None:
        self._lender = lender
        self._decoder = decoder
        self._head = head
        self._panels = lender.lend(self)
        self._is_lent = True

    def current(self) -> DecoderPanels:
        return self._panels

    def are_current(self) -> bool:
        """True if the copy reads the very panels by which the lender computes now."""
        return self._is_lent and self._panels is self._lender.current()

    def weights(self, version: int | None = None) -> dict[int, Tensor]:
        """Returns the weights that the copy reads, by the ids of the empty parameters.

        With a `version` there are the weights of one layer only, the next one at each version.
        """
        return self._panels.weights(self._decoder, self._head, version)

    @torch.no_grad()
    def load(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Reads these weights from now on, each for an empty parameter of the copy.

        The panels are the lender's if all the weights are.
        """
        lender_owns = self._lender.owns([*weights.values()])
        # The copy's own panels, too: the lender packs its next version into them.
        if self._is_lent or lender_owns:
            self._lender.give_back(self._panels, self)
        if lender_owns:
            self._panels = self._lender.lend(self)
            self._is_lent = True
            return

        for parameter, weight in weights.items():
            # No copy if the dtype is the same: the weight is only to be packed.
            parameter.data = weight.to(parameter.dtype)
        if self._is_lent:
            self._panels = DecoderPanels(self._decoder, self._head)
            self._is_lent = False
        else:
            self._panels.fill(self._decoder, self._head)
        for parameter in weights:
            parameter.data = parameter.new_empty(0)


class AdaptedDecoder(NamedTuple):
    """`DecoderPanels` of a model with adapters, as these are now."""

    layers: list[list[LowRank]]
    head: Panels


class AdaptedPanels:
    """The panels of frozen weights, `base`, which all copies share, and a model's own adapters."""

    def __init__(self, base: OwnPanels, decoder: Any) -> None:
        self.base = base
        self._decoder = decoder
        self._parameters: list[nn.Parameter] = []
        for module in decoder.modules():
            if has_adapter(module):
                self._parameters += [module.lora_A, module.lora_B]
        self._panels: AdaptedDecoder | None = None
        # The state of the parameters that `_panels` has.
        self._packed: State = []

    def current(self) -> AdaptedDecoder:
        """Returns the panels with the adapters as they are now."""
        state = _state(self._parameters)
        if self._panels is None:
            self._panels = self._pack()
        elif state != self._packed:
            for low_rank in chain.from_iterable(self._panels.layers):
                low_rank.fill_adapters()
            # A new object, because ranks may have changed: a stack of kernels has copies of them.
            self._panels = AdaptedDecoder(self._panels.layers, self._panels.head)
        self._packed = state
        return self._panels

    def _pack(self) -> AdaptedDecoder:
        base = self.base.current()
        layers: list[list[LowRank]] = []
        for base_panels, layer in zip(base.layers, self._decoder.layers, strict=True):
            groups = joined(layer)
            layers.append([LowRank(*pair) for pair in zip(base_panels, groups, strict=True)])
        return AdaptedDecoder(layers, base.head)


ModelPanels = OwnPanels | BorrowedPanels | AdaptedPanels


# Which instructions compute products


@cache
def chosen_products() -> str | None:
    """Chooses the instructions by which the library computes products.

    They are the first ones that this processor has and that are right here. The choice is made once
    in a process, before any product. Returns their name, or None if there are none.
    """
    tiles = "AMX emulated in C" if isa_level() == "emulated_tiles" else "AMX"
    vectors = "AVX512-BF16" if call("has_dot_products") else "vectors"
    for way, name in ((BY_TILES, tiles), (BY_VECTORS, vectors)):
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
    """True if products equal plain sums, number after number (products.c), to the bit.

    It compares linear layers, alone and with an adapter, in a few milliseconds.
    """
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device="cpu", dtype=torch.float32)

    for rows, n, k in CHECKED:
        x = normal(rows, k).bfloat16()
        layer: Any = nn.Linear(k, n, device="meta").to_empty(device="cpu").bfloat16()
        layer.weight.copy_(normal(n, k))
        layer.bias.copy_(normal(n))
        panels = Panels([layer])
        if not torch.equal(panels(x), _plain(x, layer.weight, layer.bias)):
            return False

        # With an adapter, the rank stands behind k as if it were more inputs. Zeros fill up k, so
        # that the rank begins with a whole step of any instruction.
        layer.lora_A = nn.Parameter(normal(CHECKED_RANK, k).bfloat16())
        layer.lora_B = nn.Parameter(normal(n, CHECKED_RANK).bfloat16())
        layer.scale = 2.0
        gap = x.new_zeros(1, -k % DEPTH)
        low = _plain(x, layer.lora_A)  # [rows, rank]
        wide_x = torch.cat([x, gap.expand(rows, -1), low], 1)
        wide_weight = torch.cat([layer.weight, gap.expand(n, -1), layer.lora_B * layer.scale], 1)
        adapted = LowRank(panels, [layer])
        if not torch.equal(adapted(x), _plain(wide_x, wide_weight, layer.bias)):
            return False
    return True


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x [rows, k] · weightᵀ [k, n] + bias, number after number: [rows, n]."""
    rows, k = x.shape
    n = len(weight)
    y = x.new_empty(rows, n)
    wide_bias = None if bias is None else bias.float()
    call("plain_product", rows, n, k, x, weight, wide_bias, y)
    return y
