"""Empty modules in the place of packages that are not installed.

With them a peer's losses can be imported alone.

verl, Trinity-RFT, SkyRL and AReaL import ray, tensordict, hydra … when any of their modules is
imported; none of it takes part in a loss. A stub has every attribute: a class that takes any
arguments, can be a base class or a context manager and, as a decorator, gives back what it
decorates. Nothing that computes is stubbed: a name that a loss used would raise or show in the
comparison.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import MutableSequence, Sequence

PACKAGES = (
    "codetiming",
    "einops",
    "flash_attn",
    "hydra",
    "loguru",
    "omegaconf",
    "PIL",
    "orjson",
    "ray",
    "skyrl_gym",
    "tensordict",
    "torchdata",
    "uvloop",
)
"""Packages that are not installed."""

PARTS = (
    "skyrl.backends.backend",
    "areal.api.alloc_mode",
    "areal.api.io_struct",
    "areal.experimental",
    "areal.infra",
    "areal.trainer.dpo_trainer",
    "areal.trainer.rl_trainer",
    "areal.trainer.rw_trainer",
    "areal.trainer.sft_trainer",
    "areal.utils.logging",
    "areal.utils.seqpack",
    "areal.utils.stats_tracker",
)
"""Parts of installed peers: servers and launchers, which import dozens of packages, and metrics,
which take float32 alone.
"""


class _Kind(type):
    """A class of which every attribute is a class like it."""

    def __getattr__(cls, name: str) -> type:
        # Python looks for special attributes by itself and must find that there are none.
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> type:
    """A class that takes any arguments, and whose objects can be called, entered and asked."""
    members = {
        "__init__": lambda self, *arguments, **options: None,
        # As a decorator it returns what it decorates.
        "__call__": lambda self, argument=None, *arguments, **options: argument,
        "__enter__": lambda self: self,
        "__exit__": lambda self, *error: None,
        "__getattr__": lambda self, attribute: _anything(attribute),
    }
    return _Kind(name, (), members)


class _Stub(types.ModuleType):
    """A module that has every attribute."""

    # A module with a path is a package, so that modules below it can be imported.
    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of these names, and the modules below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{name}.") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leaves the module as it is: there is no code to run."""


def install() -> None:
    """Makes the names in PACKAGES and PARTS importable from now on."""
    # Last, so that a package that is installed is not replaced; first, so that a part is.
    sys.meta_path.append(_Finder(PACKAGES))
    sys.meta_path.insert(0, _Finder(PARTS))
