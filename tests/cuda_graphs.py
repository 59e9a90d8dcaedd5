"""CUDA graphs on a CPU: what is computed inside `torch.cuda.graph` is written down operation by
operation, and a replay does it again on the same tensors. As on a GPU, graphs share their memory: a
replay destroys what others have computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lagrpo.rollout import local, recorded


def record_on_cpu(monkeypatch: Any) -> list[RecordedGraph]:
    """Let decoding states record their steps as on a GPU. Returns the list that graphs will be
    added to."""
    graphs: list[RecordedGraph] = []

    @contextmanager
    def recording(graph: RecordedGraph, **_: Any):
        with graph:
            yield
        graphs.append(graph)

    monkeypatch.setattr(local, "records_steps", lambda model: True)
    monkeypatch.setattr(recorded, "total_memory", lambda device: 80 << 30)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordedGraph(graphs))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return graphs


class RecordedGraph(TorchDispatchMode):
    """The operations of a step, as a CUDA graph holds them: fixed tensors in, fixed tensors out."""

    def __init__(self, graphs: list[RecordedGraph]) -> None:
        super().__init__()
        self.graphs = graphs  # all that share the memory
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self.memory: list[Tensor] = []  # what operations made, and did not get
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {address(tensor) for tensor in tensors_in((args, kwargs))}
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, tensors_in(out)))
        self.memory += [tensor for tensor in tensors_in(out) if address(tensor) not in before]
        return out

    def replay(self) -> None:
        self.replays += 1
        for graph in self.graphs:
            for tensor in graph.memory if graph is not self else ():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        for func, args, kwargs, results in self.operations:
            for result, again in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                if address(result) != address(again):
                    result.copy_(again)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
