"""Judges completions in a worker process: one at a time, or the group of a reward that takes whole groups.

This imports neither torch nor transformers, so a worker starts in about a tenth of a second and takes little memory
(besides what the judge's own module imports). Judging runs beside sampling and learning, which wait for all their
threads, so a worker gives way to them and computes with one thread. A verdict travels as a pair: ("scored", reward),
("unscored", reason), or ("unloadable", reason) where this process could not load the judge.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from lagrpo.redaction import redact_start
from lagrpo.tasks.base import Judge, Unjudgeable
from lagrpo.tasks.rewards import Answer, Reward, Rewards
from lagrpo.verify.surroundings import Surroundings
from lagrpo.workers import Process, die_with_parent, limit_cpu_time

Verdict = tuple[str, float | str]
T = TypeVar("T")

SPOILED = 100  # exit code: the process cannot be made as it was before the judge's call
POLITENESS = 5  # niceness: of a core that both want, the policy gets three quarters and the judge one
_SPARE_SECONDS = 5
_LONGEST_REASON = 300
_READ = 4096  # characters of a judge's text that are searched for secrets, for a reason
_LONGEST_VALUE = 60  # characters of a value that is no reward
_LONGEST_INTEGER = 10_000  # bits: Python writes no more than 4,300 digits
_SILENT = "ignore:resource_tracker:UserWarning"  # for the tracker, which gets our warning options
_SEGMENTS = "/dev/shm"  # where Linux lists them; elsewhere every segment counts as our own

_judge: Judge | Rewards | None = None
_problem = ""
_deadline = math.inf
_process = 0


class JudgeProcess(Process):
    """A worker process, which never ends itself: not with exit code 0 either, which a pool takes for a proper end."""

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return 1 if code == 0 else code


def start(judge: bytes, deadline: float, file_size: int) -> None:
    """Prepare this process: give way to the policy, limit every file that it writes to `file_size` bytes, load the
    judge, end with the parent, leave nothing behind. SIGTERM keeps its default effect, because a handler in Python
    would wait for a judge that hangs in C code."""
    global _judge, _problem, _deadline, _process
    _process = os.getpid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is blocked; starting a resource tracker unblocks it
    track_alone()
    _give_way()
    _limit_files(file_size)
    threading.Thread(target=die_with_parent, daemon=True).start()
    _deadline = deadline
    try:
        _judge = pickle.loads(judge)
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
        _problem = _describe(error)


def warm_up() -> None:
    """Do nothing: scheduling this makes the pool start its processes."""


def give_verdict(payload: bytes) -> Verdict:
    """The verdict on a pickled (text, gold)."""
    return _undisturbed(_deadline, lambda judge: _ask(lambda: judge(*pickle.loads(payload))), lambda verdict: verdict)


def give_verdicts(payload: bytes, seconds: float) -> list[Verdict]:
    """The verdicts of one of several rewards on a pickled (number of the reward, answers), where a call has so many
    seconds: one for each answer, or one for all."""

    def judge(rewards: Rewards) -> list[Verdict]:
        number, answers = pickle.loads(payload)
        return _ask_reward(rewards.of[number], answers, seconds)

    return _undisturbed(seconds, judge, lambda verdict: [verdict])


def _undisturbed(seconds: float, call: Callable[[Any], T], make: Callable[[Verdict], T]) -> T:
    """What `call` returns for the judge, whatever the judge does to this process; `make` makes it of a verdict where
    there is nothing to return."""
    if _judge is None:
        return make(("unloadable", _problem))
    limit_cpu_time((seconds + _SPARE_SECONDS) * (os.cpu_count() or 1))
    before = Surroundings.read()
    try:
        return call(_judge)
    except BaseException as error:  # noqa: BLE001 - an exception whose own text raises one
        return make(("unscored", f"the judge raised {type(error).__name__}"))
    finally:
        if os.getpid() != _process:  # the judge has forked, and this is the copy
            os._exit(0)
        try:
            before.put_back()
        except (OSError, ValueError):
            os._exit(SPOILED)


def _ask(call: Callable[[], object]) -> Verdict:
    try:
        return _score(call())
    except BaseException as error:  # noqa: BLE001 - whatever a judge raises, sys.exit too, concerns this completion only
        return _refusal(error)


def _refusal(error: BaseException) -> Verdict:
    """The verdict that an exception of the judge stands for."""
    if isinstance(error, Unjudgeable):
        return "unscored", _told(str.__str__(str(error)))
    return "unscored", f"the judge raised {_describe(error)}"


def _ask_reward(reward: Reward, answers: Sequence[Answer], seconds: float) -> list[Verdict]:
    """One reward of these answers, each call within so many seconds where it waits for something."""
    function = reward.function
    if reward.takes == "batch":
        return _ask_batch(function, answers, seconds)
    if getattr(function, "side_by_side", False):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(answers)) as pool:
            return list(pool.map(lambda answer: _ask(lambda: function(answer, seconds)), answers))
    if reward.waits:
        import asyncio

        return asyncio.run(_await_all([lambda a=a: function(a.text, a.gold) for a in answers], seconds))
    if reward.takes == "answer":
        return [_ask(lambda a=a: function(a)) for a in answers]
    return [_ask(lambda a=a: function(a.text, a.gold)) for a in answers]


async def _await_all(calls: Sequence[Callable[[], Any]], seconds: float) -> list[Verdict]:
    """The verdicts of coroutine functions that wait side by side."""
    import asyncio

    async def ask(call: Callable[[], Any]) -> Verdict:
        try:
            async with asyncio.timeout(seconds) as limit:
                value = await call()
        except BaseException as error:  # noqa: BLE001 - as in _ask
            return ("unscored", f"no verdict within {seconds:g} s") if limit.expired() else _refusal(error)
        return _score(value)

    return list(await asyncio.gather(*map(ask, calls)))


def _ask_batch(function: Callable[..., Any], answers: Sequence[Answer], seconds: float) -> list[Verdict]:
    """One call for all answers."""
    try:
        values = function([answer.text for answer in answers], [answer.gold for answer in answers])
        if inspect.isawaitable(values):
            import asyncio

            values = asyncio.run(asyncio.wait_for(values, seconds))
        listed = list(values)
    except BaseException as error:  # noqa: BLE001 - as in _ask
        return [_refusal(error)]
    if len(listed) != len(answers):
        return [("unscored", f"the judge returned {len(listed)} values for {len(answers)} completions")]
    return [_ask(lambda value=value: value) for value in listed]


def _score(value: object) -> Verdict:
    """Take any finite number (numpy's and torch's scalars, too), but no text that spells one."""
    try:
        reward = math.nan if isinstance(value, str | bytes | bytearray) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if math.isfinite(reward):
        return "scored", reward
    return "unscored", f"the judge returned {_shown(value)} ({type(value).__name__}), not a finite number"


def _shown(value: object) -> str:
    """A value as Python writes it, shortened where that is long, once no secret can be cut in two."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
        return reprlib.repr(value)
    text = repr(_told(value)) if isinstance(value, str) else _told(repr(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE // 2]}...{text[-_LONGEST_VALUE // 4 :]}"


def _describe(error: BaseException) -> str:
    return _told(traceback.format_exception_only(error)[-1].strip())


def _told(text: str) -> str:
    """A judge's text as a part of a reason."""
    return redact_start(text, _READ)[:_LONGEST_REASON]


def _limit_files(size: int) -> None:
    """Limit each file that this process writes; a core file has no use at all."""
    if sys.platform != "win32":
        import resource

        for limit, most in ((resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _give_way() -> None:
    """Take a lower priority, and one thread for what the judge loads (or has loaded as part of the main script). An
    even lower priority would leave a judge too little of a core to meet its deadline."""
    if sys.platform != "win32":
        os.nice(POLITENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


class OwnTracker(resource_tracker.ResourceTracker):
    """Removes what a judge leaves behind: shared memory and semaphores that outlive their process. Python has one
    tracker for a program and its children, which does so when the program ends, with a warning. A worker gets its own,
    which does so silently as soon as the worker has ended, killed or not.

    Python also registers shared memory that a process only opens (always, before 3.13); segments older than this
    tracker belong to other processes and stay."""

    def __init__(self) -> None:
        super().__init__()
        self._others = frozenset(os.listdir(_SEGMENTS)) if os.path.isdir(_SEGMENTS) else frozenset[str]()
        self._tracked: set[tuple[str, str]] = set()

    def register(self, name: str, rtype: str) -> None:
        if rtype != "shared_memory" or name.lstrip("/") not in self._others:
            self._tracked.add((name, rtype))
            super().register(name, rtype)

    def unregister(self, name: str, rtype: str) -> None:
        if (name, rtype) in self._tracked:
            self._tracked.remove((name, rtype))
            super().unregister(name, rtype)


def track_alone() -> None:
    """Give this process its own tracker, which starts when it is first needed."""
    sys.warnoptions.append(_SILENT)
    own = OwnTracker()
    resource_tracker._resource_tracker = own
    for name in ("ensure_running", "register", "unregister", "getfd"):
        setattr(resource_tracker, name, getattr(own, name))
