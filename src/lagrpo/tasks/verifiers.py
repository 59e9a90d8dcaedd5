"""Tasks `verifiers:NAME`: environments of the package `verifiers`, in a Python of their own.

The package has many dependencies, so it may live in another virtual environment, whose Python is `task.python`. There
the program tasks/bridge loads the environment and lets its own loop run: its prompts, state, stop conditions, replies,
tools and rewards are its own. Each time that the loop asks a model, it waits here until the policy has spoken. What the
policy samples stays tokens: the loop gets its text, and what it says next is appended.

Each worker process of the verifier has a program of its own. One that takes over an episode plays it again from its
row, with the same seeds, and compares what it hears.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lagrpo.tasks.base import Address, EpisodeTask, Final, Messages, Turn, Unjudgeable, option
from lagrpo.tasks.bridges import Bridge, BridgeError, Given, RefusedError, find_python
from lagrpo.tasks.gym import judge
from lagrpo.tasks.names import VERIFIERS
from lagrpo.tasks.tools import OPEN, MalformedError, find_calls, told
from lagrpo.types import Prompt

KEPT = 64  # episodes that a program keeps between their turns
HOLDOUT = 5  # of the rows of an environment without rows for evaluation, one in so many is for testing


@dataclass(frozen=True, slots=True)
class Options:
    """The options of these tasks."""

    options: Mapping[str, Any] | None = option(
        None, "table of the options of its own, of the generator or the environment"
    )
    python: str | None = option(None, "Python with the package verifiers; by default the one that runs lagrpo")
    train_size: int = option(10_000, "training prompts", least=1, most=10_000_000)
    test_size: int = option(1_000, "test prompts", least=1, most=10_000_000)


def load(options: Options, name: str) -> EpisodeTask:
    """The task. Raises ValueError or ImportError where the environment cannot be had, or cannot be driven turn by
    turn."""
    given = Given(find_python(options.python), name, json.dumps(options.options or {}))
    try:
        with Bridge(given) as bridge:
            said = bridge.described()
    except (BridgeError, RefusedError) as error:
        raise ValueError(f"task.name: {VERIFIERS}:{name} cannot be had: {error}") from error
    if "missing" in said:
        raise ImportError(
            f"the task {VERIFIERS}:{name} needs the package verifiers, which {given.python} does not have: "
            f"{given.python} -m pip install verifiers, or `make verifiers-env` and --task.python "
            ".venv-verifiers/bin/python"
        )
    train, test, tools = _check(said.get("ready"))
    splits = split(train, test, options.train_size, options.test_size)
    return EpisodeTask(f"{VERIFIERS}:{name}", splits, _ask, judge, environment=Verifiers(given, json.dumps(tools)))


def split(train: int | None, test: int, most: int, most_test: int) -> dict[str, range]:
    """The rows of each split, of so many (None: without end) for training and so many for evaluation behind them."""
    if train is None:
        return {"train": range(most), "test": range(most, most + most_test)}
    if not test:
        held = min(most_test, max(1, train // HOLDOUT)) if train > 1 else 0
        return {"train": range(min(most, train - held)), "test": range(train - held, train)}
    return {"train": range(min(most, train)), "test": range(train, train + min(most_test, test))}


def _check(ready: Any) -> tuple[int | None, int, list[dict[str, Any]]]:
    """What a program says of its environment: rows for training and for evaluation, schemas of its tools."""
    match ready:
        case {"train": int() | None as train, "test": int() as test, "tools": list() as tools} if all(
            isinstance(tool, dict) and isinstance(tool.get("function", {}).get("name"), str) for tool in tools
        ):
            return train, test, tools
    raise ValueError(f"the program in the other Python says {ready!r:.80} of its environment")


def _ask(row: int) -> tuple[Messages, dict[str, int]]:
    return ({"role": "user", "content": f"row {row}"},), {"row": row}


@dataclass(frozen=True, slots=True)
class Verifiers:
    """Makes the episodes of an environment. A process that unpickles it starts a program, not under the deadline of the
    first turn. `system` tells the policy of tools, "" where its chat template does."""

    given: Given
    tools: str = "[]"
    system: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.given, self.tools, self.system)

    def __call__(self) -> Playing:
        return Playing(self)

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the environment's tools."""
        return json.loads(self.tools)


