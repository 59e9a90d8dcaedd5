"""Memory that PyTorch frees on a CPU stays with the process while a run computes.

glibc gives large freed blocks back to the system at once. The next micro-batch then gets the same memory page by page,
each cleared by the kernel first: 400,000 page faults and a sixth of the time of an update, measured. Blocks of more
than 32 MiB still go back: in one heap with the others they fragment it, and it grows and grows."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEEP = {M_MMAP_THRESHOLD: 1 << 25, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 1 << 26}
INITIAL = 128 << 10  # of all three: mallopt(3)


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Inside, the process keeps freed memory; afterward it returns to the system. Yields False, and changes nothing,
    for another C library or when the user set the allocator (MALLOC_*, GLIBC_TUNABLES)."""
    users = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if users or not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"):
        yield False
        return
    libc = ctypes.CDLL(None)
    try:
        yield all(libc.mallopt(name, size) for name, size in KEEP.items())
    finally:
        for name in KEEP:
            libc.mallopt(name, INITIAL)
        libc.malloc_trim(0)
