"""Files that are whole or absent: written under a temporary name, synced to the disk and renamed; and strict JSON."""

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

UMASK = os.umask(0o077)
os.umask(UMASK)
MODE = 0o666 & ~UMASK  # of files: safetensors gives its own 0600
TEMPORARY = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp")


@contextmanager
def _temporary_name(path: Path) -> Iterator[Path]:
    """A name next to `path`, removed at the end. Errors in between, such as a full disk, name `path`."""
    from safetensors import SafetensorError

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield scratch
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        _remove(scratch)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str | Callable[[Path], None]) -> Path:
    """Write `path`, and its parent directories: a reader sees the old file or the new one, whole. `content` may be a
    function that writes the file that it is given."""
    with _temporary_name(path) as scratch:
        if callable(content):
            content(scratch)
        else:
            scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        finish_file(scratch)
        scratch.replace(path)
    sync_to_disk(path.parent)
    return path


def write_directory_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Likewise a directory: `write` fills a new one, which then replaces `path`."""
    with _temporary_name(path) as scratch, _temporary_name(path) as old:
        scratch.mkdir()
        write(scratch)
        for part in (*scratch.rglob("*"), scratch):
            sync_to_disk(part) if part.is_dir() else finish_file(part)
        if path.exists():
            path.rename(old)
        scratch.rename(path)
    sync_to_disk(path.parent)
    return path


def finish_file(path: Path) -> None:
    """A new file has the mode that the umask says, and is on the disk."""
    path.chmod(MODE)
    sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    """Return when a file, or the names in a directory, are on the disk: a power cut leaves them whole."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_directory(path: Path) -> None:
    """Remove a directory, or a file: it is whole until it is gone."""
    with _temporary_name(path) as old, suppress(FileNotFoundError):
        path.rename(old)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers left under temporary names."""
    for path in [*directory.rglob(".*.tmp")]:
        if TEMPORARY.fullmatch(path.name):
            _remove(path)


def numbered(folder: Path, before: str, after: str = "") -> dict[int, Path]:
    """The files of a folder named `before`, digits, `after`, by number."""
    form = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    return {
        int(name[1]): path
        for path in sorted(folder.glob("*"))
        if (name := form.fullmatch(path.name))
    }


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], schema: Any = None) -> Path:
    """Write rows as a Parquet file. Without a schema their values decide the types of the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    return write_atomically(
        path, lambda scratch: pq.write_table(table, scratch, compression="zstd")
    )


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null, NumPy scalars numbers, paths text. Raises TypeError for what JSON
    does not take, for example a tensor."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
