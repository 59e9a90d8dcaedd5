"""The splits of a data set: in files, in a directory, on the Hugging Face hub, or in memory."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lagrpo.errors import list_folders, one_line_errors
from lagrpo.tasks.columns import (
    ARROW_FLOATS,
    NARROW_TYPES,
    decode,
    mark_narrow,
    mark_narrow_arrow,
)
from lagrpo.tasks.files import FORMATS, Row, format_of, parse_row, read_rows

Named = Any
"""task.data, or the data itself: a `datasets.Dataset` or `DatasetDict`, a data frame, a table of
pyarrow, a dict of columns, or rows."""

Rows = Any
"""A list of `Row`, or a `datasets.Dataset`, which stays on the disk.

Both have a length and indices.
"""

# "owner/name" or "owner/name:configuration".
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")

CHUNK = 1000
"""Rows of a dataset that are read at a time."""

# The end of a file's name after the name of its split, as the hub's shards have it:
# "-00000-of-00002.parquet". Group 2 is the number of shards.
_ENDING = re.compile(r"(-\d{5}-of-(\d{5})(-[0-9a-f]{16})?)?\.(jsonl|json|csv|parquet)(\.gz)?$")


def find_splits(named: Named, hub: str) -> dict[str, Any]:
    """Returns the existing splits by name: files, a `datasets.Dataset`, or rows in memory.

    named: task.data, or the data itself; hub: the dataset that is suggested if no data is named.
    Raises ValueError for missing data.
    """
    if isinstance(named, Mapping) and not _has_columns(named):
        return {split: _open_named(split, data) for split, data in named.items()}
    if not isinstance(named, str | None):
        return {"train": named}

    setting = "task.data" if named else "LAGRPO_DATA"
    data = named or os.environ.get("LAGRPO_DATA")
    if not data:
        raise ValueError(
            "this task needs data: set task.data, or the environment variable LAGRPO_DATA, to a "
            f"file ending in {', '.join(FORMATS)}, a directory of such files, "
            f"or a hub dataset such as {hub!r}"
        )

    path = Path(data).expanduser()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        with one_line_errors(f"{setting}: {path}, which save_to_disk wrote, cannot be read"):
            return _as_splits(datasets.load_from_disk(path))

    files = _match_files(path)
    if files or path.is_dir():
        return _group_by_split(files, path, setting)

    # A name whose directory exists is meant as a file. LAGRPO_DATA never names a hub dataset.
    is_hub_id = bool(named and _HUB_ID.fullmatch(data))
    if not is_hub_id or format_of(path) is not None or path.parent.is_dir():
        raise ValueError(
            f"{setting}: no file or directory {data!r} (current directory: {os.getcwd()})"
        )
    return _load_from_hub(data, hub)


def _open_named(split: str, data: Any) -> Any:
    """Returns the files of a split that is a path, a pattern, or a list of them; else the data."""
    if _is_list_of_files(data):
        return [file for entry in data for file in _open_named(split, entry)]
    if not isinstance(data, str | Path):
        return data
    path = Path(data).expanduser()
    files = [file for file in _match_files(path) if format_of(file) is not None]
    if not files:
        raise ValueError(
            f"data[{split!r}]: no file {str(data)!r} that ends in {', '.join(FORMATS)} "
            f"(current directory: {os.getcwd()})"
        )
    return files


def _is_list_of_files(data: object) -> bool:
    """True for a list whose first entry is the name of a file, which stands for all."""
    if not isinstance(data, list | tuple) or not data:
        return False
    first = data[0]
    return isinstance(first, str | Path) and format_of(Path(first)) is not None


def _has_columns(table: Mapping[str, Any]) -> bool:
    """True for a dict of columns, such as {"prompt": ["2+3?"]}; False for one of splits.

    The entries of a split are rows.
    """
    for values in table.values():
        is_table = hasattr(values, "column_names") or hasattr(values, "columns")
        if is_table or isinstance(values, str | Path | Mapping) or not hasattr(values, "__len__"):
            continue
        if _is_list_of_files(values):
            continue
        for entry in values:
            is_row_of_json = isinstance(entry, str) and entry.lstrip().startswith("{")
            if not isinstance(entry, Mapping | Path) and not is_row_of_json:
                return True
            break  # the first entry stands for all
    return False


def _load_from_hub(name: str, suggested: str) -> dict[str, Any]:
    """Loads a dataset "owner/name" or "owner/name:configuration" of the hub.

    The name of the `suggested` dataset alone stands for its suggested configuration.
    """
    import datasets

    suggested_repository, _, _ = suggested.partition(":")
    full_name = suggested if name == suggested_repository else name
    repository, _, configuration = full_name.partition(":")
    with one_line_errors(
        f"{name!r} is not a file or directory here, and could not be loaded from the hub"
    ):
        return _as_splits(datasets.load_dataset(repository, configuration or None))


def _as_splits(dataset: Any) -> dict[str, Any]:
    """Returns a `DatasetDict` as a dict, and a single dataset as the split "train"."""
    if isinstance(dataset, dict):
        return dict(dataset)
    return {"train": dataset}


def _match_files(path: Path) -> list[Path]:
    """Returns the files of a directory, the file of this name, or the files of this pattern."""
    if path.is_dir():
        return sorted(path.iterdir())
    if path.exists():
        return [path]
    folder = str(path.parent)
    if path.parent.is_dir():
        folder = glob.escape(folder)
    return sorted(Path(name) for name in glob.glob(os.path.join(folder, path.name)))


def _group_by_split(files: Sequence[Path], path: Path, setting: str) -> dict[str, list[Path]]:
    """Groups files by the split that they are named after: one file, or all shards of a split.

    A pattern may choose some of the shards. Raises ValueError for other files.
    """
    splits: dict[str, list[Path]] = {}
    for file in files:
        if format_of(file) is not None:
            splits.setdefault(_ENDING.sub("", file.name), []).append(file)
    is_pattern = not path.is_dir()
    are_complete = all(_is_complete(members, is_pattern=is_pattern) for members in splits.values())
    if not splits or not are_complete:
        raise ValueError(
            f"{setting}: {path}: name files that end in {', '.join(FORMATS)}: "
            "one for each split, or all its shards"
            + list_folders(path, *(f"*{ending}" for ending in FORMATS))
        )
    return splits


def _is_complete(files: Sequence[Path], *, is_pattern: bool) -> bool:
    """True for one file, for all shards of a split, and for any shards that a pattern chooses."""
    shard_counts = {_num_shards(file) for file in files}
    if len(shard_counts) > 1:
        return False
    (shard_count,) = shard_counts
    if is_pattern and shard_count != 1:
        return True
    return shard_count == len(files)


def _num_shards(file: Path) -> int:
    """Returns the N of a shard's name, "…-of-N"; 1 for a file that is not a shard."""
    match = _ENDING.search(file.name)
    assert match is not None  # the file has one of FORMATS
    return int(match[2] or 1)


