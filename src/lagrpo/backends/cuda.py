"""The GPU: FlexAttention along packed rows, and decoding steps recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lagrpo.backends import flex
from lagrpo.backends.attention import Shape
from lagrpo.backends.backend import Backend
from lagrpo.backends.layout import PackedLayout
from lagrpo.backends.steps import Fed, StepLayout, Steps

ROWS_RECORDED = 16  # a CUDA graph is recorded for each multiple of so many rows


class CudaBackend(Backend):
    """FlexAttention where it can be compiled (flex.py), recorded decoding steps; PyTorch's operations for the rest."""

    def attend(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if flex.why_not(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2]):
            return super().attend(layout, query, key, value, scaling)
        return flex.attend(layout, query, key, value, scaling)

    def steps(self, model: Any) -> Steps:
        return RecordedSteps(model)

    def computation(self, text: Any, layers: Any) -> str:
        shape = Shape.of(text)
        reason = flex.why_not(self.device, self.dtype, shape.heads, shape.kv_heads, shape.d)
        return f"PyTorch (FlexAttention is unavailable: {reason})" if reason else "PyTorch with FlexAttention"

    def decoding(self, layers: Any) -> str:
        return "steps recorded as CUDA graphs"


class RecordedSteps(Steps):
    """The hundreds of small launches of a step are recorded once for each shape and then replayed as one. Shapes
    repeat: rows are filled up to a multiple of ROWS_RECORDED, and caches grow rarely. The host does not wait for the
    device between two steps."""

    records = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._caches: tuple[int, ...] = ()
        self._recorded: dict[tuple[int, int], tuple[Tensor, Tensor, StepLayout, Callable[[], Tensor]]] = {}

    def step(self, state: Any, fed: Fed) -> Tensor:
        """Rows that are left out get a token all the same, whose key and value the next one overwrites. A step with
        several tokens of a row is rare, and is not recorded."""
        if fed.several:
            return super().step(state, fed)
        if len(fed) == state.rows:
            return self._step(state, fed)
        every = torch.zeros(state.rows, dtype=torch.long).index_copy(0, fed.rows, fed.ids)
        hidden = self._step(state, Fed(every, torch.arange(state.rows), state.lengths))
        return hidden.index_select(0, fed.rows.to(hidden.device))

    def _step(self, state: Any, fed: Fed) -> Tensor:
        caches = (state.own.keys, state.own.values, state.prefix.keys, state.prefix.values)
        if self._caches != (addresses := tuple(t.data_ptr() for t in caches)):
            self._caches, self._recorded = addresses, {}
        padded = min(-(-state.rows // ROWS_RECORDED) * ROWS_RECORDED, state.max_rows)
        layout = StepLayout(state, fed, self.model.device, padded)
        given = state.inputs(fed.of(torch.arange(padded) % state.rows))
        shape = (padded, state.widest)
        if shape not in self._recorded:
            self._recorded[shape] = *given, layout, record(lambda: self.model.hidden(*given, layout))
        tokens, positions, known, replay = self._recorded[shape]
        tokens.copy_(given[0])
        positions.copy_(given[1])
        known.take_over(layout)
        return replay()


def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of `compute`, as a function that replays it and returns the tensor that it fills. Raises
    RuntimeError for what cannot be recorded (dynamic rotary scaling waits for the GPU, for example)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is set up at the first call must not be recorded
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            made = compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"a decoding step of this model cannot be recorded as a CUDA graph ({error}); set model.kernels = 'torch'"
        ) from error

    def replay() -> Tensor:
        graph.replay()
        return made

    return replay
