"""Code that runs in a worker process: its start, calls of reward functions, values to outcomes.

A worker holds one object that it unpickled when it started: the reward functions of a task, or the
factory of an environment. An exception, or a value that is not a finite number, leaves that one
completion *unscored*. pool.py, in the training process, starts the workers and handles what a
worker cannot report itself: a hang and a crash.

Workers must start fast, so neither this module nor its imports may load PyTorch.
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
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from lagrpo.errors import one_line
from lagrpo.logs import print_traceback, redact
from lagrpo.rewards.reasons import past_deadline
from lagrpo.rewards.reward import RewardFunction, RewardKwargs, UnscorableError
from lagrpo.types import Outcome, OutcomeKind

NICENESS = 5
"""On a core that a worker and the policy both want, the policy gets three quarters of the time."""

MAX_REASON_INPUT = 4096
"""Characters of a user's text that a reason is made from: an exception may quote megabytes."""


class LoadError(Exception):
    """The worker could not load the object that it is to call."""


# ---- The life of a worker ----

# A call that pebble runs cannot reach what the initializer returned, so the object that
# `start_worker` loads is a global of the worker process.
_loaded: object = None


def start_worker(pickled: bytes, memory_bytes: int) -> None:
    """Sets the signals, memory limit and priority of a new worker, and loads its object."""
    global _loaded
    # pebble ends a worker with SIGTERM. A handler in Python would wait until a function that hangs
    # in C returns; the default action ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _limit_memory(memory_bytes)
    # Signals to the parent's process group, such as Ctrl-C, do not reach another session.
    os.setsid()
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The error is kept: the first call raises it, and the run ends with its message.
    try:
        _loaded = pickle.loads(pickled)
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
        print_traceback(error)
        _loaded = LoadError(describe_exception(error))


def _limit_memory(memory_bytes: int) -> None:
    """Makes allocations beyond the limit fail with MemoryError, instead of filling the machine."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit >= 0:  # negative: the system sets no limit
        memory_bytes = min(memory_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard_limit))


def _exit_with_parent() -> None:
    """Ends this process when the training process ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # in a thread, sys.exit would end only the thread


def get_loaded() -> Any:
    """Returns the object that this worker has loaded. Raises LoadError if it could not load it."""
    if isinstance(_loaded, LoadError):
        raise _loaded
    return _loaded


# ---- Calling a reward function ----


def call_loaded_reward(
    reward_index: int, calls: Sequence[RewardKwargs], list_length: int | None, deadline: float
) -> list[Outcome]:
    """Runs `call_reward` with one of the functions that this worker has loaded."""
    functions = get_loaded()
    return call_reward(functions[reward_index], calls, list_length, deadline)


def call_reward(
    function: RewardFunction,
    calls: Sequence[RewardKwargs],
    list_length: int | None,
    deadline: float,
) -> list[Outcome]:
    """Calls a reward function once per set of keyword arguments. Returns an outcome per completion.

    A function in TRL's signature scores `list_length` completions in a single call. For the other
    signatures `list_length` is None, and each call scores one completion. Coroutines run
    concurrently, each for at most `deadline` seconds.
    """
    values: list[object] = []
    for kwargs in calls:
        try:
            values.append(function(**kwargs))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - costs this completion only
            values.append(error)
    if any(inspect.isawaitable(value) for value in values):
        coroutine = _await_all(values, deadline)
        values = asyncio.run_coroutine_threadsafe(coroutine, _get_event_loop()).result()
    if list_length is not None:
        values = _split_list(values[0], list_length)
    return [to_outcome(value) for value in values]


@cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all coroutines of this process. It runs in its own thread.

    In a notebook, the main thread already runs a loop. Clients of servers fail in a loop other than
    the one that they first ran in, so all calls share this loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="lagrpo rewards", daemon=True).start()
    return loop


async def _await_all(values: Sequence[object], deadline: float) -> list[object]:
    """Awaits all values that can be awaited, concurrently.

    Returns each one's result or exception. Other values are returned as they are.
    """
    limited = (_await_value(value, deadline) for value in values)
    return await asyncio.gather(*limited, return_exceptions=True)


async def _await_value(value: object, deadline: float) -> object:
    if not inspect.isawaitable(value):
        return value
    try:
        return await asyncio.wait_for(_result_or_error(value), deadline)
    except TimeoutError:
        # This is wait_for's own error: `_result_or_error` returns one that the function raises.
        return UnscorableError(past_deadline(deadline))


async def _result_or_error(awaitable: Awaitable[object]) -> object:
    try:
        return await awaitable
    except (Exception, SystemExit) as error:  # noqa: BLE001 - SystemExit would end the event loop
        return error


def _split_list(value: object, length: int) -> list[object]:
    """Returns the entries of the list that a function in TRL's signature returned.

    If the function raised, or did not return `length` values, every completion gets the exception.
    """
    if isinstance(value, BaseException):
        return [value] * length
    entries: list[object] = []
    # A text and a mapping can be iterated over, but not as one value per completion.
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            entries = list(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a generator runs only here
            return [error] * length
    if len(entries) == length:
        return entries
    description = f"a {type(value).__name__}"
    if entries:
        description += f" of {len(entries)}"
    problem = f"the reward function returned {description}, not a list of {length} numbers"
    return [UnscorableError(problem)] * length


# ---- From values to outcomes ----


def to_outcome(value: object, source: str = "the reward function") -> Outcome:
    """Converts a value that `source` returned or raised into an outcome.

    A finite number is a reward, also as the "score" of a mapping (verl's signature), but not as a
    text. None means that the function does not score this completion: unscored, without a reason.
    Everything else is unscored with a reason.
    """
    if isinstance(value, UnscorableError):
        return Outcome.unscored(clean(str(value)) or f"{source} cannot score it")
    if isinstance(value, BaseException):
        print_traceback(value)
        return Outcome.unscored(f"{source} raised {describe_exception(value)}")
    if isinstance(value, Mapping):
        value = value.get("score", value)
    if value is None:
        return Outcome(OutcomeKind.UNSCORED)
    reward = _to_float(value)
    if math.isfinite(reward):
        return Outcome.scored(reward)
    description = f"{value}" if isinstance(value, float) else f"a {type(value).__name__}"
    return Outcome.unscored(f"{source} returned {description}, not a finite number")


def _to_float(value: Any) -> float:
    """Returns the value as a float, or NaN if it is not a number."""
    if isinstance(value, str | bytes):  # float() would read "1.0"
        return math.nan
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - __float__ of a user's class can raise anything
        return math.nan


def describe_exception(error: BaseException) -> str:
    """Returns the last line of the traceback, such as "ValueError: bad answer"."""
    return clean(traceback.format_exception_only(error)[-1])


def clean(text: str) -> str:
    """Makes a user's text safe as a part of a reason: one line, without secrets, encodable."""
    line = one_line(redact(text[:MAX_REASON_INPUT]))
    # Half of a surrogate pair cannot be encoded: Parquet and JSON files would refuse it.
    return line.encode(errors="backslashreplace").decode()
