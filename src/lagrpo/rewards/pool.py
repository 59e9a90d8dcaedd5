"""Worker processes with deadlines, and the pool of them that scores completions.

`WorkerPool` makes calls in processes; environments use it too. `RewardPool` scores groups with it.
This is the side of the training process; worker.py is the side of the workers.

A call that hangs or ends its process leaves that one completion *unscored*. Only two errors
stop the run, as RewardError: the workers cannot load the reward, or too many completions have no
reward.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar, TypeVarTuple, cast

from lagrpo.machine import usable_cores
from lagrpo.rewards.processes import (
    LoadError,
    UnreadableAnswerError,
    Worker,
    WorkerEndedError,
)
from lagrpo.rewards.reasons import MachineReason, past_deadline
from lagrpo.rewards.reward import TRL, Reward, RewardFunction, Rewards
from lagrpo.rewards.worker import call_loaded_reward, call_reward
from lagrpo.types import Completion, Group, Outcome, OutcomeKind

logger = logging.getLogger("lagrpo")

MIN_FOR_EARLY_STOP = 64
"""Completions with an outcome from which `RewardPool.score` may stop before a batch is complete."""

MAX_STARTS = 3
"""Times that a process is started for a call if it ends before the call begins."""

ASYNC_GRACE = 2.0
"""Seconds that a call of coroutines has beyond their deadline.

Each coroutine has the deadline itself. If the worker were killed at the same moment, coroutines
that are done would lose their values.
"""


Returned = TypeVar("Returned")
Arguments = TypeVarTuple("Arguments")


class RewardError(RuntimeError):
    """The run cannot continue: the workers do not work, or too many completions have no reward."""


# Calls with a deadline in worker processes


@dataclass(eq=False, slots=True)
class Job(Generic[Returned]):
    """A call in a worker process, which gets the worker's object before these arguments."""

    call: Callable[..., Returned]
    arguments: tuple[object, ...]
    deadline: float  # seconds from when a worker gets the call
    future: Future[Returned | Outcome] = field(default_factory=Future)


