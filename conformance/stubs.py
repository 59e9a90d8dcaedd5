"""Empty modules in the place of packages that are not installed, so that a peer's loss functions can be imported alone.

verl and Trinity-RFT import ray, tensordict, hydra … when any of their modules is imported; none of it takes part in a
loss. A stub has every attribute: a class that takes any arguments, can be a base class and, as a decorator, gives back
what it is given. Nothing that computes is stubbed: a name that a loss used would raise or show in the comparison.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

STUBBED = ("ray", "tensordict", "hydra", "omegaconf", "codetiming", "orjson", "flash_attn")


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    members = {
        "__init__": lambda self, *arguments, **options: None,
        "__call__": lambda self, given=None, *arguments, **options: given,
        "__getattr__": lambda self, attribute: _anything(attribute),
    }
    return _Kind(name, (), members)


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that a package that is installed is never replaced."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """From now on the names in STUBBED can be imported."""
    sys.meta_path.append(_Finder(STUBBED))
