"""Environments of verifiers with tasks and harnesses (verifiers.v1).

The seat of the policy is played by a harness of this program: a loop of requests to the model and calls of tools, which
needs no other program and no container. Its requests pass through the environment's own interception, and arrive at a
server of this program on 127.0.0.1, which waits for what the policy says.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from conversation import CURRENT, Conversation, Unfit

HARNESS = "lagrpo_policy"
MODEL = "policy"
CONTAINERS = "harbor", "openenv", "nemo_gym"


class Tasksets:
    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        if name in CONTAINERS:
            raise Unfit(f"the taskset {name!r} runs in containers, which the policy's turns do not reach")
        self.vf = importlib.import_module("verifiers.v1")
        self._of: dict[str, Conversation] = {}  # by the id of a trace
        self._url = ""
        try:
            seat = self._seat(loaders, name)
        except (TypeError, AttributeError) as error:
            raise Unfit(f"module {name!r} has neither load_environment nor a Taskset in __all__: {error}") from error
        sys.modules[HARNESS] = _harness(self.vf)
        own = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "network_notice": False}
        config = loaders.resolve_env_config({"taskset": {"id": name, **arguments}, seat: own})
        self.env = loaders.load_environment(config)
        self._tasks: list[Any] = []
        self._further = iter(self.env.taskset)

    def _seat(self, loaders: Any, name: str) -> str:
        """The name of the one agent. Raises Unfit where the environment cannot be driven."""
        loaders.taskset_class(name)
        if loaders.task_type(name).NEEDS_CONTAINER:
            raise Unfit("its tasks run in containers (NEEDS_CONTAINER), which the policy's turns do not reach")
        fields = loaders.env_config_type(name).model_fields.items()
        seats = {field: info.default for field, info in fields if isinstance(info.default, self.vf.AgentConfig)}
        if len(seats) != 1:
            raise Unfit(f"it has {len(seats)} agents ({', '.join(seats)}); a run has one policy")
        (seat, default), bundled = next(iter(seats.items())), loaders.default_harness_id(name)
        harness = default.harness.id if default.harness is not None else bundled
        if harness not in ("bash", "null"):
            raise Unfit(f"its agent is the program {harness!r}, which talks to the model itself")
        return seat

    async def rows(self) -> tuple[int | None, int]:
        if not self.env.taskset.bounded:
            return None, 0
        self._tasks += self._further
        return len(self._tasks), 0

    async def play(self, row: int) -> tuple[float, str]:
        self._tasks += itertools.islice(self._further, max(0, row + 1 - len(self._tasks)))
        task = self._tasks[row]
        if judges := task.plugged_judges():
            raise Unfit(f"its reward {judges[0].reward_name!r} asks another model")
        traces: list[str] = []

        def minted(trace: Any) -> None:
            traces.append(trace.id)
            self._of[trace.id] = CURRENT.get()

        client = self.vf.EvalClientConfig(base_url=self._url, api_key_var="LAGRPO_NO_KEY")
        context = self.vf.ModelContext(model=MODEL, client=client)
        try:
            episode = await self.env.run_episode(task, context, on_trace=minted)
        finally:
            for trace in traces:
                del self._of[trace]
        trace = episode.traces[-1] if episode.traces else None
        if errors := [*episode.errors, *(trace.errors if trace else ())]:
            raise Unfit(f"it failed: {errors[0].type}: {errors[0].message}")
        assert trace is not None
        parts = [f"{name} {reward.value:g}" for name, reward in trace.rewards.items() if reward is not None]
        return trace.reward, "; ".join([str(trace.stop_condition or ""), *parts]).strip("; ")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The server that stands for the model, and what the environment shares among its episodes."""
        web = importlib.import_module("aiohttp.web")

        async def complete(request: Any) -> Any:
            conversation, body = self._of[request.headers["X-Session-ID"]], await request.json()
            try:
                said = await conversation.ask(body["messages"], body.get("tools") or [])
            except Unfit as error:
                return web.json_response({"error": {"message": str(error)}}, status=400)
            return web.json_response(completion(said))

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            async with self.env.serving():
                yield
        finally:
            await runner.cleanup()


def completion(said: dict[str, Any]) -> dict[str, Any]:
    """What the policy said, as the chat API has it."""
    calls = [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
        for c in said["tool_calls"]
    ]
    message = {"role": "assistant", "content": said["content"], **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    return {"id": MODEL, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}


def _harness(vf: Any) -> types.ModuleType:
    """A module with the harness, as the loaders want one."""
    httpx, mcp = importlib.import_module("httpx"), importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire

    class Policy(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(wire, prompt or ())
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                tools = await Tools.connect(mcp, mcp_urls, self.config.tool_timeout, stack)

                async def ask() -> Any:
                    body = {"model": ctx.model, "messages": messages, **({"tools": tools.schemas} if tools else {})}
                    headers = {"Authorization": f"Bearer {secret}"}
                    return await client.post(f"{endpoint}/chat/completions", headers=headers, json=body)

                refusal = await converse(messages, ask, tools)
                return vf.ProgramResult(exit_code=1 if refusal else 0, stdout="", stderr=refusal)

    module: Any = types.ModuleType(HARNESS)
    module.Policy, module.__all__ = Policy, ["Policy"]
    return module


async def converse(messages: list[Any], ask: Callable[[], Awaitable[Any]], tools: Tools) -> str:
    """Ask the model and call its tools until it calls none. Returns what the server says where it refuses."""
    while True:
        response = await ask()
        if response.status_code != 200:
            return response.text
        messages.append(response.json()["choices"][0]["message"])
        if not (calls := messages[-1].get("tool_calls")):
            return ""
        messages += [await tools.call(call) for call in calls]


@dataclass(slots=True)
class Tools:
    """The tools that the task's servers have: their schemas, where each is, and the connections."""

    mcp: Any
    schemas: list[Any]
    where: dict[str, Any]
    servers: dict[str, Any]

    @staticmethod
    async def connect(mcp: Any, urls: dict[str, str], seconds: float, stack: AsyncExitStack) -> Tools:
        servers = {"mcpServers": {name: {"url": url, "timeout": seconds} for name, url in urls.items()}}
        return Tools(mcp, *await mcp.connect_mcp(servers, stack))

    def __bool__(self) -> bool:
        return bool(self.schemas)

    async def call(self, call: Any) -> dict[str, Any]:
        """The message with what a call gives."""
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        try:
            content = await self.mcp.call_mcp(self.servers, self.where, name, arguments)
        except Exception as error:  # noqa: BLE001 - the policy is told of its mistakes
            content = f"error: {error}" if name in self.where else f"error: there is no tool {name!r}"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
