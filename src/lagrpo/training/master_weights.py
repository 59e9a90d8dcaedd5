"""float32 master weights of bfloat16 weights: the numbers that the optimizer updates.

On a GPU a weight is half of its master, which split_masters.py joins for an update.

A *dithered* master starts at a random place among the float32 numbers that round to its weight, so
small steps move the weight from the first update on. docs/precision.md derives this.

    MasterWeights       one process
    ZeroMasterWeights   every rank has all weights, and its part of the masters and moments
                        (ZeRO-1, arXiv:1910.02054)
    FsdpMasterWeights   every rank has its shard of everything (FSDP2; training/fsdp.py)
"""

# Some methods of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lagrpo.rng import signed16
from lagrpo.training.split_masters import Block, fill_blocks, is_split, make_blocks, new_window

Start = Literal["dithered", "plain"]
# Weights of these dtypes are their own masters: nothing is rounded. Others are bfloat16.
EXACT = (torch.float32, torch.float64)
# AdamW's names of its moments.
MOMENTS = ("exp_avg", "exp_avg_sq")
# Bytes: a cache line, and the widest vector.
ALIGNED = 64
DITHERED_AT_ONCE = 2**22
"""Numbers whose random numbers are drawn at once: 8 MiB of them."""


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers `start` .. `stop` - 1 of a flat weight.

    `shape` is the shape of the whole weight.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.shape.numel()

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1

    @property
    def label(self) -> str:
        """The name of the span in a saved state: NAME, or NAME@START:TOTAL for a part."""
        if self.is_whole:
            return self.name
        return f"{self.name}@{self.start}:{self.shape.numel()}"

    def select(self, weight: Tensor) -> Tensor:
        """Returns these numbers of a weight: the weight itself, or a part of it, flat.

        The part is a view if the weight is contiguous.
        """
        if self.is_whole:
            return weight
        return weight.reshape(-1)[self.start : self.stop]


