"""The forward pass of Llama-like decoders: transformers' weights, our kernels.

transformers computes norms, rotary embedding and gated activation in several passes over memory
each. Here each is one pass, with the same roundings, forward and backward. With panels (panels.py)
the kernels also compute the matrix products of the forward pass, and a decoding step is one call.
Linear layers may have adapters. Layers may be sharded (training/fsdp.py). Other families keep
transformers' modules, and so do models whose linear layers are of another class or have hooks.

Shapes: n rows of a packed row, or tokens of a step; H hidden size; I width of the MLP; Hq query
heads, Hkv key-value heads, D numbers in a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lagrpo.cpu import kernels
from lagrpo.cpu.autograd import (
    LayerKernels,
    Linears,
    RMSNorm,
    add_norm,
    gated_product,
    normed_products,
    product,
    rotary,
)
from lagrpo.cpu.panels import (
    AdaptedDecoder,
    DecoderPanels,
    ModelPanels,
    Panels,
    has_adapter,
    joined,
)

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# The names of the modules in these families, by what they are in.
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_WITH_NORMS = ATTENTION | {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Layout(Protocol):
    """The attention pattern of one call of the model, and the code that attends."""

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attends in one layer: query [n, Hq, D], key and value [n, Hkv, D] -> [n, Hq, D]."""
        ...


# Which models, and when


def check_window(module: nn.Module, layout: Layout, sliding_window: int | None) -> None:
    """Raises ValueError for a sequence longer than the window that a layer attends within."""
    if sliding_window is not None and layout.longest > sliding_window:
        raise ValueError(
            f"{type(module).__name__} attends to {sliding_window} tokens, but a sequence has "
            f"{layout.longest}: lower rollout.max_prompt_length or rollout.max_completion_length"
        )


def is_reproduced(lm: Any, d: int) -> bool:
    """True if the kernels can compute the layers of a model with heads of d numbers.

    Its family and its modules decide.
    """
    text_config = lm.config.get_text_config()
    decoder = lm.get_decoder()
    if text_config.model_type not in FAMILIES or text_config.hidden_act != "silu":
        return False
    if _child_names(decoder) != DECODER:
        return False
    # The kernel turns whole heads, each half of them in whole vectors.
    rope = getattr(text_config, "rope_parameters", None) or {}
    turns_whole_heads = rope.get("partial_rotary_factor", 1.0) == 1.0
    if not turns_whole_heads or d % (2 * kernels.VECTOR) != 0:
        return False
    return all(_is_plain(layer) for layer in decoder.layers)


