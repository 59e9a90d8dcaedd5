"""A policy's copy that only samples: its weights lie in memory as the matrix products of few rows read them fastest.

One decoding step reads every weight once and does little else, so how they lie decides its time. Products that share
their input (query, key and value; gate and up) become one, and oneDNN's own order of the numbers is made once per
delivery in place of in every product: a fifth to a third of the time of a step. For bfloat16 on a CPU. The numbers and
the order of every sum are those of the plain product, which the proof of each delivery checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo import kernels
from lagrpo.policy.attention import Layout
from lagrpo.policy.fused import FusedDecoder
from lagrpo.policy.model import Policy

Pack = tuple[Tensor, Tensor | None]  # weights in oneDNN's order, and the bias
ROWS = 64  # what oneDNN is told to expect in a product; any number is computed


def replica(policy: Policy) -> Policy:
    """A second policy with the same weights, to sample from: a Replica where that is possible, else a twin."""
    possible = policy.fused is not None and policy.dtype == torch.bfloat16 and kernels.run_on(policy.head.weight)
    return Replica(policy) if possible and packs() else policy.twin()


def packs() -> bool:
    """Whether PyTorch has oneDNN here, and a processor on which that packs bfloat16."""
    operations = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operations, "_linear_pointwise")
        and hasattr(operations, "_is_mkldnn_bf16_supported")
        and operations._is_mkldnn_bf16_supported()
    )


class Replica(Policy):
    """Hidden states and logits from packed weights; those of the decoder's linear layers are not kept beside them."""

    def __init__(self, policy: Policy) -> None:
        twin = policy.twin()
        super().__init__(twin.model, twin.tokenizer, twin.tau, twin.version)
        self._decoder = PackedDecoder(self.decoder)
        self._head: Pack | None = None
        self._shapes = {name: p.shape for name, p in self.model.named_parameters()}
        linear = {m.weight for group in self._decoder.groups() for m in group}
        self._in_packs = {name: p for name, p in self.model.named_parameters() if p in linear}
        self.load_weights(policy.weights(), policy.version)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.check_weights(weights, self._shapes, version)
        for name, parameter in self.model.named_parameters():
            if name in self._in_packs:
                parameter.data = weights[name].to(parameter.dtype)  # no copy: only to be packed
            else:
                parameter.copy_(weights[name])
        self._decoder.pack()
        self._head = _pack([self.head], self._head)
        for parameter in self._in_packs.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.version = version

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        return self._decoder(input_ids, position_ids, layout)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None
        return _product(hidden, *self._head)


class PackedDecoder(FusedDecoder):
    """A fused decoder whose products with the same input are one, of packed weights."""

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self._packs: dict[nn.Linear, Pack] = {}  # by the first of the layers in one

    def groups(self) -> list[list[nn.Linear]]:
        """The linear layers, those with the same input together."""
        groups = []
        for layer in self.decoder.layers:
            a, mlp = layer.self_attn, layer.mlp
            groups += [[a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
        return groups

    def pack(self) -> None:
        """Take over the layers' weights, in the place of those before."""
        for group in self.groups():
            self._packs[group[0]] = _pack(group, self._packs.get(group[0]))

    def products(self, x: Tensor, *modules: nn.Linear) -> tuple[Tensor, ...]:
        return _product(x, *self._packs[modules[0]]).split([m.out_features for m in modules], 1)


def _pack(modules: list[nn.Linear], into: Pack | None) -> Pack:
    """The layers' weights one below the other, in oneDNN's order, and their biases, zero where only others have one; in
    the memory of a pack of the same layers, where there is one: memory would be torn into pieces otherwise."""
    first, *others = (m.weight.detach() for m in modules)
    weight = torch.cat([first, *others]) if others else first
    biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules]
    bias = torch.cat(biases) if any(m.bias is not None for m in modules) else None
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return (ordered if into is None else into[0].copy_(ordered)), bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
