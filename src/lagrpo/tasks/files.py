"""The rows of a file: JSON, lines of JSON, CSV or Parquet, compressed or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lagrpo.errors import check_is_pulled, one_line, parse_json
from lagrpo.tasks.columns import Columns, decode, mark_narrow_arrow
from lagrpo.types import JsonObject

FORMATS = (".jsonl", ".json", ".csv", ".parquet")


class Row(JsonObject):
    """A row of a file. `place` is where it stands: "data.jsonl, line 3".

    `path` is None for a row of a table in memory.
    """

    def __init__(self, values: Columns, path: Path | str | None, place: str) -> None:
        super().__init__(values)
        self.path = path
        self.place = place


def format_of(path: Path) -> str | None:
    """Returns the ending of FORMATS that a file's name has, without .gz; None for another one."""
    for ending in FORMATS:
        if path.name.endswith((ending, f"{ending}.gz")):
            return ending
    return None


def read_rows(path: Path, marked_columns: Collection[str] | None = None) -> list[Row]:
    """Reads the rows of a file, in the format that its ending says. The values of CSV are texts.

    marked_columns: columns whose numbers are NarrowFloat if they are stored as float32 or float16;
        None for all columns.

    Raises ValueError, with the place.
    """
    check_is_pulled(path)
    ending = format_of(path)
    if ending == ".parquet":
        return _to_rows(_read_parquet(path, marked_columns), path, "row")
    if ending == ".csv":
        return _to_rows(_read_csv(path), path, "row")
    return _read_json_rows(path)


def _to_rows(values: Iterable[object], path: Path, unit: str) -> list[Row]:
    """Returns the values as rows that know their place, such as "data.csv, row 3"."""
    rows: list[Row] = []
    for number, value in enumerate(values, start=1):
        if unit == "line" and isinstance(value, str) and not value.strip():
            continue
        place = f"{path}, {unit} {number}"
        rows.append(Row(parse_row(value, place), path, place))
    return rows


def _read_parquet(path: Path, marked_columns: Collection[str] | None) -> list[JsonObject]:
    """Reads a Parquet file. Texts that are stored as binary become texts."""
    import pyarrow.parquet

    with _naming_damage(path):
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    binary_columns = [field.name for field in table.schema if "binary" in str(field.type)]
    float_types = {
        field.name: field.type
        for field in table.schema
        if "float" in str(field.type) and (marked_columns is None or field.name in marked_columns)
    }
    for row in rows:
        for name in binary_columns:
            row[name] = decode(row[name])
        for name, arrow_type in float_types.items():
            row[name] = mark_narrow_arrow(row[name], arrow_type)
    return rows


def _read_csv(path: Path) -> list[dict[str, str]]:
    """Reads a CSV file with a header."""
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows: list[dict[str, str]] = []
    # The csv module takes fields of at most 131,072 characters by default.
    default_limit = csv.field_size_limit(sys.maxsize)
    try:
        for row in reader:
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{path}, row {len(rows) + 1}: this is not CSV: {error}") from error
    finally:
        csv.field_size_limit(default_limit)
    names = reader.fieldnames or ()
    if len(set(names)) < len(names):
        raise ValueError(
            f"{path} cannot be read: its header names a column twice: {', '.join(names)}"
        )
    for number, row in enumerate(rows, start=1):
        # DictReader puts further fields under None, and None into columns without a field.
        if None in row or None in row.values():
            raise ValueError(f"{path}, row {number}: its number of fields is not the header's")
    return rows


def _read_json_rows(path: Path) -> list[Row]:
    """Reads one list, one {"data": [...]}, or lines of JSON, whatever the file's ending says."""
    text = _read_text(path)
    # Lines end at \n, \r\n and \r alone, as in files that are opened as text.
    lines = list(io.StringIO(text, newline=None))
    first_line = lines[0].strip() if lines else ""
    if format_of(path) != ".json" and not first_line.startswith("["):
        return _to_rows(lines, path, "line")
    try:
        content = parse_json(text)
    except ValueError as error:
        # Some .json files hold lines of JSON.
        if _is_json(first_line):
            return _to_rows(lines, path, "line")
        raise ValueError(f"{path}: {_describe_json_error(error)}") from error
    items = content.get("data") if isinstance(content, dict) else content
    if not isinstance(items, list):
        items = [content]
    return _to_rows(items, path, "item")


def _read_text(path: Path) -> str:
    """Reads the text of a file, which may be compressed. Raises ValueError if it is not UTF-8."""
    with _naming_damage(path):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}: line {line} is not UTF-8 (byte 0x{content[error.start]:02x}): "
            "save the file as UTF-8"
        ) from error


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Turns any error of a library that reads a file into a ValueError with the file's name."""
    try:
        yield
    except Exception as error:
        # An error of the system, such as a missing permission: the content may be fine.
        if isinstance(error, OSError) and error.strerror is not None:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        problem = one_line(str(error)).rstrip(".") or type(error).__name__
        raise ValueError(f"{path} cannot be read: {problem}. Write or download it again") from error


def parse_row(value: object, place: str) -> JsonObject:
    """Returns the columns of a row, which may be a line of JSON. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = parse_json(value.strip())
        except ValueError as error:
            problem = _describe_json_error(error)
            raise ValueError(f"{place}: {problem}. A row is one line of JSON") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{place}: this is a {type(value).__name__}, not an object with columns")
    return dict(value)


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _describe_json_error(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f"this is not JSON: {one_line(str(error))}"
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    near = error.doc[max(0, error.pos - 20) : error.pos + 20]
    return f"this is not JSON: {error.msg} ({line}character {error.colno}) near {near!r}"
