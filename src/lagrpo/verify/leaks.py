"""What a judge leaves behind: shared memory and semaphores that outlive their process.

Python has one resource tracker for a program and its children; it removes what is left when the program ends, and
complains then. A worker gets a tracker of its own, which removes what this worker has made as soon as the worker has
ended, killed or not, and in silence.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import resource_tracker

_SILENT = "ignore:resource_tracker:UserWarning"  # for the tracker, which gets our warning options
_SEGMENTS = "/dev/shm"  # where Linux shows them; elsewhere all are taken for our own


class OwnTracker(resource_tracker.ResourceTracker):
    """Tracks what this process makes. Python registers shared memory too that is only opened (before 3.13, always):
    segments that were there before this tracker are somebody else's, and stay."""

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
    """From now on this process has a tracker of its own, started when it is first needed."""
    sys.warnoptions.append(_SILENT)
    own = OwnTracker()
    resource_tracker._resource_tracker = own
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(own, name))
