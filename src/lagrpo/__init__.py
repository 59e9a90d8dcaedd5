"""Train language models with GRPO and its relatives on verifiable rewards, on-policy or off-policy.

`lagrpo.train` trains, `lagrpo.evaluate` evaluates a model, `lagrpo.compare` makes a table of runs; subclass
`lagrpo.Callback` to follow a run; `lagrpo.core` has the losses and imports only torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagrpo.machine import shorten_spin

if TYPE_CHECKING:
    from lagrpo.core.inputs import LossInputs
    from lagrpo.core.objective import Recipe
    from lagrpo.rewards.reward import Reward
    from lagrpo.runs.comparing import compare
    from lagrpo.training.callbacks import Callback
    from lagrpo.training.evaluate import evaluate
    from lagrpo.training.run import Result, train

shorten_spin()  # before PyTorch loads OpenMP

__all__ = [
    "Callback",
    "LossInputs",
    "Recipe",
    "Result",
    "Reward",
    "compare",
    "evaluate",
    "train",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """The names of `__all__`, loaded at first use, so that `import lagrpo.core` stays light."""
    if name not in __all__:
        raise AttributeError(f"module 'lagrpo' has no attribute {name!r}")
    import importlib

    modules = {
        "LossInputs": "lagrpo.core.inputs",
        "Recipe": "lagrpo.core.objective",
        "Reward": "lagrpo.rewards.reward",
        "compare": "lagrpo.runs.comparing",
        "evaluate": "lagrpo.training.evaluate",
    }
    return getattr(importlib.import_module(modules.get(name, "lagrpo.training.run")), name)
