"""The train and test rows of a task, from files or datasets of the Hugging Face hub.

The setting `task.data`, else the environment variable LAGRPO_DATA, is a file (JSON lines, a JSON array, CSV, also
packed with gzip, or Parquet), a pattern for files such as "data/train-*.parquet", a directory of files named after
their splits, a directory that datasets' `save_to_disk` wrote, or a hub dataset: "owner/name", or "owner/name:config".
Files such as train-00000-of-00003.parquet are one split. A column can be a path into a column: "reward_model.answer".
"""

from __future__ import annotations

import glob
import gzip
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line, one_line_errors, suggest
from lagrpo.tasks.base import Ask, build_messages, option

logger = logging.getLogger("lagrpo")
FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")
_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.(jsonl|json|csv|parquet)(\.gz)?$")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a task with data."""

    data: str | None = option(None, "dataset's hub id, directory or file (JSONL, CSV, Parquet); $LAGRPO_DATA otherwise")
    train_split: str | None = option(None, "split (or file, by its stem) to train on")
    test_split: str | None = option(None, "split (or file, by its stem) to evaluate on")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file (or of a hub dataset) as mappings, with the line of each, or its number from 1."""

    path: Path | str
    rows: Any
    numbers: Sequence[int]
    unit: str = "row"

    def map(self, function: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        """The function's results for every row. Raises ValueError, with the row's place, if it raises ValueError or
        TypeError."""
        results = []
        for number, row in zip(self.numbers, self.rows, strict=True):
            try:
                results.append(function(row))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.path}, {self.unit} {number}: {error}") from error
        return results


def format_of(path: Path) -> str | None:
    """The ending of FORMATS that a file's name has, without .gz; None for another one."""
    return next((ending for ending in FORMATS if path.name.endswith((ending, f"{ending}.gz"))), None)


def read_table(path: Path, texts: Sequence[str] = ()) -> Table:
    """The rows of a file by its ending; in a CSV file the columns `texts` are not read as numbers. Raises ValueError,
    with the place, for what cannot be read."""
    kind, lines, rows = format_of(path), list[tuple[int, str]](), list[dict[str, Any]]()
    with one_line_errors(f"{path} cannot be read"):
        if kind == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif kind == ".csv":
            rows = _read_csv(path, texts)
        else:
            opened: Any = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8-sig") as file:
                lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    if kind in (".parquet", ".csv"):
        return Table(path, rows, range(1, len(rows) + 1))
    table = Table(path, [line for _, line in lines], [number for number, _ in lines], "line")
    if kind == ".json" and lines and lines[0][1].lstrip().startswith("["):
        with one_line_errors(f"{path} is not JSON"):
            items = json.loads("".join(table.rows))
        table = Table(path, items, range(1, len(items) + 1), "item")
    return replace(table, rows=table.map(_parse))


