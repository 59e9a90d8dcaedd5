"""The CPU with a C compiler: lagrpo's kernels attend, take log-probs, sample, and compute whole decoder layers.

Whole layers are computed for the families that fused.py reproduces; the modules of transformers compute all others. In
bfloat16 the matrix products of these layers and of the head are the kernels' too, from panels (panels.py): then sampler
and learner agree to the bit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends.adapters import adapted, with_own_adapters
from lagrpo.backends.attention import Shape
from lagrpo.backends.backend import Backend
from lagrpo.backends.cpu import kernels, library, logprobs
from lagrpo.backends.cpu.fused import FusedDecoder, is_reproduced
from lagrpo.backends.cpu.panels import AdaptedPanels, BorrowedPanels, OwnPanels, chosen_products, joined
from lagrpo.backends.layout import PackedLayout
from lagrpo.backends.logprobs import Product
from lagrpo.backends.steps import Fed, Rows, Steps

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class CpuBackend(Backend):
    """`products`: what computes products of bfloat16 (AMX, AVX512-BF16, vectors), None where PyTorch does."""

    products: str | None = field(default_factory=lambda: chosen_products())

    def __str__(self) -> str:
        return library.describe()

    def attend(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if query.shape[-1] % kernels.VECTOR:
            return super().attend(layout, query, key, value, scaling)
        return _Attention.apply(query, key, value, layout, scaling)  # type: ignore[return-value]

    def token_logp(
        self, hidden_TH: Tensor, head: Any, token_ids_T: Tensor, tau: float, entropy_T: Tensor | None,
        product: Product | None = None,
    ) -> Tensor:  # fmt: skip
        return logprobs.token_logp(hidden_TH, head, token_ids_T, tau, entropy_T, product)

    def logp(self, logits_TV: Tensor, token_ids_T: Tensor, tau: float) -> Tensor:
        return kernels.token_logp(logits_TV, token_ids_T, tau)[0]

    def sample(self, logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.sample_tokens(logits_RV, tau, uniform_R)

    def layers(self, lm: Any, panels: Any = None) -> FusedDecoder | None:
        if not is_reproduced(lm):
            return None
        if panels is None and self._multiplies(lm):
            panels = OwnPanels(lm.get_decoder(), lm.get_output_embeddings())
        if isinstance(panels, OwnPanels) and adapted(lm):
            panels = AdaptedPanels(panels, lm.get_decoder())
        return FusedDecoder(lm, panels)

    def _multiplies(self, lm: Any) -> bool:
        """Whether the products of this model are the kernels': bfloat16 goes in pairs along the inputs."""
        even = all(m.in_features % 2 == 0 for m in lm.modules() if isinstance(m, nn.Linear))
        return self.dtype == torch.bfloat16 and self.products is not None and even

    def copy(self, model: Any) -> tuple[Any, BorrowedPanels | OwnPanels | None]:
        """Without weights of linear layers where the products read panels: these are lent, or the copy's own. Panels of
        frozen weights beside adapters are shared."""
        if not model.exact:
            return super().copy(model)
        if isinstance(model.layers.panels, AdaptedPanels):
            return with_own_adapters(model.lm), model.layers.panels.base
        weights = [m.weight for layer in model.decoder.layers for group in joined(layer) for m in group]
        empty = {id(p): nn.Parameter(p.new_empty(0), requires_grad=False) for p in weights}
        lm: Any = copy.deepcopy(model.lm, empty).requires_grad_(False)
        return lm, BorrowedPanels(model.layers.panels, lm.get_decoder(), lm.get_output_embeddings())

    def steps(self, model: Any) -> Steps:
        d = Shape.of(model.config.get_text_config()).d
        return super().steps(model) if d % kernels.VECTOR else KernelSteps(model)

    def computation(self, text: Any, layers: FusedDecoder | None) -> str:
        products = f", forward products by {self.products}" if layers is not None and layers.exact else ""
        whole = layers is not None and layers.fits(None)
        besides = "" if whole else f"; norms and activations of {text.model_type!r} by transformers"
        if (d := Shape.of(text).d) % kernels.VECTOR:
            besides += f"; attention by PyTorch (heads of {d} numbers, no multiple of {kernels.VECTOR})"
        return f"{self}{products}{besides}"

    def decoding(self, layers: FusedDecoder | None) -> str:
        if layers is None or layers.panels is None or not layers.exact:
            return super().decoding(layers)
        way = "one call through all layers" if layers.stack(layers.panels.current()) is not None else "layer by layer"
        return f"{way}, products by {self.products}"


class _Attention(torch.autograd.Function):
    """The backward pass computes the scores again; they are never stored."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))
        out, lse = kernels.attention(layout, query, key, value, scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        given = (ctx.layout, query, key, value, out, lse, grad_out.contiguous(), ctx.scaling)
        return *kernels.attention_backward(*given), None, None


class KernelSteps(Steps):
    """Decoding steps by the kernels: their attention, or all layers in one call (fused.py)."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.lanes = kernels.numbers_in_a_lane(model.dtype)

    def layout(self, state: Rows, fed: Fed) -> KernelStepLayout:
        return KernelStepLayout(state, fed)


class KernelStepLayout:
    """The tokens of a step. The kernels put their keys and values into the own caches and attend; they read
    `active`."""

    def __init__(self, state: Rows, fed: Fed) -> None:
        group_of_row = state.group_of_row[fed.rows]
        self.longest = int((state.prompt_lengths[group_of_row] + fed.before).max()) + 1
        counts = torch.bincount(group_of_row, minlength=state.prefix.batch)
        groups = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        self.active = kernels.Active(
            groups, torch.argsort(group_of_row, stable=True), state.prompt_lengths, fed.before, fed.rows,
            state.own.keys, state.own.values, state.prefix.keys, state.prefix.values,
        )  # fmt: skip

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return kernels.decode(self.active, layer, query, key, value, scaling)
