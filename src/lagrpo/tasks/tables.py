"""Tables in files: JSON lines, a JSON array, CSV (also packed with gzip) and Parquet, as rows with places."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line

EXACT = 17  # characters of a decimal number that a float can still tell apart
FORMATS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file (or of a hub dataset) as mappings, with the line of each, or its number from 1."""

    path: Path | str
    rows: Any
    numbers: Sequence[int]
    unit: str = "row"

    def place(self, index: int) -> str:
        return f"{self.path}, {self.unit} {self.numbers[index]}"

    def check(self, check: Callable[[Mapping[str, Any]], object]) -> None:
        """Call `check` with every row. Raises ValueError, with the row's place, if that raises ValueError or TypeError,
        and for a table without rows."""
        if not len(self.rows):
            raise ValueError(f"{self.path} has no rows")
        for index, row in enumerate(self.rows):
            try:
                check(row)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.place(index)}: {error}") from error


def format_of(path: Path) -> str | None:
    """The ending of FORMATS that a file's name has, without .gz; None for another one."""
    ending = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return ending if ending in FORMATS else None


def stem_of(path: Path) -> str:
    """The name of a file without the ending of its format and .gz.

    >>> stem_of(Path("data/train.jsonl.gz")), stem_of(Path("test.csv"))
    ('train', 'test')
    """
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def read_table(path: Path) -> Table:
    """The rows of a file by its ending. Raises ValueError, with the place, for malformed content; OSError for a file
    that cannot be read."""
    import pyarrow as pa

    try:
        if (kind := format_of(path)) in (".parquet", ".csv"):
            rows = _read_columns(path, kind).to_pylist()
            return Table(path, rows, range(1, len(rows) + 1))
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (pa.ArrowException, UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {one_line(str(error))}") from error
    if kind == ".json" and lines and lines[0][1].lstrip()[:1] == "[":
        items = _parse(str(path), "".join(line for _, line in lines), list)
        return Table(path, [_parse(f"{path}, item {n}", item) for n, item in enumerate(items, start=1)],
                     range(1, len(items) + 1), "item")  # fmt: skip
    rows = [_parse(f"{path}, line {number}", line) for number, line in lines]
    return Table(path, rows, [number for number, _ in lines], "line")


def _read_columns(path: Path, kind: str) -> Any:
    import pyarrow as pa
    from pyarrow import csv, parquet

    if kind == ".parquet":
        return parquet.read_table(path)
    lines = csv.ParseOptions(newlines_in_values=True)
    texts = dict.fromkeys(csv.open_csv(path, parse_options=lines).schema.names, pa.string())
    fields = csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
    table = csv.read_csv(path, None, lines, fields)
    return pa.table({name: _typed(table[name]) for name in table.column_names})


def _typed(texts: Any) -> Any:
    """A CSV column whose fields are all numbers, or all true or false, holds these, unless a float would round them."""
    import pyarrow as pa

    is_short = max((len(text or "") for text in texts.to_pylist()), default=0) <= EXACT
    for kind in (pa.int64(), *[pa.float64()] * is_short, pa.bool_()):
        with suppress(pa.ArrowInvalid):
            return texts.cast(kind)
    return texts


def _parse(place: str, text: Any, kind: type = dict) -> Any:
    """The value of a JSON text, which must be of this type."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: this is not JSON ({error.msg}, column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: this is not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"{place}: this is a {type(value).__name__}, not an object with columns")
    return value
