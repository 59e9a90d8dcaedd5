"""The train and test rows of a task, each with a question that can be asked and an answer.

docs/data-and-rewards.md says how they are read. If task.data is unset, LAGRPO_DATA names the file
or the directory. splits.py finds and reads the data, files.py reads a file, columns.py a value.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lagrpo.errors import one_line, one_line_errors, suggest
from lagrpo.tasks import Ask, RowTask, Task, select
from lagrpo.tasks.columns import Columns, find_column, get_value, plain
from lagrpo.tasks.messages import build_messages, read_tools
from lagrpo.tasks.splits import (
    Named,
    Rows,
    find_splits,
    iterate_rows,
    read_split,
    without_media,
)

logger = logging.getLogger("lagrpo")

MAX_HELD_OUT_PROMPTS = 1000

# Columns that look like a part of the prompt, but that the model does not see.
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_OTHER_NAMES_OF_TOOLS = ("functions", "tool_definitions", "tool_schemas", "available_tools")

_NO_COLUMN = object()  # stands for the answer of a row without a column for it


def load_rows(
    named: Named,
    train_split: str,
    test_split: str,
    *,
    hub: str,
    ask: Ask,
    answers: Sequence[str] = ("answer",),
    answer_may_be_row: bool = False,
    seed: int | None = None,
) -> dict[str, Rows]:
    """Loads the rows for training and testing, each with a question that can be asked.

    named: task.data, or the data itself.
    train_split, test_split: "a|b" names the split a, or b if a is missing.
    hub: the dataset that is suggested if no data is named.
    answers: columns; the first in which a row has a value holds its answer. Rows without an answer
        are left out.
    answer_may_be_row: if no row has any of these columns, no row is left out.
    seed: holds out a tenth of the prompts if the data lacks a test split; None holds out none.

    Raises ValueError for unfit data.
    """
    splits = find_splits(named, hub)
    source = "data"
    if isinstance(named, str | None):
        source = named or os.environ.get("LAGRPO_DATA")
    test_names = test_split.split("|")
    names_test_split = any(name in splits for name in test_names)
    # If the data lacks a test split with a name of the user's own, `_choose_split` says so.
    has_test_split = seed is None or names_test_split or "test" not in test_names

    # The only split is the training split, whatever its name is.
    if seed is not None and len(splits) == 1:
        only = next(iter(splits))
        train_split = only if train_split == "train" else train_split
        test_split = only if test_split == "train" else test_split
    split_names = {"train": _choose_split(splits, "train", train_split)}
    if has_test_split:
        split_names["test"] = _choose_split(splits, "test", test_split)

    places = {side: f"the {side} split of {source}" for side in split_names}
    rows = {side: read_split(splits[name], places[side]) for side, name in split_names.items()}
    _warn_of_unseen_columns(rows["train"], places["train"])
    rows = _leave_out_unanswered(rows, places, answers, answer_may_be_row=answer_may_be_row)

    if seed is None or has_test_split:
        for side, place in places.items():
            _check_prompts(rows[side], place, ask)
        return rows

    prompts = _digest_prompts(rows["train"], places["train"], ask)
    if len(set(prompts)) < 2:
        # A run that should overfit its only prompt. If it evaluates, it says on what.
        return {"train": rows["train"], "test": rows["train"]}
    train_indices, test_indices = hold_out(prompts, seed)
    _log_hold_out(source, prompts, test_indices, seed)
    return {
        "train": select(rows["train"], train_indices),
        "test": select(rows["train"], test_indices),
    }


def _choose_split(splits: Mapping[str, object], side: str, names: str) -> str:
    """Returns the first of the names "a|b" that is a split. Raises ValueError if none is."""
    wanted = names.split("|")
    for name in wanted:
        if name in splits:
            return name
    raise ValueError(
        f"task.options.{side}_split: no {' or '.join(map(repr, wanted))}; "
        f"there are {', '.join(splits)}.{suggest(wanted[-1], splits)}"
    )


def _leave_out_unanswered(
    splits: Mapping[str, Rows],
    places: Mapping[str, str],
    columns: Sequence[str],
    *,
    answer_may_be_row: bool,
) -> dict[str, Rows]:
    """Returns the rows that have an answer in one of the columns.

    Raises ValueError for a split in which none has. If answers may be rows and no row has any of
    the columns, all rows are returned.
    """
    answers = {side: _find_answers(rows, places[side], columns) for side, rows in splits.items()}
    has_column = any(answer is not _NO_COLUMN for answer in chain.from_iterable(answers.values()))
    if answer_may_be_row and not has_column:
        return dict(splits)
    return {
        side: _select_answered(rows, places[side], answers[side], columns[0])
        for side, rows in splits.items()
    }


def _select_answered(rows: Rows, split_place: str, answers: Sequence[object], column: str) -> Rows:
    """Returns the rows of a split that have an answer. Raises ValueError if none has."""
    answered = [index for index, answer in enumerate(answers) if not _is_missing(answer)]
    if not answered:
        # If the column does not exist, this error names the columns that do.
        with one_line_errors(_place_of(rows[0], split_place, 1)):
            get_value(rows[0], column)
        raise ValueError(
            f"{split_place}: none of its {len(rows)} rows has an answer (column {column!r})"
        )
    if len(answered) == len(rows):
        return rows
    logger.warning(
        "%d of the %d rows of %s have no answer and are left out",
        len(rows) - len(answered),
        len(rows),
        split_place,
    )
    return select(rows, answered)


def _find_answers(rows: Rows, split_place: str, columns: Sequence[str]) -> list[object]:
    """Returns the answer of each row, _NO_COLUMN for a row that has none of the columns."""
    if not isinstance(rows, list):
        # Only the columns of a dataset that may hold an answer are read: others may hold images.
        answer_columns = [name for name in rows.column_names if _may_hold(name, columns)]
        if not answer_columns:
            return [_NO_COLUMN] * len(rows)
        rows = rows.select_columns(answer_columns)
    answers: list[object] = []
    for number, row in enumerate(rows, start=1):
        column = find_column(row, columns)
        with one_line_errors(_place_of(row, split_place, number)):
            answers.append(_NO_COLUMN if column is None else plain(get_value(row, column)))
    return answers


def _may_hold(name: str, columns: Sequence[str]) -> bool:
    """True if a column of this name is one of `columns`, or has a field that is one of them."""
    return any(f"{column}.".startswith(f"{name}.") for column in columns)


def _is_missing(answer: object) -> bool:
    """True for null, white space, and lists of nothing else."""
    if isinstance(answer, list):
        return all(map(_is_missing, answer))
    return answer is None or answer is _NO_COLUMN or not str(answer).strip()


def _warn_of_unseen_columns(rows: Rows, split_place: str) -> None:
    """Warns of columns with images or functions that the model does not see."""
    for name in (*_MEDIA, *_OTHER_NAMES_OF_TOOLS):
        if isinstance(rows, list):
            is_there = any(row.get(name) for row in rows)
        else:
            is_there = name in rows.column_names
        if not is_there:
            continue
        reason = "models get text only"
        if name in _OTHER_NAMES_OF_TOOLS:
            reason = "the chat template gets functions of a column named 'tools'"
        logger.warning("the model does not see the column %r of %s: %s", name, split_place, reason)


def _check_prompts(rows: Rows, split_place: str, ask: Ask) -> None:
    """Raises ValueError if the prompts of a split cannot be asked."""
    # The columns of a dataset have types, so its first row stands for all of them.
    checked_rows = rows if isinstance(rows, list) else rows.select([0])
    _digest_prompts(checked_rows, split_place, ask)


def _digest_prompts(rows: Iterable[Columns], split_place: str, ask: Ask) -> list[bytes]:
    """Returns a digest of each row's prompt: equal for equal messages.

    Raises ValueError for a prompt that cannot be asked.
    """
    digests: list[bytes] = []
    openings: list[Opening] = []
    for number, row in enumerate(rows, start=1):
        place = _place_of(row, split_place, number)
        with one_line_errors(place):
            question, answer = ask(row)
            messages = build_messages(question)
            read_tools(row, padded=False)
        text = json.dumps(messages, sort_keys=True)
        digests.append(hashlib.blake2b(text.encode(), digest_size=16).digest())
        if messages[-1]["role"] == "assistant":
            openings.append(Opening(messages[-1]["content"], answer, place))
    _check_openings(openings, split_place)
    return digests


@dataclass(frozen=True, slots=True)
class Opening:
    """The last message of a prompt, if it is the assistant's: the beginning of its answer."""

    text: str
    answer: Any
    place: str

    @property
    def has_answer(self) -> bool:
        """True if the text contains the reference answer."""
        answers = self.answer if isinstance(self.answer, list) else [self.answer]
        return any(_stands_in(answer, self.text) for answer in answers)


