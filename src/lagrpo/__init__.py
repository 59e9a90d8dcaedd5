"""Train language models with GRPO and its relatives on verifiable rewards, on-policy or off-policy.

`lagrpo.train` trains, `lagrpo.evaluate` evaluates a model, `lagrpo.compare` makes a table of runs,
`lagrpo.diagnose` says what is wrong with one; subclass `lagrpo.Callback` to follow a run;
`lagrpo.core` has the losses and imports only torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagrpo.machine import shorten_spin

if TYPE_CHECKING:
    from lagrpo.core.inputs import LossInputs
    from lagrpo.core.objective import Recipe
    from lagrpo.diagnosis.diagnose import diagnose
    from lagrpo.lifecycle.callbacks import Callback
    from lagrpo.lifecycle.evaluate import evaluate
    from lagrpo.lifecycle.run import Result, train
    from lagrpo.rewards.reward import Reward
    from lagrpo.runs.comparing import compare

# Before PyTorch loads OpenMP, which reads then how threads wait.
shorten_spin()

__all__ = [
    "Callback",
    "LossInputs",
    "Recipe",
    "Result",
    "Reward",
    "compare",
    "diagnose",
    "evaluate",
    "train",
]


def __dir__() -> list[str]:
    return __all__


_MODULES = {
    "Callback": "lagrpo.lifecycle.callbacks",
    "LossInputs": "lagrpo.core.inputs",
    "Recipe": "lagrpo.core.objective",
    "Result": "lagrpo.lifecycle.run",
    "Reward": "lagrpo.rewards.reward",
    "compare": "lagrpo.runs.comparing",
    "diagnose": "lagrpo.diagnosis.diagnose",
    "evaluate": "lagrpo.lifecycle.evaluate",
    "train": "lagrpo.lifecycle.run",
}
"""The module of each name of `__all__`."""


def __getattr__(name: str) -> Any:
    """Loads a name of `__all__` at its first use, so that `import lagrpo.core` stays light."""
    if name not in _MODULES:
        raise AttributeError(f"module 'lagrpo' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
