"""Code that runs in a worker process: its start, calls of reward functions, values to outcomes.

Workers import this module, so nothing here imports PyTorch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from lagrpo.errors import one_line
from lagrpo.logs import print_traceback, redact
from lagrpo.rewards.reward import UnscorableError
from lagrpo.types import Outcome

NICENESS = 5  # of a core that both want, the policy gets three quarters and a worker one


class LoadError(Exception):
    """The process could not load what it is to call."""


_called: Any = None


def start_worker(pickled: bytes, memory: int) -> None:
    """Limit the memory of this process, give way to the policy, load what it is to call, and end with the parent."""
    global _called
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # a handler in Python would wait for a function that hangs in C
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory if hard < 0 else min(memory, hard), hard))
    os.setsid()  # signals to the parent's process group, such as Ctrl-C, do not reach it
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _called = pickle.loads(pickled)
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
        print_traceback(error)
        _called = LoadError(_describe(error))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def called() -> Any:
    """What this process is to call. Raises LoadError if it could not be loaded."""
    if isinstance(_called, LoadError):
        raise _called
    return _called


def score(
    reward: int | Callable[..., Any],
    calls: Sequence[Mapping[str, Any]],
    count: int | None,
    seconds: float,
) -> list[Outcome]:
    """The outcome of each call of a function (or the one of this number in a worker) with these keyword arguments. With
    `count` the only call gives a list with a value for each of so many completions. Coroutines run concurrently, each
    for at most so many seconds."""
    values, function = list[Any](), called()[reward] if isinstance(reward, int) else reward
    for arguments in calls:
        try:
            values.append(function(**arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it concerns this completion only
            values.append(error)
    if any(map(inspect.isawaitable, values)):
        waiting = _wait_for_all(values, seconds)
        values = asyncio.run_coroutine_threadsafe(waiting, event_loop()).result()
    if count is not None:
        values = _spread(values[0], count)
    return [to_outcome(value) for value in values]


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all coroutines of this process, in a thread of its own: in a notebook the main thread already
    runs a loop, and clients of servers fail in another loop than their first one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="lagrpo rewards", daemon=True).start()
    return loop


async def _wait_for_all(values: Sequence[Any], seconds: float) -> list[Any]:
    """The values, with the result or the exception of each that is awaitable. All are awaited at the same time."""
    waiting = (_wait_for(value, seconds) for value in values)
    return await asyncio.gather(*waiting, return_exceptions=True)


async def _wait_for(value: Any, seconds: float) -> Any:
    if not inspect.isawaitable(value):
        return value
    try:
        return await asyncio.wait_for(_result_or_error(value), seconds)
    except TimeoutError:  # of wait_for: the function's own TimeoutError is a value here
        return UnscorableError(f"no reward within {seconds:g} s")


async def _result_or_error(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (Exception, SystemExit) as error:  # noqa: BLE001 - SystemExit would end the event loop
        return error


def _spread(value: Any, count: int) -> list[Any]:
    """The values that a function in TRL's signature returned, or its exception, for each completion."""
    if isinstance(value, BaseException):
        return [value] * count
    values = []
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            values = list(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a generator runs only here
            return [error] * count
    if len(values) == count:
        return values
    wrong = f"a {type(value).__name__} of {len(values)}" if values else f"a {type(value).__name__}"
    return [
        UnscorableError(f"the reward function returned {wrong}, not a list of {count} numbers")
    ] * count


def to_outcome(value: Any, who: str = "the reward function") -> Outcome:
    """The outcome that a value returned or raised by `who` stands for: any finite number scores, but not its text. None
    gives an unscored outcome without a reason."""
    if isinstance(value, UnscorableError):
        return Outcome.unscored(clean(str(value)) or f"{who} cannot score it")
    if isinstance(value, BaseException):
        print_traceback(value)
        return Outcome.unscored(f"{who} raised {_describe(value)}")
    if isinstance(value, Mapping):
        value = value.get("score", value)
    if value is None:
        return Outcome("unscored")
    try:
        reward = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001 - whatever float raises for a user's object
        reward = math.nan
    if math.isfinite(reward):
        return Outcome.scored(reward)
    what = f"{value}" if isinstance(value, float) else f"a {type(value).__name__}"
    return Outcome.unscored(f"{who} returned {what}, not a finite number")


def _describe(error: BaseException) -> str:
    """The exception as in the last line of a traceback."""
    return clean(traceback.format_exception_only(error)[-1])


def clean(text: str) -> str:
    """A user's text as part of a reason: one line, without secrets and half surrogate pairs, which no file takes."""
    return one_line(redact(text[:4096])).encode(errors="backslashreplace").decode()
