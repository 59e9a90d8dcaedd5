"""Environments: which one the settings name, and the worker processes that run it.

Every turn is a call with a deadline, in whichever process is free: the environment travels pickled.
"""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lagrpo.errors import suggest
from lagrpo.rewards import worker
from lagrpo.rewards.load import load_function
from lagrpo.rewards.pool import Job, WorkerPool
from lagrpo.tasks.base import Key, Make, StepResult, Task, TaskWithEnvironment
from lagrpo.tasks.tools import Tools
from lagrpo.types import Outcome, Prompt

TOOLS = {"calculator": "lagrpo.tasks.calculator:calculate"}
"""The built-in functions that environment.tools can name."""


class EnvironmentPool:
    """Worker processes for the environments that `make` makes. Any thread may use them. Raises TypeError for what
    cannot be sent to another process."""

    def __init__(self, make: Make, *, workers: int = 1, deadline: float = 5.0, memory: float = 4.0) -> None:
        self._workers, self._deadline = WorkerPool(make, workers, memory), deadline

    def open(self, prompt: Prompt, key: Key) -> tuple[Mapping[str, Any], ...]:
        """The messages with which an episode begins. Raises ValueError if it cannot begin."""
        kind, said = self.result(self.submit(None, prompt, key, None))
        if kind == "unscored":
            raise ValueError(f"its environment does not start: {said}")
        return said[0]

    def submit(self, state: bytes | None, prompt: Prompt | None, key: Key | None, text: str | None) -> Job:
        """Have an environment reply to `text`: the one that is pickled in `state`, else a new one, which begins with
        the prompt and the key."""
        return self._workers.submit(take_turn, state, prompt, key, text, seconds=self._deadline)

    def result(self, job: Job) -> tuple[str, Any]:
        """("turn", (messages, reward, state)), ("final", (reward, reason)) or ("unscored", reason)."""
        found = self._workers.result(job)
        return ("unscored", found.reason) if isinstance(found, Outcome) else found

    def forget(self, job: Job) -> None:
        """Cancel a call whose result is not needed."""
        job.future.cancel()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._workers.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def take_turn(state: bytes | None, prompt: Prompt | None, key: Key | None, text: str | None) -> Any:
    """What an environment says, in a worker process: see `EnvironmentPool.submit` and `result`. Without a text a new
    environment only begins."""
    make = worker.loaded()
    try:
        return _take_turn(make, state, prompt, key, text)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it concerns this completion only
        found = worker.to_outcome(error)
        return Outcome.unscored(found.reason.replace("the reward function raised", "the environment raised"))


def _take_turn(make: Make, state: bytes | None, prompt: Any, key: Any, text: str | None) -> Any:
    environment = make() if state is None else pickle.loads(state)
    if state is None:
        asked = replace(prompt, messages=prompt.asked or prompt.messages, asked=())
        opening = _plain(environment.reset(asked, key))
        if text is None:
            return "turn", (opening, 0.0, pickle.dumps(environment))
        if opening != _plain(prompt.messages):
            raise ValueError("reset gave this completion other messages than its group")
    said = environment.step(str(text))
    if not isinstance(said, StepResult):
        raise TypeError(f"step returned a {type(said).__name__}, not a StepResult")
    reward = worker.to_outcome(said.reward)
    if reward.reward is None:
        raise ValueError(f"its reward is {said.reward!r:.40}, not a finite number")
    if said.done:
        return "final", (reward.reward, worker.clean(said.reason))
    return "turn", (_plain(said.messages), reward.reward, pickle.dumps(environment))


def _plain(messages: Any) -> tuple[dict[str, Any], ...]:
    """Messages as JSON has them. Raises TypeError or ValueError for what cannot be one."""
    plain = json.loads(json.dumps([dict(message) for message in messages]))
    if not plain or not all(isinstance(message.get("role"), str) for message in plain):
        raise ValueError(f"its messages are {plain!r:.80}: it needs at least one, each with a role")
    return tuple(plain)


def load_environment(settings: Any, task: Task, system: str = "") -> Make | None:
    """What makes an environment for each completion, by section environment or the task; None if completions have one
    turn. `system` is what tells the policy of functions. Raises ValueError for a function that does not exist."""
    if settings.name is not None:
        return load_function(settings.name)
    if isinstance(task, TaskWithEnvironment):
        if settings.tools:
            raise ValueError(f"the task {task.name!r} has an environment: leave out environment.tools")
        return task.environment
    functions = load_tools(settings.tools)
    return Tools({function.__name__: function for function in functions}, task.reward, system) if functions else None


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions of these names. Raises ValueError for one that does not exist, has the name of another one, or is
    not a plain function."""
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        if ":" not in name and name not in TOOLS:
            raise ValueError(
                f"there is no tool {name!r}; there are {', '.join(TOOLS)}, and functions of your own as "
                f"'package.module:function'.{suggest(name, TOOLS)}"
            )
        function = load_function(TOOLS.get(name, name))
        called = getattr(function, "__name__", None)
        if called is None or inspect.iscoroutinefunction(function):
            raise ValueError(f"tool {name!r} is not a plain function, whose name the policy calls")
        if called in found:
            raise ValueError(f"tool {name!r}: another one is called {called!r}, too: rename one of them")
        found[called] = function
    return [*found.values()]
