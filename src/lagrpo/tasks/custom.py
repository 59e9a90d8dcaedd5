"""Task `custom`: a dataset and rewards of the user's own.

`prompt_column` (by default prompt or question) holds a text or a list of chat messages (also as JSON), `answer_column`
(by default answer) the reference answer; without it the reference answer is the whole row, as a dict. Of an only split
a tenth (at most 1,000 rows) is for testing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks import Messages, RowTask
from lagrpo.tasks.data import get_value, load_rows

PROMPT, ANSWER = ("prompt", "question"), "answer"
"""Columns with the prompt and with the reference answer, if none are named."""


def load(
    seed: int, *, data: str | None = None, prompt_column: str | None = None, answer_column: str | None = None,
    train_split: str = "train", test_split: str = "test",
) -> RowTask:  # fmt: skip
    """The task. Raises ValueError for missing or unfit settings or data."""
    ask, columns = partial(ask_row, prompt_column, answer_column), filter(None, (prompt_column, answer_column))
    splits = train_split, test_split
    rows = load_rows(data, *splits, "openai/gsm8k:main", ask, list(columns), answer_column, seed)
    return RowTask("custom", rows, ask, exact)


def ask_row(prompt: str | None, answer: str | None, row: Mapping[str, Any]) -> tuple[str | Messages, Any]:
    """The question and the reference answer in these columns of a row."""
    prompt = prompt or next((name for name in PROMPT if name in row), None)
    if prompt is None:
        raise ValueError(f"no column 'prompt' or 'question': set task.prompt_column; the columns are {', '.join(row)}")
    asked, answer = get_value(row, prompt), answer or (ANSWER if ANSWER in row else None)
    with suppress(ValueError):  # messages as JSON
        if isinstance(asked, str) and re.match(r"\s*\[\s*\{", asked):
            messages = json.loads(asked)
            asked = messages if all("role" in turn for turn in messages) else asked
    return asked, dict(row) if answer is None else get_value(row, answer)
