"""Pieces: functions with all of their knobs bound. A knob is a number, a flag, or another piece.

A function's keyword-only arguments are its knobs. Each knob has a path, `surrogate.mask.epsilon_high` for example, so a
mask and a weight that both have an `epsilon_high` keep two values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A function and the values of all its knobs."""

    function: Callable[..., Tensor]
    knobs: Mapping[str, Any]

    def __call__(self, *inputs: Any) -> Tensor:
        return self.function(*inputs, **self.knobs)

    @property
    def name(self) -> str:
        """The function's name; of a function from outside lagrpo with its module, as settings name it."""
        return function_name(self.function)

    def functions(self) -> Iterator[Callable]:
        """The function, and those of the pieces among its knobs."""
        yield self.function
        for value in self.knobs.values():
            if isinstance(value, Piece):
                yield from value.functions()


def function_name(function: Callable) -> str:
    """The name by which settings name a function: `clipped`, or `my_losses:dppo` for one from outside lagrpo."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None) or "?"
    return name if module.startswith("lagrpo.core.") else f"{module}:{name}"


def piece(function: Callable[..., Tensor], **knobs: Any) -> Piece:
    """Bind the keyword-only arguments of a function; those not named keep their defaults.

    Raises ValueError for a knob that the function does not have, and for one without a value."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in knobs:
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise ValueError(f"{function_name(function)} has no knob {name!r}; it has: {known}")
    bound = {}
    for name, default in defaults.items():
        value = knobs.get(name, default)
        if value is inspect.Parameter.empty:
            raise ValueError(f"{function_name(function)}: its knob {name!r} needs a default")
        bound[name] = as_piece(value) if callable(value) else value  # pyright: ignore
    return Piece(function, bound)


def as_piece(function: Callable[..., Tensor] | Piece) -> Piece:
    """The function with the defaults of its knobs; a piece stays as it is."""
    return function if isinstance(function, Piece) else piece(function)


def knob_paths(root: Piece, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every knob below a piece, with its path: ("surrogate.mask.epsilon_high", 0.2)."""
    for name, value in root.knobs.items():
        path = f"{prefix}.{name}"
        yield path, value
        if isinstance(value, Piece):
            yield from knob_paths(value, path)


def with_knob(root: Piece, path: list[str], value: Any) -> Piece:
    """A copy of a piece in which the knob at `path` has another value."""
    name, *below = path
    if below:
        value = with_knob(root.knobs[name], below, value)
    return piece(root.function, **{**root.knobs, name: value})
