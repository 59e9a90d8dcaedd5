"""Numbers of tensors as Python's own, with types: PyTorch leaves the type of `tolist` open."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

from typing import cast

from torch import Tensor


def to_floats(values: Tensor) -> list[float]:
    """Returns the numbers of a one-dimensional tensor of floats."""
    return cast("list[float]", values.tolist())


def to_ints(values: Tensor) -> list[int]:
    """Returns the numbers of a one-dimensional tensor of integers."""
    return cast("list[int]", values.tolist())
