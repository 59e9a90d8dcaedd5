"""Task `custom`: a dataset and rewards of the user's own.

Without a column for the reference answer, it is the whole row, as a dict. docs/data-and-rewards.md says how rows are
read. Of an only split a tenth (at most 1,000 rows) is for testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.tasks import Messages, RowTask
from lagrpo.tasks.data import get_value, load_rows, parse_messages, plain


def load(
    seed: int, *, data: Any = None, prompt_column: str | None = None, answer_column: str | None = None,
    train_split: str = "train", test_split: str = "test",
) -> RowTask:  # fmt: skip
    """The task. Raises ValueError for missing or unfit settings or data."""
    ask, columns = (
        partial(ask_row, prompt_column, answer_column),
        [*filter(None, (prompt_column, answer_column))],
    )
    rows = load_rows(
        data,
        train_split,
        test_split,
        "openai/gsm8k:main",
        ask,
        columns,
        answer_column or "answer",
        seed,
    )
    return RowTask("custom", rows, ask, exact)


def ask_row(
    prompt: str | None, answer: str | None, row: Mapping[str, Any]
) -> tuple[str | Messages, Any]:
    """The question and the reference answer in these columns of a row."""
    prompt = prompt or next((name for name in ("prompt", "question") if name in row), None)
    if prompt is None:
        raise ValueError(
            f"no column 'prompt' or 'question': set task.prompt_column; the columns are {', '.join(row)}"
        )
    of_verl = "ground_truth" in (row.get("reward_model") or ())
    answer = answer or (
        "answer" if "answer" in row else "reward_model.ground_truth" if of_verl else None
    )
    return parse_messages(get_value(row, prompt)), plain(
        dict(row) if answer is None else get_value(row, answer)
    )
