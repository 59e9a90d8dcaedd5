"""Writes files that are whole or absent, and strict JSON.

A file is written under a temporary name, synced to the disk, and renamed.
"""

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

from lagrpo.errors import parse_json_object
from lagrpo.types import JsonObject, JsonView

# The umask can only be read by setting another one, so it is set back at once.
UMASK = os.umask(0o077)
os.umask(UMASK)
MODE = 0o666 & ~UMASK
"""The mode of files. safetensors gives files 0600."""

TEMPORARY = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp")
"""Temporary names: .NAME.PROCESS-RANDOM.tmp."""


@contextmanager
def naming_file(path: Path, scratch: Path | None = None) -> Iterator[None]:
    """Gives errors of the system inside, such as a full disk, the name of the file.

    Errors of other files than `scratch`, its temporary name, have their names already.
    """
    try:
        yield
    except OSError as error:
        is_of_file = scratch is not None and str(error.filename).startswith(str(scratch))
        if error.filename is not None and not is_of_file:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextmanager
def _temporary_name(path: Path) -> Iterator[Path]:
    """Yields a name next to `path`, and removes it at the end.

    Errors in between, such as a full disk, name `path`.
    """
    from safetensors import SafetensorError

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with naming_file(path, scratch):
            yield scratch
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        # It may be impossible to remove for the same reason, and then becomes a leftover.
        with suppress(OSError):
            _remove(scratch)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str | Callable[[Path], None]) -> Path:
    """Writes `path`, and its parent directories. A reader sees the old file or the new one, whole.

    `content` may be a function that writes the file at the path that it is given.
    """
    with _temporary_name(path) as scratch:
        if callable(content):
            content(scratch)
        elif isinstance(content, str):
            scratch.write_bytes(content.encode())
        else:
            scratch.write_bytes(content)
        finish_file(scratch)
        scratch.replace(path)
    sync_to_disk(path.parent)
    return path


def write_directory_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Writes the directory `path`: `write` fills a new one, which then replaces it."""
    with _temporary_name(path) as scratch, _temporary_name(path) as old:
        scratch.mkdir()
        write(scratch)
        for part in (*scratch.rglob("*"), scratch):
            if part.is_dir():
                sync_to_disk(part)
            else:
                finish_file(part)
        # rename does not replace a directory that has files, so the old one makes room first.
        if path.exists():
            path.rename(old)
        scratch.rename(path)
    sync_to_disk(path.parent)
    return path


def finish_file(path: Path) -> None:
    """Gives a new file the mode that the umask says, and syncs it to the disk."""
    path.chmod(MODE)
    sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    """Returns when a file, or the names in a directory, are on the disk.

    A power cut then leaves them whole.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_directory(path: Path) -> None:
    """Removes a directory or a file, which is whole until it is gone."""
    # The rename takes all of it away at once; leaving the context deletes it piece by piece.
    with _temporary_name(path) as old, suppress(FileNotFoundError):
        path.rename(old)


def remove_leftovers(directory: Path) -> None:
    """Removes what killed writers left under temporary names."""
    for path in list(directory.rglob(".*.tmp")):
        if TEMPORARY.fullmatch(path.name):
            _remove(path)


def numbered(folder: Path, before: str, after: str = "") -> dict[int, Path]:
    """Returns the files of a folder named `before`, digits, `after`, by number."""
    pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    files = {}
    for path in sorted(folder.glob("*")):
        match = pattern.fullmatch(path.name)
        if match:
            files[int(match[1])] = path
    return files


def read_json_object(path: Path) -> JsonObject:
    """Returns the object in a JSON file. Raises ValueError, with its name, for a damaged one."""
    try:
        return parse_json_object(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore or remove it") from error


def read_table(path: Path) -> list[JsonObject]:
    """Returns the rows of a Parquet file. Raises ValueError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def write_table(path: Path, rows: Iterable[JsonView], schema: Any = None) -> Path:
    """Writes rows as a Parquet file. Without a schema, values decide the types of the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    return write_atomically(
        path, lambda scratch: pq.write_table(table, scratch, compression="zstd")
    )


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns strict JSON: NaN and infinities become null, NumPy scalars numbers, paths text.

    Raises TypeError for values that JSON does not have, for example a tensor.
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """Returns the value in types of JSON; values of other types stay as they are."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # Python counts True as an Integral and a Real, but JSON has true.
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value
