"""The forward pass of Llama-like decoders on a CPU: transformers' weights, our kernels.

transformers computes norms, rotary embedding and gated activation in several passes over memory each; here each is one,
with the same roundings, forward and backward. With panels (panels.py) the matrix products of the forward pass are ours
too, and a decoding step is one call. Linear layers may have adapters. Other families, and models whose linear layers
are anything else or have hooks, keep transformers' modules.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lagrpo.cpu import kernels
from lagrpo.cpu.autograd import Linears, add_norm, gated_product, normed_products, product, rotary
from lagrpo.cpu.panels import Panels, has_adapter, joined

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Layout(Protocol):
    """Who attends to whom in one call of the model, and what computes it (model/attention.py): `attend` takes
    [rows, Hq, D] and twice [rows, Hkv, D], and gives [rows, Hq, D]."""

    @property
    def longest(self) -> int: ...  # tokens of the longest sequence
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor: ...


def check_window(module: nn.Module, layout: Layout, sliding_window: int | None) -> None:
    """Raise ValueError for a sequence that is longer than the window that a layer attends within."""
    if sliding_window is not None and layout.longest > sliding_window:
        what = f"{type(module).__name__} attends to {sliding_window} tokens, but a sequence has {layout.longest}"
        raise ValueError(
            f"{what}: lower rollout.max_prompt_length or rollout.max_completion_length"
        )


def is_reproduced(lm: Any, d: int) -> bool:
    """Whether the kernels compute the layers of a model with heads of d numbers, by its family and its modules."""
    text, decoder = lm.config.get_text_config(), lm.get_decoder()
    if text.model_type not in FAMILIES or text.hidden_act != "silu" or _names(decoder) != DECODER:
        return False
    rope = getattr(text, "rope_parameters", None) or {}
    turned = d % (2 * kernels.VECTOR) == 0 and rope.get("partial_rotary_factor", 1.0) == 1.0
    return turned and all(map(_is_plain, decoder.layers))


def has_hooks(m: nn.Module) -> bool:
    """Whether a module has hooks or a replaced forward method, and therefore must be called."""
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in vars(m)


def is_unhooked(module: nn.Module) -> bool:
    """Whether neither a module nor anything in it has hooks."""
    return not any(map(has_hooks, module.modules()))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is nn.Linear itself, without hooks: its product may be computed from its weights."""
    return type(module) is nn.Linear and is_unhooked(module)