def read_split(data: Any, split_place: str) -> Rows:
    """Returns a split's rows: a list for files and data in memory, a dataset for a dataset.

    Raises ValueError if there are none.
    """
    is_dataset = hasattr(data, "with_transform")
    # In the format "custom" a function of the user makes the rows. with_transform would drop it.
    if is_dataset and data.format["type"] != "custom":
        rows: Any = read_dataset(data)
    else:
        # All objects of a column of Arrow have the same keys, so they are padded with None.
        path = None if hasattr(data, "schema") else split_place
        rows = []
        for number, value in enumerate(_to_records(data, split_place), start=1):
            if isinstance(value, Path):
                rows += read_rows(value)
            else:
                place = f"{split_place}, row {number}"
                rows.append(Row(decode(parse_row(value, place)), path, place))
    if not len(rows):
        raise ValueError(f"{split_place} has no rows")
    return rows


def _to_records(data: Any, split_place: str) -> Iterable[Any]:
    """Returns the rows of a data frame, of a table, or of a dict of columns; rows as they are.

    Raises ValueError for anything else.
    """
    if hasattr(data, "iloc"):
        return _rows_of_frame(data)
    if hasattr(data, "to_pylist"):  # a table of pyarrow
        types = {field.name: field.type for field in data.schema}
        return [
            {name: mark_narrow_arrow(value, types[name]) for name, value in row.items()}
            for row in data.to_pylist()
        ]
    if hasattr(data, "to_dicts"):  # a data frame of polars
        return data.to_dicts()
    if isinstance(data, Mapping):
        return _rows_of_columns(data, split_place)
    if not isinstance(data, Iterable):
        raise ValueError(f"{split_place}: the data is of type {type(data).__name__}, not rows")
    return data


def _rows_of_columns(columns: Mapping[str, Any], split_place: str) -> list[dict[str, Any]]:
    """Returns the rows of a dict of columns. Raises ValueError if their lengths differ."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{split_place}: its columns have different lengths: {counts}")
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _rows_of_frame(data: Any) -> list[dict[str, Any]]:
    """Returns the rows of a data frame of pandas, with None for missing values."""
    records = data.astype(object).where(data.notna(), None).to_dict("records")
    for name, dtype in data.dtypes.items():
        # pandas has its own names of types: Float32, and "float[pyarrow]".
        dtype_name = str(dtype).lower().removesuffix("[pyarrow]")
        dtype_name = ARROW_FLOATS.get(dtype_name, dtype_name)
        if dtype_name in NARROW_TYPES:
            for record in records:
                record[name] = mark_narrow(record[name], dtype_name)
    return records


def read_dataset(rows: Any) -> Any:
    """Returns a dataset with the values that a file would have.

    Class labels become their names; the label -1, which means no label, becomes None.
    """
    # Label -1 is the last entry of its list.
    label_names = {
        name: [*feature.names, None]
        for name, feature in rows.features.items()
        if hasattr(feature, "int2str")
    }

    types = {field.name: field.type for field in rows.features.arrow_schema}

    def read(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        values: dict[str, Sequence[Any]] = {
            name: [mark_narrow_arrow(value, types[name]) for value in decode(column)]
            for name, column in columns.items()
        }
        for name in label_names.keys() & columns.keys():
            values[name] = [label_names[name][label] for label in columns[name]]
        return values

    return rows.with_transform(read)


def without_media(rows: Rows) -> Rows:
    """Returns the rows without columns of a dataset that hold images, sounds or films.

    It takes long to decode them.
    """
    if isinstance(rows, list):
        return rows
    media = [
        name
        for name, feature in rows.features.items()
        if hasattr(getattr(feature, "feature", feature), "decode_example")
    ]
    return rows.remove_columns(media)


def iterate_rows(rows: Any) -> Iterator[Any]:
    """Yields the rows of a sequence, or of a dataset.

    A dataset is read by chunks: row by row, it takes ten times as long.
    """
    is_dataset = hasattr(rows, "select")
    if not is_dataset:
        yield from rows
        return
    for start in range(0, len(rows), CHUNK):
        columns = rows[start : start + CHUNK]  # a list for each column
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))
