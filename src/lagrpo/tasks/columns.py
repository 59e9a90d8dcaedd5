"""The values of a row: by column or by field of a column, and as JSON has them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from lagrpo.errors import parse_json, suggest
from lagrpo.types import JsonView

Columns = JsonView
"""The columns of a row, by name. A column may be a table with fields."""

NARROW_TYPES = ("float16", "float32")
ARROW_FLOATS = {"halffloat": "float16", "float": "float32"}
"""NumPy's names of Arrow's types."""

# The beginning of a text that holds messages, as JSON or as Python prints them.
_MESSAGES_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content|name|from|value)['\"]\s*:")


def has_column(row: Columns, column: str) -> bool:
    """True if the row has the column, or the field in a column."""
    if column in row:
        return True
    outer, _, field = column.partition(".")
    return bool(field) and isinstance(row.get(outer), Mapping) and has_column(row[outer], field)


def find_column(row: Columns, columns: Sequence[str]) -> str | None:
    """Returns the first of these columns with a value in the row.

    Returns the first that the row has if none has a value, and None if it has none.
    """
    present = [column for column in columns if has_column(row, column)]
    for column in present:
        if get_value(row, column) is not None:
            return column
    return present[0] if present else None


def get_value(row: Columns, column: str) -> Any:
    """Returns the value of a column, or of a field in a column ("reward_model.answer").

    Raises ValueError if the row has no such column.
    """
    if column in row:
        return row[column]
    outer, _, field = column.partition(".")
    if field and isinstance(row.get(outer), Mapping):
        return get_value(row[outer], field)
    raise ValueError(
        f"no column {column!r}.{suggest(column, row)} The columns are {', '.join(row)}"
    )


class NarrowFloat(float):
    """A number of data that is stored as float32 or float16.

    Its value is the number that was written: the fewest digits that give the stored one, such as
    0.1 for 0.10000000149. `stored` is the stored number.
    """

    stored: float


def from_stored(stored: float, dtype: str) -> NarrowFloat:
    """Returns the number that was written for one that is stored in NumPy's type `dtype`."""
    import numpy

    # Small integers are stored exactly, but may have more digits than tell them apart.
    is_exact = stored.is_integer() and abs(stored) < 2**24
    number = NarrowFloat(stored if is_exact else str(numpy.dtype(dtype).type(stored)))
    number.stored = stored
    return number


def as_stored(value: Any) -> Any:
    """Returns a value with the stored numbers for each NarrowFloat in it."""
    if isinstance(value, NarrowFloat):
        return value.stored
    if isinstance(value, Mapping):
        return {name: as_stored(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_stored(entry) for entry in value]
    return value


def mark_narrow(value: Any, dtype: str) -> Any:
    """Returns a value of a column, or of NumPy, with its numbers as NarrowFloat if they are.

    dtype: the type of the numbers. Numbers in lists are marked too.
    """
    if dtype not in NARROW_TYPES:
        return value
    if isinstance(value, list):
        return [mark_narrow(entry, dtype) for entry in value]
    return from_stored(value, dtype) if isinstance(value, float) else value


def mark_narrow_arrow(value: Any, arrow_type: Any) -> Any:
    """Returns a value of a column of Arrow with its numbers as NarrowFloat if they are."""
    if isinstance(value, Mapping) and hasattr(arrow_type, "get_field_index"):  # a struct
        fields = {field.name: field.type for field in arrow_type}
        return {name: mark_narrow_arrow(entry, fields[name]) for name, entry in value.items()}
    if isinstance(value, list) and hasattr(arrow_type, "value_type"):
        return [mark_narrow_arrow(entry, arrow_type.value_type) for entry in value]
    return mark_narrow(value, ARROW_FLOATS.get(str(arrow_type), ""))


def decode(value: Any) -> Any:
    """Returns a value with texts for bytes in UTF-8, and Python's lists and numbers for NumPy's.

    Values within lists and tables are decoded too. Other bytes, such as images, stay bytes.
    """
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, Mapping):
        return {name: decode(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(decode(entry) for entry in value)
    if hasattr(value, "tolist"):
        return mark_narrow(decode(value.tolist()), str(getattr(value, "dtype", "")))
    return value


def plain(value: object) -> Any:
    """Returns a value as JSON has it: dates and decimals as texts, sets as lists, NaN as None.

    Raises ValueError for bytes that are not text.
    """
    # Through JSON and back: reward functions get what the rollouts record.
    text = json.dumps(decode(value), default=_to_json_type)
    return json.loads(text, parse_constant=_parse_constant)


def _to_json_type(value: object) -> str | list[object]:
    if isinstance(value, bytes | bytearray):
        raise ValueError(
            f"its answer has bytes that are not text ({bytes(value)!r:.40}): "
            "set task.answer_column to a column of texts"
        )
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, Decimal):
        return f"{value:f}"
    return str(value)


def _parse_constant(name: str) -> float | None:
    """Returns the value of a constant that Python's JSON has: NaN, Infinity or -Infinity."""
    return None if name == "NaN" else float(name)


def parse_messages(text: object) -> Any:
    """Returns the messages of a text that holds some, as JSON or as Python prints them.

    Anything else is returned as it is. Raises ValueError for messages that cannot be read.
    """
    if not isinstance(text, str) or not _MESSAGES_TEXT.match(text):
        return text
    # literal_eval also reads Python's spelling, with single quotes and None.
    for read in (parse_json, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    raise ValueError(f"it has messages that are not JSON: {text!r:.80}")


def text_of(row: Columns, column: str) -> str:
    """Returns the text in a column. Raises ValueError for something else, and for white space."""
    value = get_value(row, column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its {column} is {value!r:.80}, not a text")
    return value
