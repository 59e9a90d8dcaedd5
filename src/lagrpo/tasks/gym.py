"""Tasks `gym:NAME`: text environments in the style of Gymnasium, such as those of GEM.

`NAME` is the id of an environment of GEM (`gym:game:GuessTheNumber-v0-easy`), or a package.module:function that returns
an object with the methods

    reset(seed=…) -> text, info
    step(text) -> text, reward, terminated, truncated, info

A "suffix" in `info`, as GEM's environments have, follows the text. A prompt is a seed: the completions of a group play
the same episode. The reward is the sum over the steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from lagrpo.rewards.load import load_function
from lagrpo.rewards.reward import UnscorableError
from lagrpo.tasks.base import EpisodeTask, Key, Messages, StepResult, build_messages
from lagrpo.types import Prompt

TRAIN, TEST = 10_000, 1_000  # seeds
GEM = re.compile(r".*-v\d+(-\w+)*")  # ids of GEM


def load(name: str, system_prompt: str | None = None) -> EpisodeTask:
    """The task of this name. Raises ValueError or ImportError if there is no such environment."""
    environment = name.removeprefix("gym:")
    build(environment)
    rows, make = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}, partial(Gym, environment, system_prompt)
    return EpisodeTask(name, rows, lambda seed: (f"seed {seed}", seed), score, environment=make)


def build(name: str) -> Any:
    """An environment."""
    if not GEM.fullmatch(name):
        return load_function(name)()
    try:
        import gem  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"the task gym:{name} needs GEM: pip install gem-llm") from error
    return gem.make(name)


def score(completion: str, answer: Any) -> float:
    raise UnscorableError("the reward of this task comes from its environment")


class Gym:
    """One episode. Environments of others may not be picklable, so every step repeats the earlier ones."""

    def __init__(self, name: str, system_prompt: str | None) -> None:
        self.name, self.system_prompt, self.steps, self.reward = name, system_prompt, list[str](), 0.0

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.seed = int(prompt.answer)
        return build_messages(self._begin()[1], self.system_prompt)

    def step(self, text: str) -> StepResult:
        env, _ = self._begin()
        for earlier in self.steps:
            env.step(earlier)
        said, reward, terminated, truncated, info = env.step(text)
        self.steps.append(text)
        self.reward += float(reward)
        if terminated or truncated:
            reason = "truncated by the environment" if not terminated else ""
            return StepResult(reward=self.reward, done=True, reason=reason)
        return StepResult([{"role": "user", "content": _whole(said, info)}], self.reward)

    def _begin(self) -> tuple[Any, str]:
        env = build(self.name)
        return env, _whole(*env.reset(seed=self.seed))


def _whole(text: Any, info: Any) -> str:
    suffix = info.get("suffix") if isinstance(info, Mapping) else None
    return f"{text}\n{suffix}" if suffix else str(text)
