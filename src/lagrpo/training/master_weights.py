"""float32 master weights of bfloat16 weights: what the optimizer steps on.

A *dithered* master starts at a random place among the float32 numbers that round to its weight, so small steps move the
weight from the first update on. docs/precision.md derives this.

    MasterWeights       one process
    ZeroMasterWeights   every rank has all weights, and its part of the masters and moments (ZeRO-1, arXiv:1910.02054)
    FsdpMasterWeights   every rank has its shard of everything (FSDP2; training/fsdp.py)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lagrpo.rng import signed16

Start = Literal["dithered", "plain"]
EXACT = (torch.float32, torch.float64)  # weights of these are their own masters: nothing is rounded
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 64  # bytes: a line of the cache, and the widest vector


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers `start` .. `stop` - 1 of a weight; `shape` is the shape of the whole weight."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return (self.start, self.stop) == (0, self.shape.numel())

    @property
    def label(self) -> str:
        """What a state calls it: NAME, or NAME@START:TOTAL for a part."""
        return self.name if self.is_whole else f"{self.name}@{self.start}:{self.shape.numel()}"

    def of(self, weight: Tensor) -> Tensor:
        """These numbers of a weight, flat unless they are all; a view of it if it is contiguous."""
        return weight if self.is_whole else weight.reshape(-1)[self.start : self.stop]


class MasterWeights:
    """`parameters` is what the optimizer steps on: a float32 master of every trained weight of `model`, or the weight
    itself if the whole model is float32 or float64; `spans` says which weight each is of. Weights pass their gradients
    on to their masters as soon as they have them. A dithered start is keyed by (seed, "masters", parameter's name)."""

    passes_are_collective = False
    """whether all ranks have to make every pass through the model"""
    group: dist.ProcessGroup | None = None
    device = torch.device("cpu")

    def __init__(self, model: nn.Module, start: Start, seed: int) -> None:
        trained = trained_parameters(model)
        self.spans = [
            Span(name, weight.shape, 0, weight.numel()) for name, weight in trained.items()
        ]
        self.parameters = self.weights = list(trained.values())
        if all(weight.dtype in EXACT for weight in self.weights):
            return
        self.parameters = []
        for span, weight in zip(self.spans, self.weights, strict=True):
            master = nn.Parameter(start_master(span, weight.detach(), start, seed))
            weight.register_post_accumulate_grad_hook(partial(add_to_master, master))
            self.parameters.append(master)

    def reduce_grads(self) -> None:
        """Give every master the gradient of the whole batch: zeros if there is none. Collective."""
        for master in self.parameters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad

    def grad_norm(self) -> Tensor:
        """The norm of the gradient of the whole batch, a tensor of one number, the same on all ranks. Collective."""
        own = torch.nn.utils.get_total_norm([m.grad for m in self.parameters if m.grad is not None])
        if self.group is None:
            return own
        norms = all_gather(own.to(self.device, torch.float64).view(1), self.group)
        return (
            norms.square()
            .sum()
            .sqrt()
            .to(torch.float64 if own.dtype == torch.float64 else torch.float32)
        )

    def zero_grads(self) -> None:
        for master in self.parameters:
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Every weight becomes its master, rounded to nearest, ties to even. Collective."""
        for weight, master in zip(self.weights, self.parameters, strict=True):
            if weight is not master:
                weight.copy_(master)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def add_to_master(master: nn.Parameter, weight: Tensor) -> None:
    assert weight.grad is not None
    if master.grad is None:
        master.grad = weight.grad.to(master.dtype)
    else:
        master.grad += weight.grad
    weight.grad = None


def start_master(span: Span, weight: Tensor, start: Start, seed: int) -> Tensor:
    """The masters of a span of a weight; what a number starts at does not depend on the span."""
    value = span.of(weight).to(
        torch.float64 if weight.dtype == torch.float64 else torch.float32, copy=True
    )
    if start == "dithered" and weight.dtype == torch.bfloat16:
        dither_(value, signed16(span.stop, seed, "masters", span.name)[span.start :])
    return value


def dither_(value: Tensor, numbers: np.ndarray) -> None:
    """Move bfloat16 numbers, in float32, inside their rounding cells, in place: add one of `numbers`, int16 of [-32767,
    32767], to the bits of each. The low 16 bits of a bfloat16 number's float32 pattern are 0, and a cell reaches 2^15
    patterns to either side. Zeros, infinities and NaN stay: their cells are different."""
    steps = torch.from_numpy(numbers).view(value.shape).to(value.device)
    steps.masked_fill_((value == 0) | ~value.isfinite(), 0)
    value.view(torch.int32).add_(steps)


# ZeRO-1


class FlatBuffer:
    """The trained weights of one dtype side by side, each at a multiple of ALIGNED bytes, and the whole filled up to
    one equal part for each rank. Parts begin at multiples of ALIGNED bytes too, so an update of a number takes the same
    instructions on any rank. `gradient` is this rank's sum over its rows, float32 (float64 for weights in float64)."""

    def __init__(self, weights: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.weights, self.group = weights, group
        first = next(iter(weights.values()))
        self.dtype, self.device = first.dtype, first.device
        unit, end, self.starts = ALIGNED // first.element_size(), 0, dict[str, int]()
        for name, weight in weights.items():
            self.starts[name] = end
            end += -(-weight.numel() // unit) * unit
            weight.register_post_accumulate_grad_hook(partial(self._add_gradient, name))
        self.part = -(-end // (unit * group.size())) * unit  # numbers of each rank
        self.gradient: Tensor | None = None

    def spans(self) -> Iterator[Span]:
        """What this rank's part has of the weights, in their order."""
        first = self.group.rank() * self.part
        for name, weight in self.weights.items():
            start, stop = (
                min(max(n - self.starts[name], 0), weight.numel())
                for n in (first, first + self.part)
            )
            if start < stop:
                yield Span(name, weight.shape, start, stop)

    def view(self, part: Tensor, span: Span) -> Tensor:
        """The numbers of a span in this rank's part, flat: a view."""
        first = self.starts[span.name] + span.start - self.group.rank() * self.part
        return part[first : first + span.stop - span.start]

    def sum_gradients(self) -> Tensor:
        """This rank's part of the sum of all ranks' gradients, which are dropped. Collective."""
        given, self.gradient = self._zeros() if self.gradient is None else self.gradient, None
        part = given.new_empty(self.part)
        (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(
            part, given, group=self.group
        )
        return part

    def gather(self, part: Tensor) -> None:
        """Every weight becomes what the ranks have of it in their parts. Collective."""
        everything = all_gather(part, self.group)
        for name, weight in self.weights.items():
            weight.copy_(everything[self.starts[name] :][: weight.numel()].view_as(weight))

    def _zeros(self) -> Tensor:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.zeros(self.part * self.group.size(), dtype=wide, device=self.device)

    def _add_gradient(self, name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        if self.gradient is None:
            self.gradient = self._zeros()
        self.gradient[self.starts[name] :][: weight.numel()].add_(weight.grad.reshape(-1))
        weight.grad = None


class ZeroMasterWeights(MasterWeights):
    """Master weights over the ranks of a group, which start from the same weights: `parameters` are the spans that this
    rank has. Masters are the same numbers on any number of ranks."""

    def __init__(self, model: nn.Module, start: Start, seed: int, group: dist.ProcessGroup) -> None:
        trained, by_dtype = (
            trained_parameters(model),
            defaultdict[torch.dtype, dict[str, nn.Parameter]](dict),
        )
        for name, weight in trained.items():
            by_dtype[weight.dtype][name] = weight
        self.group = group
        self.buffers = [FlatBuffer(weights, group) for weights in by_dtype.values()]
        self.device = self.buffers[0].device
        self.held = [(buffer, span) for buffer in self.buffers for span in buffer.spans()]
        self.spans = [span for _, span in self.held]
        self.parameters, exact = [], all(weight.dtype in EXACT for weight in trained.values())
        for span in self.spans:
            weight = trained[span.name].detach()
            self.parameters.append(
                nn.Parameter(span.of(weight) if exact else start_master(span, weight, start, seed))
            )

    def reduce_grads(self) -> None:
        sums = {buffer: buffer.sum_gradients() for buffer in self.buffers}
        for (buffer, span), master in zip(self.held, self.parameters, strict=True):
            master.grad = buffer.view(sums[buffer], span).view_as(master)

    def zero_grads(self) -> None:
        super().zero_grads()
        for buffer in self.buffers:
            buffer.gradient = None

    @torch.no_grad()
    def write_back(self) -> None:
        for buffer in self.buffers:
            part = torch.zeros(buffer.part, dtype=buffer.dtype, device=buffer.device)
            for (of, span), master in zip(self.held, self.parameters, strict=True):
                if of is buffer:
                    buffer.view(part, span).copy_(master.view(-1))
            buffer.gather(part)


def all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, [n] each, in their order: [ranks · n]. Collective."""
    everything = part.new_empty(len(part) * group.size())
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(
        everything, part, group=group
    )
    return everything


# The state of the optimizer


def step_offloaded(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """One step of AdamW whose moments stay in the host's memory, and visit the device one weight at a time."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        state: dict[str, Any] = optimizer.state[parameter]
        kept = {name: state[name] for name in MOMENTS if name in state}
        state |= {name: moment.to(parameter.device) for name, moment in kept.items()}
        parameter.grad = gradient
        optimizer.step()  # passes over parameters without a gradient
        parameter.grad = None
        for name in MOMENTS:
            state[name] = (
                kept[name].copy_(state[name])
                if name in kept
                else to_host(state[name], parameter.device)
            )


def to_host(tensor: Tensor, of: torch.device) -> Tensor:
    """A copy in the host's memory, pinned if a GPU `of` it is to fetch it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=of.type == "cuda").copy_(tensor)


class MergedState(Mapping[str, Tensor]):
    """The states of one or several ranks, read as one. A state has a weight's numbers under `master/NAME`,
    `exp_avg/NAME`, `exp_avg_sq/NAME`; a rank that has the numbers A .. B - 1 of N has them flat, under
    `master/NAME@A:N`. AdamW's step count is `step/NAME`. Files may be mapped: what is not asked for is not read.

    >>> states = {"master/a@0:3": torch.tensor([1.0, 2.0])}, {"master/a@2:3": torch.tensor([3.0])}
    >>> MergedState(states)["master/a"]
    tensor([1., 2., 3.])
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self._pieces: dict[str, dict[int, Tensor]] = {}  # by the number that they start at
        for state in states:
            for key in state:
                name, _, place = key.partition("@")
                self._pieces.setdefault(name, {})[int(place.partition(":")[0] or 0)] = state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> Tensor:
        pieces = [piece for _, piece in sorted(self._pieces[name].items())]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def count(self, name: str) -> int:
        """How many numbers of a tensor are there; 0 if there is none."""
        return sum(piece.numel() for piece in self._pieces.get(name, {}).values())

    def part(self, name: str, span: Span) -> Tensor:
        """A copy of the numbers of a span of the tensor `name`, flat unless they are all."""
        found = [
            piece.reshape(-1)[max(span.start - first, 0) : max(span.stop - first, 0)]
            for first, piece in sorted(self._pieces[name].items())
        ]
        numbers = torch.cat(found)
        return numbers.view(span.shape) if span.is_whole else numbers
