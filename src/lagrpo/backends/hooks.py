"""Whether a module may be computed without being called: nobody has hung hooks on it."""

from __future__ import annotations

from torch import nn


def has_hooks(m: nn.Module) -> bool:
    """Whether a module itself has hooks, or a forward method of its own."""
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in vars(m)


def is_unhooked(module: nn.Module) -> bool:
    """Whether neither a module nor anything in it has hooks."""
    return not any(map(has_hooks, module.modules()))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is nn.Linear itself, without hooks: its product may be computed from its weights."""
    return type(module) is nn.Linear and is_unhooked(module)
