"""The train and test rows of a task, from files, datasets of the Hugging Face hub, or memory.

docs/data-and-rewards.md says how they are read. If task.data is unset, LAGRPO_DATA names the file or the directory.
"""

from __future__ import annotations

import ast
import csv
import glob
import gzip
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line_errors, suggest
from lagrpo.tasks import Ask, build_messages, select

logger = logging.getLogger("lagrpo")
FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")
_ENDING = re.compile(r"(-\d{5}-of-(\d{5})(-[0-9a-f]{16})?)?\.(jsonl|json|csv|parquet)(\.gz)?$")


# ---- files ----


class Row(dict[str, Any]):
    """A row of a file, and where it stands: "data.jsonl, line 3"."""

    def __init__(self, values: Mapping[str, Any], path: Path | str, place: str) -> None:
        super().__init__(values)
        self.path, self.place = path, place


def format_of(path: Path) -> str | None:
    """The ending of FORMATS that a file's name has, without .gz; None for another one."""
    return next(
        (ending for ending in FORMATS if path.name.endswith((ending, f"{ending}.gz"))), None
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file by its ending; the values of CSV are texts. Raises ValueError, with the place."""
    kind, unit = format_of(path), "row"
    values: list[Any] = []
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with one_line_errors(f"{path} cannot be read"):
        if kind == ".parquet":
            import pyarrow.parquet

            values = pyarrow.parquet.read_table(path).to_pylist()
        else:
            with opened(
                path, "rt", encoding="utf-8-sig", newline="" if kind == ".csv" else None
            ) as file:
                values = (
                    list(reader := csv.DictReader(file, strict=True))
                    if kind == ".csv"
                    else list(file)
                )
                if kind == ".csv" and len({*(names := reader.fieldnames or ())}) < len(names):
                    raise ValueError(f"its header names a column twice: {', '.join(names)}")
    if kind in (".json", ".jsonl"):
        unit = "line"
        if kind == ".json" or "".join(values[:1]).startswith("["):
            with suppress(ValueError):  # lines of JSON
                whole = json.loads("".join(values))
                items = whole.get("data") if isinstance(whole, dict) else whole
                values, unit = items if isinstance(items, list) else [whole], "item"
    places = ((f"{path}, {unit} {number}", value) for number, value in enumerate(values, start=1))
    return [
        Row(_parse(value, place, kind), path, place)
        for place, value in places
        if unit != "line" or value.strip()
    ]


def _parse(value: Any, place: str, kind: str | None = None) -> dict[str, Any]:
    """A row, which may be a line of JSON."""
    if isinstance(value, str):
        with one_line_errors(f"{place}: this is not JSON"):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError(f"{place}: this is a {type(value).__name__}, not an object with columns")
    if kind == ".csv" and (None in value or None in value.values()):
        raise ValueError(f"{place}: its number of fields is not the header's")
    return value


# ---- splits ----


def load_rows(
    named: Any, train_split: str, test_split: str, hub: str, ask: Ask, columns: Sequence[str],
    answer: str | None, seed: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The rows for training and testing, with these columns. "a|b" names the split a, or b if there is no a.

    `named` is task.data or the data, `hub` the dataset to suggest without it. Rows without an answer (column `answer`)
    are left out. With a seed, rows of an only split are held out for testing. Raises ValueError for unfit data."""
    there = find_splits(named, hub)
    source = named or os.environ.get("LAGRPO_DATA") if isinstance(named, str | None) else "data"

    def load(side: str, split: str) -> Any:
        names = split.split("|")
        if (found := next((there[name] for name in names if name in there), None)) is None:
            known = f"there are {', '.join(there)}.{suggest(names[-1], there)}"
            raise ValueError(
                f"task.options.{side}_split: no {' or '.join(map(repr, names))}; {known}"
            )
        where = f"the {side} split of {source}"
        return _with_answer(_read_split(found, where, ask, columns), answer, where)

    is_only = seed is not None and train_split == "train" and len(there) == 1
    rows = load("train", next(iter(there)) if is_only else train_split)
    if seed is None or test_split != "test" or "test" in there:
        return {"train": rows, "test": load("test", test_split)}
    kept, held_out = hold_out(len(rows), seed)
    message = "%s has no test split: training on %d of its %d rows, testing on the other %d (chosen by seed %d)"
    logger.warning(message, source, len(kept), len(rows), len(held_out), seed)
    return {"train": select(rows, kept), "test": select(rows, held_out)}


def _read_split(found: Any, where: str, ask: Ask, columns: Sequence[str]) -> Any:
    """The rows of files or in memory, each checked, or a dataset, whose columns have types, with its first row
    checked."""
    rows: Any = name_labels(found) if (is_dataset := hasattr(found, "select")) else []
    for number, each in enumerate(() if is_dataset else found, start=1):
        place = f"{where}, row {number}"
        rows += (
            read_rows(each) if isinstance(each, Path) else [Row(_parse(each, place), where, place)]
        )
    if not len(rows):
        raise ValueError(f"{where} has no rows")
    for row in [Row(rows[0], where, f"{where}, row 1")] if is_dataset else rows:
        with one_line_errors(row.place):
            for column in columns:
                get_value(row, column)
            build_messages(ask(row)[0])
    return rows


def name_labels(rows: Any) -> Any:
    """A dataset whose class labels are read as their names, not as numbers; -1, "no label", as None."""
    labels = {
        name: feature.names
        for name, feature in rows.features.items()
        if hasattr(feature, "int2str")
    }

    def read(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        named = {name: [*labels[name], None] for name in labels.keys() & columns.keys()}
        return {
            **columns,
            **{name: [named[name][label] for label in columns[name]] for name in named},
        }

    return rows.with_transform(read) if labels else rows


def find_splits(named: Any, hub: str) -> dict[str, Any]:
    """The existing splits by name: files, a `datasets.Dataset`, or rows. Raises ValueError for missing data."""
    if not isinstance(named, str | None):
        named = named.to_dict("records") if hasattr(named, "iloc") else named  # a data frame
        return dict(named) if isinstance(named, Mapping) else {"train": named}
    endings, setting = ", ".join(FORMATS), "task.data" if named else "LAGRPO_DATA"
    if not (data := named or os.environ.get("LAGRPO_DATA")):
        files = f"a file ending in {endings}, a directory of such files, or a hub dataset such as {hub!r}"
        raise ValueError(
            f"this task needs data: set task.data, or the environment variable LAGRPO_DATA, to {files}"
        )
    path = Path(data).expanduser()
    saved: Any = None
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        saved = datasets.load_from_disk(path)
    files = (
        sorted(path.iterdir())
        if path.is_dir()
        else sorted(map(Path, glob.glob(str(path)))) or [path]
    )
    if not path.is_dir() and not files[0].exists():
        if (
            not (named and _HUB_ID.fullmatch(data))
            or format_of(path) is not None
            or path.parent.is_dir()
        ):
            raise ValueError(
                f"{setting}: no file or directory {data!r} (current directory: {os.getcwd()})"
            )
        import datasets

        repository, _, config = (hub if data == hub.partition(":")[0] else data).partition(":")
        with one_line_errors(
            f"{data!r} is not a file or directory here, and could not be loaded from the hub"
        ):
            saved = datasets.load_dataset(repository, config or None)
    if saved is not None:
        return dict(saved) if isinstance(saved, dict) else {"train": saved}
    there: dict[str, list[Path]] = {}
    for file in filter(format_of, files):
        there.setdefault(_ENDING.sub("", file.name), []).append(file)
    shards = {
        name: {int(_ENDING.findall(file.name)[0][1] or 1) for file in found}
        for name, found in there.items()
    }
    chosen = lambda counts: not path.is_dir() and len(counts) == 1 and counts != {1}  # noqa: E731 - by a pattern
    if not there or not all(
        counts == {len(there[name])} or chosen(counts) for name, counts in shards.items()
    ):
        raise ValueError(
            f"{setting}: {path}: name files that end in {endings}: one for each split, or all its shards"
        )
    return there


def _with_answer(rows: Any, column: str | None, where: str) -> Any:
    """The rows that have an answer. Raises ValueError if none has."""
    if column is None or not (
        near := [name for name in rows[0] if f"{column}.".startswith(f"{name}.")]
    ):
        return rows
    values = rows if isinstance(rows, list) else rows.select_columns(near)
    found = [
        plain(get_value(row, column)) if any(name in row for name in near) else None
        for row in values
    ]
    kept = [n for n, each in enumerate(found) if each not in (None, []) and str(each).strip()]
    if not kept:
        raise ValueError(f"{where}: none of its {len(rows)} rows has an answer (column {column!r})")
    if left_out := len(rows) - len(kept):
        logger.warning(
            "%d of the %d rows of %s have no answer and are left out", left_out, len(rows), where
        )
    return select(rows, kept) if left_out else rows


def hold_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Places of rows for training and for testing: the seed chooses a tenth (1 to 1,000) for testing, in order."""
    from lagrpo.rng import permutation

    if count < 2:
        raise ValueError(
            f"the data has {count} row{'s' * (count != 1)}: too few to hold any out for testing"
        )
    order = permutation(count, seed, "hold-out").tolist()
    test = max(1, min(1000, count // 10))
    return sorted(order[test:]), sorted(order[:test])


# ---- columns ----


def get_value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a field in a column ("reward_model.answer"). Raises ValueError if there is none."""
    first, _, rest = column.partition(".")
    if column not in row and rest and isinstance(row.get(first), Mapping):
        return get_value(row[first], rest)
    if column not in row:
        raise ValueError(
            f"no column {column!r}.{suggest(column, row)} The columns are {', '.join(row)}"
        )
    return row[column]


def plain(value: Any) -> Any:
    """A value as JSON has it: dates and decimals as texts, lists and numbers of NumPy as Python's, NaN as None."""
    found = json.loads(
        json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    )
    return found if found == found else None


def parse_messages(text: Any) -> Any:
    """The messages of a text that holds some, as JSON or as Python prints them; anything else as it is. Raises
    ValueError for messages that cannot be read."""
    if not isinstance(text, str) or not re.match(
        r"\s*\[\s*\{\s*['\"](role|content|name|from|value)['\"]\s*:", text
    ):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(text)
    raise ValueError(f"it has messages that are not JSON: {text!r:.80}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text in a column. Raises ValueError for something else, and for white space."""
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its {column} is {value!r:.80}, not a text")
    return value
