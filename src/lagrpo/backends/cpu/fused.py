"""The forward pass of Llama-like decoders on a CPU: transformers' weights, our kernels.

transformers computes norms, rotary embedding and gated activation in several passes over memory each; here each is one,
with the same roundings, forward and backward. With panels (panels.py) the matrix products of the forward pass are ours
too, and a decoding step is one call. Linear layers may have adapters (adapters.py). Other families, and models whose
linear layers are anything else or have hooks, keep transformers' modules.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lagrpo.backends.adapters import AdaptedLinear
from lagrpo.backends.attention import Layout, Shape, check_window
from lagrpo.backends.backend import has_hooks, is_plain_linear, is_unhooked
from lagrpo.backends.cpu import kernels
from lagrpo.backends.cpu.linear import Linears
from lagrpo.backends.cpu.panels import (
    AdaptedDecoder,
    AdaptedPanels,
    BorrowedPanels,
    DecoderPanels,
    LowRank,
    OwnPanels,
    Panels,
    joined,
)

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

Packed = DecoderPanels | AdaptedDecoder


def is_reproduced(lm: Any) -> bool:
    """Whether the kernels compute the layers of such a model, by its family and the parts that it is made of."""
    text, decoder = lm.config.get_text_config(), lm.get_decoder()
    if text.model_type not in FAMILIES or text.hidden_act != "silu" or _names(decoder) != DECODER:
        return False
    rope = getattr(text, "rope_parameters", None) or {}
    turned = Shape.of(text).d % (2 * kernels.VECTOR) == 0 and rope.get("partial_rotary_factor", 1.0) == 1.0
    return turned and all(map(_is_plain, decoder.layers))


class FusedDecoder:
    """The decoder of a model of transformers and its head, computed with the kernels from the weights of its modules,
    or for the forward products from `panels`."""

    def __init__(self, lm: Any, panels: OwnPanels | BorrowedPanels | AdaptedPanels | None = None) -> None:
        self.decoder, self.head, self.panels = lm.get_decoder(), lm.get_output_embeddings(), panels
        self._stack: tuple[Packed, kernels.Stack | None] | None = None
        self._plain = True

    @property
    def exact(self) -> bool:
        """Whether all matrix products of the forward pass are the kernels'."""
        return self.panels is not None and self.fits(None) and is_plain_linear(self.head)

    def fits(self, layout: Layout | None) -> bool:
        """Whether the linear layers are plain and nothing that is computed here has a hook; else the decoder must be
        called. Looked at for every packed row; the decoding steps that follow keep to what was found."""
        if getattr(layout, "active", None) is None:
            parts = (self.decoder.layers, self.decoder.norm)
            plain = all(map(_is_plain, self.decoder.layers)) and all(map(is_unhooked, parts))
            self._plain = plain and not has_hooks(self.decoder)
        return self._plain

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Final hidden states: input_ids and position_ids [rows] -> [rows, H]. The gradient goes to the modules'
        weights, whatever computes the products."""
        panels = self.panels.current() if self.panels is not None else None
        active: kernels.Active | None = getattr(layout, "active", None)
        stack = self.stack(panels) if active is not None and panels is not None else None
        x = self.decoder.embed_tokens(input_ids)
        cosine, sine = (t.squeeze(0) for t in self.decoder.rotary_emb(x, position_ids.unsqueeze(0)))
        if stack is not None and active is not None:
            for layer in self.decoder.layers:
                check_layer(layer, layout)
            return add_norm(*kernels.decode_step(stack, active, x, cosine, sine), self.decoder.norm)[1]
        delta: Tensor | None = None
        for number, layer in enumerate(self.decoder.layers):
            four = panels.layers[number] if panels is not None else None
            given = (number, layer, four, x, delta, cosine, sine, layout)
            if torch.is_grad_enabled() and layer.training and getattr(layer, "gradient_checkpointing", False):
                x, delta = checkpoint(self._layer, *given, use_reentrant=False)  # type: ignore[misc]
            else:
                x, delta = self._layer(*given)
        return add_norm(x, delta, self.decoder.norm)[1]

    @property
    def product(self) -> Panels | None:
        """The head's product by panels; None where PyTorch computes it, or the layers are not computed here."""
        return self.panels.current().head if self.panels is not None and self._plain else None

    def stack(self, panels: Packed) -> kernels.Stack | None:
        """All layers for one call per decoding step; None where they differ in their scaling or norms."""
        if self._stack is None or self._stack[0] is not panels:
            self._stack = panels, _stack(self.decoder, panels)
        return self._stack[1]

    def _layer(
        self, number: int, layer: Any, panels: list[Panels] | list[LowRank] | None, x: Tensor, delta: Tensor | None,
        cosine: Tensor, sine: Tensor, layout: Layout,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The residual stream before the layer's last addition, and what is to be added."""
        check_layer(layer, layout)
        attention = layer.self_attn
        qkv, output, gate_up, down = map(Linears, joined(layer), panels if panels is not None else [None] * 4)
        x, *made = _normed_products(x, delta, layer.input_layernorm, qkv)
        query, key, value = (t.unflatten(1, (-1, attention.head_dim)) for t in made)
        if hasattr(attention, "q_norm"):
            query, key = _head_norm(query, attention.q_norm), _head_norm(key, attention.k_norm)
        query, key = rotary(query, cosine, sine), rotary(key, cosine, sine)
        attended = layout.attend(number, query, key, value, attention.scaling)
        delta = _Product.apply(attended.flatten(1), output, *output.parameters)
        x, gate, up = _normed_products(x, delta, layer.post_attention_layernorm, gate_up)
        return x, _GatedProduct.apply(gate, up, down, *down.parameters)  # type: ignore[return-value]


def _normed_products(x: Tensor, delta: Tensor | None, norm: Any, linears: Linears) -> tuple[Tensor, ...]:
    """x + delta, and what linear layers make of its norm."""
    given = x, delta, norm.weight, norm.variance_epsilon
    return _NormedProducts.apply(*given, linears, *linears.parameters)  # type: ignore[return-value]


def _stack(decoder: Any, panels: Packed) -> kernels.Stack | None:
    """All layers for one call, where they are alike."""
    layers = decoder.layers
    scalings = {layer.self_attn.scaling for layer in layers}
    eps = {norm.variance_epsilon for layer in layers for norm in _norms(layer) if norm is not None}
    if len(scalings) > 1 or len(eps) > 1:
        return None
    fields: list[list[Tensor | int | None]] = []
    for layer, four in zip(layers, panels.layers, strict=True):
        scales = [None if norm is None else norm.weight.detach() for norm in _norms(layer)]
        fields.append([*scales, *chain.from_iterable(p.fields for p in four)])
    qkv, output, _, down = panels.layers[0]
    d = layers[0].self_attn.head_dim
    return kernels.Stack(
        fields, width=qkv.k, inner=down.k, heads=output.k // d, kv_heads=(qkv.n - output.k) // (2 * d), d=d,
        rank=max(p.rank for four in panels.layers for p in four), scaling=scalings.pop(), eps=eps.pop(),
    )  # fmt: skip


def _norms(layer: Any) -> tuple[Any, ...]:
    """Of a layer's input, of each head of queries and keys (None in most families), of the MLP's input."""
    a = layer.self_attn
    return layer.input_layernorm, getattr(a, "q_norm", None), getattr(a, "k_norm", None), layer.post_attention_layernorm


def check_layer(layer: Any, layout: Layout) -> None:
    """Raise ValueError where a sequence is longer than the window that the layer attends within."""
    a = layer.self_attn
    check_window(a, layout, getattr(a, "sliding_window", getattr(a.config, "sliding_window", None)))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_plain(layer: Any) -> bool:
    """Whether a layer is made of the parts of its family and nothing else but adapters of ours."""
    made_of = _names(layer) == LAYER and _names(layer.mlp) == MLP
    if not made_of or _names(layer.self_attn) not in (ATTENTION, ATTENTION | {"q_norm", "k_norm"}):
        return False
    return all(type(m) in (nn.Linear, AdaptedLinear) for group in joined(layer) for m in group)


def add_norm(x: Tensor, delta: Tensor | None, module: Any) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm by a module of the RMSNorm kind): [n, H] twice; differentiable."""
    return _AddNorm.apply(x, delta, module.weight, module.variance_epsilon)  # type: ignore[return-value]


def _head_norm(x: Tensor, module: Any) -> Tensor:
    """The norm of each head by itself: [n, heads, D]."""
    return add_norm(x.reshape(-1, x.shape[-1]), None, module)[1].view(x.shape)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, rstd = kernels.norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.first = delta is None
        ctx.set_materialize_grads(False)
        return total.view_as(total) if delta is None else total, y

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, grad_y: Tensor):  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = kernels.norm_backward(x, weight, rstd, grad_y, grad_total)
        return grad_x, None if ctx.first else grad_x, grad_weight, None


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding: x [n, heads, D], cosine and sine [n, D], the same in both halves of D. Raises
    ValueError for angles of a part of D only."""
    if cosine.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"rotary embedding of {cosine.shape[-1]} out of {x.shape[-1]} numbers of a head is not supported"
        )
    return _Rotary.apply(x, cosine, sine)  # type: ignore[return-value]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return kernels.rotary(x, cosine, sine)

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        return kernels.rotary(grad_y.contiguous(), cosine, sine, back=True), None, None


