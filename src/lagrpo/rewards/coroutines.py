"""Coroutines of asynchronous reward functions: they run concurrently, each with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import cache

from lagrpo.rewards.reasons import past_deadline
from lagrpo.rewards.reward import UnscorableError


def await_all(values: Sequence[object], deadline: float) -> list[object]:
    """Awaits all values that can be awaited, concurrently, each for at most `deadline` seconds.

    Returns each one's result or exception. Other values are returned as they are.
    """
    coroutine = _await_each(values, deadline)
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, _get_event_loop()).result()
    except CancelledError as error:  # a completion may cancel all tasks of the loop
        return [error] * len(values)


@cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all coroutines of this process. It runs in its own thread.

    In a notebook, the main thread already runs a loop. Clients of servers fail in a loop other than
    the one that they first ran in, so all calls share this loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_loop, args=(loop,), name="lagrpo rewards", daemon=True).start()
    return loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # A task that a reward function starts may stop the loop, or end it by a SystemExit.
        with suppress(BaseException):
            loop.run_forever()


async def _await_each(values: Sequence[object], deadline: float) -> list[object]:
    limited = (_await_value(value, deadline) for value in values)
    return await asyncio.gather(*limited)


async def _await_value(value: object, deadline: float) -> object:
    if not inspect.isawaitable(value):
        return value
    task = asyncio.ensure_future(_result_or_error(value))
    # Unlike wait_for, this does not wait for a coroutine that refuses to be cancelled.
    await asyncio.wait([task], timeout=deadline)
    if task.done():
        return task.result()
    task.cancel()
    return UnscorableError(past_deadline(deadline))


async def _result_or_error(awaitable: Awaitable[object]) -> object:
    try:
        return await awaitable
    except BaseException as error:  # noqa: BLE001 - this is not the thread that signals interrupt
        return error
