"""Matrix products of bfloat16 by the C kernels, from packed weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lagrpo.backends.cpu.build import isa_level
from lagrpo.backends.cpu.library import call

logger = logging.getLogger("lagrpo")

BY_VECTORS, BY_TILES = 1, 2  # products.c's ways to compute
CHECKED = ((1, 5, 2), (3, 49, 30), (17, 33, 576), (33, 97, 1030))
"""Rows, outputs and inputs of the products that are compared with their plain form before any other is computed."""


class Panels:
    """Linear layers with the same input [rows, k], k even, as one product: y [rows, n] with the outputs of the
    layers side by side. A row's numbers depend on that row alone: see products.c."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths = [m.out_features for m in layers]
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

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, k] -> [rows, n], in `out` where it is given."""
        y = x.new_empty(len(x), self.n) if out is None else out
        call("product", len(x), self.n, self.k, x.contiguous(), self.packed, self.bias, y)
        return y


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


@torch.no_grad()
def products_are_right() -> bool:
    """Compare products, to the bit, with the sums that products.c writes down number after number: a few
    milliseconds."""
    numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, device="cpu", dtype=torch.float32)

    for m, n, k in CHECKED:
        x, layer = normal(m, k).bfloat16(), nn.Linear(k, n, device="meta").to_empty(device="cpu").bfloat16()
        layer.weight.copy_(normal(n, k))
        layer.bias.copy_(normal(n))
        plain = x.new_empty(m, n)
        call("plain_product", m, n, k, x, layer.weight, layer.bias.float(), plain)
        if not torch.equal(Panels([layer])(x), plain):
            return False
    return True
