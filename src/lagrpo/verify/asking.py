"""How a worker process asks one of several rewards: each completion by itself, or a group's side by side or at once."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from lagrpo.tasks.base import Unjudgeable
from lagrpo.tasks.rewards import Answer, Reward
from lagrpo.verify.verdicts import Verdict, ask, refuse, score


def ask_reward(reward: Reward, answers: Sequence[Answer], seconds: float) -> Verdict:
    """The verdicts of a reward on these answers, each call within so many seconds where it waits for something."""
    function = reward.function
    if reward.takes == "batch":
        return ask(partial(_ask_batch, function, answers, seconds))
    if getattr(function, "side_by_side", False):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(answers)) as pool:
            return "several", list(pool.map(lambda answer: _judge(function, answer, seconds), answers))
    if reward.waits:
        import asyncio

        return "several", asyncio.run(_await_all([partial(function, a.text, a.gold) for a in answers], seconds))
    if reward.takes == "answer":
        return "several", [_judge(function, answer) for answer in answers]
    return "several", [_judge(function, answer.text, answer.gold) for answer in answers]


def _judge(function: Callable[..., Any], *given: Any) -> Verdict:
    return ask(lambda: score(function(*given)))


async def _await_all(calls: Sequence[Callable[[], Any]], seconds: float) -> list[Verdict]:
    """The verdicts of coroutine functions that wait side by side."""
    import asyncio

    async def judge(call: Callable[[], Any]) -> Verdict:
        try:
            async with asyncio.timeout(seconds) as limit:
                value = await call()
        except BaseException as error:  # noqa: BLE001 - as in ask
            return ("unscored", f"no verdict within {seconds:g} s") if limit.expired() else refuse(error)
        return ask(partial(score, value))

    return list(await asyncio.gather(*map(judge, calls)))


async def _await_batch(values: Awaitable[Any], seconds: float) -> Any:
    """What a coroutine function returns for a group. Raises Unjudgeable where that takes longer."""
    import asyncio

    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await values
    except TimeoutError:
        if limit.expired():
            raise Unjudgeable(f"no verdict within {seconds:g} s") from None
        raise


def _ask_batch(function: Callable[..., Any], answers: Sequence[Answer], seconds: float) -> Verdict:
    """One call for all answers."""
    values = function([answer.text for answer in answers], [answer.gold for answer in answers])
    if inspect.isawaitable(values):
        import asyncio

        values = asyncio.run(_await_batch(values, seconds))
    if isinstance(values, Mapping | Set | str | bytes):
        return "unscored", f"the judge returned a {type(values).__name__}, not a list of numbers"
    listed = list(values)
    if len(listed) != len(answers):
        return "unscored", f"the judge returned {len(listed)} values for {len(answers)} completions"
    return "several", [ask(partial(score, value)) for value in listed]
