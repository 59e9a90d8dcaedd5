"""Tasks `reasoning_gym:NAME`: puzzles that generators of reasoning-gym make and score.

A puzzle is a function of the run's seed and its number. The training prompts have the first
numbers, the test prompts the next ones. A few generators (knight_swap, say) depend on the order of
Python's sets: they need PYTHONHASHSEED=0. task.options also holds the generator's own options (its
config without seed and size).

The answer is the text between the last <answer> and </answer>, or the whole text without them.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

from lagrpo.errors import suggest
from lagrpo.rewards.reward import UnscorableError
from lagrpo.rewards.texts import text_after_thinking
from lagrpo.tasks import RowTask
from lagrpo.tasks.numbers import find_tagged
from lagrpo.types import JsonObject, JsonView

WORDING = "{question}\n\nPut the final answer between <answer> and </answer>."


class GymReward:
    """Scores answers as the generator `name` does: a dataset of `size` puzzles from `seed` on."""

    def __init__(self, name: str, options: JsonView, seed: int, size: int) -> None:
        self.name = name
        self.options = dict(options)
        self.seed = seed
        self.size = size
        self.dataset = make_dataset(name, self.options, seed, size)
        self.entry = lru_cache(4096)(lambda index: self.dataset[index])

    def __reduce__(self) -> tuple[Any, ...]:
        # The cache cannot be pickled, so a worker makes the dataset again.
        return GymReward, (self.name, self.options, self.seed, self.size)

    def __call__(self, completion: str, answer: Any, prefix: str = "") -> float:
        entry = self.entry(answer["index"])
        if reference(answer["index"], entry) != answer:
            raise UnscorableError(
                f"{self.name} makes different puzzles in different processes: set the environment "
                "variable PYTHONHASHSEED to 0 for the whole run"
            )
        answer_text = find_tagged(text_after_thinking(completion, prefix)).strip()
        return float(self.dataset.score_answer(answer_text, entry))


def load(
    seed: int, name: str, *, train_size: int = 10_000, test_size: int = 1_000, **options: Any
) -> RowTask:
    """Returns the task with puzzles of this seed."""
    from lagrpo.rng import uniforms

    dataset_seed = int(uniforms(1, seed, "reasoning_gym", name)[0] * 2**31)
    size = train_size + test_size
    reward = GymReward(name, options, dataset_seed, size)

    def ask(index: int) -> tuple[str, Any]:
        entry = reward.entry(index)
        return WORDING.format(question=entry["question"]), reference(index, entry)

    rows = {"train": range(train_size), "test": range(train_size, size)}
    return RowTask(f"reasoning_gym:{name}", rows, ask, reward)


def reference(index: int, entry: JsonView) -> JsonObject:
    """Returns the reference answer, which finds its puzzle again and tells it from another one."""
    return {
        "index": index,
        "answer": entry["answer"],
        "digest": zlib.crc32(entry["question"].encode()),
    }


def make_dataset(name: str, options: JsonView, seed: int, size: int) -> Any:
    """Returns the dataset of a generator.

    Raises ValueError for an unknown generator and for options that it does not take, and
    ImportError without the package.
    """
    try:
        import reasoning_gym.factory as factory  # noqa: PLR0402 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "this task needs the package reasoning-gym: pip install 'lagrpo[gym]'"
        ) from error
    if name not in factory.DATASETS:
        raise ValueError(
            f"task.name: reasoning_gym has no {name!r}.{suggest(name, factory.DATASETS)}"
        )
    try:
        return factory.create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"task.options: reasoning_gym:{name} rejects these options: {error}"
        ) from error