def _stands_in(answer: object, text: str) -> bool:
    """True if the answer stands between word boundaries in a text; False for a row."""
    if answer is None or isinstance(answer, bool | Mapping):
        return False
    words = str(answer).rpartition("####")[2].strip()
    if isinstance(answer, float):
        words = words.removesuffix(".0")
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _check_openings(openings: Sequence[Opening], split_place: str) -> None:
    """Raises ValueError if prompts end with the answer that the model is to find.

    One such prompt may be chance: "Step 1:" has the answer 1. Warns of other beginnings of answers.
    """
    if not openings:
        return
    solved = [opening for opening in openings if opening.has_answer]
    if len(solved) > len(openings) / 2:
        first = solved[0]
        raise ValueError(
            f"{first.place}: its prompt ends with the assistant's message {first.text!r:.80}, "
            f"which has the answer {first.answer!r:.40}: end the prompt before it"
        )
    logger.warning(
        "prompts of %s end with a message of the assistant, which completions continue, such as %r",
        split_place,
        one_line(openings[0].text, 80),
    )


def prompt_keys(task: Task, split: str) -> Iterator[str]:
    """Yields a text for each row of data: equal for equal prompts, but for white space around them.

    Yields nothing for a task whose prompts are not rows of data.
    """
    if not isinstance(task, RowTask) or not task.size(split):
        return
    rows = task.rows[split]
    if isinstance(rows, list) and not isinstance(rows[0], Mapping):
        return
    for row in iterate_rows(without_media(rows)):
        # The check of the prompts that a run visits names a row that cannot be asked.
        with suppress(ValueError):
            question, _ = task.ask(row)
            if not isinstance(question, str):
                messages = build_messages(question)
                question = json.dumps(messages)
                if len(messages) == 1 and messages[0]["role"] == "user":
                    question = messages[0]["content"]
            yield question.strip()