def has_fixed_angles(text_config: Any) -> bool:
    """True if a token's rotary embedding depends on its position alone.

    For some models it depends on the longest sequence, too.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    return rope.get("rope_type") not in ("dynamic", "longrope")


def has_hooks(module: nn.Module) -> bool:
    """True if a module has hooks or a replaced forward method, and therefore must be called.

    Hooks of FSDP2 do not count: sharded layers are gathered without a call, too.
    """
    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    )
    return not all(map(_is_of_fsdp, hooks)) or "forward" in vars(module)


def _is_of_fsdp(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


def is_unhooked(module: nn.Module) -> bool:
    """True if neither a module nor anything in it has hooks."""
    return not any(has_hooks(inner) for inner in module.modules())


def is_plain_linear(module: nn.Module) -> bool:
    """True if a module is nn.Linear itself, without hooks.

    Then its product may be computed from its weights.
    """
    return type(module) is nn.Linear and is_unhooked(module)


def _child_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_plain(layer: Any) -> bool:
    """True if a layer has the parts of its family and nothing else but adapters."""
    if _child_names(layer) != LAYER or _child_names(layer.mlp) != MLP:
        return False
    if _child_names(layer.self_attn) not in (ATTENTION, ATTENTION_WITH_NORMS):
        return False
    for group in joined(layer):
        for module in group:
            if type(module) is not nn.Linear and not has_adapter(module):
                return False
    return True


# The forward pass


class FusedDecoder:
    """The decoder of a model of transformers and its head, computed with the kernels.

    It reads the weights of the modules. With `panels` the forward products are the kernels', too.
    `layer_kernels` compute between the products: the C kernels, or their twins on a GPU.
    `exact_products` says that PyTorch's products are as exact as the kernels' are.

    `layer_functions` are `compute_layer` of each layer. For sharded layers they are replaced by
    methods that also gather the weights.
    """

    # False: decoding steps go layer by layer, as packed rows do. For tests.
    at_once = True

    def __init__(
        self,
        lm: Any,
        panels: ModelPanels | None = None,
        layer_kernels: LayerKernels = kernels,
        *,
        exact_products: bool = False,
    ) -> None:
        self.decoder = lm.get_decoder()
        self.head: nn.Linear = lm.get_output_embeddings()
        self.panels = panels
        self.layer_kernels = layer_kernels
        self.exact_products = exact_products
        self.layer_functions: list[Callable[..., tuple[Tensor, Tensor]]] = [
            partial(compute_layer, layer) for layer in self.decoder.layers
        ]
        # All layers for one call, and the panels that they were made of.
        self._stack: kernels.Stack | None = None
        self._stack_panels: DecoderPanels | AdaptedDecoder | None = None
        # What `fits` found last.
        self._fits = True

    @property
    def exact(self) -> bool:
        """True if no row of any product depends on the rows that are computed with it.

        The kernels' products are so; PyTorch's are with `exact_products`.
        """
        exact_products = self.panels is not None or self.exact_products
        return exact_products and self.fits(None) and is_plain_linear(self.head)

    def fits(self, layout: Layout | None) -> bool:
        """True if the linear layers are plain, and nothing that is computed here has a hook.

        Else the decoder must be called. This is examined for every packed row; the decoding steps
        that follow keep the result, because it takes as long as a part of a step.
        """
        if isinstance(layout, kernels.Active):
            return self._fits
        self._fits = (
            all(_is_plain(layer) for layer in self.decoder.layers)
            and is_unhooked(self.decoder.layers)
            and is_unhooked(self.decoder.norm)
            and not has_hooks(self.decoder)
        )
        return self._fits

    @property
    def product(self) -> Panels | None:
        """The head's product by panels.

        None if PyTorch computes it, or if the layers are not computed here.
        """
        if self.panels is None or not self._fits:
            return None
        return self.panels.current().head

    def __call__(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Computes the final hidden states [n, H] of tokens int64 [n] at positions int64 [n].

        The gradient goes to the modules' weights, whatever computes the products.
        """
        x = self.decoder.embed_tokens(input_ids)  # [n, H]
        cosine, sine = self.decoder.rotary_emb(x, position_ids.unsqueeze(0))
        cosine = cosine.squeeze(0)  # [n, D]
        sine = sine.squeeze(0)
        for layer in self.decoder.layers:
            check_window(layer.self_attn, layout, _sliding_window(layer.self_attn))

        panels = None if self.panels is None else self.panels.current()
        if self.at_once and panels is not None and isinstance(layout, kernels.Active):
            stack = self._current_stack(panels)
            x, delta = kernels.decode_step(stack, layout, x, cosine, sine)
        else:
            x, delta = self._compute_layers(panels, x, cosine, sine, layout)
        _, hidden = add_norm(x, delta, self.decoder.norm, self.layer_kernels)
        return hidden

    def _compute_layers(
        self,
        panels: DecoderPanels | AdaptedDecoder | None,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
        layout: Layout,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream before the last addition, and what is to be added: [n, H]."""
        delta: Tensor | None = None
        for number, layer in enumerate(self.decoder.layers):
            compute = partial(
                self.layer_functions[number],
                number=number,
                panels=[None] * 4 if panels is None else panels.layers[number],
                cosine=cosine,
                sine=sine,
                layout=layout,
                layer_kernels=self.layer_kernels,
            )
            if _is_checkpointed(layer):
                x, delta = checkpoint(compute, x, delta, use_reentrant=False)  # type: ignore[misc]
            else:
                x, delta = compute(x, delta)
        return x, delta

    def _current_stack(self, panels: DecoderPanels | AdaptedDecoder) -> kernels.Stack:
        """Returns all layers for one call, from these panels."""
        if self._stack is None or self._stack_panels is not panels:
            self._stack = _make_stack(self.decoder, panels)
            self._stack_panels = panels
        return self._stack


def _sliding_window(attention: Any) -> int | None:
    """Returns the window of a layer's attention, in tokens.

    Some families have it in the module, others in the config only.
    """
    default = getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", default)


def _is_checkpointed(layer: Any) -> bool:
    """True if the layer is computed again in the backward pass, as transformers' modules do it."""
    is_on = getattr(layer, "gradient_checkpointing", False)
    return torch.is_grad_enabled() and layer.training and is_on


def compute_layer(
    layer: Any,
    x: Tensor,
    delta: Tensor | None,
    *,
    number: int,
    panels: Sequence[Panels | None],
    cosine: Tensor,
    sine: Tensor,
    layout: Layout,
    layer_kernels: LayerKernels,
) -> tuple[Tensor, Tensor]:
    """Computes a layer of x + delta, [n, H] each.

    The addition is left to the next norm, which reads both anyway. Returns the residual stream
    before the layer's own last addition, and what is to be added: [n, H] each.
    """
    attention = layer.self_attn
    qkv, output, gate_up, down = map(Linears, joined(layer), panels)

    x, query, key, value = normed_products(x, delta, layer.input_layernorm, qkv, layer_kernels)
    query = query.unflatten(1, (-1, attention.head_dim))  # [n, Hq, D]
    key = key.unflatten(1, (-1, attention.head_dim))  # [n, Hkv, D]
    value = value.unflatten(1, (-1, attention.head_dim))  # [n, Hkv, D]
    if hasattr(attention, "q_norm"):
        query = _head_norm(query, attention.q_norm, layer_kernels)
        key = _head_norm(key, attention.k_norm, layer_kernels)
    query = rotary(query, cosine, sine, layer_kernels)
    key = rotary(key, cosine, sine, layer_kernels)
    attended = layout.attend(number, query, key, value, attention.scaling)  # [n, Hq, D]
    attention_delta = product(attended.flatten(1), output)  # [n, H]

    x, gate, up = normed_products(
        x, attention_delta, layer.post_attention_layernorm, gate_up, layer_kernels
    )
    return x, gated_product(gate, up, down, layer_kernels)  # gate and up: [n, I]


def _head_norm(x: Tensor, norm: RMSNorm, layer_kernels: LayerKernels) -> Tensor:
    """Returns the norm of each head by itself: [n, heads, D]."""
    heads = x.reshape(-1, x.shape[-1])  # [n * heads, D]
    _, normed = add_norm(heads, None, norm, layer_kernels)
    return normed.view(x.shape)


def _make_stack(decoder: Any, panels: DecoderPanels | AdaptedDecoder) -> kernels.Stack:
    """Returns all layers for one call. The families' layers have one scaling and one epsilon."""
    layers: list[kernels.LayerWeights] = []
    largest_rank = 0
    for layer, panels_of_layer in zip(decoder.layers, panels.layers, strict=True):
        attention = layer.self_attn
        qkv, output, gate_up, down = panels_of_layer
        layers.append(
            kernels.LayerWeights(
                input_norm=layer.input_layernorm.weight.detach(),
                query_norm=_norm_weight(attention, "q_norm"),
                key_norm=_norm_weight(attention, "k_norm"),
                mlp_norm=layer.post_attention_layernorm.weight.detach(),
                qkv=qkv.fields,
                output=output.fields,
                gate_up=gate_up.fields,
                down=down.fields,
            )
        )
        largest_rank = max(largest_rank, *(product.rank for product in panels_of_layer))

    first = decoder.layers[0]
    qkv, output, _, down = panels.layers[0]
    d = first.self_attn.head_dim
    return kernels.Stack(
        layers,
        width=qkv.k,
        inner=down.k,
        heads=output.k // d,
        # The outputs of the first product are Hq queries, Hkv keys and Hkv values.
        kv_heads=(qkv.n - output.k) // (2 * d),
        d=d,
        rank=largest_rank,
        scaling=first.self_attn.scaling,
        eps=first.input_layernorm.variance_epsilon,
    )


def _norm_weight(attention: Any, name: str) -> Tensor | None:
    """Returns the weight [D] of the norm of each head; None in most families."""
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()
