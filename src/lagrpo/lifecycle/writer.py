"""Writes checkpoints in a thread, from a copy in the host's memory, while the run goes on.

The thread has its own connections to the threads of other ranks, so its collectives and the run's
do not wait for each other.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lagrpo.distributed.ranks import PATIENCE, Ranks
from lagrpo.distributed.torchrun import local_size
from lagrpo.lifecycle.checkpoint import NewCheckpoint
from lagrpo.machine import available_memory, process_memory, process_peak
from lagrpo.resume.checkpoint_files import prune_checkpoints
from lagrpo.runs import files
from lagrpo.threads import call_in_thread

logger = logging.getLogger("lagrpo")


@dataclass(slots=True)
class Writing:
    """A checkpoint that the thread writes, while the run goes on if it `is_copied`.

    `ended_at` is when the checkpoint was on disk. `paused` is how many seconds the run has waited.
    Times are seconds of time.monotonic().
    """

    batch: int
    is_copied: bool
    started_at: float
    ended_at: Future[float]
    paused: float


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint on disk: the seconds that it took, and the seconds that the run has waited."""

    batch: int
    seconds: float
    paused: float


class CheckpointWriter:
    """The thread that writes a checkpoint, at most one at a time, and removes older ones.

    The folder keeps the newest `limit`.
    """

    def __init__(self, folder: Path, limit: int, ranks: Ranks) -> None:
        self._folder = folder
        self._limit = limit
        self._ranks = ranks
        self._writing: Writing | None = None
        self._peak: int | None = None  # bytes of this process, before the first copy
        self._has_pinned = False  # PyTorch keeps pinned memory for the next copy
        self._has_warned = False

    def begin(self, checkpoint: NewCheckpoint, started_at: float, *, in_background: bool) -> bool:
        """Begins to write a checkpoint. Call `wait` before the next one.

        Returns True if the thread has a copy, so that the run may go on. Without `in_background` it
        has none, and if memory is short. `started_at` is when the run began to wait. Collective.
        """
        goes_on = in_background and self._has_room(checkpoint)
        if goes_on:
            checkpoint = checkpoint.copy()
        ranks = self._ranks.in_background()

        def write() -> float:
            checkpoint.write(self._folder, ranks)
            if ranks.is_first:
                prune_checkpoints(self._folder, self._limit)
            return time.monotonic()

        ended_at = call_in_thread(write)
        paused = time.monotonic() - started_at
        self._writing = Writing(checkpoint.batch, goes_on, started_at, ended_at, paused)
        return goes_on

    def has_ended(self) -> bool:
        """True if `wait` has something to return or raise, at once."""
        return self._writing is not None and self._writing.ended_at.done()

    def wait(self) -> Written | None:
        """Waits until the checkpoint that was begun is on disk; returns None if there is none.

        Raises CheckpointError, and OSError for an older checkpoint that cannot be removed. If the
        wait is interrupted, the thread goes on.
        """
        writing = self._writing
        if writing is None:
            return None
        began_at = time.monotonic()
        ended, _ = concurrent.futures.wait([writing.ended_at], PATIENCE)
        if not ended:
            if writing.is_copied:
                logger.info("waiting until the checkpoint of batch %d is on disk", writing.batch)
            concurrent.futures.wait([writing.ended_at])
        paused = writing.paused + time.monotonic() - began_at
        self._writing = None
        seconds = writing.ended_at.result() - writing.started_at
        return Written(writing.batch, seconds, paused)

    def abandon(self) -> None:
        """Removes the files of a checkpoint that is not whole, so that the thread cannot end it."""
        if self._writing is not None and self._ranks.is_first:
            with suppress(OSError):
                files.remove_leftovers(self._folder)

    def _has_room(self, checkpoint: NewCheckpoint) -> bool:
        """True if a copy fits beside the most memory that the run has had, on all ranks.

        Collective.
        """
        state = checkpoint.trainer_state
        copied = [part for name, part in state.items() if name not in checkpoint.copies]
        on_gpu = any(tensor.is_cuda for tensor in copied)
        needed = 0
        if not (on_gpu and self._has_pinned):
            needed = sum(map(_bytes_on_host, copied)) + self._growth(checkpoint)
        available = available_memory()
        has_room = available is None or needed <= available // local_size()
        if not (has_room or self._has_warned):
            self._has_warned = True
            logger.warning(
                "memory is short: the run waits while a checkpoint is written. A copy "
                "needs %.1f GiB, and %.1f GiB are available",
                needed / 2**30,
                (available or 0) / local_size() / 2**30,
            )
        has_room = all(self._ranks.gather(has_room))
        self._has_pinned = has_room and on_gpu
        return has_room

    def _growth(self, checkpoint: NewCheckpoint) -> int:
        """Returns the bytes that the run needs at its peak beside what it has now."""
        if self._peak is None:
            self._peak = process_peak() or 0
        # These copies are there now, and stay until they are on disk.
        copies = [checkpoint.trainer_state[name] for name in checkpoint.copies]
        for weights in checkpoint.whole_weights.values():
            copies += weights.values()
        stays = sum(tensor.nbytes for tensor in copies)
        return max(0, self._peak + stays - (process_memory() or 0))


def _bytes_on_host(tensor: Tensor) -> int:
    """Returns the bytes of a copy in the host's memory."""
    # PyTorch rounds pinned memory up to a power of two.
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes
