"""Freed memory stays with the process while a run computes: counted in page faults, whatever the machine's speed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from lagrpo.cpu.memory import freed_memory_kept
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def count(blocks):  # of 16 MiB, freed together
    for _ in range(10):
        [torch.ones(4 << 20) for _ in range(blocks)]
    before = faults()
    for _ in range(10):
        [torch.ones(4 << 20) for _ in range(blocks)]
    return (faults() - before) // 10
with freed_memory_kept() as kept:
    within = count(3)
print(kept, within, count(9))
"""
PAGES = (16 << 20) // os.sysconf("SC_PAGESIZE")  # of a block
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def count_faults(**environment: str) -> tuple[str, int, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    kept, *faults = done.stdout.split()
    return kept, *map(int, faults)  # type: ignore[return-value]


@glibc
def test_freed_memory_stays_until_the_end_of_the_block():
    """Of nine blocks afterward some find room where the three were, in the heap; the others come from the system, page
    by page, at each use."""
    kept, within, after = count_faults()
    assert kept == "True"
    assert within < PAGES / 10
    assert after > 4 * PAGES


@glibc
def test_allocator_settings_of_the_user_are_left_alone():
    kept, within, _ = count_faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "False"
    assert within > 2.7 * PAGES
