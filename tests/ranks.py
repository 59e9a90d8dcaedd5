"""Ranks: processes that form a group of torch.distributed (gloo), and run a test's functions on request.

They start at the first request and stay for the tests that follow. Every wait has a deadline. Where a rank fails, dies
or is late, the error has what each of them did, all are ended, and the next request starts others.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from warm import forks

STACK = signal.SIGUSR1  # has a rank write down where it is
COLLECTIVE = 30.0  # seconds that a rank waits for others in a collective
STARTED = 120.0  # seconds to start on a busy machine
GRACE = 3.0  # seconds for the others to answer once one has failed, as they may wait for it; and to end


class RanksError(AssertionError):
    """A function failed on a rank, or did not return. Says what each rank did."""


class Ranks:
    """`size` processes. Their files lie in `scratch`."""

    def __init__(self, scratch: Path, size: int = 3) -> None:
        self.size, self._scratch, self._starts = size, scratch, 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *given: Any, size: int | None = None, deadline: float = 60.0) -> list:
        """What function(group, *given) returns on each rank of a group of `size`. The function is one that can be
        imported: on the top level of a module. What it is given, and what it returns, is pickled. Raises RanksError
        where it raises, or where a rank has not returned after `deadline` seconds."""
        size = self.size if size is None else size
        if not self._processes:
            self._start()
        for pipe in self._pipes[:size]:
            pipe.send_bytes(pickle.dumps((function, given, size)))
        return self._answers(size, deadline)

    def close(self) -> None:
        """End them: those that wait for a request by themselves, with what they have started."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        """Start the processes, and wait until they are a group."""
        self._starts += 1
        for rank in range(self.size):
            ours, theirs = forks.Pipe()
            given = (rank, self.size, self._scratch / f"store-{self._starts}", self._log(rank), theirs)
            process = forks.Process(target=_work, args=given, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers(self.size, STARTED)

    def _answers(self, size: int, deadline: float) -> list[Any]:
        end, answers = time.monotonic() + deadline, dict[int, tuple[bool, Any]]()
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:size])}
        while waiting and (ready := connection.wait([*waiting], max(0.0, end - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = self._answer(rank, pipe)
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        if waiting or not all(fine for fine, _ in answers.values()):
            complaints = [self._complaint(rank, answers.get(rank)) for rank in range(size)]
            self.close()
            raise RanksError("\n\n".join(complaints))
        return [answers[rank][1] for rank in range(size)]

    def _answer(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE)
            return False, f"ended with exit code {self._processes[rank].exitcode}"

    def _complaint(self, rank: int, answer: tuple[bool, Any] | None) -> str:
        if answer is not None:
            return f"rank {rank}: {'returned' if answer[0] else answer[1]}"
        process, log = self._processes[rank], self._log(rank)
        if process.is_alive() and log.exists():
            os.kill(process.pid, STACK)
            process.join(GRACE / 10)
        return f"rank {rank}: still running\n{log.read_text() if log.exists() else ''}"

    def _log(self, rank: int) -> Path:
        return self._scratch / f"stack-{self._starts}-{rank}"


def _work(rank: int, size: int, store: Path, log: Path, pipe: Connection) -> None:
    """What a rank does until its pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups = {n: dist.new_group(range(n), timeout=timeout) for n in range(1, size + 1)}
    with log.open("w") as stack, suppress(EOFError, BrokenPipeError):
        faulthandler.register(STACK, file=stack)
        answer = pickle.dumps((True, None))
        while True:
            pipe.send_bytes(answer)
            answer = _returned(groups, pipe.recv_bytes())
    dist.destroy_process_group()


def _returned(groups: dict[int, Any], request: bytes) -> bytes:
    """What a request's function returns or raises, pickled."""
    try:
        function, given, size = pickle.loads(request)
        return pickle.dumps((True, function(groups[size], *given)))
    except BaseException:  # noqa: BLE001   whatever it is, the test is told
        return pickle.dumps((False, traceback.format_exc()))