def count_workers(ranks: int = 1, scoring_ranks: int = 1) -> int:
    """Returns the number of workers of a rank.

    A host has one per four cores, and at most 8 for each of its `ranks`. The `scoring_ranks` that
    score share them.
    """
    on_host = min(8 * ranks, usable_cores() // 4)
    return max(1, on_host // scoring_ranks)


class WorkerPool:
    """Processes that have loaded the object `called`, and call functions with it, with a deadline.

    By default there are as many workers as `count_workers` says. A worker may use `memory` GiB.
    Raises TypeError if the object cannot be sent to a process.
    """

    def __init__(self, called: object, workers: int | None = None, memory: float = 4.0) -> None:
        try:
            self._pickled = pickle.dumps(called)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{called!r} cannot be sent to worker processes ({error}): "
                "define it at the top level of a module"
            ) from error
        self._memory_bytes = int(memory * 2**30)
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._workers: set[Worker] = set()
        self._load_error: LoadError | None = None
        self._lock = threading.Lock()  # for `_workers` and `_is_closed`
        self._is_closed = False
        num_workers = workers or count_workers()
        # Each thread starts its worker at once, so that workers load the reward functions while
        # this process loads the model.
        self._threads = [
            threading.Thread(target=self._run_jobs, name="lagrpo worker", daemon=True)
            for _ in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        call: Callable[[Any, *Arguments], Returned],
        *arguments: *Arguments,
        deadline: float,
    ) -> Job[Returned]:
        """Has a worker make `call(called, *arguments)`, with a deadline in seconds."""
        job = Job(call, arguments, deadline)
        with self._lock:
            if self._is_closed:
                raise RewardError("the worker processes are closed")
            self._jobs.put(job)
        return job

    def result(self, job: Job[Returned]) -> Returned | Outcome:
        """Waits for a call. Returns its result, or an unscored Outcome if it did not return.

        Raises RewardError if the workers cannot load their object.
        """
        return job.future.result()

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.end()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_jobs(self) -> None:
        """Makes calls in one worker after the other, in a thread, until the pool is closed."""
        worker = self._start_worker()
        for job in iter(self._jobs.get, None):
            try:
                if worker is not None and not worker.is_usable():
                    self._close_worker(worker)
                    worker = None
                worker = worker or self._start_worker()
                job.future.set_result(self._run_job(job, worker))
            except UNUSABLE as error:
                assert worker is not None
                self._close_worker(worker)
                worker = None
                job.future.set_result(_outcome_without_answer(error, job.deadline))
            except BaseException as error:  # noqa: BLE001 - raised by the one who reads the result
                job.future.set_exception(error)
        if worker is not None:
            self._close_worker(worker)

    def _run_job(self, job: Job[Returned], worker: Worker | None) -> Returned | Outcome:
        """Makes a call in a worker. Without one, its outcome is unscored.

        Raises RewardError, and as `Worker.call`.
        """
        if self._is_closed:
            raise RewardError("the worker processes are closed")
        if worker is not None:
            return cast(Returned, worker.call(job.call, job.arguments, job.deadline))
        if self._load_error is not None:
            raise RewardError(
                f"the worker processes cannot load the reward or environment: {self._load_error}"
            ) from self._load_error
        return Outcome.unscored(
            f"{MachineReason.WORKER_ENDED} {MAX_STARTS} times before it began the call"
        )

    def _start_worker(self) -> Worker | None:
        """Returns a worker that has loaded its object, or None if no one can be started."""
        for _ in range(MAX_STARTS):
            with self._lock:
                if self._is_closed:
                    return None
                try:
                    worker = Worker(self._pickled, self._memory_bytes)
                except OSError:  # too many processes or files
                    continue
                self._workers.add(worker)
            try:
                worker.load()
                return worker
            except LoadError as error:
                self._load_error = error
                self._close_worker(worker)
                return None
            except UNUSABLE:
                self._close_worker(worker)
        return None

    def _close_worker(self, worker: Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
            worker.close()


UNUSABLE = (TimeoutError, WorkerEndedError, UnreadableAnswerError)
"""The errors of a call after which its worker cannot be used any more."""


def _outcome_without_answer(error: Exception, deadline: float) -> Outcome:
    """Returns the outcome of a call that its worker has not answered."""
    if isinstance(error, TimeoutError):
        return Outcome.unscored(past_deadline(deadline))
    if isinstance(error, WorkerEndedError):
        return Outcome.unscored(f"{MachineReason.WORKER_ENDED} with exit code {error.exit_code}")
    return Outcome.unscored(f"{MachineReason.WORKER_ENDED}: its answer could not be read")


# Scoring


@dataclass(frozen=True, slots=True)
class RewardJob:
    """A call of one reward function for some completions of a group."""

    reward_index: int
    completion_indices: Sequence[int]
    job: Job[list[Outcome]]  # its result: an outcome for each of these completions


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group whose completions are being scored."""

    group: Group
    completion_indices: Sequence[int]  # the completions that get an outcome
    reward_jobs: Sequence[RewardJob]

    def is_done(self) -> bool:
        return all(reward_job.job.future.done() for reward_job in self.reward_jobs)


class RewardPool(WorkerPool):
    """Scores completions by a reward function, or by several `Rewards`.

    A call has `deadline` seconds. At most the share `max_without_reward` of the completions of one
    `score` may stay without a reward. Functions that a worker cannot import run in this process,
    without a deadline.
    """

    def __init__(
        self,
        rewards: RewardFunction | Rewards,
        *,
        deadline: float = 5.0,
        workers: int | None = None,
        memory: float = 4.0,
        max_without_reward: float = 0.5,
    ) -> None:
        self._rewards = Rewards.from_reward(rewards)
        self._deadline = deadline
        self._max_without_reward = max_without_reward
        # Workers find a function by its index, so a function that runs here leaves a None.
        functions = [
            reward.function if reward.is_importable else None for reward in self._rewards.parts
        ]
        super().__init__(functions, workers, memory)
        local_titles = [reward.title for reward in self._rewards.parts if not reward.is_importable]
        if local_titles:
            logger.warning(
                "reward %s runs in the training process, without a deadline; to get a deadline, "
                "define it at the top level of a module other than the main script",
                ", ".join(local_titles),
            )

    def score(
        self, groups: Iterable[Group], *, max_without_reward: float | None = None
    ) -> Iterator[Group]:
        """Yields the groups, in their order, with the outcomes of their completions.

        A group is submitted as soon as `groups` yields it, so scoring overlaps with sampling. A
        group is yielded when it and all groups before it are done. A completion that already has
        an outcome keeps it: its sampler failed. `max_without_reward` replaces the pool's share.

        Raises RewardError if the workers do not work, or if too many completions have no reward:
        after the last group, or earlier, once MIN_FOR_EARLY_STOP completions have an outcome.
        """
        max_share = self._max_without_reward if max_without_reward is None else max_without_reward
        pending: deque[PendingGroup] = deque()
        finished: list[Completion] = []  # of all groups so far
        for group in groups:
            pending.append(self._submit_group(group))
            while pending and pending[0].is_done():
                yield self._collect(pending.popleft(), finished, max_share)
        while pending:
            yield self._collect(pending.popleft(), finished, max_share)
        _check_share(finished, max_share)

    def check_groups(self, groups: Iterable[Group]) -> None:
        """Raises RewardError if too many completions of these groups together have no reward."""
        completions = [completion for group in groups for completion in group.completions]
        _check_share(completions, self._max_without_reward)

    def _submit_group(self, group: Group) -> PendingGroup:
        """Calls every reward function for the completions that it is to score."""
        unscored = [
            index
            for index, completion in enumerate(group.completions)
            if self._needs_rewards(completion)
        ]
        reward_jobs: list[RewardJob] = []
        for reward_index, reward in enumerate(self._rewards.parts):
            to_score = [
                index
                for index in unscored
                if not _is_given(reward, group.completions[index].outcome)
            ]
            for completion_indices in _split_calls(reward, to_score):
                job = self._call_reward(reward_index, group, completion_indices)
                reward_jobs.append(RewardJob(reward_index, completion_indices, job))
        return PendingGroup(group, unscored, reward_jobs)

    def _needs_rewards(self, completion: Completion) -> bool:
        """True for a completion without an outcome, or with no more than its environment's."""
        outcome = completion.outcome
        if outcome is None or outcome.kind == OutcomeKind.ANSWERED:
            return True
        is_scored_by_environment = bool(completion.turns) and outcome.kind == OutcomeKind.SCORED
        return self._rewards.have_environment and is_scored_by_environment and not outcome.parts

    def _call_reward(
        self, reward_index: int, group: Group, completion_indices: Sequence[int]
    ) -> Job[list[Outcome]]:
        """Calls one reward function for some completions of a group."""
        reward = self._rewards.parts[reward_index]
        completions = [group.completions[index] for index in completion_indices]
        calls = reward.arguments(group.prompt, completions)
        list_length = len(completions) if reward.style == TRL else None
        if not reward.is_importable:
            outcomes = call_reward(reward.function, calls, list_length, self._deadline)
            # The call is over. The job only carries its outcomes to `_collect`.
            finished_job = Job(call_reward, (), self._deadline)
            finished_job.future.set_result(outcomes)
            return finished_job
        call = partial(
            call_loaded_reward,
            reward_index=reward_index,
            calls=calls,
            list_length=list_length,
            deadline=self._deadline,
        )
        grace = ASYNC_GRACE if reward.is_async else 0.0
        return self.submit(call, deadline=self._deadline + grace)

    def _collect(
        self, pending: PendingGroup, finished: list[Completion], max_share: float
    ) -> Group:
        """Waits for a group's outcomes, and returns the group with them.

        Adds the completions to `finished`. Raises RewardError if more than the share `max_share` of
        these have no reward.
        """
        # Of each completion, one per reward that was called, by the reward's index.
        outcomes: dict[int, dict[int, Outcome]] = {}
        for reward_job in pending.reward_jobs:
            job_outcomes = self.result(reward_job.job)
            if isinstance(job_outcomes, Outcome):  # the call did not return: one for all
                job_outcomes = [job_outcomes] * len(reward_job.completion_indices)
            for index, outcome in zip(reward_job.completion_indices, job_outcomes, strict=True):
                outcomes.setdefault(index, {})[reward_job.reward_index] = outcome

        completions = list(pending.group.completions)
        for index in pending.completion_indices:
            completion = completions[index]
            outcome = self._combine(completion, outcomes.get(index, {}))
            completions[index] = replace(completion, outcome=outcome)

        finished += completions
        if len(finished) >= MIN_FOR_EARLY_STOP:
            _check_share(finished, max_share)
        return replace(pending.group, completions=tuple(completions))

    def _combine(
        self, completion: Completion, outcomes_of_rewards: Mapping[int, Outcome]
    ) -> Outcome:
        """Returns the outcome of a completion from the rewards that were called, by index.

        An environment has given the reason why the episode ended, and maybe its own reward.
        """
        given = completion.outcome
        outcomes: list[Outcome] = []
        for reward_index, reward in enumerate(self._rewards.parts):
            if given is not None and _is_given(reward, given):
                outcomes.append(given)
            else:
                outcomes.append(outcomes_of_rewards[reward_index])
        outcome = self._rewards.combine(outcomes)
        if given is None:
            return outcome
        return replace(outcome, reason=outcome.reason or given.reason)


def _is_given(reward: Reward, outcome: Outcome | None) -> bool:
    """True if the environment has given this reward of a completion with this outcome."""
    return reward.is_of_environment and outcome is not None and outcome.kind == OutcomeKind.SCORED


def _split_calls(reward: Reward, completion_indices: Sequence[int]) -> list[Sequence[int]]:
    """Splits the completions of a group over calls to a worker.

    TRL's signature takes all completions of a prompt in one call. Coroutines run concurrently in
    one call. All others go one by one, so that a hang or a crash costs one completion.
    """
    if not completion_indices:
        return []
    if reward.style == TRL or reward.is_async:
        return [completion_indices]
    return [[index] for index in completion_indices]


def _check_share(completions: Sequence[Completion], max_share: float) -> None:
    """Raises RewardError if more than the share `max_share` of the completions have no reward."""
    without_reward: list[Completion] = []
    reasons: Counter[str] = Counter()
    for completion in completions:
        outcome = completion.outcome
        if outcome is not None and outcome.kind != OutcomeKind.SCORED:
            without_reward.append(completion)
            reasons[f"{outcome.kind}: {outcome.reason}"] += 1
    if len(without_reward) <= max_share * len(completions):
        return
    counts = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(5))
    raise RewardError(
        f"{len(without_reward)} of {len(completions)} completions have no reward, "
        f"more than the allowed share of {max_share:g}:\n{counts}\n"
        f"The first of them: {without_reward[0].text!r:.200}"
    )