def _loaded(given: Given, tools: str, system: str) -> Verifiers:
    if given not in _bridges:
        _bridges[given] = Bridge(given)
        _bridges[given].described()
    return Verifiers(given, tools, system)


@dataclass(slots=True)
class Playing:
    """One episode. What is pickled is its row and its steps: a process that does not know it takes these again."""

    make: Verifiers
    row: int = 0
    key: Address = ()
    steps: list[str] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    """digests of what the environment said"""

    def start(self, prompt: Prompt, address: Address) -> Turn:
        self.row, self.key = prompt.gold["row"], address
        turn = self._hear(self._begin())
        if not isinstance(turn, Turn):
            raise Unjudgeable(f"the environment ends before the policy has spoken: {turn.reason}")
        return Turn(told(turn.messages, self.make.system), turn.reward)

    def reply(self, text: str) -> Turn | Final:
        self._catch_up()
        said = self._hear(self._step(len(self.steps), text))
        self.steps.append(text)
        return said

    @property
    def _id(self) -> str:
        return json.dumps(self.key)

    def _bridge(self) -> Bridge:
        if self.make.given not in _bridges:
            _loaded(self.make.given, self.make.tools, self.make.system)
        return _bridges[self.make.given]

    def _catch_up(self) -> None:
        """Have the program hold this episode after its steps so far."""
        alive = self._bridge().alive
        if alive.get(self._id) == len(self.steps):
            return
        again, heard = [self._begin()], self.heard
        again += [self._step(n, text) for n, text in enumerate(self.steps)]
        if [_digest(said) for said in again] != heard:
            raise Unjudgeable(
                "the environment does not repeat itself: another process played the episode again, and was told "
                "something else. Its replies must follow from the row, Python's and numpy's random numbers, and what "
                "the policy said; with verifier.workers = 1 nothing is played again unless the process ends"
            )

    def _begin(self) -> dict[str, Any]:
        return self._exchange({"start": self._id, "row": self.row, "seed": _seed(self.key[0], "row", self.row)}, 0)

    def _step(self, number: int, text: str) -> dict[str, Any]:
        content, calls = _read(text) if self.make.tools != "[]" else (text, [])
        request = {"say": self._id, "content": content, "calls": calls, "seed": _seed(*self.key, "turn", number)}
        return self._exchange(request, number + 1)

    def _exchange(self, request: Mapping[str, Any], taken: int) -> dict[str, Any]:
        """What the program says; it holds the episode after so many turns then. The oldest of too many is let go."""
        bridge = self._bridge()
        bridge.alive.pop(self._id, None)
        try:
            said = bridge.ask(request)
            if "turn" in said:
                bridge.alive[self._id] = taken
            if len(bridge.alive) > KEPT:
                oldest = next(iter(bridge.alive))
                del bridge.alive[oldest]
                bridge.ask({"drop": oldest})
        except (BridgeError, RefusedError) as error:
            raise Unjudgeable(f"the environment: {error}") from error
        return said

    def _hear(self, said: dict[str, Any]) -> Turn | Final:
        self.heard.append(_digest(said))
        match said:
            case {"turn": {"messages": list() as messages, "reward": int() | float() as reward}}:
                return Turn(tuple(messages), float(reward))
            case {"final": {"reward": int() | float() as reward, "reason": str() as reason}}:
                return Final(float(reward), reason)
        raise Unjudgeable(f"the environment's program says {said!r:.80}")


def _read(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What a turn says beside its calls, and these; a call that cannot be read is a part of the text."""
    try:
        calls = find_calls(text)
    except MalformedError:
        return text, []
    if not calls:
        return text, []
    return text.partition(OPEN)[0] if OPEN in text else "", [
        {"name": call.name, "arguments": dict(call.arguments)} for call in calls
    ]


def _seed(*of: Any) -> int:
    return zlib.crc32(json.dumps(of).encode())


def _digest(said: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


_bridges: dict[Given, Bridge] = {}  # of this process
