"""Starts the verifier's worker processes and sends them their judge (see also lagrpo.workers)."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from multiprocessing.context import SpawnContext
from typing import Any

from pebble.pool.process import WORKERS_NAME

from lagrpo.tasks.base import Judge
from lagrpo.workers import Process


def pickle_judge(judge: Judge) -> bytes:
    """Pickle the judge for worker processes: a reference to a function in a module, or an object. Raises TypeError
    where it cannot be pickled."""
    try:
        data = pickle.dumps(judge)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the judge {judge!r} cannot be sent to worker processes ({error}): make it a function at the top level of "
            "a module, not a lambda, a nested function or an object that holds open things"
        ) from error
    if _names_main(data) and not getattr(sys.modules["__main__"], "__file__", None):
        raise TypeError(
            f"the judge {judge!r} was typed at the interactive prompt, where worker processes cannot import it: move "
            "it to a file of its own and import it from there"
        )
    return data


def refuse_in_worker() -> None:
    """Raise RuntimeError in a worker process: only a script that starts its work on import gets here."""
    if multiprocessing.current_process().name == WORKERS_NAME:
        raise RuntimeError(
            "a worker process imported the main script (the judge is defined in it), and the script began its work "
            "again: put what it does under  if __name__ == '__main__':  or move the judge to a file of its own"
        )


def _names_main(judge: bytes) -> bool:
    return b"__main__" in judge


class WorkerContext(SpawnContext):
    """The multiprocessing context of one judge's workers; it knows the processes that it started."""

    def __init__(self, judge: bytes) -> None:
        super().__init__()
        self._imports_main = _names_main(judge)
        self._started: list[Process] = []

    def Process(self, *args: Any, **kwargs: Any) -> Process:  # type: ignore[override]  # noqa: N802
        process = Process(*args, **kwargs)
        process.imports_main = self._imports_main
        self._started = [*(other for other in self._started if other.pid is None or other.is_alive()), process]
        return process

    def kill(self) -> None:
        """Kill every process that is still there."""
        for process in self._started:
            if process.pid is not None:
                process.kill()
