"""Task `custom`: a dataset and rewards of the user's own.

Without a column for the reference answer, it is the whole row, as a dict. docs/data-and-rewards.md says how rows are
read. Of an only split a tenth of the prompts (at most 1,000) is for testing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks import Messages, RowTask
from lagrpo.tasks.data import find_column, get_value, load_rows, parse_messages, plain

ANSWERS = ("answer", "reward_model.ground_truth")  # the second is verl's column


def load(
    seed: int,
    *,
    data: Any = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
) -> RowTask:
    """The task. Raises ValueError for missing or unfit settings or data."""
    answers = ANSWERS if answer_column is None else (answer_column,)
    ask = partial(ask_row, prompt_column, answers)
    rows = load_rows(
        data,
        train_split,
        test_split,
        hub="openai/gsm8k:main",
        ask=ask,
        answers=answers,
        answer_may_be_row=answer_column is None,
        seed=seed,
    )
    return RowTask("custom", rows, ask, exact)


def ask_row(
    prompt_column: str | None, answers: Sequence[str], row: Mapping[str, Any]
) -> tuple[str | Messages, Any]:
    """The question and the reference answer of a row. Without a column for the answer, it is the row."""
    prompt_column = prompt_column or find_column(row, ("prompt", "question"))
    if prompt_column is None:
        raise ValueError(
            f"no column 'prompt' or 'question': set task.prompt_column; the columns are {', '.join(row)}"
        )
    question = parse_messages(get_value(row, prompt_column))
    answer_column = find_column(row, answers)
    answer = row if answer_column is None else get_value(row, answer_column)
    return question, plain(answer)
