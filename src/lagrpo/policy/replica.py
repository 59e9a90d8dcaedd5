"""A policy's copy that only samples: its weights lie in memory as the matrix products of few rows read them fastest.

One decoding step reads every weight once and does little else, so how they lie decides its time. Products that share
their input (query, key and value; gate and up) become one, and their weights are put in order once per delivery in
place of in every product. Where our own products (`kernels.Panels`) give the same bits as PyTorch's, they compute, and
a decoding step is one call through all layers; elsewhere oneDNN's packed products do. For bfloat16 on a CPU. The
numbers and the order of every sum are those of the learner's products, which the proof of each delivery checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lagrpo import kernels
from lagrpo.policy.attention import Layout
from lagrpo.policy.fused import FusedDecoder, add_norm, check_layer
from lagrpo.policy.model import Policy

ROWS = 64  # what oneDNN is told to expect in a product; any number is computed


class Pack(Protocol):
    """Linear layers with the same input as one product: [rows, in] -> [rows, the sum of out]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def fill(self, layers: Sequence[nn.Linear]) -> None:
        """Take over the layers' weights, in the place of those before: memory would be torn into pieces otherwise."""
        ...


class OneDNN:
    """A Pack in oneDNN's own order, for its products."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._weight: Tensor | None = None
        self.fill(layers)

    @torch.no_grad()
    def fill(self, layers: Sequence[nn.Linear]) -> None:
        weight = torch.cat([m.weight for m in layers]) if len(layers) > 1 else layers[0].weight
        biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in layers]
        self._bias = torch.cat(biases) if any(m.bias is not None for m in layers) else None
        ordered = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._weight = ordered if self._weight is None else self._weight.copy_(ordered)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def pack(layers: Sequence[nn.Linear]) -> Pack:
    """With our own product where it gives PyTorch's bits."""
    run = kernels.run_of(layers[0].in_features)
    return OneDNN(layers) if run is None else kernels.Panels(layers, run)


def replica(policy: Policy) -> Policy:
    """A second policy with the same weights, to sample from: a Replica where that is possible, else a twin."""
    return packed(policy) or policy.twin()


def packed(policy: Policy) -> Replica | None:
    """The policy as a Replica, where that is possible."""
    possible = policy.fused is not None and policy.dtype == torch.bfloat16 and kernels.run_on(policy.head.weight)
    return Replica(policy) if possible and packs() else None


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
        self._shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self._decoder = PackedDecoder(self.decoder)
        self._head = pack([self.head])
        linear = {m.weight for group in self._decoder.groups() for m in group}
        self._in_packs = {name: p for name, p in self.model.named_parameters() if p in linear}
        self._empty()

    def _empty(self) -> None:
        """Let go of what is in the packs."""
        for parameter in self._in_packs.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.check_weights(weights, self._shapes, version)
        for name, parameter in self.model.named_parameters():
            if name in self._in_packs:
                parameter.data = weights[name].to(parameter.dtype)  # no copy: only to be packed
            else:
                parameter.copy_(weights[name])
        self._decoder.fill()
        self._head.fill([self.head])
        self._empty()
        self.version = version

    @property
    def decoding(self) -> str:
        if self._decoder.at_once:
            return "one call through all layers, with matrix products of our own"
        return f"layer by layer, matrix products of {' and '.join(self._decoder.kinds)} with packed weights"

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        return self._decoder(input_ids, position_ids, layout)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class PackedDecoder(FusedDecoder):
    """A fused decoder whose products with the same input are one, of packed weights."""

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self._packs = {group[0]: pack(group) for group in self.groups()}  # by the first of the layers in one
        self._stack = self._as_stack()

    def groups(self) -> list[list[nn.Linear]]:
        """The linear layers, those with the same input together."""
        groups = []
        for layer in self.decoder.layers:
            a, mlp = layer.self_attn, layer.mlp
            groups += [[a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
        return groups

    @property
    def at_once(self) -> bool:
        """Whether a decoding step is one call."""
        return self._stack is not None

    @property
    def kinds(self) -> list[str]:
        """Whose products these are."""
        ours = {isinstance(p, kernels.Panels) for p in self._packs.values()}
        return [name for own, name in ((True, "our own"), (False, "oneDNN")) if own in ours]

    def fill(self) -> None:
        """Take over the layers' weights, in the place of those before."""
        for group in self.groups():
            self._packs[group[0]].fill(group)

    def products(self, x: Tensor, *modules: nn.Linear) -> tuple[Tensor, ...]:
        return self._packs[modules[0]](x).split([m.out_features for m in modules], 1)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        live: kernels.Live | None = getattr(layout, "live", None)
        if live is None or self._stack is None:
            return super().__call__(input_ids, position_ids, layout)
        for layer in self.decoder.layers:
            check_layer(layer, layout)
        x, cosine, sine = self.embedded(input_ids, position_ids)
        return add_norm(*kernels.decode_step(self._stack, live, x, cosine, sine), self.decoder.norm)[1]

    def _as_stack(self) -> kernels.Stack | None:
        """All layers for one call, where every product is ours and the layers are alike."""
        layers, packs = self.decoder.layers, self._packs
        scalings = {layer.self_attn.scaling for layer in layers}
        eps = {norm.variance_epsilon for layer in layers for norm in _norms(layer) if norm is not None}
        fields: list[list[Tensor | None]] = []
        for layer in layers:
            a, mlp = layer.self_attn, layer.mlp
            four = [packs[first] for first in (a.q_proj, a.o_proj, mlp.gate_proj, mlp.down_proj)]
            panels = [p for p in four if isinstance(p, kernels.Panels)]
            if len(panels) < len(four) or len(scalings) > 1 or len(eps) > 1:
                return None
            weights = [None if norm is None else norm.weight.detach() for norm in _norms(layer)]
            fields.append([*weights, *(p.packed for p in panels), *(p.bias for p in panels)])
        qkv, output, _, down = panels
        d = layers[0].self_attn.head_dim
        heads, kv_heads = output.k // d, (qkv.n - output.k) // (2 * d)
        sizes = [len(layers), qkv.k, down.k, heads, kv_heads, d, qkv.run, output.run, down.run]
        return kernels.Stack(fields, sizes, scalings.pop(), eps.pop())


def _norms(layer: Any) -> tuple[Any, ...]:
    """Of a layer's input, of each head of queries and keys (None in most families), of the MLP's input."""
    a = layer.self_attn
    return layer.input_layernorm, getattr(a, "q_norm", None), getattr(a, "k_norm", None), layer.post_attention_layernorm