class MasterWeights:
    """The masters of a model's trained weights, in one process.

    - `parameters`: a float32 master of every trained weight, or the weight itself if it is float32
      or float64. The optimizer updates them. Of a weight that is half of its master it is a
      stand-in, which has the master's gradient, and its moments in the optimizer, but no numbers.
    - `spans`: the numbers that each of them has, and of which weight
    - `blocks`: the masters that are split

    A weight adds its gradient to its master as soon as it has one, and drops it. A dithered start
    is keyed by (seed, "masters", parameter's name).
    """

    # True if all ranks have to make every pass through the model.
    passes_are_collective = False
    group: dist.ProcessGroup | None = None
    device = torch.device("cpu")
    blocks: Sequence[Block] = ()

    def __init__(self, model: nn.Module, start: Start, seed: int) -> None:
        trained = trained_parameters(model)
        self.weights = list(trained.values())
        self.spans = [
            Span(name, weight.shape, 0, weight.numel()) for name, weight in trained.items()
        ]
        self.parameters: list[nn.Parameter] = []
        for span, weight in zip(self.spans, self.weights, strict=True):
            if weight.dtype in EXACT:
                self.parameters.append(weight)
                continue
            master = make_parameter(span, weight.detach(), start, seed)
            weight.register_post_accumulate_grad_hook(partial(add_to_master, master))
            self.parameters.append(master)
        self._make_blocks(self.weights, start, seed)

    def _make_blocks(self, weights: Sequence[Tensor], start: Start, seed: int) -> None:
        """Makes the masters that are split. `weights` has the numbers of each span."""
        self.blocks = make_blocks(self.spans, weights)
        numbers_of = {piece.span: piece.weight for block in self.blocks for piece in block.pieces}
        fill_blocks(self.blocks, lambda span: start_master(span, numbers_of[span], start, seed))

    def read(self) -> list[Tensor]:
        """Returns the masters of each span.

        Masters that are split are copies in the host's memory.
        """
        masters = [parameter.detach() for parameter in self.parameters]
        window = new_window(self.blocks)
        for block in self.blocks:
            joined = block.join(window)
            for piece in block.pieces:
                if piece.in_span.start == 0:
                    shape = self.parameters[piece.index].shape
                    masters[piece.index] = torch.empty(shape, dtype=torch.float32)
                masters[piece.index].view(-1)[piece.in_span] = joined[piece.in_block].cpu()
        return masters

    @torch.no_grad()
    def load(self, masters_of: Callable[[Span], Tensor]) -> None:
        """Makes `masters_of` a span, or of a part of a span, its masters.

        Weights follow after `write_back`.
        """
        split = {piece.index for block in self.blocks for piece in block.pieces}
        for index, (span, parameter) in enumerate(zip(self.spans, self.parameters, strict=True)):
            if index not in split:
                parameter.copy_(masters_of(span))
        fill_blocks(self.blocks, masters_of)

    def reduce_grads(self) -> None:
        """Gives every master the gradient of the whole batch: zeros if there is none.

        Collective.
        """
        for master in self.parameters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def grad_norm(self) -> Tensor:
        """Returns the norm of the gradient of the whole batch, the same on all ranks. Collective.

        It is a tensor of one number.
        """
        grads = [master.grad for master in self.parameters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if self.group is None:
            return norm
        # float64, so that the number of ranks matters as little as possible.
        norms = all_gather(norm.to(self.device, torch.float64).view(1), self.group)  # [ranks]
        total = norms.square().sum().sqrt()
        return total.to(torch.float64 if norm.dtype == torch.float64 else torch.float32)

    def zero_grads(self) -> None:
        for master in self.parameters:
            master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds every master to its weight: to nearest, ties to even. Collective."""
        for weight, master in zip(self.weights, self.parameters, strict=True):
            if weight is not master and not is_split(weight):
                weight.copy_(master)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model that are trained, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def make_parameter(span: Span, numbers: Tensor, start: Start, seed: int) -> nn.Parameter:
    """Returns the parameter for a span of a weight with these `numbers`: see MasterWeights."""
    if numbers.dtype in EXACT:
        return nn.Parameter(numbers)
    if is_split(numbers):
        return stand_in(numbers)
    return nn.Parameter(start_master(span, numbers, start, seed))


def stand_in(numbers: Tensor) -> nn.Parameter:
    """Returns a float32 parameter of the same shape and device, which takes no memory."""
    one_number = torch.zeros((), dtype=torch.float32, device=numbers.device)
    return nn.Parameter(one_number.expand(numbers.shape))


def add_to_master(master: nn.Parameter, weight: Tensor) -> None:
    """Adds a weight's gradient to its master's, and drops it: a hook of autograd."""
    assert weight.grad is not None
    if master.grad is None:
        master.grad = weight.grad.to(master.dtype)
    else:
        master.grad += weight.grad
    weight.grad = None


def start_master(span: Span, numbers: Tensor, start: Start, seed: int) -> Tensor:
    """Returns the first masters of a span of a weight, whose `numbers` are in any shape."""
    master_dtype = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    master = torch.empty(numbers.shape, dtype=master_dtype, device=numbers.device)
    fill_master(master, span, numbers, start, seed)
    return master


def fill_master(master: Tensor, span: Span, numbers: Tensor, start: Start, seed: int) -> None:
    """Makes `master`, contiguous, the first masters of a span of a weight with these `numbers`.

    A number's master does not depend on the span, so it is the same on any number of ranks.
    """
    master.copy_(numbers)
    if start == "plain" or numbers.dtype != torch.bfloat16:
        return
    # In blocks, because the random numbers of a large embedding take as much memory as its weight.
    flat_master = master.view(-1)
    for block_start in range(span.start, span.stop, DITHERED_AT_ONCE):
        block_stop = min(block_start + DITHERED_AT_ONCE, span.stop)
        steps = signed16(block_start, block_stop, seed, "masters", span.name)
        dither_(flat_master[block_start - span.start : block_stop - span.start], steps)


def dither_(value: Tensor, numbers: np.ndarray) -> None:
    """Moves bfloat16 numbers, in float32, inside their rounding cells, in place.

    It adds one of `numbers`, int16 of [-32767, 32767], to the bits of each. The low 16 bits of a
    bfloat16 number's float32 pattern are 0, and a cell reaches 2^15 patterns to either side. Zeros,
    infinities and NaN stay: their cells are different.
    """
    steps = torch.from_numpy(numbers).view(value.shape).to(value.device)
    steps.masked_fill_((value == 0) | ~value.isfinite(), 0)
    value.view(torch.int32).add_(steps)


# ZeRO-1


class FlatBuffer:
    """The trained weights of one dtype side by side, in one equal part for each rank.

    Each weight begins at a multiple of ALIGNED bytes, and zeros fill up the last part. Parts begin
    at multiples of ALIGNED bytes, too, so an update of a number takes the same instructions on any
    rank. `gradient` [part * ranks] is this rank's sum over its rows, float32 (float64 for weights
    in float64).
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.weights = weights
        self.group = group
        first_weight = next(iter(weights.values()))
        self.dtype = first_weight.dtype
        self.device = first_weight.device
        # The index of each weight's first number, and the numbers of a rank's part.
        self.starts: dict[str, int] = {}
        unit = ALIGNED // first_weight.element_size()  # numbers in ALIGNED bytes
        end = 0
        for name, weight in weights.items():
            self.starts[name] = end
            end += -(-weight.numel() // unit) * unit
            weight.register_post_accumulate_grad_hook(partial(self._add_gradient, name))
        self.part = -(-end // (unit * group.size())) * unit
        self.gradient: Tensor | None = None

    def spans(self) -> Iterator[Span]:
        """Yields the numbers of weights that are in this rank's part, in order."""
        part_start = self.group.rank() * self.part
        part_stop = part_start + self.part
        for name, weight in self.weights.items():
            weight_start = self.starts[name]
            start = min(max(part_start - weight_start, 0), weight.numel())
            stop = min(max(part_stop - weight_start, 0), weight.numel())
            if start < stop:
                yield Span(name, weight.shape, start, stop)

    def view(self, part: Tensor, span: Span) -> Tensor:
        """Returns the numbers of a span in this rank's `part`, flat: a view."""
        part_start = self.group.rank() * self.part
        start = self.starts[span.name] + span.start - part_start
        return part[start : start + span.stop - span.start]

    def new_part(self) -> Tensor:
        """Returns memory for this rank's part of the gradients' sum, with anything in it.

        A rank that has computed no gradient gets zeros for it.
        """
        if self.gradient is None:
            self.gradient = self._zeros()
        return self.gradient.new_empty(self.part)

    def sum_gradients(self, part: Tensor) -> None:
        """Fills `part` with this rank's part of the sum of all ranks' gradients, and drops them.

        Collective.
        """
        assert self.gradient is not None
        if self.gradient.is_cuda:
            reduce_scatter = _renamed_collective("reduce_scatter_single", "reduce_scatter_tensor")
            reduce_scatter(part, self.gradient, group=self.group)
        else:
            # Gloo would make a copy of all gradients to scatter their sum.
            dist.all_reduce(self.gradient, group=self.group)
            part.copy_(self.gradient.view(self.group.size(), -1)[self.group.rank()])
        self.gradient = None

    def gather(self, part: Tensor) -> None:
        """Copies the parts of all ranks into the weights. Collective."""
        everything = all_gather(part, self.group)
        for name, weight in self.weights.items():
            weight.copy_(self._numbers_of(name, everything).view_as(weight))

    def _numbers_of(self, name: str, everything: Tensor) -> Tensor:
        """Returns the numbers of a weight in a flat tensor [part * ranks]: a view."""
        start = self.starts[name]
        return everything[start : start + self.weights[name].numel()]

    def _zeros(self) -> Tensor:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.zeros(self.part * self.group.size(), dtype=wide, device=self.device)

    def _add_gradient(self, name: str, weight: Tensor) -> None:
        """Adds a weight's gradient to the buffer, and drops it: a hook of autograd."""
        assert weight.grad is not None
        if self.gradient is None:
            self.gradient = self._zeros()
        self._numbers_of(name, self.gradient).add_(weight.grad.reshape(-1))
        weight.grad = None


class ZeroMasterWeights(MasterWeights):
    """Master weights over the ranks of a group, which start from the same weights.

    `parameters` are the spans that this rank has. Masters are the same numbers on any number of
    ranks.
    """

    def __init__(self, model: nn.Module, start: Start, seed: int, group: dist.ProcessGroup) -> None:
        trained = trained_parameters(model)
        by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, weight in trained.items():
            by_dtype[weight.dtype][name] = weight
        self.group = group
        self.buffers = [FlatBuffer(weights, group) for weights in by_dtype.values()]
        self.device = self.buffers[0].device
        self.placed_spans = [(buffer, span) for buffer in self.buffers for span in buffer.spans()]
        self.spans = [span for _, span in self.placed_spans]

        weights = [span.select(trained[span.name].detach()) for span in self.spans]
        self.parameters = [
            make_parameter(span, weight, start, seed)
            for span, weight in zip(self.spans, weights, strict=True)
        ]
        self._make_blocks(weights, start, seed)

    def reduce_grads(self) -> None:
        # All memory comes first: a rank that lacks some can try again while the others wait.
        sums = {buffer: buffer.new_part() for buffer in self.buffers}
        for buffer, part in sums.items():
            buffer.sum_gradients(part)
        for (buffer, span), master in zip(self.placed_spans, self.parameters, strict=True):
            master.grad = buffer.view(sums[buffer], span).view_as(master)

    def zero_grads(self) -> None:
        super().zero_grads()
        for buffer in self.buffers:
            buffer.gradient = None

    @torch.no_grad()
    def write_back(self) -> None:
        for buffer in self.buffers:
            part = torch.zeros(buffer.part, dtype=buffer.dtype, device=buffer.device)
            for (owner, span), master in zip(self.placed_spans, self.parameters, strict=True):
                if owner is buffer:
                    weight = span.select(buffer.weights[span.name])
                    numbers = weight if is_split(weight) else master
                    buffer.view(part, span).copy_(numbers.view(-1))
            buffer.gather(part)


def all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the parts [n] of all ranks, in the order of ranks: [ranks * n]. Collective."""
    everything = part.new_empty(len(part) * group.size())
    gather = _renamed_collective("all_gather_single", "all_gather_into_tensor")
    gather(everything, part, group=group)
    return everything


def _renamed_collective(name: str, old_name: str) -> Callable[..., object]:
    """Returns a function of torch.distributed that PyTorch 2.13 renamed.

    2.13 has both names, and warns of the old one.
    """
    return getattr(dist, name if hasattr(dist, name) else old_name)


# The state of the optimizer


def step_offloaded(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Makes a step of AdamW whose moments are in the host's memory.

    They visit the device one weight at a time: the optimizer passes over parameters without a
    gradient, so each of its steps is for one weight.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        state: dict[str, Any] = optimizer.state[parameter]
        on_host = {name: state[name] for name in MOMENTS}
        for name, moment in on_host.items():
            state[name] = moment.to(parameter.device)
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None
        for name in MOMENTS:
            # In the same memory, which is pinned already.
            state[name] = on_host[name].copy_(state[name])


def to_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy in the host's memory, pinned if `device`, which will fetch it, is a GPU."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    return copy.copy_(tensor)


class MergedState(Mapping[str, Tensor]):
    """The states of one or several ranks, read as one.

    A state has a weight's numbers under `master/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`. A rank
    that has the numbers A .. B - 1 of N has them flat, under `master/NAME@A:N`. AdamW's step count
    is `step/NAME`. Files may be memory-mapped: then only the numbers that are looked up are read.

    >>> states = {"master/a@0:3": torch.tensor([1.0, 2.0])}, {"master/a@2:3": torch.tensor([3.0])}
    >>> MergedState(states)["master/a"]
    tensor([1., 2., 3.])
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        # The pieces of each tensor, by the index of their first number.
        self._pieces: dict[str, dict[int, Tensor]] = {}
        for state in states:
            for key, piece in state.items():
                name, _, numbers = key.partition("@")
                start, _, _ = numbers.partition(":")
                self._pieces.setdefault(name, {})[int(start or 0)] = piece

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> Tensor:
        pieces = [piece for _, piece in sorted(self._pieces[name].items())]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def count(self, name: str) -> int:
        """Returns how many numbers of a tensor the states have; 0 if they lack it."""
        return sum(piece.numel() for piece in self._pieces.get(name, {}).values())

    def part(self, name: str, span: Span) -> Tensor:
        """Returns a copy of the numbers of a span of a tensor, flat unless they are all."""
        overlaps: list[Tensor] = []
        for piece_start, piece in sorted(self._pieces[name].items()):
            start = max(span.start - piece_start, 0)
            stop = max(span.stop - piece_start, 0)
            overlaps.append(piece.reshape(-1)[start:stop])
        numbers = torch.cat(overlaps)
        return numbers.view(span.shape) if span.is_whole else numbers
