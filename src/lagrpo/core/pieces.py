"""Pieces: functions with all of their knobs bound. A knob is a number, a flag, or another piece.

A function's keyword-only arguments are its knobs. Each knob has a path, for example
`surrogate.mask.epsilon_high`, so a mask and a weight that both have an `epsilon_high` keep two
values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, cast, get_type_hints

from torch import Tensor

PieceFunction: TypeAlias = Callable[..., Tensor]
"""A function with any arguments: an advantage, surrogate, mask, reduction …"""


@dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest value of a knob, in the annotation of the function whose knob it is."""

    value: float


NonNegative: TypeAlias = Annotated[float, Minimum(0.0)]

Positive: TypeAlias = Annotated[float, Minimum(1e-9)]
"""A divisor: 1e-9 stands for "more than 0"."""

AtLeastOne: TypeAlias = Annotated[float, Minimum(1.0)]


@dataclass(frozen=True, slots=True)
class Piece:
    """A function and the values of all its knobs.

    The values are of any type: a function of your own may take other knobs than lagrpo's.
    """

    function: PieceFunction
    knobs: Mapping[str, object]

    def __call__(self, *inputs: object) -> Tensor:
        return self.function(*inputs, **self.knobs)

    @property
    def name(self) -> str:
        """The function's name, as settings write it: with its module if it is not lagrpo's."""
        return function_name(self.function)

    def pieces(self) -> Iterator[Piece]:
        """The piece itself, and all pieces among its knobs."""
        yield self
        for value in self.knobs.values():
            if isinstance(value, Piece):
                yield from value.pieces()


def function_name(function: Callable[..., object]) -> str:
    """The name of a function in settings: `clipped`; `my_losses:dppo` if it is not lagrpo's."""
    # An object that can be called has no name: its class stands for it.
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None) or "?"
    return name if module.startswith("lagrpo.core.") else f"{module}:{name}"


def minimum_of(owner: Callable[..., object], knob: str) -> float | None:
    """The smallest value of a knob that a function or class of lagrpo states, if it states one."""
    if ":" in function_name(owner):
        # Annotations of your own functions may name types that exist for type checkers alone.
        return None
    annotation = _hints_of(owner)[knob]
    metadata: tuple[Any, ...] = getattr(annotation, "__metadata__", ())
    bounds = [bound.value for bound in metadata if isinstance(bound, Minimum)]
    return bounds[0] if bounds else None


@cache  # of lagrpo's functions alone, which stay; reading them is half of resolving a recipe
def _hints_of(owner: Callable[..., object]) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)


def piece(function: PieceFunction, **knobs: object) -> Piece:
    """Binds the keyword-only arguments of a function; the others keep their defaults.

    Raises ValueError for a knob that the function does not have, and for one without a value.
    """
    parameters = inspect.signature(function).parameters.values()
    defaults: dict[str, object] = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name in knobs:
        if name not in defaults:
            knob_names = ", ".join(defaults) or "none"
            raise ValueError(
                f"{function_name(function)} has no knob {name!r}; it has: {knob_names}"
            )
    bound: dict[str, object] = {}
    for name, default in defaults.items():
        value = knobs.get(name, default)
        if value is inspect.Parameter.empty:
            raise ValueError(f"{function_name(function)}: its knob {name!r} needs a default")
        bound[name] = as_piece(cast(PieceFunction, value)) if callable(value) else value
    return Piece(function, bound)


def as_piece(function: PieceFunction) -> Piece:
    """The function with the defaults of its knobs; a piece stays as it is."""
    return function if isinstance(function, Piece) else piece(function)


def knob_paths(root: Piece, prefix: str) -> Iterator[tuple[str, object]]:
    """Every knob below a piece, with its path: ("surrogate.mask.epsilon_high", 0.2)."""
    for name, value in root.knobs.items():
        path = f"{prefix}.{name}"
        yield path, value
        if isinstance(value, Piece):
            yield from knob_paths(value, path)


def with_knob(root: Piece, path: Sequence[str], value: object) -> Piece:
    """A copy of a piece in which the knob at `path` has another value.

    `path` has the knob's name, after the names of the pieces that lead to it.
    """
    name, *path_below = path
    if path_below:
        piece_below = root.knobs[name]
        assert isinstance(piece_below, Piece)  # only a piece has knobs
        value = with_knob(piece_below, path_below, value)
    return piece(root.function, **{**root.knobs, name: value})
