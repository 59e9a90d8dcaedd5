"""What computes attention, log-probs and decoding for one device and dtype.

A policy gets its backend when it is built (choose.py); the process keeps nothing of the choice. `Backend` itself is
PyTorch's operations, which run on any device; CpuBackend and CudaBackend replace what they do better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends import logprobs, parts
from lagrpo.backends.adapters import with_own_adapters
from lagrpo.backends.layout import PackedLayout
from lagrpo.backends.logprobs import Product
from lagrpo.backends.steps import Steps


@dataclass(frozen=True)
class Backend:
    """PyTorch's operations. `reason` says why no other backend computes, in words."""

    device: torch.device
    dtype: torch.dtype
    reason: str = "as chosen"

    def __str__(self) -> str:
        return f"PyTorch ({self.reason})"

    def over(self, layout: PackedLayout) -> RowLayout:
        """A packed row with this backend: the layout that a model is called with."""
        return RowLayout(layout, self)

    def attend(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend along a packed row: query [rows, Hq, D], key and value [rows, Hkv, D] -> [rows, Hq, D];
        differentiable. No [T, T] matrix is ever stored."""
        return parts.attend(layout, query, key, value, scaling)

    def token_logp(
        self, hidden_TH: Tensor, head: Any, token_ids_T: Tensor, tau: float, entropy_T: Tensor | None,
        product: Product | None = None,
    ) -> Tensor:  # fmt: skip
        """log softmax(head(hidden) / tau)[token] for each row: float32 [T], nats, differentiable (see logprobs.py)."""
        return logprobs.token_logp(hidden_TH, head.weight, head.bias, token_ids_T, tau, entropy_T)

    def logp(self, logits_TV: Tensor, token_ids_T: Tensor, tau: float) -> Tensor:
        """log softmax(logits / tau)[token], of logits in the model's dtype: float32 [T], nats, without a gradient."""
        return logprobs.logp_from_logits(logits_TV, token_ids_T, tau)

    def sample(self, logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens from softmax(logits / tau) by inverse CDF at uniform numbers float64 in [0, 1), and their log-probs:
        int64 [R], float32 [R] (nats)."""
        return logprobs.sample_tokens(logits_RV, tau, uniform_R)

    def layers(self, lm: Any, panels: Any = None) -> Any:
        """What computes whole decoder layers of a model of transformers, from its weights or from `panels`; None where
        its own modules do."""
        return None

    def copy(self, model: Any) -> tuple[Any, Any]:
        """A copy of a model's transformers model that does not learn, and `panels` for its layers, None where these are
        the copy's own. Where the copy lacks weights, panels have `load`, which takes them. Frozen layers beside
        adapters are shared."""
        return with_own_adapters(model.lm), None

    def steps(self, model: Any) -> Steps:
        return Steps(model)

    def computation(self, text: Any, layers: Any) -> str:
        """What computes the forward pass besides PyTorch's products, in words; `layers`: what computes whole layers."""
        return str(self)

    def decoding(self, layers: Any) -> str:
        """How tokens are sampled, in words."""
        return f"layer by layer, PyTorch's matrix products in {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A packed row, and the backend that attends along it."""

    row: PackedLayout
    backend: Backend

    @property
    def longest(self) -> int:
        return self.row.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return self.backend.attend(self.row, query, key, value, scaling)


def has_hooks(m: nn.Module) -> bool:
    """Whether a module itself has hooks, or a forward method of its own: then it must be called to be computed."""
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in vars(m)


def is_unhooked(module: nn.Module) -> bool:
    """Whether neither a module nor anything in it has hooks."""
    return not any(map(has_hooks, module.modules()))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is nn.Linear itself, without hooks: its product may be computed from its weights."""
    return type(module) is nn.Linear and is_unhooked(module)
