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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.context import SpawnContext
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from lagrpo.tasks.base import Judge, Messages
from lagrpo.tasks.rewards import Answer, Rewards
from lagrpo.threads import cores
from lagrpo.types import Completion, Group, Outcome
from lagrpo.verify import worker
from lagrpo.workers import Process

_EARLY = 64
_RESTARTS = 3
_PATIENCE = 30.0
_CLOSING = 10.0
_SPARE = 2.0  # seconds for a worker whose calls keep a deadline themselves
MAIN = b"__main__"  # in a pickled judge: it is defined in the main script


class VerifierError(RuntimeError):
    """The run cannot go on: too many completions have no reward, or no worker process can judge."""


class Verifier:
    """Workers that judge completions.

    Args:
        judge: (text, gold) -> reward, picklable by reference; or several `Rewards`, each with calls of its own.
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
        judge: Judge | Rewards,
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
        self._rewards = judge.of if isinstance(judge, Rewards) else ()
        self._combine = judge.combine if isinstance(judge, Rewards) else _only
        self._longest = max([deadline, *(reward.deadline or 0.0 for reward in self._rewards)])
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
        pending: deque[tuple[Group, list[_Job]]] = deque()
        tally = Tally()
        try:
            for group in groups:
                pending.append((group, [self._submit(job) for job in self._jobs(group)]))
                while pending and all(job.future.done() for job in pending[0][1]):
                    yield self._collect(*pending.popleft(), tally)
            while pending:
                yield self._collect(*pending.popleft(), tally)
        finally:
            for job in (job for _, jobs in pending for job in jobs):
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

    def _jobs(self, group: Group) -> Iterator[_Job]:
        """What the workers are asked of a group: of each completion that has no outcome yet, and of its rewards one by
        one."""
        places = [n for n, completion in enumerate(group.completions) if completion.outcome is None]
        if not self._rewards:
            for n in places:
                payload = pickle.dumps((group.completions[n].text, group.prompt.gold))
                yield _Job(payload, (n,), self.deadline)
        for number, reward in enumerate(self._rewards if places else ()):
            seconds, whole = reward.deadline or self.deadline, reward.whole_groups
            messages = group.prompt.messages if reward.takes == "answer" else ()
            answers = {n: _answer(group.completions[n], group.prompt.gold, messages) for n in places}
            for own in [places] if whole else [[n] for n in places]:
                payload = pickle.dumps((number, [answers[n] for n in own]))
                yield _Job(payload, tuple(own), seconds, _SPARE if reward.waits else 0.0)

    def _submit(self, job: _Job) -> _Job:
        """Send a job to the workers."""
        if self._closed:
            raise VerifierError("this verifier is closed")
        self._open[job] = None
        self._schedule(job)
        return job

    def _schedule(self, job: _Job) -> None:
        call: Any = worker.give_verdicts if self._rewards else worker.give_verdict
        given = (job.payload, job.deadline) if self._rewards else (job.payload,)
        try:
            job.future = self._pool.schedule(call, args=given, timeout=job.deadline + job.spare)
        except RuntimeError as error:  # the pool has broken down: a process died while it had nothing to do
            self._restart(str(error))

    def _collect(self, group: Group, jobs: list[_Job], tally: Tally) -> Group:
        """Wait for the outcomes of the group, and return it with them."""
        found: dict[int, list[Outcome]] = {}
        for job in jobs:
            for n, outcome in zip(job.places, self._outcomes(job), strict=True):
                found.setdefault(n, []).append(outcome)
        completions = [
            replace(c, outcome=self._combine(found[n])) if n in found else c for n, c in enumerate(group.completions)
        ]
        judged = replace(group, completions=tuple(completions))
        tally.add(judged)
        if tally.completions >= _EARLY and (message := describe_excess(tally, self.max_without_reward)):
            raise VerifierError(message)
        return judged

    def _outcomes(self, job: _Job) -> list[Outcome]:
        """What became of each completion of a job."""
        outcomes, answered = None, -1
        while outcomes is None:
            try:
                outcomes = _read(job.future.result(timeout=self._longest + _PATIENCE))
            except ProcessExpired as error:
                outcomes = [Outcome.unscored(_describe_end(error, self._context))]
            except (BrokenProcessPool, CancelledError) as error:
                self._restart(f"{error}; {self._context.describe_ends()}".strip("; "))
            except TimeoutError:
                if job.future.done() and isinstance(job.future.exception(), TimeoutError):
                    outcomes = [Outcome.unscored(f"no verdict within {job.deadline:g} s")]
                elif answered == (answered := sum(other.future.done() for other in self._open)):
                    self._restart(f"no verdict on anything for {self._longest + _PATIENCE:g} s")
        self._open.pop(job, None)
        self._restarts = 0
        return outcomes * len(job.places) if len(outcomes) == 1 else outcomes

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
    """Completions under way: what the worker gets, which of their group they are, the seconds for a verdict (and those
    to spare where the worker itself keeps them), and the future verdict, or verdicts."""

    payload: bytes
    places: tuple[int, ...]
    deadline: float
    spare: float = 0.0
    future: Future[Any] = field(default_factory=Future)


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


def _answer(completion: Completion, gold: Any, messages: Messages) -> Answer:
    return Answer(completion.text, gold, messages, completion.length, completion.finished)


def _only(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that a single judge gives."""
    return outcomes[0]


def _read(answer: worker.Verdict | list[worker.Verdict]) -> list[Outcome]:
    return [_outcome(verdict) for verdict in (answer if isinstance(answer, list) else [answer])]


def _outcome(verdict: worker.Verdict) -> Outcome:
    kind, value = verdict
    if kind == "unloadable":
        raise VerifierError(f"the worker processes cannot load the judge: {value}")
    return Outcome.scored(float(value)) if kind == "scored" else Outcome.unscored(str(value))


def _describe_end(error: ProcessExpired, context: WorkerContext) -> str:
    if error.exitcode == worker.SPOILED:
        return "the judge closed files of its process, lowered its limits or removed its directory"
    return f"the worker process {context.describe_end(error.pid)} while it judged"


def pickle_judge(judge: Judge | Rewards) -> bytes:
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
