"""The train and test rows of a task, from files or datasets of the Hugging Face hub.

The setting `task.data`, else the environment variable LAGRPO_DATA, is a file (see `tables.py`), a directory of files
named after their splits, or a hub dataset: "owner/name", or "owner/name:config". A split with a slash,
"owner/name:split", is a hub dataset itself, whatever `task.data` says.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line, suggest
from lagrpo.tasks.base import Ask, build_messages, option
from lagrpo.tasks.tables import FORMATS, Table, format_of, read_table, stem_of

logger = logging.getLogger("lagrpo")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The options of a task with data."""

    data: str | None = option(None, "dataset's hub id, directory or file (JSONL, CSV, Parquet); $LAGRPO_DATA otherwise")
    train_split: str | None = option(None, "split (or file, by its stem) to train on")
    test_split: str | None = option(None, "split (or file, by its stem) to evaluate on")


def load_rows(
    options: DataOptions, hub: str, ask: Ask, columns: Sequence[str], answer: str | None,
    names: Callable[[str], Sequence[str]] = lambda split: (split,), seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The train and test rows of a task, each with these columns.

    A split is the first of `names` (of its setting) that exists. `hub` is the dataset to suggest if no data is named,
    and gives the configuration if `task.data` is that dataset's name alone. Rows without an answer (column `answer`)
    are left out, which is logged. With a seed, rows are held out for testing if there is no test split. Raises
    ValueError for data that is missing, cannot be read, lacks a column or cannot be asked."""
    train, test = options.train_split or "train", options.test_split or "test"
    there = find_splits(options.data, hub) if "/" not in train or "/" not in test else {}
    if seed is not None and options.train_split is None and len(there) == 1:
        (train,) = there

    def load(split: str, side: str) -> Any:
        table = _load_split(there, split, side, names)
        _check(table, ask, columns)
        return _answered(table, answer)

    rows = load(train, "train")
    if seed is None or options.test_split is not None or test in there:
        return {"train": rows, "test": load(test, "test")}
    kept, held_out = hold_out(len(rows), seed)
    message = "%s has no test split: %d rows are for training, %d chosen by seed %d are held out for testing"
    logger.warning(message, options.data, len(kept), len(held_out), seed)
    return {"train": select(rows, kept), "test": select(rows, held_out)}


def find_splits(data: str | None, hub: str) -> dict[str, Any]:
    """The existing splits by name: paths, or splits of a hub dataset. Raises ValueError for missing data."""
    endings = ", ".join(FORMATS)
    if not (named := data or os.environ.get("LAGRPO_DATA")):
        raise ValueError(
            "this task needs data: set task.data (or the environment variable LAGRPO_DATA) to a file ending in "
            f"{endings}, a directory of such files, or a dataset of the Hugging Face hub such as {hub!r}"
        )
    path = Path(named).expanduser()
    if not path.exists():
        if data and _HUB_ID.fullmatch(named) and format_of(path) is None and not path.parent.is_dir():
            return dict(load_hub(hub if named == hub.partition(":")[0] else named))
        setting = "task.data" if data else "LAGRPO_DATA"
        raise ValueError(f"{setting}: there is no file or directory {named!r} (seen from {os.getcwd()})")
    files = [each for each in (sorted(path.iterdir()) if path.is_dir() else [path]) if format_of(each)]
    there = {stem_of(file): file for file in files}
    if len(there) < len(files) or not there:
        raise ValueError(f"task.data: {path} needs files that end in {endings}, one for each split")
    return there


def load_hub(name: str, split: str | None = None) -> Any:
    """The rows of one split of the hub dataset "owner/name" or "owner/name:config"; for None all splits by name."""
    import datasets

    repository, _, config = name.partition(":")
    try:
        return datasets.load_dataset(repository, config or None, split=split)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"{name!r} is not a file or directory here (seen from {os.getcwd()}), and could not be loaded from the "
            f"Hugging Face hub: {one_line(str(error))}"
        ) from error


def _load_split(there: Mapping[str, Any], split: str, side: str, names: Callable[[str], Sequence[str]]) -> Table:
    if "/" in split:
        repository, _, of_hub = split.partition(":")
        found = load_hub(repository, of_hub or side)
    else:
        found = next((there[name] for name in names(split) if name in there), None)
    if found is None:
        wanted = " or ".join(map(repr, names(split)))
        raise ValueError(f"task.{side}_split: no {wanted}; there are {', '.join(there)}.{suggest(split, there)}")
    if not isinstance(found, Path):
        return Table(f"the {side} split", found, range(1, len(found) + 1))
    try:
        return read_table(found)
    except OSError as error:
        raise ValueError(f"task.data: {found} cannot be read: {error.strerror or error}") from error


def _check(table: Table, ask: Ask, columns: Sequence[str]) -> None:
    """Check every row of a file; of a hub dataset, whose columns have types, the first. Raises ValueError."""

    def check(row: Mapping[str, Any]) -> None:
        if missing := [column for column in columns if column not in row]:
            names, like = one_line(", ".join(row)), suggest(missing[0], row)
            raise ValueError(f"there is no column {missing[0]!r}; the columns are {names}.{like}")
        question, answer = ask(row)
        build_messages(question)
        json.dumps(answer)  # TypeError for what cannot be recorded

    is_file = isinstance(table.rows, list) or not len(table.rows)
    (table if is_file else replace(table, rows=[table.rows[0]])).check(check)


def _answered(table: Table, column: str | None) -> Any:
    """The rows of a table that have an answer. Raises ValueError if none has."""
    if column is None:
        return table.rows
    answers = [row[column] for row in table.rows] if isinstance(table.rows, list) else table.rows[column]
    kept = [n for n, value in enumerate(answers) if value not in (None, "")]
    if not kept:
        raise ValueError(f"{table.path}: none of its {len(table.rows)} rows has an answer (column {column!r})")
    if left_out := len(table.rows) - len(kept):
        logger.warning("%d of the %d rows of %s have no answer and are left out", left_out, len(table.rows), table.path)
    return select(table.rows, kept) if left_out else table.rows


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text in a column. Raises ValueError for something else, and for white space."""
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its {column} is {value!r:.80}, not a text")
    return value


def select(rows: Any, chosen: Sequence[int]) -> Any:
    """These rows of a list, or of a hub dataset, which stays on the disk."""
    return [rows[n] for n in chosen] if isinstance(rows, list) else rows.select(chosen)


def hold_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Split the rows of data with one split into training and test rows: the seed chooses a tenth (at least one row, at
    most 1,000) for testing. Both keep their order.

    >>> [len(rows) for rows in hold_out(40, seed=0)]
    [36, 4]
    """
    from lagrpo.rng import permutation

    if count < 2:
        raise ValueError(f"the data has {count} row{'s' * (count != 1)}: too few to hold any out for testing")
    order = permutation(count, seed, "hold-out").tolist()
    test = max(1, min(1000, count // 10))
    return sorted(order[test:]), sorted(order[:test])
