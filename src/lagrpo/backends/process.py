"""What a run sets for the whole process, and gives back: threads, allocator, the tokenizers' threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lagrpo.backends import memory
from lagrpo.threads import team


@contextmanager
def restored() -> Iterator[None]:
    """Inside, a policy may be built (lagrpo.training.build), which sets all of these; afterward they are as they were.
    glibc's own adaptation of its allocator to the program does not come back: it stays at the sizes that glibc starts
    with."""
    try:
        yield
    finally:
        team.release()
        memory.give_freed_memory_back()
