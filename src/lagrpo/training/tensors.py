"""Numbers and parts of tensors, with types: PyTorch gives `tolist` and `split` no types."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor


def to_floats(values: Tensor) -> list[float]:
    """Returns the numbers of a one-dimensional tensor of floats."""
    return cast("list[float]", values.tolist())


def to_ints(values: Tensor) -> list[int]:
    """Returns the numbers of a one-dimensional tensor of integers."""
    return cast("list[int]", values.tolist())


def split(values: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns the parts of a tensor that have these lengths, one after the other."""
    return cast("tuple[Tensor, ...]", values.split(list(lengths)))
