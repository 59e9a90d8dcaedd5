"""Tasks `gym:NAME`: text environments in Gymnasium's style, such as GEM's (pip install gem-llm).

NAME is the id of a GEM environment (`gym:game:GuessTheNumber-v0-easy`), or a
package.module:function that returns an object with these methods:

    reset(seed=…)  -> text, info
    step(text)     -> text, reward, terminated, truncated, info

If `info` has a "suffix", as in GEM's environments, the suffix follows the text. A prompt is a seed.
The reward is the sum over the steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lagrpo.rewards.entries import load_function
from lagrpo.rewards.reward import UnscorableError
from lagrpo.tasks import Key, Messages, RowTask, StepResult
from lagrpo.types import Prompt

NUM_TRAIN = 10_000  # seeds
NUM_TEST = 1_000


def load(seed: int, name: str) -> RowTask:
    """Returns the task of an environment. Raises ValueError or ImportError if it does not exist."""
    build(name)  # an error of the environment comes before the model is loaded
    rows = {"train": range(NUM_TRAIN), "test": range(NUM_TRAIN, NUM_TRAIN + NUM_TEST)}
    return RowTask(f"gym:{name}", rows, _ask, score, environment=partial(Gym, name))


def _ask(environment_seed: int) -> tuple[str, int]:
    return f"seed {environment_seed}", environment_seed


def build(name: str) -> Any:
    """Returns a new environment. Raises ValueError or ImportError if it does not exist."""
    if "-v" not in name:
        return load_function(name)()
    try:
        import gem  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"gym:{name} needs the package gem-llm: pip install gem-llm") from error

    return gem.make(name)


def score(completion: str, answer: Any) -> float:
    """Raises UnscorableError: the environment gives the rewards of this task."""
    raise UnscorableError("the reward of this task comes from its environment")


class Gym:
    """One episode.

    Environments of other packages may not be picklable. So every step builds a new environment, and
    repeats the earlier steps.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[str] = []  # the texts of the policy
        self.reward = 0.0  # the sum so far

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.seed = int(prompt.answer)
        text, info = build(self.name).reset(seed=self.seed)
        return [to_message(text, info)]

    def step(self, text: str) -> StepResult:
        environment = build(self.name)
        environment.reset(seed=self.seed)
        for earlier_text in self.steps:
            environment.step(earlier_text)
        reply, reward, terminated, truncated, info = environment.step(text)
        self.steps.append(text)
        self.reward += float(reward)
        if terminated or truncated:
            reason = "truncated" if truncated else ""
            return StepResult(reward=self.reward, done=True, reason=reason)
        return StepResult([to_message(reply, info)], self.reward)


def to_message(text: Any, info: Any) -> dict[str, str]:
    """Returns an environment's text as a message, with the suffix in `info` if there is one."""
    suffix = (info or {}).get("suffix")
    content = f"{text}\n{suffix}" if suffix else str(text)
    return {"role": "user", "content": content}
