"""On-policy and off-policy GRPO and its family on verifiable rewards.

`lagrpo.core` is the mathematics and imports torch alone; `lagrpo.train` runs Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagrpo.machine import shorten_spin

if TYPE_CHECKING:
    from lagrpo.training.callbacks import Callback
    from lagrpo.training.run import Result, train

shorten_spin()  # before PyTorch loads OpenMP

__all__ = ["Callback", "Result", "train"]


def __getattr__(name: str) -> Any:
    """`lagrpo.train` and what belongs to it, loaded when asked for: `import lagrpo.core` stays light."""
    if name not in __all__:
        raise AttributeError(f"module 'lagrpo' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("lagrpo.training.run"), name)
