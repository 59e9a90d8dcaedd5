"""The checks that open every function of core: a wrong shape is an error that names the tensors, never a broadcast."""

from torch import Tensor


def require_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError, naming every tensor and its shape, unless all shapes are equal."""
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
    """Raises ValueError unless the last dimension is a group of at least one finite reward. A reward that is not
    finite is an answer nobody scored: it must be left out of the group, not counted."""
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards need a last dimension of G >= 1 completions, but have shape {tuple(rewards.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError("rewards must be finite; leave completions without a reward out of their group")


def require_at_least(minimum: float, **numbers: float) -> None:
    """Raises ValueError unless every number is at least `minimum` (and not NaN)."""
    for name, number in numbers.items():
        if not number >= minimum:
            raise ValueError(f"{name} must be at least {minimum:g}, but is {number}")
