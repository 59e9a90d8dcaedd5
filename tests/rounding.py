"""How far apart two computations of the same numbers may be: the order of a sum, and whether a product and a sum are
rounded together, is the processor's choice."""

import torch


def rounding(dtype: torch.dtype, size: float, roundings: int) -> float:
    """After so many roundings, one for each term of a sum and for each operation, of numbers of at most this size."""
    return roundings * torch.finfo(dtype).eps / 2 * size
