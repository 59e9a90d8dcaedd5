"""Tasks of a user's own, in a light module: worker processes import it, and need no PyTorch to
judge."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from lagrpo.tasks import RowTask

if TYPE_CHECKING:
    from lagrpo.settings.sections import TaskSettings


def spread(completion: str, answer: object) -> float:
    """A reward between 0 and 1 that hardly two texts share: no group is without a signal."""
    return zlib.crc32(completion.encode()) / 2**32


def impossible(completion: str, answer: object) -> float:
    raise RuntimeError("this function never answers")


def load(settings: TaskSettings | None = None, seed: int = 0) -> RowTask:
    """Six prompts to train on and four to test on, of several lengths."""
    rows = {"train": [f"{'x' * n}?" for n in range(6)], "test": [f"{'y' * n}!" for n in range(4)]}
    return RowTask("spread", rows, lambda row: (row, row), spread)


def load_impossible(settings: TaskSettings, seed: int) -> RowTask:
    return RowTask("impossible", load().rows, lambda row: (row, row), impossible)


def load_empty(settings: TaskSettings, seed: int) -> RowTask:
    return RowTask("empty", {"train": [], "test": []}, lambda row: (row, row), spread)


def load_untested(settings: TaskSettings, seed: int) -> RowTask:
    return RowTask("untested", {**load().rows, "test": []}, lambda row: (row, row), spread)


def load_rarely_right(settings: TaskSettings, seed: int) -> RowTask:
    """Two dozen prompts; a completion is right by chance, one in four."""
    rows = {split: [f"{n}?" for n in range(24)] for split in ("train", "test")}
    return RowTask("rare", rows, lambda row: (row, row), rarely_right)


def rarely_right(completion: str, answer: str) -> float:
    return float(zlib.crc32((completion + answer).encode()) % 4 == 0)


def load_letters(settings: TaskSettings, seed: int) -> RowTask:
    """Rewards differ within nearly every group: how many lower-case letters an answer has."""
    return _say("letters", "abcdefghij", count_letters)


def count_letters(completion: str, answer: object) -> float:
    return sum(c.islower() for c in completion) / 8


def load_vowels(settings: TaskSettings, seed: int) -> RowTask:
    """Many groups of equal rewards: whether an answer has a vowel."""
    return _say("vowels", "abcdefghij", has_vowel)


def has_vowel(completion: str, answer: object) -> float:
    return float(bool(set("aeiou") & set(completion)))


def load_hopeless(settings: TaskSettings, seed: int) -> RowTask:
    """A task that nobody ever solves."""
    return _say("hopeless", "abcdef", never_right)


def never_right(completion: str, answer: object) -> float:
    return 0.0


def _say(name: str, letters: str, reward: Callable[[str, object], float]) -> RowTask:
    rows = {split: list(letters) for split in ("train", "test")}
    return RowTask(name, rows, lambda row: (f"Say {row}", row), reward)


def sometimes(completion: str, answer: object) -> float:
    """The reward of `spread`, for two texts of three; for the others none."""
    if zlib.crc32(completion.encode()) % 3 == 0:
        raise RuntimeError("not today")
    return spread(completion, answer)