class FusedDecoder:
    """The decoder of a model of transformers and its head, computed with the kernels from the weights of its modules,
    or for the forward products from `panels` (OwnPanels, BorrowedPanels or AdaptedPanels)."""

    at_once = True  # a decoding step is one call

    def __init__(self, lm: Any, panels: Any = None) -> None:
        self.decoder, self.head, self.panels = lm.get_decoder(), lm.get_output_embeddings(), panels
        self._stack: tuple[object, kernels.Stack] | None = (
            None  # of which panels, and all layers for one call
        )
        self._plain = True

    @property
    def exact(self) -> bool:
        """Whether all matrix products of the forward pass are the kernels'."""
        return self.panels is not None and self.fits(None) and is_plain_linear(self.head)

    def fits(self, layout: Layout | None) -> bool:
        """Whether the linear layers are plain and nothing that is computed here has a hook; else the decoder must be
        called. Examined for every packed row; the decoding steps that follow keep to what was found."""
        if not isinstance(layout, kernels.Active):
            parts = (self.decoder.layers, self.decoder.norm)
            plain = all(map(_is_plain, self.decoder.layers)) and all(map(is_unhooked, parts))
            self._plain = plain and not has_hooks(self.decoder)
        return self._plain

    @property
    def product(self) -> Panels | None:
        """The head's product by panels; None if PyTorch computes it, or the layers are not computed here."""
        return self.panels.current().head if self.panels is not None and self._plain else None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Final hidden states: input_ids and position_ids [rows] -> [rows, H]. The gradient goes to the modules'
        weights, whatever computes the products."""
        x = self.decoder.embed_tokens(input_ids)
        cosine, sine = (t.squeeze(0) for t in self.decoder.rotary_emb(x, position_ids.unsqueeze(0)))
        for layer in self.decoder.layers:
            attention = layer.self_attn
            window = getattr(
                attention, "sliding_window", getattr(attention.config, "sliding_window", None)
            )
            check_window(attention, layout, window)
        panels, delta = self.panels.current() if self.panels is not None else None, None
        if self.at_once and panels is not None and isinstance(layout, kernels.Active):
            if self._stack is None or self._stack[0] is not panels:
                self._stack = panels, _stack(self.decoder, panels)
            return add_norm(
                *kernels.decode_step(self._stack[1], layout, x, cosine, sine), self.decoder.norm
            )[1]
        for number, layer in enumerate(self.decoder.layers):
            four = panels.layers[number] if panels is not None else [None] * 4
            given = (number, layer, four, x, delta, cosine, sine, layout)
            if (
                torch.is_grad_enabled()
                and layer.training
                and getattr(layer, "gradient_checkpointing", False)
            ):
                x, delta = checkpoint(_compute_layer, *given, use_reentrant=False)  # type: ignore[misc]
            else:
                x, delta = _compute_layer(*given)
        return add_norm(x, delta, self.decoder.norm)[1]


def _compute_layer(
    number: int,
    layer: Any,
    panels: Any,
    x: Tensor,
    delta: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """The residual stream before the layer's last addition, and what is to be added."""
    attention = layer.self_attn
    qkv, output, gate_up, down = map(Linears, joined(layer), panels)
    x, *made = normed_products(x, delta, layer.input_layernorm, qkv)
    query, key, value = (t.unflatten(1, (-1, attention.head_dim)) for t in made)
    if hasattr(attention, "q_norm"):
        query, key = _head_norm(query, attention.q_norm), _head_norm(key, attention.k_norm)
    query, key = rotary(query, cosine, sine), rotary(key, cosine, sine)
    attended = layout.attend(number, query, key, value, attention.scaling)
    x, gate, up = normed_products(
        x, product(attended.flatten(1), output), layer.post_attention_layernorm, gate_up
    )
    return x, gated_product(gate, up, down)


def _head_norm(x: Tensor, module: Any) -> Tensor:
    """The norm of each head by itself: [n, heads, D]."""
    return add_norm(x.reshape(-1, x.shape[-1]), None, module)[1].view(x.shape)


def _stack(decoder: Any, panels: Any) -> kernels.Stack:
    """All layers for one call: the families' layers have one scaling and one epsilon."""
    layers = decoder.layers
    fields: list[list[Tensor | int | None]] = []
    for layer, four in zip(layers, panels.layers, strict=True):
        scales = [None if norm is None else norm.weight.detach() for norm in _norms(layer)]
        fields.append([*scales, *chain.from_iterable(p.fields for p in four)])
    qkv, output, _, down = panels.layers[0]
    d = layers[0].self_attn.head_dim
    return kernels.Stack(
        fields,
        width=qkv.k,
        inner=down.k,
        heads=output.k // d,
        kv_heads=(qkv.n - output.k) // (2 * d),
        d=d,
        rank=max(p.rank for four in panels.layers for p in four),
        scaling=layers[0].self_attn.scaling,
        eps=layers[0].input_layernorm.variance_epsilon,
    )


def _norms(layer: Any) -> tuple[Any, ...]:
    """Of a layer's input, of each head of queries and keys (None in most families), of the MLP's input."""
    a = layer.self_attn
    return (
        layer.input_layernorm,
        getattr(a, "q_norm", None),
        getattr(a, "k_norm", None),
        layer.post_attention_layernorm,
    )


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_plain(layer: Any) -> bool:
    """Whether a layer is made of the parts of its family and nothing else but adapters."""
    made_of = _names(layer) == LAYER and _names(layer.mlp) == MLP
    if not made_of or _names(layer.self_attn) not in (ATTENTION, ATTENTION | {"q_norm", "k_norm"}):
        return False
    return all(type(m) is nn.Linear or has_adapter(m) for group in joined(layer) for m in group)
