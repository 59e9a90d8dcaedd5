"""Tables in files: JSON lines, a JSON array, CSV (any of them packed with gzip or not) and Parquet, as rows that know
where they stand. What is malformed is refused with its file and its line; see `lagrpo.untrusted` for the limits."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.untrusted import EXPANSION, LONGEST_LINE, UNPACKED, opened, parse_json, read_lines

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_BATCH = 256  # rows of a Parquet file that are unpacked before their size is looked at
_EXACT = 17  # characters of a decimal number that a float can still tell apart


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file, with the line of each (or its number, from 1, in a Parquet file or a JSON array)."""

    path: Path | str
    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    unit: str

    def place(self, index: int) -> str:
        return f"{self.path}, {self.unit} {self.numbers[index]}"

    def check(self, check: Callable[[Mapping[str, Any]], object]) -> None:
        """Call `check` with every row. Raise ValueError, with the row's place, where that raises ValueError or
        TypeError, and for a table without rows."""
        if not self.rows:
            raise ValueError(f"{self.path} has no rows")
        for index, row in enumerate(self.rows):
            try:
                check(row)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.place(index)}: {error}") from error


def format_of(path: Path) -> str | None:
    """The ending of FORMATS that a file's name has, .gz left aside; None for another one."""
    ending = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return ending if ending in FORMATS else None


def stem_of(path: Path) -> str:
    """The name of a file without the ending of its format, and without .gz.

    >>> stem_of(Path("data/train.jsonl.gz")), stem_of(Path("test.csv"))
    ('train', 'test')
    """
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def read_table(path: Path, longest: int = LONGEST_LINE, unpacked: int = UNPACKED) -> Table:
    """The rows of a file by its ending. A line may have `longest` bytes, a file that is small for it may unpack to
    `unpacked` ones. Raises ValueError, with file and line, for what is malformed or too large; OSError for what cannot
    be read."""
    kind = format_of(path)
    if kind == ".parquet":
        rows = list(_parquet_rows(path, unpacked))
        return Table(path, rows, range(1, len(rows) + 1), "row")
    if kind is None:
        raise ValueError(f"{path} does not end in {', '.join(FORMATS)}")
    lines = read_lines(path, longest, unpacked)
    if kind == ".csv":
        return _csv_table(path, lines, longest)
    first = next(((number, line) for number, line in lines if line.strip()), (1, ""))
    if kind == ".json" and first[1].lstrip()[:1] == "[":
        return _json_array(path, first, lines, longest)
    found = [
        (n, _json_row(line.rstrip("\r\n"), f"{path}, line {n}")) for n, line in _chained(first, lines) if line.strip()
    ]
    return Table(path, [row for _, row in found], [n for n, _ in found], "line")


def _chained(first: tuple[int, str], others: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from others


def _json_row(text: str, place: str) -> dict[str, Any]:
    try:
        row = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return _object(row, place)


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: this is a {type(row).__name__}, not an object with columns")
    return row


def _json_array(path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]], longest: int) -> Table:
    """The objects of a file that is one JSON array, which is read as a whole, so that it counts as one line."""
    parts, size = ["\n" * (first[0] - 1), first[1]], len(first[1])
    for _, line in lines:
        parts.append(line)
        if (size := size + len(line)) > longest:
            raise ValueError(f"{path} is a JSON array of more than {longest:,} characters: write an object per line")
    try:
        items = parse_json("".join(parts))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    rows = [_object(row, f"{path}, item {number}") for number, row in enumerate(items, start=1)]
    return Table(path, rows, range(1, len(rows) + 1), "item")


def _csv_table(path: Path, lines: Iterator[tuple[int, str]], longest: int) -> Table:
    """A column whose fields are all numbers, or all true or false, holds these, unless a float would round them; an
    empty field is None."""
    csv.field_size_limit(longest)  # of all readers in the process; the default is 131,072
    reader = csv.reader((line for _, line in lines), strict=True)
    found: list[tuple[int, list[str]]] = []
    try:
        names = next(reader, [])
        _check_names(path, names)
        if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
            raise ValueError(f"{path}, line 1: its columns are separated by {other!r}, and CSV is read with commas")
        for fields in reader:
            if fields and len(fields) != len(names):
                raise csv.Error(f"{len(fields)} fields, but {len(names)} columns ({one_line(', '.join(names), 80)})")
            found += [(reader.line_num, fields)] if fields else []
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: this is not CSV: {error}") from error
    columns = zip(*(fields for _, fields in found), strict=True)
    values = dict(zip(names, map(_typed, columns), strict=True)) if found else {}
    rows = [dict(zip(names, fields, strict=True)) for fields in zip(*values.values(), strict=True)]
    return Table(path, rows, [number for number, _ in found], "line")


def _typed(fields: Sequence[str]) -> list[Any]:
    import pyarrow as pa

    texts = pa.array([field or None for field in fields], pa.string())
    short = max(map(len, fields), default=0) <= _EXACT
    for kind in (pa.int64(), *[pa.float64()] * short, pa.bool_()):
        with suppress(pa.ArrowInvalid):
            return texts.cast(kind).to_pylist()
    return texts.to_pylist()


def _parquet_rows(path: Path, unpacked: int) -> Iterator[dict[str, Any]]:
    """Read in pieces, so that a small file that stands for a huge table is refused before it fills the memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, most = 0, max(unpacked, EXPANSION * path.stat().st_size)
    with opened(path) as file:
        try:
            table = pq.ParquetFile(file, page_checksum_verification=True)
            _check_names(path, table.schema_arrow.names)
            _check_time_zones(path, table.schema_arrow)
            for batch in table.iter_batches(_BATCH):
                if (size := size + batch.nbytes) > most:
                    raise MemoryError(f"it unpacks to more than {most:,} bytes")
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError, MemoryError) as error:
            raise ValueError(f"{path} cannot be read as Parquet: {one_line(str(error))}") from error


def _check_time_zones(path: Path, schema: Any) -> None:
    """Raise ValueError for a time zone that Python does not know."""
    import pyarrow as pa

    for column in schema:
        if pa.types.is_timestamp(column.type) and column.type.tz is not None:
            try:
                pa.scalar(0, column.type).as_py()
            except (pa.ArrowException, ValueError, KeyError, ImportError) as error:
                zone = one_line(column.type.tz, 80)
                raise ValueError(f"{path}: the column {column.name!r:.80} has an unknown time zone, {zone}") from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} has the column {twice[0]!r:.80} twice")
