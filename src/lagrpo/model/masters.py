"""float32 masters of bfloat16 weights: what the optimizer steps on, started inside the rounding cells of the weights.

A checkpoint in bfloat16 puts every master in the middle of its cell (the float32 numbers that round to its weight), so
a weight stands still until the sum of its steps passes half a spacing. A *dithered* master starts at a uniform draw
inside the cell instead. It rounds to the same weight, and from the first update on the weight's expected change is the
master's. docs/precision.md derives that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from lagrpo.model.spans import Span
from lagrpo.rng import signed16

Start = Literal["dithered", "plain"]
EXACT = (torch.float32, torch.float64)  # weights of these are their own masters: nothing is rounded
CHUNK = 2**20  # numbers rounded and compared at a time: what lies between stays in the cache
SAMPLE = 2**20  # about so many weights tell how many a weight sync moves


class Masters:
    """`parameters` is what the optimizer steps on: a float32 master of every trained weight of `model`, or the weight
    itself where the whole model is float32 or float64; `spans` says which weight each is of. Weights pass their
    gradients on to their masters as soon as they have them, so no gradient in bfloat16 is kept or added up. Draws of a
    dithered start are addressed by (seed, "masters", parameter's name).

    ShardedMasters (sharded.py) does the same for several processes."""

    def __init__(self, model: nn.Module, start: Start, seed: int) -> None:
        named = trained(model)
        self.spans = [Span.whole(name, p) for name, p in named.items()]
        self._working: list[nn.Parameter] = []
        self.parameters = list(named.values())
        if are_exact(self.parameters):
            return
        self._working, self.parameters = self.parameters, []
        for name, working in named.items():
            master = nn.Parameter(start_master(Span.whole(name, working), working.detach(), start, seed))
            working.register_post_accumulate_grad_hook(partial(_pass_gradient, master))
            self.parameters.append(master)

    def collect(self) -> None:
        """Give every master the gradient of the whole batch: zeros where there is none."""
        for master in self.parameters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad

    def norm(self) -> Tensor:
        """The norm of what was collected, a tensor of one number."""
        return torch.nn.utils.get_total_norm([m.grad for m in self.parameters if m.grad is not None])

    def discard(self) -> None:
        """Drop the gradients."""
        for master in self.parameters:
            master.grad = None

    @torch.no_grad()
    def round(self) -> float | None:
        """Every weight becomes its master, rounded to nearest, ties to even. Returns the share of the weights whose
        bits changed; None where nothing is rounded."""
        if not self._working:
            return None
        moved: int | Tensor = 0
        for working, master in zip(self._working, self.parameters, strict=True):
            for old, exact in zip(chunks(working), chunks(master), strict=True):
                moved += round_(old, exact)
        return int(moved) / sum(working.numel() for working in self._working)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are trained, tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def are_exact(weights: Iterable[Tensor]) -> bool:
    """Whether all of a model's weights are their own masters."""
    return all(w.dtype in EXACT for w in weights)


def start_master(span: Span, weight: Tensor, start: Start, seed: int) -> Tensor:
    """The masters of a span of a weight, in the span's own shape. What is drawn for a number does not depend on the
    span."""
    value = span.of(weight).to(torch.float64 if weight.dtype == torch.float64 else torch.float32, copy=True)
    if start == "dithered" and weight.dtype == torch.bfloat16:
        dither_(value, signed16(span.stop, seed, "masters", span.name)[span.start :])
    return value


def round_(weights: Tensor, masters: Tensor) -> int | Tensor:
    """Weights become their masters, rounded to nearest, in place. Returns of how many the bits changed."""
    new = masters.to(weights.dtype)
    moved = differing(new, weights)
    weights.copy_(new)
    return moved


def dither_(value: Tensor, draws: np.ndarray) -> None:
    """Move bfloat16 numbers, in float32, inside their rounding cells, in place: add a draw to the bits of each.

    `draws` int16, as many as there are numbers, of [-32767, 32767]. The low 16 bits of a bfloat16 number's float32
    pattern are 0 and a cell reaches 2^15 patterns to either side (its ends round to the neighbor where the number is
    odd), so what comes out rounds to the same number. Zeros, infinities and NaN stay: their cells are not such."""
    steps = torch.from_numpy(draws).view(value.shape).to(value.device)
    steps.masked_fill_((value == 0) | ~value.isfinite(), 0)
    value.view(torch.int32).add_(steps)


def differing(one: Tensor, other: Tensor) -> int | Tensor:
    """How many numbers of two tensors differ in their bits; on a GPU as a tensor there, so that nobody waits for it."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    unequal = one.view(bits) != other.view(bits)
    # NumPy counts bytes several times as fast as PyTorch does on a CPU.
    return int(np.count_nonzero(unequal.numpy())) if unequal.device.type == "cpu" else unequal.sum()


@torch.no_grad()
def sample_weights(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """A copy of every n-th weight of each parameter, about SAMPLE in all."""
    every = max(1, sum(w.numel() for w in weights.values()) // SAMPLE) | 1
    return [w.reshape(-1)[::every].clone() for w in weights.values()]


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Tells versions of a model's weights apart, by a sample of them."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in zip(weights, sample_weights(weights), strict=True):
        digest.update(name.encode())
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class SyncedWeights:
    """How much of the weights each weight sync changes, by a sample of the weights: every n-th of each parameter, about
    a million in all, so that no further copy of the weights has to be kept. All of them in a small model; in a large
    one the share p has a standard error of about √(p / 10⁶)."""

    def __init__(self) -> None:
        self.last: list[Tensor] = []
        """What the last weight sync brought of each parameter; empty before the first."""

    def share(self, weights: Mapping[str, Tensor]) -> float | None:
        """The share of the weights that differ in their bits from what the call before got; None at the first call."""
        last, self.last = self.last, sample_weights(weights)
        if not last:
            return None
        moved = sum(differing(new, old.to(new.device)) for new, old in zip(self.last, last, strict=True))
        return int(moved) / sum(len(w) for w in last)

    def metrics(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """The share as `moved_synced`; nothing at the first weight sync."""
        share = self.share(weights)
        return {} if share is None else {"moved_synced": share}


def chunks(parameter: Tensor) -> Iterator[Tensor]:
    """Views of a tensor's rows, of about CHUNK numbers each."""
    rows = torch.atleast_1d(parameter.detach())
    yield from rows.split(max(1, CHUNK // max(1, rows[0].numel())))


def _pass_gradient(master: nn.Parameter, working: Tensor) -> None:
    assert working.grad is not None
    if master.grad is None:
        master.grad = working.grad.to(master.dtype)
    else:
        master.grad += working.grad
    working.grad = None
