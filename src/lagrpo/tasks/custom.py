"""Task `custom`: a dataset and rewards of the user's own.

If the data has no column for the reference answer, the answer is the whole row, as a dict.
docs/data-and-rewards.md says how rows are read. If there is only one split, a tenth of its prompts
(at most 1,000) is for testing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks import Messages, RowTask
from lagrpo.tasks.columns import find_column, get_value, parse_messages, plain
from lagrpo.tasks.data import load_rows
from lagrpo.types import JsonView

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
    """Returns the task. Raises ValueError for missing or unfit settings or data."""
    answer_columns = ANSWERS if answer_column is None else (answer_column,)
    ask = partial(ask_row, prompt_column, answer_columns)
    rows = load_rows(
        data,
        train_split,
        test_split,
        hub="openai/gsm8k:main",
        ask=ask,
        answers=answer_columns,
        answer_may_be_row=answer_column is None,
        seed=seed,
    )
    return RowTask("custom", rows, ask, exact)


def ask_row(
    prompt_column: str | None, answer_columns: Sequence[str], row: JsonView
) -> tuple[str | Messages, Any]:
    """Returns the question and the reference answer of a row.

    If the row has none of the answer columns, the answer is the row. Raises ValueError.
    """
    prompt_column = prompt_column or find_column(row, ("prompt", "question"))
    if prompt_column is None:
        raise ValueError(
            "no column 'prompt' or 'question': set task.prompt_column; "
            f"the columns are {', '.join(row)}"
        )
    question = parse_messages(get_value(row, prompt_column))
    answer_column = find_column(row, answer_columns)
    answer = row if answer_column is None else get_value(row, answer_column)
    return question, plain(answer)
