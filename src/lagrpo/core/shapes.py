"""Shapes: their names in signatures, and the checks at the start of every function of core. A wrong shape raises a
ValueError that names the tensors; it never broadcasts."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FloatT = Float[Tensor, "T"]
BoolT = Bool[Tensor, "T"]
IntT = Int[Tensor, "T"]
FloatC = Float[Tensor, "C"]
BoolC = Bool[Tensor, "C"]
IntC = Int[Tensor, "C"]
FloatG = Float[Tensor, "*N G"]
FloatK = Float[Tensor, "*N K"]
FloatN = Float[Tensor, "*N"]


def per_index(value_T: Tensor, index_T: Tensor, count: int) -> Tensor:
    """Sums of the values that share an index, 0 .. count-1: over the tokens of a completion, say."""
    return torch.zeros(count, dtype=value_T.dtype, device=value_T.device).index_add(0, index_T, value_T)


def mean_per_index(value_T: Tensor, index_T: Tensor, count: int) -> Tensor:
    """Means of the values that share an index; 0 where none does."""
    return per_index(value_T, index_T, count) / per_index(torch.ones_like(value_T), index_T, count).clamp(min=1)


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError unless all shapes are equal."""
    if len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"these tensors must have one shape: {found}")


def require_vector(**tensors: Tensor) -> None:
    """Raises ValueError unless every tensor is flat (one dimension) and all have the same length."""
    for name, tensor in tensors.items():
        if tensor.dim() != 1:
            raise ValueError(f"{name} must be flat (one dimension, no padding), but has shape {tuple(tensor.shape)}")
    require_same_shape(**tensors)


def require_group(rewards: Tensor) -> None:
    """Raises ValueError unless the last dimension is a group of at least one finite reward. An infinite or NaN reward
    belongs to an unscored answer: leave it out of the group."""
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards need a last dimension of G >= 1 completions, but have shape {tuple(rewards.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError("rewards must be finite; leave completions without a reward out of their group")


def require_at_least(minimum: float, **numbers: float) -> None:
    """Raises ValueError unless every number is at least `minimum` (and not NaN)."""
    for name, number in numbers.items():
        if not number >= minimum:
            raise ValueError(f"{name} must be at least {minimum:g}, but is {number}")


def require_above(minimum: float, **numbers: float) -> None:
    """Raises ValueError unless every number is greater than `minimum` (and not NaN)."""
    for name, number in numbers.items():
        if not number > minimum:
            raise ValueError(f"{name} must be greater than {minimum:g}, but is {number}")
