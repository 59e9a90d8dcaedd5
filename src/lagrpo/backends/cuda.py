"""The GPU: FlexAttention along packed rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lagrpo.backends import flex
from lagrpo.backends.attention import Shape
from lagrpo.backends.backend import Backend
from lagrpo.backends.layout import PackedLayout


class CudaBackend(Backend):
    """FlexAttention where it can be compiled (flex.py); PyTorch's operations for the rest."""

    def attend(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if flex.why_not(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2]):
            return super().attend(layout, query, key, value, scaling)
        return flex.attend(layout, query, key, value, scaling)

    def computation(self, text: Any, layers: Any) -> str:
        shape = Shape.of(text)
        reason = flex.why_not(self.device, self.dtype, shape.heads, shape.kv_heads, shape.d)
        return f"PyTorch (FlexAttention is unavailable: {reason})" if reason else "PyTorch with FlexAttention"
