"""A task of a user's own, in a light module that worker processes import."""

from __future__ import annotations

import zlib
from typing import Any

from lagrpo.tasks import RowTask


def spread(text: str, gold: Any) -> float:
    """A reward between 0 and 1 that hardly two texts share: no group is without a signal."""
    return zlib.crc32(text.encode()) / 2**32


def even(text: str, gold: Any) -> float:
    """The same for every text: no group has a signal."""
    return 1.0


def impossible(text: str, gold: Any) -> float:
    raise RuntimeError("this judge never answers")


def load(settings: Any = None, seed: int = 0) -> RowTask:
    """Six prompts to train on and four to test on, of several lengths."""
    rows = {"train": [f"{'x' * n}?" for n in range(6)], "test": [f"{'y' * n}!" for n in range(4)]}
    return RowTask("spread", rows, lambda row: (row, row), spread)


def load_even(settings: Any, seed: int) -> RowTask:
    return RowTask("even", load().rows, lambda row: (row, row), even)


def load_impossible(settings: Any, seed: int) -> RowTask:
    return RowTask("impossible", load().rows, lambda row: (row, row), impossible)


def load_empty(settings: Any, seed: int) -> RowTask:
    return RowTask("empty", {"train": [], "test": []}, lambda row: (row, row), spread)


def load_untested(settings: Any, seed: int) -> RowTask:
    return RowTask("untested", {**load().rows, "test": []}, lambda row: (row, row), spread)
