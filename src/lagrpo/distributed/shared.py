"""Files that ranks share: a run needs one file system that all of them see."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lagrpo.distributed.ranks import POLL, Ranks

VISIBLE_WITHIN = 60.0
"""Seconds until a file of another host must be seen: as long as NFS keeps names by default."""


def check_shared(ranks: Ranks, directory: Path) -> None:
    """Raises ValueError if ranks have different directories under this path.

    Rank 0 writes a file, and all others look for it. Collective.
    """
    if ranks.size == 1:
        return
    first_file, token = ranks.on_rank0(partial(_write_token, directory.absolute()))
    file = directory / first_file.name
    is_seen = wait_for(lambda: file.is_file() and file.read_text(encoding="utf-8") == token)
    hosts = ranks.gather((is_seen, socket.gethostname()))
    if ranks.is_first:
        file.unlink(missing_ok=True)
    for rank, (rank_sees, host) in enumerate(hosts):
        if not rank_sees:
            raise ValueError(
                f"rank {rank} on {host} does not see {first_file.parent} of rank 0 on "
                f"{hosts[0][1]}: choose a directory of a file system that all hosts share"
            )


def _write_token(directory: Path) -> tuple[Path, str]:
    """Writes a random text to a new file in the directory. Returns the file's path and the text."""
    token = secrets.token_hex(8)
    directory.mkdir(parents=True, exist_ok=True)
    # It has the form that `files.remove_leftovers` removes.
    file = directory / f".shared.{os.getpid()}-{token[:8]}.tmp"
    file.write_text(token, encoding="utf-8")
    return file, token


def wait_for(condition: Callable[[], bool]) -> bool:
    """Returns True as soon as the condition holds, and False after VISIBLE_WITHIN seconds."""
    end = time.monotonic() + VISIBLE_WITHIN
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL)
    return True
