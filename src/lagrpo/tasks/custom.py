"""Task `custom`: a dataset and a reward of the user's own.

`data` is a file (.jsonl, .json, .csv, each also packed as .gz, or .parquet), a directory of such files named after
their splits, or a dataset of the hub (see `lagrpo.tasks.files`). `prompt_column` holds a text or a list of chat
messages; `answer_column` what a completion is judged against; `reward` is a built-in reward or
"package.module:function", called as function(text, gold) with the answer column's value as gold, or with the whole row
as a dict when `answer_column` is not set.

Where there is only one split, the seed chooses a tenth of its rows (at most 1,000) for testing, which is logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line, suggest
from lagrpo.tasks.base import Ask, Messages, Unjudgeable, build_messages, option
from lagrpo.tasks.files import DataOptions, Rows, check_columns, find_source, hold_out, load_hub_rows, logger
from lagrpo.tasks.tables import FORMATS, Table, format_of, read_table, stem_of


@dataclass(frozen=True, slots=True)
class Options(DataOptions):
    """The options of this task."""

    prompt_column: str | None = option(None, "column with the prompt: a string, or a list of chat messages")
    answer_column: str | None = option(None, "column that the reward gets as gold; without one it gets the whole row")


def load(options: Options, seed: int) -> tuple[dict[str, Rows], Ask]:
    """The rows of each split, and how one is asked. Raises ValueError for missing or unfit settings or data."""
    ask = partial(_ask, options)
    return _load_splits(options, seed), ask


def judge(text: str, gold: Any) -> float:
    """1.0 where the answer is the gold answer, letter by letter, except for white space around either; else 0.0. Raises
    Unjudgeable without a gold answer."""
    if gold is None:
        raise Unjudgeable("the gold answer is empty")
    return float(text.strip() == str(gold).strip())


def _ask(options: Options, row: Mapping[str, Any]) -> tuple[str | Messages, Any]:
    prompt = row[str(options.prompt_column)]
    gold = dict(row) if options.answer_column is None else row[options.answer_column]
    if isinstance(prompt, str):
        return prompt, gold
    if isinstance(prompt, list) and prompt and all(isinstance(turn, Mapping) and "role" in turn for turn in prompt):
        return [{key: value for key, value in turn.items() if value is not None} for turn in prompt], gold
    raise ValueError(
        f"the column {options.prompt_column!r} holds {prompt!r:.80}: a prompt is a text, or a list of messages such "
        "as {'role': 'user', 'content': '...'}"
    )


def _check(options: Options, split: Any, where: str) -> Rows:
    """The rows of a split. Raises ValueError for a column that is not there, and for a row that cannot be asked, or
    whose gold answer cannot be recorded. Of a file every row is looked at; of a hub dataset, whose columns have types,
    the first."""
    table = split if isinstance(split, Table) else Table(where, split, [1], "row")
    columns = [column for column in (options.prompt_column, options.answer_column) if column is not None]
    check_columns(table.rows, columns, where if len(table.rows) else str(table.path))
    if options.prompt_column is None:
        known = one_line(", ".join(table.rows[0]))
        raise ValueError(f"the task 'custom' needs task.prompt_column; the columns of {where} are {known}")
    looked_at = table if table is split else replace(table, rows=[table.rows[0]])
    looked_at.check(partial(_check_row, options, columns))
    if options.answer_column and table is split and all(row[options.answer_column] is None for row in table.rows):
        raise ValueError(f"{table.path}: no row has an answer (column {options.answer_column!r})")
    return table.rows


def _check_row(options: Options, columns: Sequence[str], row: Mapping[str, Any]) -> None:
    check_columns([row], columns, "it")
    question, gold = _ask(options, row)
    build_messages(question)
    try:
        json.dumps(gold)
        if options.answer_column is not None:  # of a whole row a column may lack a number
            check_finite(gold)
    except TypeError as error:
        column = options.answer_column or "the whole row, as task.answer_column is not set"
        raise ValueError(f"the gold answers ({column}) cannot be written as JSON: {error}") from error


def check_finite(gold: Any) -> None:
    """Raise ValueError for NaN and infinities in a gold answer, which JSON lacks."""
    try:
        json.dumps(gold, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"the gold answer {gold!r:.80} has a number that is not finite, and JSON has none") from error


def _load_splits(options: Options, seed: int) -> dict[str, Rows]:
    there = _find_splits(options)
    train, test = options.train_split or "train", options.test_split or "test"
    if options.train_split is None and len(there) == 1:
        (train,) = there
    for setting, split in (("train_split", train), ("test_split", options.test_split)):
        if split is not None and split not in there:
            known = ", ".join(there)
            raise ValueError(f"task.{setting}: there is no split {split!r}; there are {known}.{suggest(split, there)}")
    rows = _check(options, _read(there[train]), "the train split")
    if test in there:
        return {"train": rows, "test": _check(options, _read(there[test]), "the test split")}
    kept, held_out = hold_out(len(rows), seed)
    logger.warning(
        "%s has no test split: %d rows are for training, %d drawn by seed %d are held out for testing",
        options.data, len(kept), len(held_out), seed,
    )  # fmt: skip
    return {"train": _select(rows, kept), "test": _select(rows, held_out)}


def _select(rows: Any, chosen: Sequence[int]) -> Rows:
    """These rows of a list, or of a dataset, which stays on the disk."""
    return [rows[n] for n in chosen] if isinstance(rows, list) else rows.select(chosen)


def _find_splits(options: Options) -> dict[str, Any]:
    """The existing splits by name: files yet to be read, or a hub dataset's splits."""
    endings = ", ".join(FORMATS)
    source = find_source(options.data, f"a file ending in {endings}, or a directory of such files", "openai/gsm8k:main")
    if isinstance(source, str):
        return dict(load_hub_rows(source, None))
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    there: dict[str, Any] = {}
    for path in (path for path in files if format_of(path)):
        if (other := there.setdefault(stem_of(path), path)) != path:
            raise ValueError(f"task.data: {source} has {other.name} and {path.name} for one split: keep one of them")
    if not there:
        raise ValueError(f"task.data: {source} is no file that ends in {endings}, nor a directory of such files")
    return there


def _read(split: Any) -> Any:
    try:
        return read_table(split) if isinstance(split, Path) else split
    except OSError as error:
        raise ValueError(f"task.data: {split} cannot be read: {error.strerror or error}") from error
