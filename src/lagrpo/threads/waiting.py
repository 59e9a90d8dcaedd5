"""Chooses how OpenMP's threads wait for each other, before PyTorch loads OpenMP.

At the end of a parallel region a finished thread waits for the others: it spins, and after a while it sleeps. GNU's
OpenMP spins 300,000 times, which takes milliseconds, and a decoding step has hundreds of regions. Where another program
has a core, the spinning thread uses up the time in which the thread that it waits for could run. With a short spin it
sleeps, and both make progress. OpenMP reads its environment once, when it is loaded, so this runs first."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping, MutableMapping

SPINS = "1000"  # tens of microseconds; see "A machine that is not idle" in benchmarks/README.md
POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # what GNU's OpenMP reads

_own: dict[str, str] = {}  # what this module put into the environment


def choose(environment: MutableMapping[str, str], loaded: Container[str]) -> dict[str, str]:
    """Put a short spin into `environment`, unless the user chose how threads wait or PyTorch is `loaded`; return it."""
    if not sys.platform.startswith("linux") or "torch" in loaded or any(name in environment for name in POLICIES):
        return {}
    environment["GOMP_SPINCOUNT"] = SPINS
    return {"GOMP_SPINCOUNT": SPINS}


def begin() -> None:
    _own.update(choose(os.environ, sys.modules))


def quiet_tokenizers() -> None:
    """Keep tokenizers from starting threads beside the computing ones, unless the user decided."""
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        os.environ["TOKENIZERS_PARALLELISM"] = _own["TOKENIZERS_PARALLELISM"] = "false"


def wake_tokenizers() -> None:
    """Undo `quiet_tokenizers`, unless other code has decided since."""
    ours = _own.pop("TOKENIZERS_PARALLELISM", None)
    if ours is not None and os.environ.get("TOKENIZERS_PARALLELISM") == ours:
        del os.environ["TOKENIZERS_PARALLELISM"]


def drop_own(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what this module put there: for programs with their own OpenMP."""
    return {name: value for name, value in environment.items() if _own.get(name) != value}


def describe(environment: Mapping[str, str]) -> str:
    """The wait policy in words.

    >>> describe({"OMP_WAIT_POLICY": "passive"}), describe({})
    ('OMP_WAIT_POLICY=passive', "OpenMP's own")
    """
    chosen = [f"{name}={environment[name]}" for name in POLICIES if name in environment]
    return ", ".join(chosen) or "OpenMP's own"
