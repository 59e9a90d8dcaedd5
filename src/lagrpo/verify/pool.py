"""Worker processes that call a user's function, each call with a deadline: a judge, or what makes environments.

An exception, a crash, a hang or more memory than allowed ends that one call with a reason. Its process is replaced if
need be, and the other calls go on.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from lagrpo.threads import usable_cores
from lagrpo.verify import worker
from lagrpo.verify.verdicts import Verdict, What
from lagrpo.workers import Process

_RESTARTS = 3
_PATIENCE = 30.0
_CLOSING = 10.0
_GIVES = {"judge": "verdict", "environment": "reply"}
_DOES = {"judge": "it judged", "environment": "the environment replied"}
MAIN = b"__main__"  # in a pickled function: it is defined in the main script


class VerifierError(RuntimeError):
    """The run cannot go on: too many completions have no reward, or no worker process can judge."""


@dataclass(eq=False, slots=True)
class Job:
    """A call under way: the function of worker.py, its pickled arguments, the seconds that it has (and those to spare
    where it keeps them itself), the pool that has it, and what comes of it."""

    call: Callable[[bytes], Verdict]
    payload: bytes
    seconds: float
    spare: float
    pool: ProcessPool
    future: Future[Verdict] = field(default_factory=Future)

    def done(self) -> bool:
        """Whether `Workers.result` need not wait, unless processes must be started over."""
        return self.future.done()


class Workers:
    """Processes for `called`, which error messages name `what`. They start in the background at once, and run until
    `close`. Any thread may use them.

    Args:
        called: picklable by reference.
        what: "judge" or "environment".
        workers: number of processes; by default the number of CPUs at hand, at most 4.
        deadline: seconds for a call that has no deadline of its own.
        memory: GiB that a process may take with everything that it starts (on Linux).
        file_size: GiB that a process may write into one file.

    Raises TypeError for what cannot be sent to another process.
    """

    def __init__(
        self, called: Any, what: What, workers: int | None, deadline: float, memory: float, file_size: float,
    ) -> None:  # fmt: skip
        refuse_in_worker(what)
        self._deadline = self._longest = deadline
        self._what: What = what
        self._file_size = int(file_size * 2**30)
        self._workers = workers or min(4, usable_cores())
        self._called = pickle_called(called, what)
        self._context = WorkerContext(self._called, int(memory * 2**30))
        self._open: dict[Job, None] = {}
        self._restarts = 0
        self._closed = False
        self._lock = threading.RLock()
        self._pool = self._start()

    def submit(
        self, call: Callable[[bytes], Verdict], *arguments: Any, seconds: float | None = None, spare: float = 0.0
    ) -> Job:
        """Have a process call a function of worker.py. The call has `seconds`, by default the deadline of all; `spare`
        seconds later its process is ended."""
        if self._closed:
            raise VerifierError("this verifier is closed")
        job = Job(call, pickle.dumps(arguments), seconds or self._deadline, spare, self._pool)
        with self._lock:
            self._longest = max(self._longest, job.seconds)
            self._open[job] = None
            self._schedule(job)
        return job

    def forget(self, job: Job) -> None:
        """Nobody will ask for its result."""
        self._open.pop(job, None)

    def result(self, job: Job) -> Verdict:
        """Wait for what the call gave, or why it gave nothing. Raises VerifierError where no process can do it."""
        found, answered = None, -1
        while found is None:
            pool, patience = job.pool, self._longest + _PATIENCE
            try:
                found = job.future.result(timeout=patience)
            except ProcessExpired as error:
                found = "unscored", _describe_end(error, self._context, self._what)
            except (BrokenProcessPool, CancelledError) as error:
                self._restart(f"{error}; {self._context.describe_ends()}".strip("; "), pool)
            except TimeoutError:
                if job.future.done() and isinstance(job.future.exception(), TimeoutError):
                    found = "unscored", f"no {_GIVES[self._what]} within {job.seconds:g} s"
                elif answered == (answered := sum(other.future.done() for other in list(self._open))):
                    self._restart(f"no {_GIVES[self._what]} on anything for {patience:g} s", pool)
        self.forget(job)
        self._restarts = 0
        if found[0] == "unloadable":
            raise VerifierError(f"the worker processes cannot load the {self._what}: {found[1]}")
        return found

    def close(self) -> None:
        """End the processes, whatever they are doing, within seconds."""
        self._closed = True
        self._open.clear()
        self._stop()

    def _schedule(self, job: Job) -> None:
        try:
            job.future = self._pool.schedule(job.call, args=(job.payload,), timeout=job.seconds + job.spare)
            job.pool = self._pool  # last: a thread that saw the old future must not take this pool for the broken one
        except RuntimeError as error:  # the pool has broken down: a process died while it had nothing to do
            self._restart(str(error), self._pool)

    def _start(self) -> ProcessPool:
        initial = (self._called, self._deadline, self._file_size)
        pool = ProcessPool(self._workers, initializer=worker.start, initargs=initial, context=self._context)
        pool.schedule(worker.warm_up)
        return pool

    def _stop(self) -> None:
        self._pool.stop()
        ending = threading.Thread(target=self._pool.join, daemon=True)
        ending.start()
        ending.join(_CLOSING)
        self._context.kill()

    def _restart(self, reason: str, broken: ProcessPool) -> None:
        """Start over with new processes and send them everything without a result, unless another thread has done so. A
        pool does not survive the death of an idle process."""
        with self._lock:
            if self._closed:
                raise VerifierError("the verifier was closed while it judged")
            if self._pool is not broken:
                return
            self._restarts += 1
            if self._restarts > _RESTARTS:
                raise VerifierError(
                    f"worker processes were started {_RESTARTS} times over without judging anything ({reason}); what "
                    f"they printed says why. If the {self._what} is defined in your main script: what the script does "
                    "must be under  if __name__ == '__main__':"
                )
            self._stop()
            self._pool = self._start()
            for job in list(self._open):
                if _is_lost(job.future):
                    self._schedule(job)


def _is_lost(future: Future[Verdict]) -> bool:
    return not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool)


def _describe_end(error: ProcessExpired, context: WorkerContext, what: What) -> str:
    if error.exitcode == worker.SPOILED:
        return f"the {what} closed files of its process, lowered its limits or removed its directory"
    return f"the worker process {context.describe_end(error.pid)} while {_DOES[what]}"


def pickle_called(called: Any, what: str) -> bytes:
    """Pickle a judge or an environment for worker processes: a reference to a function in a module, or an object.
    Raises TypeError where it cannot be pickled."""
    try:
        data = pickle.dumps(called)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the {what} {called!r} cannot be sent to worker processes ({error}): make it a function at the top level "
            "of a module, not a lambda, a nested function or an object that holds open things"
        ) from error
    if MAIN in data and not getattr(sys.modules["__main__"], "__file__", None):
        raise TypeError(
            f"the {what} {called!r} was typed at the interactive prompt, where worker processes cannot import it: move "
            "it to a file of its own and import it from there"
        )
    return data


def refuse_in_worker(what: str) -> None:
    """Raise RuntimeError in a worker process: only a script that starts its work on import gets here."""
    if multiprocessing.current_process().name == WORKERS_NAME:
        raise RuntimeError(
            f"a worker process imported the main script (the {what} is defined in it), and the script began its work "
            f"again: put what it does under  if __name__ == '__main__':  or move the {what} to a file of its own"
        )


class WorkerContext(SpawnContext):
    """The multiprocessing context of one pool's workers, which may take so many bytes of memory each; it knows the
    processes that it started."""

    def __init__(self, called: bytes, memory: int) -> None:
        super().__init__()
        self._imports_main, self._memory = MAIN in called, memory
        self._started: list[Process] = []
        self._ends: dict[int | None, str] = {}

    def Process(self, *args: Any, **kwargs: Any) -> Process:  # type: ignore[override]  # noqa: N802
        process = worker.JudgeProcess(*args, **kwargs)
        process.imports_main, process.memory = self._imports_main, self._memory
        ended = {other: end for other in self._started if (end := other.end)}
        self._ends.update((other.pid, end) for other, end in ended.items())
        self._started = [*(other for other in self._started if other not in ended), process]
        return process

    def describe_end(self, process: int | None) -> str:
        """How the process with this id ended, as a phrase."""
        ends = {other.pid: other.end for other in self._started if other.end}
        return ends.get(process) or self._ends.get(process) or "ended"

    def describe_ends(self) -> str:
        """How the processes ended that were not replaced yet."""
        return ", ".join(f"a worker process {other.end}" for other in self._started if other.end)

    def kill(self) -> None:
        """Kill every process that is still there."""
        for process in self._started:
            if process.pid is not None:
                process.kill()
