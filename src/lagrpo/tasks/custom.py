"""Task `custom`: a dataset and rewards of the user's own.

`prompt_column` holds a text or a list of chat messages (also as JSON), `answer_column` the reference answer; without it
the reference answer is the whole row, as a dict. If there is only one split, the seed chooses a tenth of its rows (at
most 1,000) for testing, which is logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks import data
from lagrpo.tasks.base import Messages, RowTask, option

PROMPT, ANSWER = ("prompt", "question"), "answer"
"""Columns with the prompt and with the reference answer, if none are named."""


@dataclass(frozen=True, slots=True)
class Options(data.Options):
    """The options of this task."""

    prompt_column: str | None = option(None, "column with the prompt: a string, or a list of chat messages")
    answer_column: str | None = option(None, "column with the reference answer; by default it is the whole row")


def load(options: Options, seed: int) -> RowTask:
    """The task. Raises ValueError for missing or unfit settings or data."""
    ask = partial(_ask, options)
    columns = [column for column in (options.prompt_column, options.answer_column) if column is not None]
    rows = data.load_rows(options, "openai/gsm8k:main", ask, columns, options.answer_column, seed=seed)
    return RowTask("custom", rows, ask, exact)


def _ask(options: Options, row: Mapping[str, Any]) -> tuple[str | Messages, Any]:
    column = options.prompt_column or next((name for name in PROMPT if name in row), None)
    if column is None:
        raise ValueError(f"the task 'custom' needs task.prompt_column; the columns are {', '.join(row)}")
    prompt, named = data.get_value(row, column), options.answer_column or (ANSWER if ANSWER in row else None)
    prompt = _parse_messages(prompt) if isinstance(prompt, str) else prompt
    if isinstance(prompt, list) and all(isinstance(turn, Mapping) for turn in prompt):
        prompt = [{k: v for k, v in turn.items() if v is not None} for turn in prompt]  # Parquet fills missing keys
    return prompt, dict(row) if named is None else data.get_value(row, named)


def _parse_messages(text: str) -> Any:
    """The messages that the text is as JSON, else the text."""
    with suppress(ValueError):
        if re.match(r"\s*\[\s*\{", text) and all("role" in turn for turn in json.loads(text)):
            return json.loads(text)
    return text
