"""Loads a task's rows from files or from datasets of the Hugging Face hub.

The setting `task.data`, else the environment variable LAGRPO_DATA, is a path or a hub dataset: "owner/name", or
"owner/name:config" where it has several configurations. A split with a slash, "owner/name:split", is a hub dataset of
its own, whatever `task.data` says.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line, suggest
from lagrpo.tasks.base import option
from lagrpo.tasks.tables import Table, format_of, read_table

logger = logging.getLogger("lagrpo")

Rows = Sequence[Mapping[str, Any]]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The options of a task with data."""

    data: str | None = option(None, "dataset's hub id, directory or file (JSONL, CSV, Parquet); $LAGRPO_DATA otherwise")
    train_split: str | None = option(None, "split (or file, by its stem) to train on")
    test_split: str | None = option(None, "split (or file, by its stem) to evaluate on")


def load_rows(
    options: DataOptions, file_names: Callable[[str], Sequence[str]], hub: str, question: str, answer: str
) -> dict[str, Rows]:
    """The train and test rows of a built-in dataset task, each with its question and its answer column.

    In a directory, a split is the first existing file of file_names(split). `hub` is the dataset to suggest where no
    data is named, and the configuration to take where `task.data` is that dataset's name alone. Rows with an empty
    answer are left out, which is logged. Raises ValueError for data that is missing, cannot be read or lacks a column.
    """
    rows: dict[str, Rows] = {}
    for side, split in (("train", options.train_split or "train"), ("test", options.test_split or "test")):
        if "/" in split:
            name, _, hub_split = split.partition(":")
            found = load_hub_rows(name, hub_split or side)
        else:
            source = find_source(options.data, f"{' or '.join(file_names(split))} is looked for there", hub)
            if isinstance(source, Path):
                found = read_table(_find_file(source, file_names(split)))
            else:
                found = load_hub_rows(hub if source == hub.partition(":")[0] else source, split)
        rows[side] = _answered(found, question, answer, side)
    return rows


def _answered(found: Any, question: str, answer: str, side: str) -> Rows:
    """The rows that have an answer. Raises ValueError for one whose question or answer cannot be used, and for none."""
    split = f"the {side} split"
    table = found if isinstance(found, Table) else Table(split, found, range(1, len(found) + 1), "row")
    check_columns(table.rows, (question, answer), split if len(table.rows) else str(table.path))
    table.check(lambda row: _check_row(row, question, answer))
    rows = [row for row in table.rows if row[answer] not in (None, "")]
    if not rows:
        raise ValueError(f"{table.path}: none of its {len(table.rows)} rows has an answer (column {answer!r})")
    if left_out := len(table.rows) - len(rows):
        message = "%d of the %d rows of the %s split have no answer and are left out"
        logger.warning(message, left_out, len(table.rows), side)
    return rows


def _check_row(row: Mapping[str, Any], question: str, answer: str) -> None:
    check_columns([row], (question, answer), "it")
    asked, right = row[question], row[answer]
    if not isinstance(asked, str) or not asked.strip():
        raise ValueError(f"its {question} is {asked!r:.80}, not a text")
    finite = math.isfinite(right) if isinstance(right, float) else isinstance(right, int)
    if right is not None and not isinstance(right, str) and (not finite or isinstance(right, bool)):
        raise ValueError(f"its {answer} is {right!r:.80}, neither a text nor a number")


def find_source(data: str | None, needed: str, hub: str) -> Path | str:
    """The path or the hub name in the setting or the environment. Raises ValueError without either, saying what is
    needed, and for a path that does not exist."""
    named = data or os.environ.get("LAGRPO_DATA")
    if not named:
        raise ValueError(
            f"this task needs data: set task.data (or the environment variable LAGRPO_DATA) to a path ({needed}), or "
            f"to a dataset of the Hugging Face hub such as {hub!r}"
        )
    path = Path(named).expanduser()
    if path.exists():
        return path
    if data and _HUB_ID.fullmatch(named) and format_of(path) is None and not path.parent.is_dir():
        return named
    setting = "task.data" if data else "LAGRPO_DATA"
    raise ValueError(f"{setting}: there is no file or directory {named!r} (seen from {os.getcwd()})")


def load_hub_rows(name: str, split: str | None) -> Any:
    """The rows of one split of the hub dataset "owner/name" or "owner/name:config"; for None all splits by name."""
    import datasets

    repository, _, config = name.partition(":")
    wanted = f"the split {split!r} of a dataset of that name" if split else "a dataset of that name"
    try:
        return datasets.load_dataset(repository, config or None, split=split)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no file or directory here (seen from {os.getcwd()}), and {wanted} could not be loaded from "
            f"the Hugging Face hub: {error}"
        ) from error


def check_columns(rows: Rows, columns: Iterable[str], where: str) -> None:
    """Raise ValueError where there are no rows, or the first row lacks one of these columns."""
    if not len(rows):
        raise ValueError(f"{where} has no rows")
    known = list(rows[0])
    for column in columns:
        if column not in known:
            names = one_line(", ".join(known))
            raise ValueError(f"{where} has no column {column!r}; its columns are {names}.{suggest(column, known)}")


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


def _find_file(directory: Path, names: Sequence[str]) -> Path:
    """The first of these files that is there, packed with gzip or not."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file; this task wants the directory that holds {' or '.join(names)}")
    for path in (directory / (name + packed) for name in names for packed in ("", ".gz")):
        if os.path.lexists(path):
            return path
    there = sorted(path.name for path in directory.iterdir() if format_of(path) == ".jsonl")
    raise ValueError(
        f"there is no {' or '.join(names)} in {directory}; "
        + (f"there are {', '.join(there)}.{suggest(names[0], there)}" if there else "no .jsonl file is there")
    )
