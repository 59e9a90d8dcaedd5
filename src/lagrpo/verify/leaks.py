"""Removes what a judge leaves behind: shared memory and semaphores that outlive their process.

Python has one resource tracker for a program and its children, which removes leftovers when the program ends, with a
warning. A worker gets its own tracker, which silently removes this worker's leftovers as soon as the worker has ended,
killed or not.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import resource_tracker

_SILENT = "ignore:resource_tracker:UserWarning"  # for the tracker, which gets our warning options
_SEGMENTS = "/dev/shm"  # where Linux lists them; elsewhere every segment counts as our own


class OwnTracker(resource_tracker.ResourceTracker):
    """Tracks what this process makes. Python also registers shared memory that a process only opens (always, before
    3.13); segments older than this tracker belong to other processes and stay."""

    def __init__(self) -> None:
        super().__init__()
        self._others = frozenset(os.listdir(_SEGMENTS)) if os.path.isdir(_SEGMENTS) else frozenset[str]()
        self._tracked: set[tuple[str, str]] = set()

    def register(self, name: str, rtype: str) -> None:
        if rtype != "shared_memory" or name.lstrip("/") not in self._others:
            self._tracked.add((name, rtype))
            super().register(name, rtype)

    def unregister(self, name: str, rtype: str) -> None:
        if (name, rtype) in self._tracked:
            self._tracked.remove((name, rtype))
            super().unregister(name, rtype)


def track_alone() -> None:
    """Give this process its own tracker, which starts when it is first needed."""
    sys.warnoptions.append(_SILENT)
    own = OwnTracker()
    resource_tracker._resource_tracker = own
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(own, name))
