"""Several rewards of one completion, as the weighted sum that it is trained with.

A `Rewards` takes the place of a task's judge. Each of its rewards is a function of its own, with its own deadline; the
verifier calls them one by one, and a completion is scored where all of them could score it.

The verifier's worker processes import this module, so nothing here imports torch, numpy or pydantic at the top.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lagrpo.tasks.base import Messages
from lagrpo.types import Outcome, Range, is_right

Takes = Literal["text", "answer", "batch"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as rewards see it: most of them text and gold alone."""

    text: str
    gold: Any
    prompt: Messages = ()
    tokens: int = 0
    """how many were sampled"""
    finished: bool = True
    """False where it was cut at the token limit"""


@dataclass(frozen=True, slots=True)
class Reward:
    """One of several rewards. `function` gets, as `takes` says: `text` a completion and its gold answer; `answer` an
    `Answer`; `batch` the lists of the texts and of the gold answers of a group, for a list of numbers."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    range: Range = (0.0, 1.0)
    """its least and greatest value"""
    takes: Takes = "text"
    decides: bool = False
    """whether its greatest value is what makes a completion right"""
    deadline: float | None = None
    """seconds for a call; None: that of the verifier"""

    @property
    def whole_groups(self) -> bool:
        """Whether a worker gets all completions of a group at once: for one call, or for calls that wait side by side
        (of a coroutine function, or of an object that says so by `side_by_side`)."""
        return self.takes == "batch" or self.waits

    @property
    def waits(self) -> bool:
        """Whether its calls wait for something else than this machine's processor."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - an object's own method, not whether it has one
        asynchronous = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        return asynchronous or getattr(self.function, "side_by_side", False)

    @property
    def repeats(self) -> bool:
        """Whether it finds the same when it is asked again, which a server need not."""
        return not getattr(self.function, "side_by_side", False)


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of a task: the judge of its completions."""

    of: tuple[Reward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.of)

    @property
    def range(self) -> Range:
        """The least and the greatest weighted sum."""
        return sum_ranges([(reward.weight, reward.range) for reward in self.of])

    def combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        """The outcome of a completion from what each reward found, in their order."""
        parts = {reward.name: found.reward for reward, found in zip(self.of, outcomes, strict=True)}
        for reward, found in zip(self.of, outcomes, strict=True):
            if found.reward is None:
                return Outcome("unscored", reason=f"{found.reason} (reward {reward.name!r})", parts=parts)
        values = [found.reward for found in outcomes if found.reward is not None]
        total = self.total(values)
        if not math.isfinite(total):
            return Outcome("unscored", reason=f"the weighted sum of the rewards is {total}", parts=parts)
        return Outcome("scored", total, parts=parts, right=self.call_right(values))

    def total(self, values: Sequence[float]) -> float:
        """The weighted sum of the values, in the order of the rewards; NaN or infinite where it is no number."""
        return sum_up([reward.weight * value for reward, value in zip(self.of, values, strict=True)])

    def call_right(self, values: Sequence[float]) -> bool:
        """Whether every reward that decides has its greatest value: the first where none says that it does."""
        decides = [reward.decides for reward in self.of]
        deciding = decides if any(decides) else [n == 0 for n in range(len(self.of))]
        judged = zip(self.of, values, deciding, strict=True)
        return all(is_right(value, reward.range) for reward, value, counts in judged if counts)


def sum_ranges(parts: Sequence[tuple[float, Range]]) -> Range:
    """The least and the greatest sum of weight * value with each value in its range.

    >>> sum_ranges([(1.0, (0.0, 1.0)), (-0.5, (0.0, 2.0))])
    (-1.0, 1.0)
    """
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in parts]
    return sum_up([low for low, _ in ends]), sum_up([high for _, high in ends])


def sum_up(numbers: Sequence[float]) -> float:
    """The sum, rounded once; NaN where it passes the largest number, or infinities of both signs meet.

    >>> sum_up([0.1] * 10), sum_up([1e308, 1e308])
    (1.0, nan)
    """
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return math.nan


def reward_names(judge: object) -> tuple[str, ...]:
    """The names of the rewards of a task's judge; none where it is a function."""
    return judge.names if isinstance(judge, Rewards) else ()
