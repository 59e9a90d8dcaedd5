"""Computations that are recorded as CUDA graphs when they come again.

A replay is one launch; the computation itself is hundreds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

# A computation is recorded when it comes for this time. Triton compiles and cuBLAS makes its
# workspace in the first calls, which a recording cannot do.
OFTEN = 3


@dataclass(frozen=True, slots=True)
class _Recording:
    """A CUDA graph, the tensor that it reads, and the tensor that it writes."""

    graph: torch.cuda.CUDAGraph
    input: Tensor
    output: Tensor


class Graphs:
    """CUDA graphs by a key, each from one tensor to one tensor.

    A replay repeats the launches of the recording at the same addresses. So everything that differs
    between two calls with the same key must be in the input; all other tensors that it uses (a
    model's weights, a cache) must keep their addresses. No Python of the computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_calls = Counter[Hashable]()
        self._recordings: dict[Hashable, _Recording] = {}
        # Graphs run one after the other, so they share their memory.
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(
        self, key: Hashable, compute: Callable[[Tensor], Tensor], values: Tensor
    ) -> Tensor:
        """Returns compute(values), on the device. The values are on the CPU.

        The next call, with this key or another one, writes over the result. If the values are in
        pinned memory, the caller must not change them before it has read the result: a replay
        does not wait until they have been copied.
        """
        recording = self._recordings.get(key)
        if recording is None:
            self._num_calls[key] += 1
            if self._num_calls[key] < OFTEN:
                return compute(values.to(self._device))
            recording = self._record(compute, values)
            self._recordings[key] = recording
        recording.input.copy_(values, non_blocking=True)
        recording.graph.replay()
        return recording.output

    def _record(self, compute: Callable[[Tensor], Tensor], values: Tensor) -> _Recording:
        graph_input = values.to(self._device, copy=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = compute(graph_input)
        return _Recording(graph, graph_input, output)
