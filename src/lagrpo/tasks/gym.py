"""Tasks `gym:NAME`: text environments in the style of Gymnasium, such as GEM's (pip install gem-llm).

NAME is the id of one of GEM's (`gym:game:GuessTheNumber-v0-easy`), or a package.module:function that returns an object
with reset(seed=…) -> text, info and step(text) -> text, reward, terminated, truncated, info. A "suffix" in `info`, as
GEM's environments have, follows the text. A prompt is a seed. The reward is the sum over the steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lagrpo.rewards.reward import UnscorableError, load_function
from lagrpo.tasks import Key, Messages, RowTask, StepResult
from lagrpo.types import Prompt

TRAIN, TEST = 10_000, 1_000  # seeds


def load(seed: int, name: str) -> RowTask:
    """The task of an environment. Raises ValueError or ImportError if it does not exist."""
    build(name)  # an error of the environment comes before the model is loaded
    rows = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}
    return RowTask(
        f"gym:{name}", rows, lambda n: (f"seed {n}", n), score, environment=partial(Gym, name)
    )


def build(name: str) -> Any:
    if "-v" not in name:
        return load_function(name)()
    try:
        import gem  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"gym:{name} needs the package gem-llm: pip install gem-llm") from error

    return gem.make(name)


def score(completion: str, answer: Any) -> float:
    raise UnscorableError("the reward of this task comes from its environment")


class Gym:
    """One episode. Environments of others may not be picklable, so every step repeats the earlier ones."""

    def __init__(self, name: str) -> None:
        self.name, self.steps, self.reward = name, list[str](), 0.0

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.seed = int(prompt.answer)
        return [to_message(*build(self.name).reset(seed=self.seed))]

    def step(self, text: str) -> StepResult:
        env = build(self.name)
        env.reset(seed=self.seed)
        for earlier in self.steps:
            env.step(earlier)
        said, reward, terminated, truncated, info = env.step(text)
        self.steps.append(text)
        self.reward += float(reward)
        if terminated or truncated:
            return StepResult(
                reward=self.reward, done=True, reason="truncated" if truncated else ""
            )
        return StepResult([to_message(said, info)], self.reward)


def to_message(text: Any, info: Any) -> dict[str, str]:
    suffix = (info or {}).get("suffix")
    return {"role": "user", "content": f"{text}\n{suffix}" if suffix else str(text)}
