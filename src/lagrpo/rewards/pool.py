"""Scores completions in worker processes (pebble's), each call with a deadline and a limit of memory.

An exception, a crash, a hang or a value that is not a finite number makes that one completion *unscored*. Functions
that worker processes cannot import run in the training process, without a deadline.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, spawn
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from lagrpo.machine import usable_cores
from lagrpo.rewards.reward import TRL, Rewards
from lagrpo.rewards.worker import LoadError, score, start_worker
from lagrpo.types import Completion, Group, Outcome

logger = logging.getLogger("lagrpo")
BY_MACHINE = (
    "no reward within ",
    "the worker process ",
)  # how reasons begin that depend on the machine
ENOUGH = 64  # completions after which a batch is stopped early
RESTARTS = 3
SPARE = 2.0  # seconds for a call of coroutines, which have deadlines themselves
_prepare = spawn.get_preparation_data


class RewardError(RuntimeError):
    """The run cannot continue: too many completions have no reward, or the worker processes do not work."""


@dataclass(eq=False, slots=True)
class Job:
    """A call under way in a pool."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    seconds: float
    future: Future[Any] = field(default_factory=Future)


class WorkerPool:
    """`workers` processes that have loaded `called` and run functions of modules with a deadline: by default a quarter
    of the cores, at most 8. A process may take `memory` GiB. Raises TypeError for what cannot be sent to a process."""

    def __init__(self, called: Any, workers: int | None = None, memory: float = 4.0) -> None:
        try:
            pickled = pickle.dumps(called)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            cure = "define it at the top level of a module"
            raise TypeError(
                f"{called!r} cannot be sent to worker processes ({error}): {cure}"
            ) from error
        self._workers = workers or max(1, min(8, usable_cores() // 4))
        self._given = pickled, int(memory * 2**30)
        self._lock, self._closed = threading.Lock(), False
        self._pool = self._start()

    def submit(self, call: Callable[..., Any], *arguments: Any, seconds: float) -> Job:
        """Have a process call `call(*arguments)`."""
        job = Job(call, arguments, seconds)
        self._schedule(job)
        return job

    def result(self, job: Job) -> Any:
        """What the call returned, or an unscored Outcome if it did not return. Raises RewardError."""
        for _ in range(RESTARTS):
            try:
                return job.future.result()
            except TimeoutError:
                return Outcome.unscored(f"no reward within {job.seconds:g} s")
            except ProcessExpired as error:
                return Outcome.unscored(f"the worker process ended with exit code {error.exitcode}")
            except LoadError as error:
                raise RewardError(
                    f"the worker processes cannot load the reward or environment: {error}"
                ) from error
            except (BrokenProcessPool, CancelledError):
                self._schedule(job)
        return Outcome.unscored(
            f"the worker process ended {RESTARTS} times before it began the call"
        )

    def _schedule(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                raise RewardError("the worker processes are closed")
            if not self._pool.active:  # pebble's pool breaks if a process dies between two calls
                self._pool.stop()
                self._pool.join()
                self._pool = self._start()
            job.future = self._pool.schedule(job.call, job.arguments, timeout=job.seconds)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closed = True
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> ProcessPool:
        spawn.get_preparation_data = _prepare_without_main
        context = get_context("spawn")
        pool = ProcessPool(
            self._workers, initializer=start_worker, initargs=self._given, context=context
        )
        pool.schedule(os.getpid)  # any call starts the processes
        return pool


def _prepare_without_main(name: str) -> dict[str, Any]:
    """What multiprocessing sends to a new process: workers do not import the main script."""
    given = _prepare(name)
    return {
        key: value
        for key, value in given.items()
        if name != WORKERS_NAME or not key.startswith("init_main")
    }


class RewardPool(WorkerPool):
    """Scores completions by a reward function, or by several `Rewards`, with `deadline` seconds for one call, and at
    most this share of a batch's completions without a reward."""

    def __init__(
        self,
        rewards: Callable[..., Any] | Rewards,
        *,
        deadline: float = 5.0,
        workers: int | None = None,
        memory: float = 4.0,
        max_without_reward: float = 0.5,
    ) -> None:
        self._rewards, self._deadline, self._share = (
            Rewards.from_reward(rewards),
            deadline,
            max_without_reward,
        )
        functions = [
            reward.function if reward.importable else None for reward in self._rewards.parts
        ]
        super().__init__(functions, workers, memory)
        if here := [reward.title for reward in self._rewards.parts if not reward.importable]:
            cure = "to get a deadline, define it at the top level of a module other than the main script"
            logger.warning(
                "reward %s runs in the training process, without a deadline; %s",
                ", ".join(here),
                cure,
            )

    def score(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups with the outcome of every completion, in the order given, each as soon as it is done. A completion
        that failed keeps its outcome. Raises RewardError if the processes do not work, or too many completions have no
        reward (after every group was yielded, or earlier, once 64 have an outcome)."""
        pending, done = deque[tuple[Group, list[tuple[Sequence[int], Job]]]](), list[Completion]()
        for group in groups:
            pending.append((group, list(self._call_rewards(group))))
            while pending and all(job.future.done() for _, job in pending[0][1]):
                yield self._collect(*pending.popleft(), done)
        while pending:
            yield self._collect(*pending.popleft(), done)
        check_share(done, self._share)

    def _call_rewards(self, group: Group) -> Iterator[tuple[Sequence[int], Job]]:
        """Call every reward for the completions without an outcome: places in the group, and the call for them."""
        places = [n for n, completion in enumerate(group.completions) if completion.outcome is None]
        for number, reward in enumerate(self._rewards.parts if places else ()):
            together = reward.style == TRL or reward.is_async
            for part in [places] if together else [[n] for n in places]:
                calls = reward.arguments(group.prompt, [group.completions[n] for n in part])
                given = calls, len(part) if reward.style == TRL else None, self._deadline
                if reward.importable:
                    job = self.submit(
                        score, number, *given, seconds=self._deadline + SPARE * reward.is_async
                    )
                else:
                    job = Job(score, (), self._deadline)
                    job.future.set_result(score(reward.function, *given))
                yield part, job

    def _collect(
        self, group: Group, jobs: Sequence[tuple[Sequence[int], Job]], done: list[Completion]
    ) -> Group:
        """Wait for the outcomes of the group, and return it with them."""
        found: dict[int, list[Outcome]] = {}
        for places, job in jobs:
            said = self.result(job)  # an outcome for each, or one for all
            for n, outcome in zip(
                places, said if isinstance(said, list) else [said] * len(places), strict=True
            ):
                found.setdefault(n, []).append(outcome)
        completions = list(group.completions)
        for n, outcomes in found.items():
            completions[n] = replace(completions[n], outcome=self._rewards.combine(outcomes))
        done += completions
        if len(done) >= ENOUGH:
            check_share(done, self._share)
        return replace(group, completions=tuple(completions))


def check_share(completions: Sequence[Completion], share: float) -> None:
    """Raise RewardError if more than this share of the completions have no reward."""
    missing = [
        (c, c.outcome) for c in completions if c.outcome is not None and c.outcome.kind != "scored"
    ]
    if len(missing) > share * len(completions):
        reasons = Counter(
            f"{outcome.kind}: {outcome.reason}" for _, outcome in missing
        ).most_common(5)
        counts = "\n".join(f"  {count} x {reason}" for reason, count in reasons)
        said = f"more than the allowed share of {share:g}:\n{counts}\nThe first of them: {missing[0][0].text!r:.200}"
        raise RewardError(
            f"{len(missing)} of {len(completions)} completions have no reward, {said}"
        )
