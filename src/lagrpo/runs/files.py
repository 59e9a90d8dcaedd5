"""Files that are whole or absent: temporary names, synced to the disk and renamed; and JSON that any reader accepts."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp")

_OF_SYSTEM = re.compile(
    r"(?:os error |Os \{ code: )([0-9]{1,4})\b"
)  # how Rust, in which safetensors is written, says it


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, `path` is written: an error of the system that names no file names it."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if (system := _OF_SYSTEM.search(str(error))) is None:
            raise OSError(f"{path} could not be written: {error}") from error
        raise OSError(code := int(system[1]), os.strerror(code), str(path)) from error
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: bytes | str | Callable[[Path], None]) -> Path:
    """Write `path` (and its parent directories) under a temporary name beside it and rename it, so that a reader sees
    the old file or the new one, whole. `content` is the content, or a function that writes the file it is given."""
    with naming(path), _temporary_name(path) as scratch:
        if callable(content):
            content(scratch)
        else:
            scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        sync_to_disk(scratch)
        os.replace(scratch, path)
    sync_to_disk(path.parent)
    return path


def write_directory_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a directory likewise: `write` fills a new one, which then replaces `path`."""
    with naming(path), _temporary_name(path) as scratch, _temporary_name(path) as old:
        scratch.mkdir()
        write(scratch)
        for part in (*scratch.rglob("*"), scratch):
            sync_to_disk(part)
        if path.exists() or path.is_symlink():
            path.rename(old)
        scratch.rename(path)
    sync_to_disk(path.parent)
    return path


def remove_directory(path: Path) -> None:
    """Remove a directory: it is whole until it is gone."""
    with _temporary_name(path) as old, suppress(FileNotFoundError):
        path.rename(old)


def numbered(folder: Path, before: str, after: str = "") -> dict[int, Path]:
    """By number, what a directory has under the names that a run gives: `before`, digits, `after`. Other names, such as
    those of copies that a person made, are left out."""
    names = {
        path: re.fullmatch(f"{re.escape(before)}([0-9]{{1,18}}){re.escape(after)}", path.name)
        for path in folder.glob("*")
    }
    return {int(name[1]): path for path, name in sorted(names.items()) if name}


def sync_to_disk(path: Path) -> None:
    """Return when the system has put a file, or the names in a directory, on the disk. Only POSIX can sync names."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what killed writers left under temporary names, and return the names that it was to get."""
    found = [path for path in directory.rglob(".*.tmp") if (TEMPORARY.fullmatch(path.name))]
    for path in found:
        _remove(path)
    return [path.with_name(path.name[1:].rsplit(".", 2)[0]) for path in found]


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], schema: Any = None) -> Path:
    """Write rows as a Parquet file, whole or not at all. Without a schema their values decide the columns' types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    return write_atomically(path, lambda scratch: pq.write_table(table, scratch, compression="zstd"))


def append_line(path: Path, line: str) -> None:
    """Append one line, after removing a line that a killed writer did not finish."""
    with naming(path), path.open("ab+") as file:
        file.truncate(_end_of_last_line(file))
        file.write(line.encode() + b"\n")


def to_json(value: Any, where: str = "") -> str:
    """One line of strict JSON: NaN and infinities, which JSON lacks, become null; numpy scalars become numbers. Raises
    TypeError naming the place of a value that is none of these, for example a tensor."""
    return json.dumps(_plain(value, where), ensure_ascii=False, allow_nan=False)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    place = where.lstrip(".") or "value"
    raise TypeError(f"{place} is a {type(value).__name__}; JSON takes numbers, text, lists and maps")


def _end_of_last_line(file: Any) -> int:
    end = file.seek(0, os.SEEK_END)
    position, tail = end, b""
    while position > 0 and b"\n" not in tail:
        step = min(1 << 16, position)
        position = file.seek(position - step)
        tail = file.read(step)
    return position + tail.rfind(b"\n") + 1


@contextmanager
def _temporary_name(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield scratch
    finally:
        _remove(scratch)


def _remove(path: Path) -> None:
    """Remove a file, a directory with all that is in it, or a symbolic link, and not what that points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
