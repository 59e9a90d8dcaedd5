"""Whether a module may be computed without being called: nobody has hung hooks on it."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_unhooked(module: nn.Module) -> bool:
    """Whether neither a module nor anything in it has hooks, or a forward method of its own."""
    waiting: list[Any] = [module]
    while waiting:
        m = waiting.pop()
        if has_hooks(m):
            return False
        waiting.extend(m._modules.values())
    return True


def has_hooks(m: nn.Module) -> bool:
    """Whether a module itself has hooks, or a forward method of its own."""
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in vars(m)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is nn.Linear itself, without hooks: its product may be computed from its weights."""
    return type(module) is nn.Linear and is_unhooked(module)
