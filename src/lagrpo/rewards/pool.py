"""Scores completions in worker processes, each call with a deadline.

Every completion ends in one of three outcomes (`lagrpo.types.Outcome`). An exception, a crash, a hang or a value that
is not a finite number makes that one completion *unscored*, with the reason. If more than a given share of a batch has
no reward, the run stops. Functions that worker processes cannot import run in the training process, without a deadline.
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
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from lagrpo.rewards import worker
from lagrpo.rewards.reward import Reward, Rewards, as_rewards
from lagrpo.types import Completion, Group, Outcome

logger = logging.getLogger("lagrpo")
BY_MACHINE = ("no reward within ", "the worker process ")
"""How reasons begin that depend on the machine: another one may be faster, or have more memory."""
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


Asked = tuple[Sequence[int], Job]
"""A call under way, and the completions of the group that it is for."""


class WorkerPool:
    """`workers` processes that have loaded `called` and run functions of modules with a deadline. A process may take
    `memory` GiB (Linux). They start at once. Raises TypeError for what cannot be sent to a process."""

    def __init__(self, called: Any, workers: int = 1, memory: float = 4.0) -> None:
        try:
            pickled = pickle.dumps(called)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{called!r} cannot be sent to worker processes ({error}): define it at the top level of a module"
            ) from error
        self._workers, self._given = workers, (pickled, int(memory * 2**30))
        self._lock, self._closed = threading.Lock(), False
        self._pool = self._start()

    def submit(self, call: Callable[..., Any], *arguments: Any, seconds: float) -> Job:
        """Have a process call `call(*arguments)`."""
        job = Job(call, arguments, seconds)
        self._schedule(job)
        return job

    def result(self, job: Job) -> Any:
        """What the call returned, or an unscored Outcome if it did not return. Raises RewardError if the processes
        could not load what they are to call."""
        for _ in range(RESTARTS):
            try:
                return job.future.result()
            except TimeoutError:
                return Outcome.unscored(f"no reward within {job.seconds:g} s")
            except ProcessExpired as error:
                return Outcome.unscored(f"the worker process ended with exit code {error.exitcode}")
            except worker.LoadError as error:
                raise RewardError(f"the worker processes cannot load the reward or environment: {error}") from error
            except (BrokenProcessPool, CancelledError):
                self._schedule(job)
        return Outcome.unscored(f"the worker process ended {RESTARTS} times before it began the call")

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

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> ProcessPool:
        spawn.get_preparation_data = _prepare_without_main
        context = get_context("spawn")
        pool = ProcessPool(self._workers, initializer=worker.start, initargs=self._given, context=context)
        pool.schedule(os.getpid)  # any call starts the processes
        return pool


def _prepare_without_main(name: str) -> dict[str, Any]:
    """What multiprocessing sends to a new process. Workers do not import the main script, which may load PyTorch."""
    given = _prepare(name)
    return {key: value for key, value in given.items() if name != WORKERS_NAME or not key.startswith("init_main")}


class RewardPool:
    """Scores completions by a reward function, or by several `Rewards` (see `lagrpo.rewards.reward`), with `workers`
    processes, `deadline` seconds for one call, `memory` GiB for a process (Linux), and at most this share of a batch's
    completions without a reward (unscored or failed). Raises ValueError for a function of another signature."""

    def __init__(
        self, rewards: Callable[..., Any] | Rewards, *, workers: int = 1, deadline: float = 5.0, memory: float = 4.0,
        max_without_reward: float = 0.5,
    ) -> None:  # fmt: skip
        self.max_without_reward = max_without_reward
        self._rewards, self._deadline = as_rewards(rewards), deadline
        functions = [reward.function if reward.importable else None for reward in self._rewards.parts]
        self._workers = WorkerPool(functions, workers, memory)
        if here := [reward.title for reward in self._rewards.parts if not reward.importable]:
            logger.warning(
                "reward %s runs in the training process, without a deadline, because worker processes cannot import "
                "it: define it at the top level of a module other than the main script", ", ".join(here),
            )  # fmt: skip

    def score(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The groups with the outcome of every completion, in the order given.

        Scoring continues while `groups` yields, and a group is yielded as soon as it and those before it are done. A
        completion that has an outcome already (it failed) keeps it. Raises RewardError if the processes do not work, or
        too many completions have no reward (after every group was yielded, or earlier, once 64 have an outcome)."""
        pending, done = deque[tuple[Group, list[Asked]]](), list[Completion]()
        for group in groups:
            pending.append((group, self._submit(group)))
            while pending and all(job.future.done() for _, job in pending[0][1]):
                yield self._collect(*pending.popleft(), done)
        while pending:
            yield self._collect(*pending.popleft(), done)
        check_share(done, self.max_without_reward)

    def close(self) -> None:
        self._workers.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, group: Group) -> list[Asked]:
        """Call every reward for the completions of a group that have no outcome yet."""
        places, asked = (
            [n for n, c in enumerate(group.completions) if c.outcome is None],
            list[Asked](),
        )
        for number, reward in enumerate(self._rewards.parts if places else ()):
            parts = [places] if reward.style == "trl" or reward.is_async else [[n] for n in places]
            asked += [(part, self._call(number, reward, group, part)) for part in parts]
        return asked

    def _call(self, number: int, reward: Reward, group: Group, places: Sequence[int]) -> Job:
        calls = reward.arguments(group.prompt, [group.completions[n] for n in places])
        seconds = reward.deadline or self._deadline
        given = calls, len(places) if reward.style == "trl" else None, seconds
        if reward.importable:
            limit = seconds + SPARE if reward.is_async else seconds
            return self._workers.submit(worker.score, number, *given, seconds=limit)
        job = Job(worker.call_reward, (reward.function, *given), seconds)
        job.future.set_result(job.call(*job.arguments))
        return job

    def _collect(self, group: Group, all_asked: list[Asked], done: list[Completion]) -> Group:
        """Wait for the outcomes of the group, and return it with them."""
        found: dict[int, list[Outcome]] = {}
        for places, job in all_asked:
            said = self._workers.result(job)  # an outcome for each, or one for all
            for n, outcome in zip(places, said if isinstance(said, list) else [said] * len(places), strict=True):
                found.setdefault(n, []).append(outcome)
        completions = list(group.completions)
        for n, outcomes in found.items():
            completions[n] = replace(completions[n], outcome=self._rewards.combine(outcomes))
        done += completions
        if len(done) >= ENOUGH:
            check_share(done, self.max_without_reward)
        return replace(group, completions=tuple(completions))


def check_share(completions: Sequence[Completion], share: float) -> None:
    """Raise RewardError if more than this share of the completions have no reward."""
    missing = [(c, c.outcome) for c in completions if c.outcome is not None and c.outcome.kind != "scored"]
    if len(missing) > share * len(completions):
        reasons = Counter(f"{outcome.kind}: {outcome.reason}" for _, outcome in missing)
        counts = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(5))
        raise RewardError(
            f"{len(missing)} of {len(completions)} completions have no reward, more than the allowed share of "
            f"{share:g} (verifier.max_without_reward):\n{counts}\nThe first of them: {missing[0][0].text!r:.200}"
        )