def _place_of(row: object, split_place: str, number: int) -> str:
    return getattr(row, "place", f"{split_place}, row {number}")


def _log_hold_out(
    source: str | None, prompts: Sequence[bytes], test_indices: Sequence[int], seed: int
) -> None:
    num_rows = len(prompts)
    num_prompts = len(set(prompts))
    choice = f"chosen by seed {seed}"
    if num_prompts < num_rows:
        num_test_prompts = len({prompts[index] for index in test_indices})
        choice = f"{num_test_prompts} of {num_prompts} different prompts, {choice}"
    logger.warning(
        "%s has no test split: training on %d of its %d rows, testing on the other %d (%s)",
        source,
        num_rows - len(test_indices),
        num_rows,
        len(test_indices),
        choice,
    )


def hold_out(prompts: Sequence[Hashable], seed: int) -> tuple[list[int], list[int]]:
    """Chooses rows for testing. Returns the indices of the training and the test rows, in order.

    prompts: the prompt of each row. The seed chooses a tenth of the different prompts (1 to 1,000)
    in the order in which they first occur. All rows with such a prompt are for testing.

    >>> hold_out(["a", "b", "a", "b"], seed=0)
    ([0, 2], [1, 3])
    """
    from lagrpo.rng import permutation

    rows_by_prompt: dict[Hashable, list[int]] = {}
    for index, prompt in enumerate(prompts):
        rows_by_prompt.setdefault(prompt, []).append(index)
    row_groups = list(rows_by_prompt.values())
    order = permutation(len(row_groups), seed, "hold-out").tolist()
    num_test_prompts = max(1, min(MAX_HELD_OUT_PROMPTS, len(row_groups) // 10))
    test_indices = sorted(chain.from_iterable(row_groups[n] for n in order[:num_test_prompts]))
    train_indices = sorted(chain.from_iterable(row_groups[n] for n in order[num_test_prompts:]))
    return train_indices, test_indices
