"""The allocator, which a run sets for the whole process and gives back.

glibc gives large freed blocks and the end of its heap back to the system at once. The next micro-batch then gets the
same memory page by page, each cleared by the kernel first: 400,000 page faults and a sixth of the time of an update,
measured. So memory that PyTorch frees on a CPU stays with the process. Blocks of more than 32 MiB still go back: in one
heap with the others they tear it, and it grows and grows."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEEP = {M_MMAP_THRESHOLD: 1 << 25, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 1 << 26}
INITIAL = dict.fromkeys(KEEP, 128 << 10)  # mallopt(3)

_kept = False


def keep_freed_memory() -> bool:
    """Return whether that was possible. Settings of the user's own (MALLOC_*, GLIBC_TUNABLES) win."""
    global _kept
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if own or not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"):  # another C library
        return False
    _kept = _set(KEEP)
    return _kept


def give_freed_memory_back() -> None:
    """Where memory was kept, return it to the system now, and restore the limits that glibc starts with."""
    global _kept
    if _kept:
        _kept = not _set(INITIAL)
        ctypes.CDLL(None).malloc_trim(0)


def _set(limits: Mapping[int, int]) -> bool:
    return all(ctypes.CDLL(None).mallopt(name, size) for name, size in limits.items())


@contextmanager
def restored() -> Iterator[None]:
    """Inside, a policy may be built, which keeps freed memory (lagrpo.training.build); afterward the memory goes back.
    glibc's own adaptation of its allocator to the program does not come back."""
    try:
        yield
    finally:
        give_freed_memory_back()
