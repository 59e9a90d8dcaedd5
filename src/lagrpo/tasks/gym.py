"""Tasks `gym:NAME`: text environments in the style of Gymnasium, such as those of GEM.

`NAME` is the id of an environment of GEM (`gym:game:GuessTheNumber-v0-easy`), or a package.module:function of one's own
that returns an object with the methods

    reset(seed=…) -> text, info
    step(text) -> text, reward, terminated, truncated, info

A "suffix" in `info`, as GEM's environments have, stands behind the text. A prompt is a seed: the completions of a group
play the same episode. The reward is the sum over the steps.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lagrpo.tasks.base import Address, EpisodeTask, Final, Messages, Turn, Unjudgeable
from lagrpo.tasks.names import GYMNASIUM, load_function
from lagrpo.types import Prompt

TRAIN, TEST = 10_000, 1_000  # seeds
GEM = re.compile(r".*-v\d+(-\w+)*")  # ids of GEM
KEPT = 64  # environments that a process keeps between their turns


def load(name: str, system_prompt: str | None = None) -> Any:
    """The task of this name. Raises ValueError or ImportError where there is no such environment."""
    make = Gym(name.removeprefix(GYMNASIUM), system_prompt or "")
    make.build()
    rows = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}
    return EpisodeTask(name, rows, _ask, judge, environment=make)


def _ask(seed: int) -> tuple[Messages, int]:
    return ({"role": "user", "content": f"seed {seed}"},), seed


def judge(text: str, gold: Any) -> float:
    """What an environment gives cannot be given to a text alone."""
    raise Unjudgeable("the reward of this task is its environment's")


@dataclass(frozen=True, slots=True)
class Gym:
    """Makes the episodes of an environment. A process that unpickles it loads the environment: not under the deadline
    of the first turn."""

    name: str
    system: str = ""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return _loaded, (self.name, self.system)

    def __call__(self) -> Playing:
        return Playing(self)

    def build(self) -> Any:
        """The environment itself."""
        if not GEM.fullmatch(self.name):
            return load_function(self.name)()
        try:
            gem = importlib.import_module("gem")
        except ImportError as error:
            raise ImportError(f"the task {GYMNASIUM}{self.name} needs GEM: pip install gem-llm") from error
        return gem.make(self.name)


@dataclass(slots=True)
class Playing:
    """One episode. What is pickled is its seed and its steps: a process that does not know it takes these again."""

    gym: Gym
    seed: int = 0
    key: Address = ()
    steps: list[str] = field(default_factory=list)
    reward: float = 0.0

    def start(self, prompt: Prompt, address: Address) -> Turn:
        self.seed, self.key = int(prompt.gold), address
        _, text = self._begin()
        said = {"role": "user", "content": text}
        return Turn(({"role": "system", "content": self.gym.system}, said) if self.gym.system else (said,))

    def reply(self, text: str) -> Turn | Final:
        taken, env = _alive.pop(self.key, (-1, None))
        if taken != len(self.steps):
            env, _ = self._begin()
            for step in self.steps:
                env.step(step)
        said, reward, terminated, truncated, info = env.step(text)
        self.steps.append(text)
        self.reward += float(reward)
        if terminated or truncated:
            return Final(self.reward, "truncated by the environment" if truncated and not terminated else "")
        self._keep(env)
        return Turn(({"role": "user", "content": _whole(said, info)},), self.reward)

    def _begin(self) -> tuple[Any, str]:
        env = self.gym.build()
        text, info = env.reset(seed=self.seed)
        self._keep(env)
        return env, _whole(text, info)

    def _keep(self, env: Any) -> None:
        _alive[self.key] = len(self.steps), env
        while len(_alive) > KEPT:
            _alive.pop(next(iter(_alive)))


def _loaded(name: str, system: str) -> Gym:
    gym = Gym(name, system)
    if name not in _names:
        gym.build()
        _names.add(name)
    return gym


def _whole(text: Any, info: Any) -> str:
    suffix = info.get("suffix") if isinstance(info, Mapping) else None
    return f"{text}\n{suffix}" if suffix else str(text)


_names: set[str] = set()  # environments that this process has loaded
_alive: dict[Address, tuple[int, Any]] = {}  # by the address of an episode: its steps, and the environment after them
