"""Tasks `gym:NAME`: text environments in the style of Gymnasium, such as GEM's.

`NAME` is the id of an environment of GEM (`gym:game:GuessTheNumber-v0-easy`), or a package.module:function that returns
an object with the methods

    reset(seed=…) -> text, info
    step(text) -> text, reward, terminated, truncated, info

A "suffix" in `info`, as GEM's environments have, follows the text. A prompt is a seed: the completions of a group play
the same episode. The reward is the sum over the steps.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from lagrpo.rewards.load import load_function
from lagrpo.rewards.reward import UnscorableError
from lagrpo.tasks.base import Key, Messages, RowTask, StepResult, build_messages
from lagrpo.types import Prompt

TRAIN, TEST = 10_000, 1_000  # seeds
GEM = re.compile(r".*-v\d+(-\w+)*")  # ids of GEM


def load(name: str, system_prompt: str | None = None) -> RowTask:
    """The task of this environment. Raises ValueError or ImportError if it does not exist."""
    build(name)
    rows, make = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}, partial(Gym, name, system_prompt)
    return RowTask(f"gym:{name}", rows, lambda seed: (f"seed {seed}", seed), score, environment=make)


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
        return build_messages(_add_suffix(*build(self.name).reset(seed=self.seed)), self.system_prompt)

    def step(self, text: str) -> StepResult:
        env = build(self.name)
        env.reset(seed=self.seed)
        for earlier in self.steps:
            env.step(earlier)
        said, reward, terminated, truncated, info = env.step(text)
        self.steps.append(text)
        self.reward += float(reward)
        if terminated or truncated:
            reason = "" if terminated else "truncated by the environment"
            return StepResult(reward=self.reward, done=True, reason=reason)
        return StepResult([{"role": "user", "content": _add_suffix(said, info)}], self.reward)


def _add_suffix(text: Any, info: Any) -> str:
    suffix = (info or {}).get("suffix")
    return f"{text}\n{suffix}" if suffix else str(text)
