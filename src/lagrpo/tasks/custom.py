"""Task `custom`: a dataset and rewards of the user's own.

`prompt_column` (by default prompt or question) holds a text or a list of chat messages (also as JSON), `answer_column`
(by default answer, or verl's reward_model.ground_truth) the reference answer; without it the reference answer is the
whole row, as a dict. Of an only split a tenth (at most 1,000 rows) is for testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks import Messages, RowTask, parse_messages
from lagrpo.tasks.data import get_value, load_rows, plain

PROMPT = ("prompt", "question")
"""Columns with the prompt, if none is named."""


def load(
    seed: int, *, data: Any = None, prompt_column: str | None = None, answer_column: str | None = None,
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
    asked = parse_messages(get_value(row, prompt))
    if isinstance(asked, str) and not asked.strip():
        raise ValueError(f"its {prompt} is {asked!r}, not a text")
    if answer is None and "answer" in row:
        answer = "answer"
    elif answer is None and "ground_truth" in (row.get("reward_model") or ()):
        answer = "reward_model.ground_truth"
    return asked, plain(dict(row) if answer is None else get_value(row, answer))
