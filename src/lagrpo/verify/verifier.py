"""Judge completions in worker processes, each with a deadline.

Every completion ends in one of three outcomes (see `lagrpo.types.Outcome`). An exception, a crash, a hang or a reward
that is no finite number makes that one completion *unscored*, with its reason; its worker is replaced if need be, and
the others are judged as usual. When more than a stated share of a batch has no reward, the run stops.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.context import SpawnContext
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from lagrpo.tasks.base import Judge
from lagrpo.threads import cores
from lagrpo.types import Completion, Group, Outcome
from lagrpo.verify import worker
from lagrpo.workers import Process

_EARLY = 64
_RESTARTS = 3
_PATIENCE = 30.0
_CLOSING = 10.0
MAIN = b"__main__"  # in a pickled judge: it is defined in the main script


class VerifierError(RuntimeError):
    """The run cannot go on: too many completions have no reward, or no worker process can judge."""


class Verifier:
    """Workers that judge completions.

    Args:
        judge: (text, gold) -> reward, picklable by reference.
        workers: number of processes; by default the number of CPUs at hand, at most 4.
        deadline: seconds for one completion.
        memory: GiB that a process may take with everything that it starts (on Linux).
        file_size: GiB that a process may write into one file.
        max_without_reward: largest share of a batch's completions without a reward (unscored or failed).

    The processes start in the background at once, and run until `close` or the end of the `with` block. Raises
    TypeError for a judge that cannot be sent to another process.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        workers: int | None = None,
        deadline: float = 5.0,
        memory: float = 4.0,
        file_size: float = 1.0,
        max_without_reward: float = 0.5,
    ) -> None:
        refuse_in_worker()
        self.deadline = deadline
        self._file_size = int(file_size * 2**30)
        self.max_without_reward = max_without_reward
        self._workers = workers or cores.limit_threads(4, cores.read_quota(), cores.count_cores())
        self._judge = pickle_judge(judge)
        self._context = WorkerContext(self._judge, int(memory * 2**30))
        self._open: dict[_Job, None] = {}
        self._restarts = 0
        self._closed = False
        self._pool = self._start()

    def judge(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups with the outcome of every completion, in the order given.

        Completions are judged while `groups` goes on yielding, and a group is yielded as soon as it and those before it
        are done. A completion that has an outcome already (it failed) keeps it.

        Raises VerifierError where no worker can judge, and where more than `max_without_reward` of the completions got
        no reward (after every group was yielded, or earlier, once 64 completions have an outcome)."""
        pending: deque[tuple[Group, list[_Job | None]]] = deque()
        tally = Tally()
        try:
            for group in groups:
                pending.append((group, [self._submit(group, completion) for completion in group.completions]))
                while pending and all(job is None or job.future.done() for job in pending[0][1]):
                    yield self._collect(*pending.popleft(), tally)
            while pending:
                yield self._collect(*pending.popleft(), tally)
        finally:
            for job in (job for _, jobs in pending for job in jobs if job is not None):
                self._open.pop(job, None)
        if message := describe_excess(tally, self.max_without_reward):
            raise VerifierError(message)

    def close(self) -> None:
        """End the workers, whatever they are doing, within seconds."""
        self._closed = True
        self._open.clear()
        self._stop()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, group: Group, completion: Completion) -> _Job | None:
        """Send a completion to the workers; None for one that has its outcome."""
        if self._closed:
            raise VerifierError("this verifier is closed")
        if completion.outcome is not None:
            return None
        job = _Job(pickle.dumps((completion.text, group.prompt.gold)), Future())
        self._open[job] = None
        self._schedule(job)
        return job

    def _schedule(self, job: _Job) -> None:
        try:
            job.future = self._pool.schedule(worker.give_verdict, args=(job.payload,), timeout=self.deadline)
        except RuntimeError as error:  # the pool has broken down: a process died while it had nothing to do
            self._restart(str(error))

    def _collect(self, group: Group, jobs: list[_Job | None], tally: Tally) -> Group:
        """Wait for the outcomes of the group, and return it with them."""
        pairs = zip(group.completions, jobs, strict=True)
        completions = tuple(replace(c, outcome=self._outcome(job)) if job is not None else c for c, job in pairs)
        judged = replace(group, completions=completions)
        tally.add(judged)
        if tally.completions >= _EARLY and (message := describe_excess(tally, self.max_without_reward)):
            raise VerifierError(message)
        return judged

    def _outcome(self, job: _Job) -> Outcome:
        outcome, answered = None, -1
        while outcome is None:
            try:
                outcome = _read(job.future.result(timeout=self.deadline + _PATIENCE))
            except ProcessExpired as error:
                outcome = Outcome.unscored(_describe_end(error, self._context))
            except (BrokenProcessPool, CancelledError) as error:
                self._restart(f"{error}; {self._context.describe_ends()}".strip("; "))
            except TimeoutError:
                if job.future.done() and isinstance(job.future.exception(), TimeoutError):
                    outcome = Outcome.unscored(f"no verdict within {self.deadline:g} s")
                elif answered == (answered := sum(other.future.done() for other in self._open)):
                    self._restart(f"no verdict on anything for {self.deadline + _PATIENCE:g} s")
        self._open.pop(job, None)
        self._restarts = 0
        return outcome

    def _start(self) -> ProcessPool:
        initial = (self._judge, self.deadline, self._file_size)
        pool = ProcessPool(self._workers, initializer=worker.start, initargs=initial, context=self._context)
        pool.schedule(worker.warm_up)
        return pool

    def _stop(self) -> None:
        self._pool.stop()
        ending = threading.Thread(target=self._pool.join, daemon=True)
        ending.start()
        ending.join(_CLOSING)
        self._context.kill()

    def _restart(self, reason: str) -> None:
        """Start over with new processes and send them everything without a verdict. A pool does not survive the death
        of an idle process."""
        if self._closed:
            raise VerifierError("the verifier was closed while it judged")
        self._restarts += 1
        if self._restarts > _RESTARTS:
            raise VerifierError(
                f"worker processes were started {_RESTARTS} times over without judging anything ({reason}); what they "
                "printed says why. If the judge is defined in your main script: what the script does must be under  "
                "if __name__ == '__main__':"
            )
        self._stop()
        self._pool = self._start()
        for job in list(self._open):
            if not job.future.done() or job.future.cancelled() or isinstance(job.future.exception(), BrokenProcessPool):
                self._schedule(job)


@dataclass(eq=False, slots=True)
class _Job:
    """A completion under way: its pickled (text, gold), and the future verdict."""

    payload: bytes
    future: Future[worker.Verdict]


@dataclass(slots=True)
class Tally:
    """Counts the judged completions and the reasons for missing rewards, with an example for each reason."""

    completions: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        self.completions += len(group.completions)
        for completion in group.completions:
            if (outcome := completion.outcome) is not None and outcome.kind != "scored":
                reason = f"{outcome.kind}: {outcome.reason}"
                self.reasons[reason] += 1
                self.examples.setdefault(reason, f"{completion.text!r:.200}, judged against {group.prompt.gold!r:.100}")


def describe_excess(tally: Tally, max_share: float) -> str | None:
    """The message for the user when more than `max_share` of the completions have no reward; None for fewer.

    >>> describe_excess(Tally(8, Counter({"unscored: no verdict within 5 s": 2})), max_share=0.25) is None
    True
    """
    without_reward, most_common = tally.reasons.total(), tally.reasons.most_common(5)
    if without_reward <= max_share * tally.completions:
        return None
    counts = "\n".join(f"  {count} x {reason}" for reason, count in most_common)
    return (
        f"{without_reward} of {tally.completions} completions have no reward, which is more than the allowed share of "
        f"{max_share:g} (verifier.max_without_reward):\n{counts}\nThe first of the most common kind: "
        f"{tally.examples.get(most_common[0][0], 'not kept')}"
    )


def _read(verdict: worker.Verdict) -> Outcome:
    kind, value = verdict
    if kind == "unloadable":
        raise VerifierError(f"the worker processes cannot load the judge: {value}")
    return Outcome.scored(float(value)) if kind == "scored" else Outcome.unscored(str(value))


def _describe_end(error: ProcessExpired, context: WorkerContext) -> str:
    if error.exitcode == worker.SPOILED:
        return "the judge closed files of its process, lowered its limits or removed its directory"
    return f"the worker process {context.describe_end(error.pid)} while it judged"


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
    if MAIN in data and not getattr(sys.modules["__main__"], "__file__", None):
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


class WorkerContext(SpawnContext):
    """The multiprocessing context of one judge's workers, which may take so many bytes of memory each; it knows the
    processes that it started."""

    def __init__(self, judge: bytes, memory: int) -> None:
        super().__init__()
        self._imports_main, self._memory = MAIN in judge, memory
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
