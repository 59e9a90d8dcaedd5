"""Holds an environment of the package `verifiers` for lagrpo, which starts this with another Python.

    PYTHON lagrpo/tasks/bridge

It needs nothing of lagrpo. A request is a line of JSON on stdin, an answer one on stdout; what the environment prints
goes to stderr. The first request names the environment and is answered once it is loaded. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import random
import sys
import threading
import traceback
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [HERE, *(path for path in sys.path if os.path.abspath(path or ".") != HERE)]

from conversation import Conversation, Source, Unfit  # noqa: E402 - they stand beside this file

PROBE = "the first row"
OLDER = "pip install 'verifiers>=0.1.11,<0.3.2'"
try:
    INSTALLED = f"verifiers {importlib.metadata.version('verifiers')} is installed"
except importlib.metadata.PackageNotFoundError:
    INSTALLED = "verifiers is a directory here"


def load(name: str, arguments: dict[str, Any]) -> Source:
    """The environment of this name: of a module with load_environment, or with a Taskset. Raises Unfit."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    own = f"verifiers.v1.tasksets.{module}"
    is_own = has_tasksets() and importlib.util.find_spec(own)
    found = importlib.import_module(own) if is_own else load_module(module)
    if hasattr(found, "load_environment"):
        from classic import Classic

        return Classic(module, arguments)
    if not has_tasksets():
        raise Unfit(f"module {module!r} has no load_environment, and tasksets need verifiers 0.4 or later: {INSTALLED}")
    from tasksets import Tasksets

    return Tasksets(module, arguments)


def load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            where = f"{sys.executable} and {os.getcwd()}"
            raise Unfit(f"there is no module {name!r} where {where} have theirs: install the environment") from error
        hint = f". If it is written for verifiers before 0.3.2 (load_environment): {OLDER}" if has_tasksets() else ""
        raise Unfit(f"module {name!r} cannot be imported: {describe(error)}; {INSTALLED}{hint}") from error


def has_tasksets() -> bool:
    return importlib.util.find_spec("verifiers.v1") is not None and importlib.util.find_spec("verifiers.legacy") is None


class Program:
    """Answers requests, one at a time."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.open: dict[str, Conversation] = {}
        self.tools: list[dict[str, Any]] = []

    async def describe(self) -> dict[str, Any]:
        """Its rows and tools. The first row is begun to see whether it can be."""
        train, test = await self.source.rows()
        if "final" in (said := await self.start(PROBE, 0, None)):
            raise Unfit(f"its first row ends before the policy has spoken: {said['final']['reason']}")
        self.tools = self.open[PROBE].tools
        await self.open.pop(PROBE).close()
        return {"ready": {"train": train, "test": test, "tools": self.tools}}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "drop" in request:
            if (dropped := self.open.pop(request["drop"], None)) is not None:
                await dropped.close()
            return {"dropped": True}
        seed(request["seed"])
        if "start" in request:
            return await self.start(request["start"], request["row"], self.tools)
        conversation = self.open[request["say"]]
        try:
            said = await conversation.answer(request["content"], request["calls"])
        except BaseException:
            del self.open[request["say"]]
            raise
        if "final" in said:
            del self.open[request["say"]]
        return said

    async def start(self, key: str, row: int, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        if (before := self.open.pop(key, None)) is not None:
            await before.close()
        conversation = Conversation(self.source, row)
        said = await conversation.begin()
        if tools is not None and conversation.tools != tools:
            await conversation.close()
            raise Unfit("its rows have different tools; the chat template shows the same to all prompts of a run")
        if "turn" in said:
            self.open[key] = conversation
        return said


def seed(number: int) -> None:
    """What an environment draws in a turn follows from this number, whatever other episodes did in between."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, Unfit) else traceback.format_exception_only(error)[-1].strip()


async def serve(requests: asyncio.Queue[Any], answers: Any) -> None:
    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    given = await requests.get()
    if importlib.util.find_spec("verifiers") is None:
        return write({"missing": True})
    try:
        program = Program(load(given["name"], given["arguments"]))
        async with program.source.serving():
            write(await program.describe())
            while True:
                request = await requests.get()
                try:
                    write(await program.answer(request))
                except Exception as error:  # noqa: BLE001 - an environment can raise anything
                    write({"error": f"it raised {describe(error)}" if not isinstance(error, Unfit) else str(error)})
    except Exception as error:  # noqa: BLE001
        write({"error": describe(error)})


def read(loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[Any]) -> None:
    """Pass on what comes; end the program with its stdin, whatever it is doing."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    os._exit(0)


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints
    logging.basicConfig(level=logging.WARNING)
    requests: asyncio.Queue[Any] = asyncio.Queue()
    threading.Thread(target=read, args=(asyncio.get_running_loop(), requests), daemon=True).start()
    await serve(requests, answers)
    os._exit(0)


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # environments of one's own; last, so that no file there shadows a package
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited, os.getcwd())))  # servers of their tools
    asyncio.run(main())
