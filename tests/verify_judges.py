"""Judges for the verifier's tests, in a light module of their own: worker processes import it."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lagrpo.tasks.base import Unjudgeable


def by_name(text: str, gold: Any) -> Any:
    """Behaves as the completion's text says; judges any other text by equality."""
    action, _, rest = text.partition(" ")
    actions = {
        "raise": lambda: _raise(ValueError(rest)),
        "unjudgeable": lambda: _raise(Unjudgeable(rest)),
        "quit": lambda: sys.exit(rest),
        "exit": lambda: os._exit(int(rest)),
        "segfault": lambda: ctypes.string_at(0),
        "sleep": lambda: (time.sleep(float(rest)), 1.0)[1],
        "open": lambda: (Path(rest).touch(), 1.0)[1],
        "wait": lambda: float(wait_for(Path(rest), 1e6)),
        "hang": lambda: time.sleep(1e6),
        "spin": lambda: 7 ** (7**9),  # one instruction of the interpreter: no signal handler runs, no thread either
        "nan": lambda: math.nan,
        "inf": lambda: -math.inf,
        "text": lambda: "1.0",
        "nothing": lambda: None,
        "complex": lambda: 1j,
        "array": lambda: np.ones(2),
        "float32": lambda: np.float32(0.25),
        "bool_": lambda: np.bool_(True),
        "true": lambda: True,
        "int": lambda: -3,
        "huge": lambda: 10**400,
        "pid": os.getpid,
        "niceness": lambda: os.getpriority(os.PRIO_PROCESS, 0),
        "threads": lambda: int(os.environ["OMP_NUM_THREADS"]),
        "modules": lambda: sum(module in sys.modules for module in ("torch", "transformers", "datasets", "sympy")),
    }
    return actions[action]() if action in actions else float(text == gold)


def wait_for(path: Path, seconds: float) -> bool:
    """Whether the file exists, at once or after so many seconds at most."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def leaking(text: str, gold: Any) -> float:
    """Leaves twelve objects of the system behind; then hangs, or judges."""
    from multiprocessing import Semaphore, shared_memory

    kept.extend(shared_memory.SharedMemory(f"lagrpo-{gold}-{text}-{n}", create=True, size=64) for n in range(6))
    kept.extend(Semaphore() for _ in range(6))
    if text == "hang":
        time.sleep(1e6)
    return 1.0


def opening(text: str, gold: Any) -> float:
    """Reads shared memory that the gold names, which is another process's."""
    from multiprocessing import shared_memory

    kept.append(shared_memory.SharedMemory(gold))
    if text == "hang":
        time.sleep(1e6)
    return float(kept[-1].buf[0])


kept: list[Any] = []


def quick(text: str, gold: Any) -> float:
    return float(text == gold)


class Judge:
    """A judge that is an object: pickled with what it holds."""

    def __init__(self, right: float) -> None:
        self.right = right

    def __call__(self, text: str, gold: Any) -> float:
        return self.right if text == gold else 0.0


def _raise(error: Exception) -> None:
    raise error