def _read_csv(path: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more fields than the header
        frame = pd.read_csv(
            path, index_col=False, dtype=dict.fromkeys(texts, "string"), keep_default_na=False, na_values=[""],
            dtype_backend="numpy_nullable",
        )  # fmt: skip
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _parse(text: Any) -> Mapping[str, Any]:
    """The object of a JSON text."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(value, dict):
        raise ValueError(f"this is a {type(value).__name__}, not an object with columns")
    return value


def load_rows(
    options: Options, hub: str, ask: Ask, columns: Sequence[str], answer: str | None,
    names: Callable[[str], Sequence[str]] = lambda split: (split,), seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The train and test rows of a task, each with these columns.

    A split is the first of `names` (of its setting) that exists. `hub` is the dataset to suggest if no data is named,
    and gives the configuration if `task.data` is that dataset's name alone. Rows without an answer (column `answer`)
    are left out, which is logged. With a seed, rows are held out for testing if there are none. Raises
    ValueError for data that is missing, cannot be read, lacks a column or cannot be asked."""
    train, test = options.train_split or "train", options.test_split or "test"
    there = find_splits(options.data, hub)
    if seed is not None and options.train_split is None and len(there) == 1:
        (train,) = there

    def load(split: str, side: str) -> Any:
        tables = _load_split(there, split, side, names, columns)
        for table in tables:
            _check(table, ask, columns)
        rows = tables[0].rows if len(tables) == 1 else [row for table in tables for row in table.rows]
        return _with_answer(rows, answer, f"the {side} split, {tables[0].path}")

    rows = load(train, "train")
    if seed is None or options.test_split is not None or test in there:
        return {"train": rows, "test": load(test, "test")}
    kept, held_out = hold_out(len(rows), seed)
    message = "%s has no test split: %d rows are for training, %d chosen by seed %d are held out for testing"
    logger.warning(message, options.data, len(kept), len(held_out), seed)
    return {"train": select(rows, kept), "test": select(rows, held_out)}


def find_splits(data: str | None, hub: str) -> dict[str, Any]:
    """The existing splits by name: lists of files, or a `datasets.Dataset`. Raises ValueError for missing data."""
    endings = ", ".join(FORMATS)
    if not (named := data or os.environ.get("LAGRPO_DATA")):
        raise ValueError(
            "this task needs data: set task.data (or the environment variable LAGRPO_DATA) to a file ending in "
            f"{endings}, a directory of such files, or a dataset of the Hugging Face hub such as {hub!r}"
        )
    path = Path(named).expanduser()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _load_saved(path)
    files = sorted(path.iterdir()) if path.is_dir() else sorted(map(Path, glob.glob(str(path)))) or [path]
    if files == [path] and not path.exists():
        if data and _HUB_ID.fullmatch(named) and format_of(path) is None and not path.parent.is_dir():
            return dict(load_hub(hub if named == hub.partition(":")[0] else named))
        setting = "task.data" if data else "LAGRPO_DATA"
        raise ValueError(f"{setting}: there is no file or directory {named!r} (seen from {os.getcwd()})")
    there: dict[str, list[Path]] = {}
    for file in filter(format_of, files):
        there.setdefault(_ENDING.sub("", file.name), []).append(file)
    if not there or any(len(found) > 1 and "-of-" not in found[0].name for found in there.values()):
        raise ValueError(f"task.data: {path} needs files that end in {endings}, one for each split")
    return there


def _load_saved(path: Path) -> dict[str, Any]:
    """The splits in a directory that `save_to_disk` of datasets wrote."""
    import datasets

    found: Any = datasets.load_from_disk(path)
    return dict(found) if isinstance(found, dict) else {"train": found}


def load_hub(name: str) -> Any:
    """The splits of the hub dataset "owner/name" or "owner/name:config", by name."""
    import datasets

    repository, _, config = name.partition(":")
    try:
        return datasets.load_dataset(repository, config or None)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"{name!r} is not a file or directory here (seen from {os.getcwd()}), and could not be loaded from the "
            f"Hugging Face hub: {one_line(str(error))}"
        ) from error


def _load_split(
    there: Mapping[str, Any], split: str, side: str, names: Callable[[str], Sequence[str]], texts: Sequence[str]
) -> list[Table]:
    found = next((there[name] for name in names(split) if name in there), None)
    if found is None:
        wanted = " or ".join(map(repr, names(split)))
        raise ValueError(f"task.{side}_split: no {wanted}; there are {', '.join(there)}.{suggest(split, there)}")
    if isinstance(found, list):
        return [read_table(file, texts) for file in found]
    return [Table("the dataset", found, range(1, len(found) + 1))]


def _check(table: Table, ask: Ask, columns: Sequence[str]) -> None:
    """Check every row of a file; of a hub dataset, whose columns have types, the first. Raises ValueError."""

    def check(row: Mapping[str, Any]) -> None:
        for column in columns:
            get_value(row, column)
        question, answer = ask(row)
        build_messages(question)
        json.dumps(answer)  # TypeError for what cannot be recorded

    if not len(table.rows):
        raise ValueError(f"{table.path} has no rows")
    is_file = isinstance(table.rows, list)
    (table if is_file else replace(table, rows=[table.rows[0]], numbers=[1])).map(check)


def _with_answer(rows: Any, column: str | None, where: str) -> Any:
    """The rows that have an answer. Raises ValueError if none has."""
    if column is None:
        return rows
    values = rows if isinstance(rows, list) else rows.select_columns([n for n in rows[0] if column.startswith(n)])
    kept = [n for n, row in enumerate(values) if get_value(row, column) not in (None, "")]
    if not kept:
        raise ValueError(f"{where}: none of its {len(rows)} rows has an answer (column {column!r})")
    if left_out := len(rows) - len(kept):
        logger.warning("%d of the %d rows of %s have no answer and are left out", left_out, len(rows), where)
    return select(rows, kept) if left_out else rows


def get_value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a field in a column for a path. Raises ValueError if there is none.

    >>> get_value({"reward_model": {"answer": "7"}}, "reward_model.answer")
    '7'
    """
    first, _, rest = column.partition(".")
    if column not in row and rest and isinstance(row.get(first), Mapping):
        return get_value(row[first], rest)
    if column not in row:
        names, like = one_line(", ".join(row)), suggest(column, row)
        raise ValueError(f"there is no column {column!r}; the columns are {names}.{like}")
    return row[column]


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
