"""Parts of weights by name: what a rank has of each, how its state calls them, and how states are read again.

The state of a learner has a weight's numbers under `master/NAME`, `exp_avg/NAME`, ... A rank that has the numbers
A .. B - 1 of a weight of N numbers has them flat, under `master/NAME@A:N`. AdamW's step count is the same on all that
have part of a weight: `step/NAME`. `Merged` reads the states of any number of
ranks as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers `start` .. `stop` - 1 of a weight; `shape` is that of the whole weight."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    @staticmethod
    def whole(name: str, weight: Tensor) -> Span:
        return Span(name, weight.shape, 0, weight.numel())

    @property
    def is_whole(self) -> bool:
        return (self.start, self.stop) == (0, self.shape.numel())

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def label(self) -> str:
        """What a state calls it."""
        return self.name if self.is_whole else f"{self.name}@{self.start}:{self.shape.numel()}"

    def of(self, weight: Tensor) -> Tensor:
        """These numbers of a weight, flat unless they are all; a view of it where it is contiguous."""
        return weight if self.is_whole else weight.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where numbers of a tensor are: from `start` on, of `total`, under `key` of a state. `total` is None for all."""

    start: int
    total: int | None
    state: Mapping[str, Tensor]
    key: str

    def read(self) -> Tensor:
        return self.state[self.key]


class Merged(Mapping[str, Tensor]):
    """The states of one or several learners, read as one. A tensor is read from them when it is asked for, and nothing
    is kept. Under the name of a weight that ranks have parts of, there are all of its numbers, flat.

    >>> states = {"master/a@0:3": torch.tensor([1.0, 2.0])}, {"master/a@2:3": torch.tensor([3.0])}
    >>> Merged(states)["master/a"]
    tensor([1., 2., 3.])
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        for state in states:
            for key in state:
                parsed = re.fullmatch(r"(.+)@(\d+):(\d+)", key)
                name, start, total = (parsed[1], int(parsed[2]), int(parsed[3])) if parsed else (key, 0, None)
                self._pieces.setdefault(name, []).append(_Piece(start, total, state, key))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __getitem__(self, name: str) -> Tensor:
        """Raises ValueError where some of its numbers are in none of the states."""
        first = self._pieces[name][0]
        return self._numbers(name, 0, first.total) if first.total is not None else first.read()

    def check(self, name: str, span: Span) -> None:
        """Raise ValueError where there is nothing of that name, or where it is of another size than the weight."""
        if name not in self._pieces:
            raise ValueError(f"{name} is missing in the state of the learner")
        first, numbers = self._pieces[name][0], span.shape.numel()
        if first.total is None and (shape := first.read().shape) != span.shape:
            raise ValueError(f"{name} is {tuple(shape)} in the state of the learner, not {tuple(span.shape)}")
        if first.total is not None and first.total != numbers:
            raise ValueError(f"{name} has {first.total} numbers in the state of the learner, not {numbers}")

    def part(self, name: str, span: Span) -> Tensor:
        """The numbers of a span of the tensor `name`: flat, or in the shape of the weight where they are all of it.
        Raises ValueError where some are in none of the states."""
        if self._pieces[name][0].total is None:
            return _own(span.of(self._pieces[name][0].read()))
        numbers = self._numbers(name, span.start, span.stop)
        return numbers.view(span.shape) if span.is_whole else numbers

    def _numbers(self, name: str, start: int, stop: int) -> Tensor:
        """The numbers `start` .. `stop` - 1, flat. Parts that have none of them are not read."""
        pieces, found, reached = self._pieces[name], list[Tensor](), start
        ends = [*(piece.start for piece in pieces[1:]), stop]
        for piece, end in zip(pieces, ends, strict=True):
            if piece.start <= reached < min(end, stop):
                numbers = piece.read()[reached - piece.start : stop - piece.start]
                found.append(_own(numbers))
                reached += len(numbers)
        if reached < stop:
            raise ValueError(f"the numbers {reached} to {stop - 1} of {name} are in none of the states")
        return found[0] if len(found) == 1 else torch.cat(found)


def _own(numbers: Tensor) -> Tensor:
    """Numbers that keep no larger tensor in memory."""
    return (
        numbers if numbers.numel() * numbers.element_size() == numbers.untyped_storage().nbytes() else numbers.clone()
    )
