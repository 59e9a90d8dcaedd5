"""What is freed stays: counted in page faults, which do not depend on the machine's speed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from lagrpo.backends.process import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use = lambda: [torch.ones(4 << 20) for _ in range(3)]  # three blocks of 16 MiB, freed together
for _ in range(10):
    use()
before = faults()
for _ in range(10):
    use()
print(kept, (faults() - before) // 10)
"""
PAGES = 3 * (16 << 20) // os.sysconf("SC_PAGESIZE")


def run(what: str, **environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE, what], env=clean | environment, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_not_fetched_again_page_by_page():
    _, given_back = run("do not", MALLOC_MMAP_THRESHOLD_="131072")  # glibc's own limit, before it adapts to a program
    assert given_back > 0.9 * PAGES  # what is counted here is what there is to save
    kept, faults = run("keep")
    assert kept == "True"
    assert faults < PAGES / 20


def test_the_users_own_settings_are_left_alone():
    assert run("keep", MALLOC_ARENA_MAX="2")[0] == "False"