class _NormedProducts(torch.autograd.Function):
    """Keeps the sum for the backward pass and computes its norm again: a hundredth of the time of the products."""

    @staticmethod
    def forward(
        ctx, x: Tensor, delta: Tensor | None, scale: Tensor, eps: float, linears: Linears, *parameters: Tensor | None
    ):
        total, h, rstd = kernels.norm(x, delta, scale, eps)
        ctx.save_for_backward(total, scale, rstd, *parameters)
        ctx.eps, ctx.first, ctx.linears = eps, delta is None, linears
        ctx.set_materialize_grads(False)
        return total.view_as(total) if delta is None else total, *linears.forward(h)

    @staticmethod
    def backward(ctx, grad_total: Tensor | None, *grads: Tensor):  # type: ignore[override]
        total, scale, rstd, *parameters = ctx.saved_tensors
        h = kernels.norm(total, None, scale, ctx.eps)[1]
        found = ctx.linears.grad_parameters(h, grads, parameters, ctx.needs_input_grad[5:])
        if not any(ctx.needs_input_grad[:3]):  # the first layer, of frozen embeddings
            return *5 * (None,), *found
        grad_h = ctx.linears.grad_input(grads, parameters)
        grad_x, grad_scale = kernels.norm_backward(total, scale, rstd, grad_h, grad_total)
        return grad_x, None if ctx.first else grad_x, grad_scale, None, None, *found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, linears: Linears, *parameters: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.linears = linears
        return linears.forward(x)[0]

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        found = ctx.linears.grad_parameters(x, [grad_y], parameters, ctx.needs_input_grad[2:])
        return ctx.linears.grad_input([grad_y], parameters), None, *found


class _GatedProduct(torch.autograd.Function):
    """Keeps gate and up for the backward pass and computes the activation again."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, linears: Linears, *parameters: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, *parameters)
        ctx.linears = linears
        return linears.forward(kernels.swiglu(gate, up))[0]

    @staticmethod
    def backward(ctx, grad_y: Tensor):  # type: ignore[override]
        gate, up, *parameters = ctx.saved_tensors
        grad_made = ctx.linears.grad_input([grad_y], parameters)
        made, grad_gate, grad_up = kernels.swiglu_backward(gate, up, grad_made)
        found = ctx.linears.grad_parameters(made, [grad_y], parameters, ctx.needs_input_grad[3:])
        return grad_gate, grad_up, None, *found
