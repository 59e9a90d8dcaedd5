"""Files that others wrote: read within limits, or refused in one line.

Nothing here waits for a pipe, reads a device, unpacks without end or nests without end. A mark of byte order at the
start, line ends of any system and gzip do no harm, and are read.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

LONGEST_LINE = 2**26  # bytes
LARGEST_TEXT = 2**26  # bytes of a file that is read as one text
UNPACKED = 2**28  # bytes that any file may unpack to
EXPANSION = 100  # larger ones may unpack to so many times their size
DEEPEST = 100  # levels of JSON
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_WIDE = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A file, open for reading. Raises OSError for one that is not there or may not be read, and ValueError for a pipe
    or a device, which could have no end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is a pipe or a device, not a file")
        yield file


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """The UTF-8 text of a file. Raises as `opened` does, and ValueError for other encodings and more bytes."""
    with opened(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path} is larger than {largest:,} bytes")
    return "".join(_decoded(path, number, line) for number, line in enumerate(content.splitlines(True), start=1))


def read_lines(path: Path, longest: int = LONGEST_LINE, unpacked: int = UNPACKED) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a UTF-8 file, packed with gzip or not. Only a newline ends a line, and in a file
    without one a carriage return: texts may hold other line ends, such as U+2028. Raises as `opened` does, and
    ValueError, with the line, for other encodings, a NUL, a line of more than `longest` bytes, and what gzip cannot
    unpack or unpacks to far too much."""
    with opened(path) as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        most = max(unpacked, EXPANSION * os.fstat(file.fileno()).st_size)
        source, number, total = gzip.GzipFile(fileobj=file) if packed else file, 0, 0
        while text := _next_line(path, source, longest):
            total += len(text)
            if len(text) > longest:
                raise ValueError(f"{path}, line {number + 1}: the line is longer than {longest:,} bytes")
            if packed and total > most:
                raise ValueError(f"{path} unpacks to more than {most:,} bytes")
            by_returns = number == 0 and not text.endswith(b"\n")  # there is no newline in the whole file
            for line in text.splitlines(keepends=True) if by_returns else [text]:
                number += 1
                yield number, _decoded(path, number, line)


def _next_line(path: Path, source: BufferedReader | gzip.GzipFile, longest: int) -> bytes:
    try:
        return source.readline(longest + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked by gzip: {error}") from error


def _decoded(path: Path, number: int, line: bytes) -> str:
    place = f"{path}, line {number}"
    if number == 1 and line[:2] in _WIDE:
        raise ValueError(f"{place}: this is {_WIDE[line[:2]]}, not UTF-8")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}, byte {error.start + 1}: this is not UTF-8 ({error.reason})") from error
    if (at := text.find("\0")) >= 0:
        raise ValueError(f"{place}, column {at + 1}: there is a NUL, so this is no text")
    return text


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is no JSON, and for what others could not write or read
    again: a key that is twice in an object, half of a surrogate pair, more than 100 levels, numbers of thousands of
    digits. NaN and Infinity are read."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"this is not JSON ({error.msg}, {line}column {error.colno})") from error
    except RecursionError as error:
        raise ValueError(f"this is nested deeper than {DEEPEST} levels") from error
    except ValueError as error:
        if "integer string conversion" not in str(error):  # of _unique
            raise
        raise ValueError("this has an integer of thousands of digits") from error
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(f"this is nested deeper than {DEEPEST} levels")
    if _HALF_PAIR.search(text):
        check_pairs(value)
    return value


def check_pairs(value: Any) -> None:
    """Raise ValueError for half of a surrogate pair in the texts of a JSON value: no tokenizer and no file takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"its text has {half}, half of a surrogate pair, which no tokenizer takes") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [inner for values in inside for inner in values]
    return bool(level)
