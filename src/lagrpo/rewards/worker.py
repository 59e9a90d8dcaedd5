"""Code that runs in a worker process: its start, calls of reward functions, values to outcomes.

A worker holds one object that it unpickled when it started: the reward functions of a task, or the
factory of an environment. An exception of any kind, or a value that is not a finite number, leaves
that one completion *unscored*: a reward function may run what a completion says. pool.py, in the
training process, handles what a worker cannot report itself: a hang and a crash.

Workers must start fast, so neither this module nor its imports may load PyTorch.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import resource
import signal
import socket
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lagrpo.core.references import last_frame_of_user
from lagrpo.errors import one_line
from lagrpo.interrupts import is_from_signal
from lagrpo.logs import print_traceback, redact
from lagrpo.rewards.processes import HEADER
from lagrpo.rewards.reward import RewardFunction, RewardKwargs, UnscorableError
from lagrpo.types import Outcome, OutcomeKind

NICENESS = 5
"""On a core that a worker and the policy both want, the policy gets three quarters of the time."""

MAX_REASON_INPUT = 4096
"""Characters of a user's text that a reason is made from: an exception may quote megabytes."""


# The life of a worker


def serve(socket_descriptor: int, life_descriptor: int, memory_bytes: int) -> None:
    """Loads an object, then makes calls with it until the training process closes the socket.

    The first message is the pickled object, and its answer is why it cannot be loaded, or None.
    Every other message is a pickled function and its arguments, and its answer what that returns.
    """
    # Whoever interrupts the training process ends the worker through it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(memory_bytes)
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_exit_with_parent, args=(life_descriptor,), daemon=True).start()
    connection = socket.socket(fileno=socket_descriptor)
    messages = _read_messages(connection)
    # The code that runs here may have closed the socket.
    with suppress(OSError):
        number, pickled = next(messages)
        loaded: object = None
        problem: str | None = None
        try:
            loaded = pickle.loads(pickled)
        except BaseException as error:  # noqa: BLE001 - importing a user's module can raise anything
            print_traceback(error)
            problem = describe_exception(error)
        _send_answer(connection, number, pickle.dumps(problem))
        process = os.getpid()
        for number, message in messages:
            answer = _make_call(loaded, message)
            if os.getpid() != process:  # a copy of this process, which the call has forked
                os._exit(0)
            _send_answer(connection, number, answer)


def _read_messages(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the pickle of each message."""
    stream = connection.makefile("rb")
    while True:
        header = stream.read(HEADER.size)
        if not header:
            return
        number, size = HEADER.unpack(header)
        yield number, stream.read(size)


def _send_answer(connection: socket.socket, number: int, pickled: bytes) -> None:
    connection.sendall(HEADER.pack(number, len(pickled)) + pickled)


def _make_call(loaded: object, message: bytes) -> bytes:
    """Makes a call. Returns its pickled result, or an unscored outcome if that is impossible."""
    try:
        function, arguments = pickle.loads(message)
        return pickle.dumps(function(loaded, *arguments))
    except BaseException as error:  # noqa: BLE001 - costs this call only
        return pickle.dumps(to_outcome(error, "the call"))


def _limit_memory(memory_bytes: int) -> None:
    """Makes allocations beyond the limit fail with MemoryError, instead of filling the machine."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit >= 0:  # negative: the system sets no limit
        memory_bytes = min(memory_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard_limit))


def _exit_with_parent(life_descriptor: int) -> None:
    """Ends this process when the training process ends, even if that was killed."""
    os.read(life_descriptor, 1)
    os._exit(1)  # in a thread, sys.exit would end only the thread


# Calling a reward function


def call_loaded_reward(
    functions: Sequence[RewardFunction],
    reward_index: int,
    calls: Sequence[RewardKwargs],
    list_length: int | None,
    deadline: float,
) -> list[Outcome]:
    """Runs `call_reward` with one of the functions that this worker has loaded."""
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
        except BaseException as error:
            if is_from_signal(error):
                raise
            values.append(error)
    if any(inspect.isawaitable(value) for value in values):
        # asyncio would be a quarter of the time that a worker takes to start.
        from lagrpo.rewards.coroutines import await_all

        values = await_all(values, deadline)
    if list_length is not None:
        values = _split_list(values[0], list_length)
    return [to_outcome(value) for value in values]


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
        except BaseException as error:  # a generator runs only here
            if is_from_signal(error):
                raise
            return [error] * length
    if len(entries) == length:
        return entries
    description = f"a {type(value).__name__}"
    if entries:
        description += f" of {len(entries)}"
    problem = f"the reward function returned {description}, not a list of {length} numbers"
    return [UnscorableError(problem)] * length


# From values to outcomes


def to_outcome(value: object, source: str = "the reward function") -> Outcome:
    """Converts a value that `source` returned or raised into an outcome.

    A finite number is a reward, also as the "score" of a mapping (verl's signature), but not as a
    text. None means that the function does not score this completion: unscored, without a reason.
    Everything else is unscored with a reason.
    """
    try:
        return _read_value(value, source)
    except BaseException as error:  # the methods of a user's class can raise anything
        if is_from_signal(error):
            raise
        return Outcome.unscored(f"{source} returned or raised an object that cannot be read")


def _read_value(value: object, source: str) -> Outcome:
    if isinstance(value, UnscorableError):
        return Outcome.unscored(clean(str(value)) or f"{source} cannot score it")
    if isinstance(value, BaseException):
        print_traceback(value)
        return Outcome.unscored(f"{source} raised {describe_exception(value)}{_place_of(value)}")
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
    try:
        line = traceback.format_exception_only(error)[-1]
    except Exception:  # noqa: BLE001 - a user's class can raise anything
        line = type(error).__name__
    return clean(line)


def _place_of(error: BaseException) -> str:
    """Returns the last line of a user's code in the traceback, as " (line 3 of rewards.py)"."""
    frame = last_frame_of_user(error)
    if frame is None:
        return ""
    return f" (line {frame.lineno} of {clean(Path(frame.filename).name)})"


def clean(text: str) -> str:
    """Makes a user's text safe as a part of a reason: one line, without secrets, encodable."""
    line = one_line(redact(text[:MAX_REASON_INPUT]))
    # Half of a surrogate pair cannot be encoded: Parquet and JSON files would refuse it.
    return line.encode(errors="backslashreplace").decode()
