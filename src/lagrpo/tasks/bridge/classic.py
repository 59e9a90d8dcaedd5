"""Environments of verifiers with `load_environment`: SingleTurnEnv, MultiTurnEnv, ToolEnv and what is made of them.

Their own `rollout` runs, and their rubric scores; the client that they are given waits for what the policy says.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from conversation import CURRENT, Unfit

SANDBOXES = "SandboxEnv", "SandboxMixin", "CliAgentEnv", "BrowserEnv", "OpenEnvEnv", "RLMEnv", "MCPEnv"
MODEL = "policy"
_faults: ContextVar[list[str]] = ContextVar("faults")


class Classic:
    def __init__(self, module: str, arguments: dict[str, Any]) -> None:
        try:
            self.client = _client(
                importlib.import_module("verifiers.clients"), importlib.import_module("verifiers.types")
            )
        except ModuleNotFoundError as error:
            raise Unfit("it needs another verifiers: pip install 'verifiers>=0.1.11,<0.3.2'") from error
        self.env = importlib.import_module("verifiers").load_environment(module, **arguments)
        for env in environments(self.env):
            check(env)
            env.timeout_seconds = (
                None  # it would run while the policy is sampled, too; a turn has a deadline of its own
            )
        for rubric in rubrics(self.env):
            weighed = zip(rubric.funcs, rubric.weights, strict=True)
            rubric.funcs = [watched(function) if weight else function for function, weight in weighed]
        self.train, self.test = self._rows()
        # Its rubrics print a line for every function that fails; what concerns a reward is told with its completion.
        logging.getLogger("verifiers").setLevel(logging.CRITICAL)

    def _rows(self) -> tuple[Any, Any]:
        """The rows for training, and for evaluation: none where these are the same."""
        train, test = self.env.build_dataset(), self.env.build_eval_dataset()
        if train is None and test is None:
            raise Unfit("it has no rows")
        return (test, ()) if train is None else (train, () if test is None else test)

    async def rows(self) -> tuple[int | None, int]:
        return len(self.train), len(self.test)

    async def play(self, row: int) -> tuple[float, str]:
        given = dict(self.train[row] if row < len(self.train) else self.test[row - len(self.train)])
        _faults.set(faults := [])
        state = await self.env.rollout(given, self.client, MODEL, {})
        if (error := state.get("error")) is not None:
            raise error
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        if faults:
            raise Unfit(faults[0])
        parts = [f"{name} {value:g}" for name, value in (state.get("metrics") or {}).items()]
        return float(state["reward"]), "; ".join([str(state.get("stop_condition") or ""), *parts]).strip("; ")

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        return contextlib.nullcontext()


def environments(env: Any) -> Iterator[Any]:
    """An environment, and those that it is a group of."""
    yield env
    for each in getattr(env, "envs", ()):
        yield from environments(each)


def rubrics(of: Any) -> Iterator[Any]:
    """The rubrics of an environment, each once."""
    found = [env.rubric for env in environments(of)]
    for rubric in found:
        found += [each for each in getattr(rubric, "rubrics", ()) if each not in found]
    return iter(dict.fromkeys(found))


def check(env: Any) -> None:
    """Raise Unfit for an environment whose turns, or whose rewards, are not made here."""
    kinds = {kind.__name__ for kind in type(env).__mro__}
    what = f"it is a {type(env).__name__}"
    if sandboxes := kinds & set(SANDBOXES):
        raise Unfit(f"{what}, which runs in sandboxes or talks to other services ({min(sandboxes)})")
    if getattr(env, "message_type", "chat") != "chat":
        raise Unfit(f"{what} of message type {env.message_type!r}; the policy reads chat messages")
    for rubric in rubrics(env):
        kinds = {kind.__name__ for kind in type(rubric).__mro__}
        if "JudgeRubric" in kinds:
            raise Unfit(f"{what} whose {type(rubric).__name__} asks another model; let its rewards be functions")
        if getattr(rubric, "has_group_rewards", False):
            raise Unfit(f"{what} whose rubric scores the completions of a group together, which are under way apart")


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where an exception is noted: a rubric makes it a reward of 0, and a failure is no reward."""

    def note(error: Exception) -> None:
        name = getattr(function, "__name__", repr(function))
        _faults.get([]).append(f"its reward function {name} raised {type(error).__name__}: {error}")

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            value = function(*given, **named)
            return later(value) if inspect.isawaitable(value) else float(value)
        except Exception as error:
            note(error)
            raise

    async def later(value: Any) -> Any:
        try:
            return float(await value)
        except Exception as error:
            note(error)
            raise

    return call


def _client(clients: Any, types: Any) -> Any:
    async def get_response(self: Any, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        schemas = [{"type": "function", "function": schema_of(tool)} for tool in tools or ()]
        said = await CURRENT.get().ask(prompt if isinstance(prompt, list) else [prompt], schemas)
        calls = [types.ToolCall(**(call | {"arguments": json.dumps(call["arguments"])})) for call in said["tool_calls"]]
        message = types.ResponseMessage(
            content=said["content"], tool_calls=calls or None, is_truncated=False,
            finish_reason="tool_calls" if calls else "stop",
        )  # fmt: skip
        return types.Response(id=MODEL, created=0, model=MODEL, message=message)

    def unused(*_: Any) -> None:
        """The base class wants these for requests that this one does not make."""

    methods = dict.fromkeys(clients.Client.__abstractmethods__, unused) | {"get_response": get_response}
    return type("Policy", (clients.Client,), methods)(None)


def schema_of(tool: Any) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
