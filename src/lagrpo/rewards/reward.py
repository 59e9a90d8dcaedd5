"""A reward function in any of three signatures, and the weighted sum of several rewards.

The names of its parameters tell which signature a function has:

    ours   f(completion, answer) -> float, optionally also prompt, row, finished, num_tokens
    TRL    f(prompts, completions, **columns) -> list[float | None], one call for the completions of a prompt
    verl   f(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}

Each may be a coroutine function. None means that this function does not score the completion.
"""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Literal

from lagrpo.errors import suggest
from lagrpo.types import Completion, Outcome, Prompt, Range, is_correct

Style = Literal["ours", "trl", "verl"]
PASSED: Mapping[Style, tuple[str, ...]] = {
    "ours": ("completion", "answer", "prompt", "row", "finished", "num_tokens"),
    "trl": ("prompts", "completions", "completion_ids", "answer"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""What lagrpo passes in each signature. TRL's also gets the columns of the data."""
STYLE_OF: Mapping[str, Style] = {"completion": "ours", "completions": "trl", "solution_str": "verl"}
NOT_SCORED = "the reward function returned None"


class UnscorableError(Exception):
    """The answer cannot be scored, for example because the reference answer cannot be read. The completion is
    *unscored*: it has no reward, which is not a reward of 0."""


def accept_any(score: Callable[[str, Any], float]) -> Callable[[str, Any], float]:
    """The reward function `score`, for which a list as the answer means any of its entries."""

    @wraps(score)
    def score_any(completion: str, answer: Any) -> float:
        if not isinstance(answer, list):
            return score(completion, answer)
        found, problem = list[float](), UnscorableError("the reference answer is an empty list")
        for each in answer:
            try:
                found.append(score(completion, each))
            except UnscorableError as error:
                problem = error
        if not found:
            raise problem
        return max(found)

    return score_any


@dataclass(frozen=True)
class Reward:
    """One reward of a completion. Raises ValueError for a function whose signature is none of the three."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    range: Range = (0.0, 1.0)
    """its minimum and maximum"""
    decides: bool = False
    """whether its maximum is what makes a completion correct"""
    deadline: float | None = None
    """seconds for a call; None: the pool's"""

    def __post_init__(self) -> None:
        _ = self.style

    @cached_property
    def style(self) -> Style:
        for name in self._parameters:
            if name in STYLE_OF:
                return STYLE_OF[name]
        raise ValueError(
            f"{self.title}({', '.join(self._parameters)}): a reward function takes (completion, answer), as in TRL "
            "(prompts, completions, **columns), or as in verl (data_source, solution_str, ground_truth, extra_info)"
        )

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # some functions that are written in C
            return {}

    @property
    def is_async(self) -> bool:
        call = getattr(type(self.function), "__call__", None)  # noqa: B004 - the method, not whether it exists
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @cached_property
    def importable(self) -> bool:
        """Whether a worker process can load the function: not a lambda, a closure, or defined in the main script."""
        try:
            return b"__main__" not in pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return False

    @property
    def repeats(self) -> bool:
        """Whether it gives the same value when it is called again; a server may not."""
        return getattr(self.function, "repeats", True)

    def check(self, row: Mapping[str, Any] | None) -> None:
        """Raise ValueError if the function needs a parameter that neither lagrpo nor the columns of the data have."""
        known = {*PASSED[self.style], *(row or () if self.style == "trl" else ())}
        for name, parameter in self._parameters.items():
            is_splat = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            by_name = parameter.kind != parameter.POSITIONAL_ONLY and name in known
            if parameter.default is parameter.empty and not is_splat and not by_name:
                passed = f"lagrpo passes {', '.join(sorted(known))} by name.{suggest(name, known)}"
                raise ValueError(f"reward function {self.title!r} takes {name!r}: {passed}")

    def arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """The keyword arguments of each call: one call for each completion, in TRL's signature one for all of them."""
        if self.style == "trl":
            return [self._select(_trl_arguments(prompt, completions))]
        make = _verl_arguments if self.style == "verl" else _our_arguments
        return [self._select(make(prompt, completion)) for completion in completions]

    def _select(self, available: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the function takes."""
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            return available
        return {name: value for name, value in available.items() if name in self._parameters}


def _our_arguments(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    values = (completion.text, prompt.answer, [*(prompt.asked or prompt.messages)], prompt.row)
    return dict(zip(PASSED["ours"], (*values, completion.finished, completion.length), strict=True))


def _verl_arguments(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    row = prompt.row or {}
    values = (row.get("data_source", ""), completion.text, prompt.answer, row.get("extra_info", dict(row)))
    return dict(zip(PASSED["verl"], values, strict=True))


def _trl_arguments(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """Lists with an entry for each completion. Completions are message lists if the prompt of the row is one."""
    columns = {"answer": prompt.answer} | dict(prompt.row or {})
    asked = columns.pop("prompt", None) or [*(prompt.asked or prompt.messages)]
    texts = [c.text for c in completions]
    said = texts if isinstance(asked, str) else [[{"role": "assistant", "content": text}] for text in texts]
    return {name: [value] * len(texts) for name, value in columns.items()} | {
        "prompts": [asked] * len(texts),
        "completions": said,
        "completion_ids": [c.token_ids.tolist() for c in completions],
    }


@dataclass(frozen=True)
class Rewards:
    """The rewards of a task. A single one without a name has no columns in metrics and records."""

    parts: tuple[Reward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.parts if reward.name)

    def check(self, row: Mapping[str, Any] | None) -> None:
        """Raise ValueError if a function needs a parameter that it would not get."""
        for reward in self.parts:
            reward.check(row)

    def combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        """The outcome of a completion from the outcome of each reward, in their order. Rewards that returned None (an
        unscored outcome without a reason) are left out of the sum; one that failed leaves the completion unscored."""
        if not self.names:
            return outcomes[0] if outcomes[0] != Outcome("unscored") else Outcome.unscored(NOT_SCORED)
        parts = {reward.name: found.reward for reward, found in zip(self.parts, outcomes, strict=True)}
        for name, found in zip(parts, outcomes, strict=True):
            if found.reward is None and found.reason:
                return Outcome(found.kind, reason=f"{found.reason} (reward {name!r})", parts=parts)
        scored = [(r, o.reward) for r, o in zip(self.parts, outcomes, strict=True) if o.reward is not None]
        if not scored:
            return Outcome("unscored", reason=NOT_SCORED, parts=parts)
        total = math.fsum(reward.weight * value for reward, value in scored)
        return Outcome("scored", total, parts=parts, correct=self._is_correct(scored))

    def _is_correct(self, scored: Sequence[tuple[Reward, float]]) -> bool:
        """Whether every reward that decides has its maximum; if none says that it decides, the first does."""
        deciding = [pair for pair in scored if pair[0].decides]
        if not any(reward.decides for reward in self.parts):
            deciding = scored[:1]
        return bool(deciding) and all(is_correct(value, reward.range) for reward, value in deciding)


def as_rewards(given: Callable[..., Any] | Rewards) -> Rewards:
    """The rewards of a task, which may be a single function."""
    return given if isinstance(given, Rewards) else Rewards((Reward("", given),))


def reward_names(given: object) -> tuple[str, ...]:
    """The names of a task's rewards; none for a single function."""
    return given.names if isinstance(given, Rewards) else ()


def sum_ranges(parts: Sequence[tuple[float, Range]]) -> Range:
    """The minimum and maximum of the sum of weight * value with each value in its range.

    >>> sum_ranges([(1.0, (0.0, 1.0)), (-0.5, (0.0, 2.0))])
    (-1.0, 1.0)
    """
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in parts]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)
