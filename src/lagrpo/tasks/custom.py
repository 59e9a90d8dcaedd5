"""Task `custom`: a dataset and rewards of the user's own.

`prompt_column` holds a text or a list of chat messages, `answer_column` the reference answer; without it the reference
answer is the whole row, as a dict. If there is only one split, the seed chooses a tenth of its rows (at most 1,000) for
testing, which is logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks.base import Ask, Messages, option
from lagrpo.tasks.data import DataOptions, load_rows

score = exact


@dataclass(frozen=True, slots=True)
class Options(DataOptions):
    """The options of this task."""

    prompt_column: str | None = option(None, "column with the prompt: a string, or a list of chat messages")
    answer_column: str | None = option(None, "column with the reference answer; by default it is the whole row")


def load(options: Options, seed: int) -> tuple[dict[str, Any], Ask]:
    """The rows of each split, and how one is asked. Raises ValueError for missing or unfit settings or data."""
    ask = partial(_ask, options)
    columns = [column for column in (options.prompt_column, options.answer_column) if column is not None]
    rows = load_rows(options, "openai/gsm8k:main", ask, columns, options.answer_column, seed=seed)
    return rows, ask


def _ask(options: Options, row: Mapping[str, Any]) -> tuple[str | Messages, Any]:
    if options.prompt_column is None:
        raise ValueError(f"the task 'custom' needs task.prompt_column; the columns are {', '.join(row)}")
    prompt = row[options.prompt_column]
    answer = dict(row) if options.answer_column is None else row[options.answer_column]
    if isinstance(prompt, list) and all(isinstance(turn, Mapping) for turn in prompt):
        prompt = [{k: v for k, v in turn.items() if v is not None} for turn in prompt]  # Parquet fills missing keys
    return prompt, answer
