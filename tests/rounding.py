"""Bounds on the difference between two computations of the same numbers.

The processor chooses the order of a sum, and may round a product and a sum together.
"""

import torch


def rounding(dtype: torch.dtype, size: float, roundings: int) -> float:
    """After so many roundings, one for each term of a sum and for each operation, of numbers of at
    most this size."""
    return roundings * torch.finfo(dtype).eps / 2 * size
