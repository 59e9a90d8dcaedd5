"""CUDA graphs and streams on the CPU, as strict as the real ones.

A recording runs no work: nothing that existed before it changes. A replay does the recorded work again, operation by
operation and without its Python, on the memory that it was recorded on, and overwrites what the replay before had made.
What a device cannot record is refused: reading a number of a tensor on the host, copying one to or from the host,
shapes that depend on numbers. Work on a stream that another stream did not wait for is refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

TO_THE_HOST = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
FROM_THE_HOST = {"tensor", "as_tensor", "from_numpy", "asarray", "cuda", "pin_memory"}
SHAPES_FROM_NUMBERS = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "equal", "allclose"}
aten = torch.ops.aten
REFUSED = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.lift_fresh.default),
}


class RecordingError(RuntimeError):
    """Something that a CUDA stream cannot capture."""


class Graph:
    """What was recorded: operations with the memory that they read and write."""

    def __init__(self) -> None:
        self.work: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.replays = 0
        self.recorded = False

    def replay(self) -> None:
        if not self.recorded:
            raise RuntimeError("nothing was recorded")
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, made in self.work:
                found = tree_leaves(function(*args, **kwargs))
                for static, again in zip(made, found, strict=True) if made else ():
                    static.copy_(again)


class _Recorder(TorchDispatchMode):
    """Notes every operation. New tensors get their memory now and hold nothing yet; those there before stay as they
    are."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self._own = graph, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED or (func is aten.index.Tensor and _by_a_mask(args[1])):
            raise RecordingError(f"{func} needs the numbers of a tensor on the host: it cannot be recorded")
        fixed, fixed_kwargs = tree_map(_memory, (args, kwargs))
        if func._schema.is_mutable:
            changed = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            self.graph.work.append((func, fixed, fixed_kwargs, []))
            return func(*args, **kwargs) if changed.untyped_storage()._cdata in self._own else changed
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.untyped_storage()._cdata in given for t in made):
            return result  # a view: its memory is another's
        self._own |= {t.untyped_storage()._cdata for t in made}
        self.graph.work.append((func, fixed, fixed_kwargs, [_memory(t) for t in made]))
        return result

    def forget(self) -> None:
        """What a recording leaves in its memory is nothing."""
        for *_, made in self.graph.work:
            for tensor in made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)


class _NoHost(TorchFunctionMode):
    """Refuses what would wait for the device, or copy between it and the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in TO_THE_HOST | FROM_THE_HOST | SHAPES_FROM_NUMBERS:
            raise RecordingError(f"{name} moves numbers between host and device: it cannot be recorded")
        if name == "to" and any(isinstance(a, str) for a in (*args[1:], *kwargs.values())):  # x.device is the device
            raise RecordingError("a copy to another device cannot be recorded")
        if name == "repeat_interleave" and isinstance(args[1], Tensor) and "output_size" not in kwargs:
            raise RecordingError("repeat_interleave by a tensor reads it on the host: it cannot be recorded")
        return func(*args, **kwargs)


def _memory(value: Any) -> Any:
    """A tensor by its present memory, whatever its Python object is made to stand for later."""
    return value.detach() if isinstance(value, Tensor) else value


def _by_a_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class Stream:
    """`seen` says up to which piece of every other stream's work this one has waited, `awaited` up to which the host
    has waited for this one's."""

    def __init__(self) -> None:
        self.done, self.awaited, self.seen = 0, 0, dict[int, int]()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen | {id(other): other.done}

    def synchronize(self) -> None:
        self.awaited = self.done


class Device:
    """Stands for the CUDA of PyTorch: `graphs` has what was recorded."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.recording = False
        self._default = self._current = Stream()
        self._streams = [self._default]

    def streams(self) -> type[Stream]:
        """The class of this device's streams."""
        known = self._streams

        class Own(Stream):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__()
                known.append(self)

        return Own

    def current_stream(self, *_: Any) -> Stream:
        return self._current

    def work(self) -> None:
        """Something runs on the current stream: it must have waited for what the others did."""
        for other in self._streams:
            seen = max(self._current.seen.get(id(other), 0), other.awaited)
            if other is not self._current and seen < other.done:
                raise RecordingError("work on one stream does not wait for that of another")
        self._current.done += 1

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            self.work()
            yield
        finally:
            self._current = before

    @contextmanager
    def graph(self, graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        if self.recording:
            raise RecordingError("a recording within a recording")
        self.work()
        self.recording, recorder = True, _Recorder(graph)
        try:
            with _NoHost(), recorder:
                yield
        finally:
            self.recording = False
        recorder.forget()
        graph.recorded = True
        self.graphs.append(graph)

    def synchronize(self, *_: Any) -> None:
        if self.recording:
            raise RecordingError("a recording cannot wait for the device")


def install(patch: Callable[[Any, str, Any], None]) -> Device:
    """Puts the device in the place of torch.cuda's graphs and streams, by `patch(owner, name, value)`."""
    device = Device()
    patch(torch.cuda, "CUDAGraph", Graph)
    patch(torch.cuda, "graph", device.graph)
    patch(torch.cuda, "Stream", device.streams())
    patch(torch.cuda, "stream", device.stream)
    patch(torch.cuda, "current_stream", device.current_stream)
    patch(torch.cuda, "synchronize", device.synchronize)
    patch(torch.cuda, "is_current_stream_capturing", lambda: device.recording)  # transformers asks before a host read
    return device
