"""What worker processes run: reward functions and environments, one call at a time.

Nothing here imports PyTorch, so a process starts in a tenth of a second and takes little memory."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lagrpo.errors import one_line
from lagrpo.redaction import redact
from lagrpo.rewards.reward import UnscorableError
from lagrpo.types import Outcome

NICENESS = 5  # of a core that both want, the policy gets three quarters and a worker one
_loaded: Any = None
_problem = ""


class LoadError(Exception):
    """The process could not load what it is to call."""


def start(pickled: bytes, memory: int) -> None:
    """Prepare this process: limit its memory to `memory` bytes, give way to the policy, load what it is to call (before
    the first deadline begins), and end with the parent."""
    global _loaded, _problem
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for a function that hangs in C
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory if hard < 0 else min(memory, hard), hard))
    os.setsid()  # signals to the parent's process group, such as Ctrl-C, do not reach it
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _loaded = pickle.loads(pickled)
    except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
        _problem = describe(error)


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def loaded() -> Any:
    """What this process is to call. Raises LoadError if it could not be loaded."""
    if _problem:
        raise LoadError(_problem)
    return _loaded


def score(number: int, calls: Sequence[Mapping[str, Any]], count: int | None, seconds: float) -> list[Outcome]:
    """`call_reward` with the function of this number."""
    return call_reward(loaded()[number], calls, count, seconds)


def call_reward(
    function: Callable[..., Any], calls: Sequence[Mapping[str, Any]], count: int | None, seconds: float
) -> list[Outcome]:
    """The outcome of each call with these keyword arguments. With `count` the only call gives a list with a value for
    each of so many completions. Coroutines run concurrently, each for at most so many seconds."""
    values = list[Any]()
    for arguments in calls:
        try:
            values.append(function(**arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it concerns this completion only
            values.append(error)
    if any(asyncio.iscoroutine(value) for value in values):
        values = asyncio.run(_wait_for_all(values, seconds))
    if count is not None:
        values = _spread(values[0], count)
    return [to_outcome(value) for value in values]


async def _wait_for_all(values: Sequence[Any], seconds: float) -> list[Any]:
    async def wait(value: Any) -> Any:
        if not asyncio.iscoroutine(value):
            return value
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await value
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            return UnscorableError(f"no reward within {seconds:g} s") if limit.expired() else error

    return await asyncio.gather(*map(wait, values))


def _spread(value: Any, count: int) -> list[Any]:
    """The values that a function in TRL's signature returned, or its exception for each completion."""
    if isinstance(value, BaseException):
        return [value] * count
    values = [] if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) else list(value)
    if len(values) == count:
        return values
    wrong = f"a {type(value).__name__} of {len(values)}" if values else f"a {type(value).__name__}"
    return [UnscorableError(f"the reward function returned {wrong}, not a list of {count} numbers")] * count


def to_outcome(value: Any, who: str = "the reward function") -> Outcome:
    """The outcome that a value returned or raised by `who` stands for: any finite number scores (numpy's and torch's
    scalars, too), but not a text that spells one. None gives an unscored outcome without a reason."""
    if isinstance(value, UnscorableError):
        return Outcome.unscored(clean(str(value)) or f"{who} cannot score it")
    if isinstance(value, BaseException):
        return Outcome.unscored(f"{who} raised {describe(value)}")
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


def describe(error: BaseException) -> str:
    """The exception as in the last line of a traceback."""
    return clean(traceback.format_exception_only(error)[-1])


def clean(text: str) -> str:
    """A user's text as part of a reason: one line, without secrets and half surrogate pairs, which no file takes."""
    return one_line(redact(text[:4096])).encode(errors="backslashreplace").decode()
