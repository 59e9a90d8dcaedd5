"""An episode whose loop is the environment's own: each request to a model waits until the policy has spoken.

The messages of a request must be those of the one before, then what the policy said, then new ones: what was said is
tokens, which nobody can change any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

Message = dict[str, Any]


class Unfit(Exception):  # noqa: N818 - the reason alone is told
    """The environment cannot be driven turn by turn."""


class Source(Protocol):
    """What plays rows."""

    async def rows(self) -> tuple[int | None, int]:
        """How many rows there are for training (None: without end), and for evaluation behind them."""
        ...

    async def play(self, row: int) -> tuple[float, str]:
        """The reward of an episode, and why it ended. Asks the conversation at CURRENT for what a model says."""
        ...

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """What the episodes need in common."""
        ...


CURRENT: ContextVar[Conversation] = ContextVar("conversation")


class Conversation:
    def __init__(self, source: Source, row: int) -> None:
        self._play = source.play
        self._row = row
        self._task: asyncio.Task[tuple[float, str]] | None = None
        self._asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._said: asyncio.Future[Message] | None = None
        self._so_far: list[Message] = []
        self.tools: list[dict[str, Any]] = []

    async def begin(self) -> Message:
        """The messages that the policy sees first."""

        async def run() -> tuple[float, str]:
            CURRENT.set(self)
            return await self._play(self._row)

        self._task = asyncio.create_task(run())
        return await self._next()

    async def answer(self, content: str, calls: Sequence[dict[str, Any]]) -> Message:
        """What the environment says to this."""
        if self._said is None:
            raise Unfit("it is not this episode's turn")
        said, self._said = self._said, None
        said.set_result({"role": "assistant", "content": content, "tool_calls": list(calls)})
        return await self._next()

    async def ask(self, messages: Sequence[Any], tools: Sequence[dict[str, Any]], worth: float = 0.0) -> Message:
        """What the policy says to these messages: {"content": …, "tool_calls": [{"id", "name", "arguments"}, …]}.
        `worth` is the reward of the episode if it ended here."""
        if self._said is not None:
            raise Unfit("it asks the model for two completions at once")
        whole = [plain(message) for message in messages]
        known = self._so_far
        if [look(message) for message in whole[: len(known)]] != [look(message) for message in known]:
            raise Unfit("it changes what was said before, or begins another conversation with the model")
        if len(whole) == len(known):
            raise Unfit("it asks the model twice and says nothing in between")
        self.tools = list(tools)
        self._said = said = asyncio.get_running_loop().create_future()
        names = {call["id"]: call["name"] for message in known for call in message.get("tool_calls") or ()}
        new = [named(message, names) for message in whole[len(known) :]]
        self._asked.set_result({"turn": {"messages": new, "reward": worth}})
        answer = await said
        for number, call in enumerate(answer["tool_calls"]):
            call["id"] = f"call_{len(whole)}_{number}"
        self._so_far = [*whole, answer]
        return answer

    async def close(self) -> None:
        """End it, wherever it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5)

    async def _next(self) -> Message:
        """What comes first: another request to the model, or the end."""
        assert self._task is not None
        await asyncio.wait([self._task, self._asked], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            reward, reason = self._task.result()
            return {"final": {"reward": reward, "reason": reason}}
        asked, self._asked = self._asked, asyncio.get_running_loop().create_future()
        return asked.result()


def plain(message: Any) -> Message:
    """A message as a dictionary with a text: {"role", "content"}, and what belongs to calls. Raises Unfit for
    pictures."""
    given = dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
    content = given.get("content") or ""
    if not isinstance(content, str):
        if strange := [part.get("type") for part in content if part.get("type") != "text"]:
            raise Unfit(f"a message has a part of type {strange[0]!r}; the policy reads text alone")
        content = "\n".join(part["text"] for part in content)
    further = {key: given[key] for key in ("tool_calls", "tool_call_id", "name") if given.get(key)}
    if calls := further.get("tool_calls"):
        further["tool_calls"] = [call_of(call) for call in calls]
    return {"role": "user" if given["role"] == "text" else given["role"], "content": content, **further}


def call_of(call: Any) -> dict[str, Any]:
    given = call if isinstance(call, dict) else call.model_dump()
    function = given.get("function") or given
    arguments: Any = function.get("arguments") or {}
    with contextlib.suppress(ValueError, TypeError):
        arguments = json.loads(arguments)
    return {"id": given.get("id", ""), "name": function["name"], "arguments": arguments}


def look(message: Message) -> tuple[Any, ...]:
    """What must not change of it."""
    calls = [(call["name"], call["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"].strip(), calls


def named(message: Message, names: dict[str, str]) -> Message:
    """A message for the chat template: a result with the name of its function, calls as functions."""
    shown = {"role": message["role"], "content": message["content"]}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}} for call in calls
        ]
    if message["role"] == "tool" and (name := message.get("name") or names.get(message.get("tool_call_id", ""))):
        shown["name"] = name
    return shown
