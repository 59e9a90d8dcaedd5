"""Signs of life: every rank leaves one each second, with what it is doing, where the others can read it."""

from __future__ import annotations

import json
import platform
import threading
import time
from dataclasses import dataclass, field
from typing import Any

EVERY = 1.0  # seconds between two signs


class RankError(RuntimeError):
    """A rank has failed, ended or fallen silent, so the run cannot go on."""


class EndedError(RankError):
    """Rank 0 has ended the run with an error of its own."""


class Signs:
    """Leaves this rank's signs in `store`, from a thread of its own and over a connection of its own, until `close`.
    `phase` is what the rank is doing."""

    def __init__(self, store: Any, rank: int) -> None:
        self.phase = "starting"
        self._store, self._key = store.clone(), key_of(rank)
        self._ended = threading.Event()
        self._leave(self._store)
        self._thread = threading.Thread(target=self._go_on, name="signs of life", daemon=True)
        self._thread.start()

    def tell(self, phase: str, store: Any) -> None:
        """Leave a sign of what comes now, over the caller's connection."""
        self.phase = phase
        self._leave(store)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5 * EVERY)

    def _go_on(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self._leave(self._store)
            except (RuntimeError, OSError):  # the store has ended: the main thread notices by itself
                return

    def _leave(self, store: Any) -> None:
        store.set(self._key, json.dumps([time.time(), platform.node(), self.phase]))


def key_of(rank: int) -> str:
    return f"sign/{rank}"


@dataclass(slots=True)
class Seen:
    """The last sign of one rank that was read, and when it was first read."""

    text: bytes = b""
    since: float = field(default_factory=time.monotonic)

    def look(self, store: Any, rank: int) -> float:
        """Read the rank's sign; return for how many seconds it has been the same."""
        text = store.get(key_of(rank)) if store.check([key_of(rank)]) else b""
        if text != self.text:
            self.text, self.since = text, time.monotonic()
        return time.monotonic() - self.since

    def describe(self, rank: int) -> str:
        """Who and where, and what it was doing."""
        if not self.text:
            return f"rank {rank} (which has never been heard of)"
        _, host, phase = json.loads(self.text)
        return f"rank {rank} on {host} ({phase})"
