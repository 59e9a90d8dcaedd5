"""The pipe between a driver and the program that it measures: one JSON object per line.

This is the end inside the program, over its standard input and output. TRL's environment imports
it, too, so it needs the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict


class Update(TypedDict):
    """The measurements of one update, as a side replies with them."""

    seconds: float
    """From the request to the reply."""
    phases: dict[str, float]
    """Seconds by phase; phases may not cover the whole update."""
    prompts: list[int]
    """The keys of the prompts, sorted."""
    prompt_tokens: int
    """Tokens of the prompts, each prompt counted once."""
    completions: int
    sampled: int
    """Completion tokens sampled."""
    learned: int
    """Completion tokens in the loss."""
    micro_batches: int
    flat: float
    """Share of the groups whose rewards are equal."""
    reward: float
    peak_bytes: int
    """The driver adds it: most memory resident so far, over all processes of the side."""
    gpu_peak_bytes: int
    """Most memory of the GPU that PyTorch has allocated so far; 0 without a GPU."""
    flops: float
    """Only lagrpo replies with it: operations that training needs, see ours.learning_flops."""
    threads: int
    """Only lagrpo replies with it."""
    weights: str
    """Only TRL replies with it: the dtype of the weights that the optimizer changes."""


class Wire:
    """Requests from the driver, and replies to it.

    Replies go to what was standard output. Whatever else prints there goes to standard error
    instead. The driver stops the program when it has a reply, so a reply waits for the GPU: kernels
    of a stopped program would take time from the other side.
    """

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def reply(self, **measurements: object) -> None:
        wait_for_gpu()
        print(json.dumps(measurements), file=self._replies, flush=True)

    def request(self) -> dict[str, Any]:
        """The next request. Ends the program when the driver has ended."""
        line = sys.stdin.readline()
        if not line:
            # An exception would run the clean-up of the training loop that waits here.
            os._exit(0)
        return json.loads(line)


class Gate:
    """Lets a training loop make one update per request, and times it from request to reply.

    `others` answers requests other than updates: name -> function(**arguments) -> measurements.
    """

    def __init__(
        self, wire: Wire, others: Mapping[str, Callable[..., Mapping[str, object]]] | None = None
    ) -> None:
        self._wire = wire
        self._others = others or {}
        self._started = 0.0

    def wait(self) -> None:
        """Blocks until an update is requested."""
        while True:
            request = self._wire.request()
            if request.pop("do") == "update":
                break
            name = request.pop("name")
            self._wire.reply(**self._others[name](**request))
        self._started = time.perf_counter()

    def done(self, **measurements: object) -> None:
        """Replies that the update is made."""
        wait_for_gpu()
        seconds = time.perf_counter() - self._started
        self._wire.reply(seconds=seconds, gpu_peak_bytes=gpu_peak_bytes(), **measurements)


def wait_for_gpu() -> None:
    """Waits until the GPU has done what this program has started."""
    if has_used_gpu():
        sys.modules["torch"].cuda.synchronize()


def gpu_peak_bytes() -> int:
    """Returns the most memory of the GPU that PyTorch has had allocated; 0 without a GPU."""
    return sys.modules["torch"].cuda.max_memory_allocated() if has_used_gpu() else 0


def has_used_gpu() -> bool:
    """True if PyTorch computes on a GPU in this program."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def imported(reference: str) -> Any:
    """The object that "package.module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
