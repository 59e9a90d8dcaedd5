"""The lock of a run's directory: one process writes into it at a time.

The system gives a lock back when its process ends, however it ends, so a lock that is held has a living holder.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lagrpo.runs.files import naming

LOCK, HOLDER = ".lock", ".lock-holder.json"


class RunLockedError(RuntimeError):
    """Another process is writing into the run."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the run at `path`, which is there. Raises RunLockedError, which names the holder, at once where
    another process has it."""
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunLockedError(
            f"another process is writing into {path}{_holder(path)}; wait for its end, or stop it first"
        ) from error
    try:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": platform.node(), "since": now}
        with naming(path / HOLDER):
            (path / HOLDER).write_text(json.dumps(holder) + "\n")
        yield
    finally:
        (path / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(path: Path) -> str:
    holder = read_holder(path)
    return f": process {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else ""


def read_holder(path: Path) -> dict[str, Any]:
    """The `pid`, the `host` and since when of the process that writes, or was killed while it wrote, into the run at
    `path`; empty where there is none, or it has just begun."""
    try:
        holder = json.loads((path / HOLDER).read_bytes())
        return {name: holder[name] for name in ("pid", "host", "since")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
