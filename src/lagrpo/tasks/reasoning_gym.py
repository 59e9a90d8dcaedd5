"""Tasks `reasoning_gym:NAME`: puzzles that a generator of the package reasoning-gym makes, judged by its own scores.

A puzzle is a function of the run's seed and its number. The training prompts have the first numbers, the test prompts
those behind them, so that no seed of the one is one of the other; where a generator knows few puzzles, the same one can
still come twice. A few generators depend on the order of Python's sets, too (knight_swap, isomorphic_strings,
polynomial_multiplication and ransom_note of version 0.1.25): they need PYTHONHASHSEED=0. The options of a generator
(its config, but for seed and size) are in the table task.options.

The judge takes what stands between the last <answer> and </answer>, or the whole text where there is none. Its scores
lie between 0 and 1, and many generators give something for a part of the answer.

Needs reasoning-gym: pip install 'lagrpo[gym]'.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from lagrpo.errors import suggest
from lagrpo.tasks.base import Ask, Unjudgeable, option

WORDING = "{question}\n\nPut the final answer between <answer> and </answer>."

_OURS = ("seed", "size")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_KEPT = 4096  # puzzles that a process keeps


@dataclass(frozen=True, slots=True)
class Options:
    """The options of these tasks."""

    options: Mapping[str, Any] | None = option(
        None, "table of the options of its own, of the generator or the environment"
    )
    train_size: int = option(10_000, "training prompts", least=1, most=10_000_000)
    test_size: int = option(1_000, "test prompts", least=1, most=10_000_000)


class GymJudge:
    """Scores answers as the generator `name` does: a dataset of `size` puzzles from `seed` on. A worker process has the
    package before its first deadline runs, because making this object imports it."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int, size: int) -> None:
        self._given = name, dict(options), seed, size
        self._dataset = make_dataset(*self._given)
        self.entry = lru_cache(_KEPT)(lambda index: self._dataset[index])

    def __reduce__(self) -> tuple[Any, ...]:
        return GymJudge, self._given

    def __call__(self, text: str, gold: Any) -> float:
        """Raises Unjudgeable where the generator does not repeat itself."""
        entry, found = self.entry(gold["index"]), _ANSWER.findall(text)
        if _gold(gold["index"], entry) != gold:
            raise Unjudgeable(
                f"the generator {self._given[0]} makes another puzzle of the same seed in another process, where "
                "Python orders sets otherwise: set the environment variable PYTHONHASHSEED to 0 for the whole run"
            )
        return float(self._dataset.score_answer((found[-1] if found else text).strip(), entry))


def load(options: Options, seed: int, name: str) -> tuple[dict[str, Sequence[int]], Ask, GymJudge]:
    """The numbers of each split's puzzles, how one is asked, and the judge. Raises ValueError for an unknown generator
    and for options that it does not take."""
    from lagrpo.rng import uniforms

    first = int(uniforms(1, seed, "reasoning_gym", name)[0] * 2**31)
    judge = GymJudge(name, options.options or {}, first, options.train_size + options.test_size)

    def ask(index: int) -> tuple[str, Any]:
        entry = judge.entry(index)
        return WORDING.format(question=entry["question"]), _gold(index, entry)

    train, test = range(options.train_size), range(options.train_size, options.train_size + options.test_size)
    return {"train": train, "test": test}, ask, judge


def _gold(index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a puzzle is found again by, and told from another."""
    return {"index": index, "answer": entry["answer"], "digest": zlib.crc32(entry["question"].encode())}


def make_dataset(name: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """The generator with its options. Raises ValueError as `load` does."""
    from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]

    if name not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise ValueError(f"task.name: reasoning_gym has no {name!r}.{suggest(name, DATASETS)} There are {known}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _OURS]
    for given in options:
        if given not in known:
            ours = " (task.train_size and task.test_size say how many puzzles)" if given in _OURS else ""
            raise ValueError(
                f"task.options.{given}: reasoning_gym:{name} takes {', '.join(known) or 'no options'}{ours}."
                f"{suggest(given, known)}"
            )
    try:
        return create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task.options: reasoning_gym:{name} refuses them: {error}") from error
