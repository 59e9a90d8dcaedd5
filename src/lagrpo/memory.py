"""Memory that PyTorch frees on a CPU stays with the process.

glibc gives large freed blocks and the end of its heap back to the system at once. The next micro-batch then gets the
same memory page by page, each cleared by the kernel first: 400,000 page faults and a sixth of the time of an update,
measured. Blocks of more than 32 MiB still go back: in one heap with the others they tear it, and it grows and grows."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> bool:
    """For this process, whatever else it does; returns whether that was possible. Settings of the user's own
    (MALLOC_*, GLIBC_TUNABLES) are left alone."""
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if own or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return all(
        mallopt(*limit) for limit in ((M_MMAP_THRESHOLD, 1 << 25), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 1 << 26))
    )
