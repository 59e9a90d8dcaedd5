"""Memory that PyTorch frees on a CPU stays with the process while a run computes.

glibc gives large freed blocks back to the system at once. The next micro-batch then gets the same
memory page by page, and the system clears each page first: 400,000 page faults and a sixth of the
time of an update, measured. Blocks of more than 32 MiB still go back: in one heap with the others
they fragment it, and it grows and grows.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# malloc.h
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
# Bytes.
WHILE_KEPT = {
    M_MMAP_THRESHOLD: 1 << 25,  # larger blocks are not in the heap, and go back
    M_TRIM_THRESHOLD: 2**31 - 1,  # so much may be free at the end of the heap: the most there is
    M_TOP_PAD: 1 << 26,  # the heap grows in steps of it
}
# glibc's own value of all three: see mallopt(3).
INITIAL = 128 << 10


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Makes the process keep freed memory inside; afterward memory returns to the system.

    Yields False, and changes nothing, for another C library than glibc, and if the user has set the
    allocator (MALLOC_*, GLIBC_TUNABLES).
    """
    is_set_by_user = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    is_linux = sys.platform.startswith("linux")
    if is_set_by_user or not is_linux or not hasattr(ctypes.CDLL(None), "mallopt"):
        yield False
        return
    libc = ctypes.CDLL(None)
    try:
        # mallopt returns 0 for a value that it refuses.
        yield all(libc.mallopt(parameter, value) for parameter, value in WHILE_KEPT.items())
    finally:
        for parameter in WHILE_KEPT:
            libc.mallopt(parameter, INITIAL)
        libc.malloc_trim(0)
