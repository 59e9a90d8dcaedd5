"""The parts of a checkpoint that the ranks beside rank 0 write: each its masters and moments, in the background."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from lagrpo.model.learner import Learner
from lagrpo.ranks.world import World
from lagrpo.runs.checkpoints import learner_file, save_tensors
from lagrpo.runs.files import write_atomically

DEADLINE = 3600.0  # seconds for the disk to take a checkpoint


def copied(tensor: Tensor) -> Tensor:
    """In the memory of the host, and nobody else's."""
    return tensor.detach().to("cpu", copy=True)


def have_written(world: World, checkpoints: Path) -> Callable[[], list[Path]]:
    """Rank 0: have every other rank copy its masters and moments, and write them beside the checkpoints. Returns what
    waits for the files, in any thread; it raises OSError where a rank cannot write, or to another file system."""
    folder = checkpoints / f".learner.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    folder.mkdir(parents=True)
    world.lead("copying for a checkpoint", lambda: None, folder)

    def wait() -> list[Path]:
        reports = world.await_reports(folder.name, DEADLINE)
        if failed := {rank: said for rank, said in reports.items() if said}:
            rank = min(failed)
            raise OSError(f"rank {rank}: {failed[rank]}")
        files = [folder / learner_file(rank, world.size) for rank in sorted(reports)]
        if missing := [file for file in files if not file.exists()]:
            raise OSError(
                f"rank {1 + files.index(missing[0])} has written {missing[0]}, which is not there on rank 0: the run's "
                "directory has to be on a file system that all hosts share"
            )
        return files

    return wait


class ShardWriter:
    """On the other ranks: writes what `learner` has at the time, one after the other, and reports to rank 0: nothing,
    or why it could not be written."""

    def __init__(self, world: World, learner: Learner) -> None:
        self._world, self._learner = world, learner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def write(self, folder: Path) -> None:
        copies = {name: copied(tensor) for name, tensor in self._learner.state().items()}
        self._pool.submit(self._write, copies, folder)

    def _write(self, copies: dict[str, Tensor], folder: Path) -> None:
        said = ""
        try:
            file = folder / learner_file(self._world.rank, self._world.size)
            write_atomically(file, partial(save_tensors, copies))
        except Exception as error:  # noqa: BLE001 - rank 0 says what it is
            said = f"{type(error).__name__}: {error}"
        self._world.report(folder.name, said)
