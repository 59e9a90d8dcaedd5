"""Threads that end with the process, whatever they wait for.

Python would wait at its end for the threads of a ThreadPoolExecutor, and a request to a server
whose host is gone may wait for an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Calls: TypeAlias = "SimpleQueue[tuple[Callable[[], object], Future[object]] | None]"


class Threads:
    """Up to `size` threads, which make calls in the order in which they were submitted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_started = 0
        self._calls: Calls = SimpleQueue()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Submits a call. The future has what it returns or raises."""
        future: Future[T] = Future()
        self._calls.put((call, future))  # pyright: ignore[reportArgumentType]
        if self._num_started < self._size:
            self._num_started += 1
            threading.Thread(target=_make_calls, args=(self._calls,), daemon=True).start()
        return future

    def close(self) -> None:
        """Cancels the calls that have not begun. Threads end after their last call."""
        with suppress(Empty):
            while job := self._calls.get_nowait():
                _, future = job
                future.cancel()
        for _ in range(self._num_started):
            self._calls.put(None)


def _make_calls(calls: Calls) -> None:
    for call, future in iter(calls.get, None):
        if future.set_running_or_notify_cancel():
            _make_call(call, future)


def _make_call(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by the one who reads the result
        future.set_exception(error)


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Makes the call in a thread. The future has what it returns or raises."""
    future: Future[T] = Future()
    threading.Thread(target=_make_call, args=(call, future), daemon=True).start()
    return future


def run_together(calls: Sequence[Callable[[], T]], seconds: float | None = None) -> list[T]:
    """Returns the results of calls that are made in threads, as soon as all have ended.

    Raises the first exception at once, and TimeoutError after `seconds`. Calls that have not ended
    by then stay behind.
    """
    futures = [call_in_thread(call) for call in calls]
    done, pending = wait(futures, seconds, FIRST_EXCEPTION)
    for future in done:
        # Raises what the call raised.
        future.result()
    if pending:
        raise TimeoutError
    return [future.result() for future in futures]


def run_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Returns the results of calls that are made in threads.

    Raises an exception of one when all have ended.
    """
    futures = [call_in_thread(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]
