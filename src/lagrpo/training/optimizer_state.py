"""The optimizer's state: moments in the host's memory, and states of any number of ranks read as one.

A state has a weight's numbers under `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`. A rank that has the numbers A ..
B - 1 of a weight of N numbers has them flat, under `master/NAME@A:N`. AdamW's step count is `step/NAME`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.training.master_weights import Span

MOMENTS = ("exp_avg", "exp_avg_sq")


def step_offloaded(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """One step of AdamW whose moments stay in the host's memory: they visit the device of their master one weight at a
    time. The updates are the same bits."""
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
            state[name] = kept[name].copy_(state[name]) if name in kept else to_host(state[name], parameter.device)


def to_host(tensor: Tensor, of: torch.device) -> Tensor:
    """A copy in the host's memory, pinned if a GPU `of` it is to fetch it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=of.type == "cuda").copy_(tensor)


class MergedState(Mapping[str, Tensor]):
    """The states of one or several ranks, read as one: under the name of a weight that ranks have parts of, there are
    all of its numbers, flat. Tensors are read when they are asked for, and not kept.

    >>> states = {"master/a@0:3": torch.tensor([1.0, 2.0])}, {"master/a@2:3": torch.tensor([3.0])}
    >>> MergedState(states)["master/a"]
    tensor([1., 2., 3.])
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self._pieces: dict[str, list[tuple[int, str, Mapping[str, Tensor]]]] = {}  # start, key, state
        for state in states:
            for key in state:
                name, _, place = key.partition("@")
                self._pieces.setdefault(name, []).append((int(place.partition(":")[0] or 0), key, state))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> Tensor:
        _, key, state = self._pieces[name][0]
        return self._numbers(name, 0, self.count(name)) if "@" in key else state[key]

    def count(self, name: str) -> int:
        """How many numbers a tensor has; 0 if there is none."""
        _, key, state = self._pieces.get(name, [(0, "", {"": torch.empty(0)})])[0]
        return int(key.rpartition(":")[2]) if "@" in key else state[key].numel()

    def part(self, name: str, span: Span) -> Tensor:
        """A copy of the numbers of a span of the tensor `name`: flat, or in the shape of the weight if they are all of
        it. Raises ValueError if no state has some of them."""
        numbers = self._numbers(name, span.start, span.stop)
        return numbers.view(span.shape) if span.is_whole else numbers

    def _numbers(self, name: str, start: int, stop: int) -> Tensor:
        """The numbers `start` .. `stop` - 1, flat. Parts that have none of them are not read."""
        pieces, found, reached = self._pieces[name], list[Tensor](), start
        for n, (first, key, state) in enumerate(pieces):
            end = pieces[n + 1][0] if n + 1 < len(pieces) else stop
            if first <= reached < min(end, stop):
                found.append(state[key].reshape(-1)[reached - first : stop - first])
                reached += len(found[-1])
        if reached < stop:
            raise ValueError(f"the numbers {reached} to {stop - 1} of {name} are in none of the states")
        return torch.cat(found)
