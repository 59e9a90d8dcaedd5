"""Reward functions: their signatures, the built-in ones, and the weighted sum of several.

The names of its parameters tell which signature a function has:

    ours   f(completion, answer) -> float, optionally also prompt, row, finished, num_tokens, prefix
    TRL    f(prompts, completions, **columns) -> list[float | None], one call for the completions of a prompt
    verl   f(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}

Each may be a coroutine function. None means that this function does not score the completion.
"""

from __future__ import annotations

import inspect
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any

from lagrpo.core.references import describe_raised, load_reference
from lagrpo.errors import suggest
from lagrpo.logs import is_secret
from lagrpo.types import Completion, Outcome, Prompt, Range, is_correct

REWARDS = {
    "exact": "lagrpo.rewards.builtin:exact",
    "length": "lagrpo.rewards.builtin:length",
    "format": "lagrpo.rewards.builtin:format",
    "llm_judge": "lagrpo.rewards.llm_judge:LlmJudge",
    "number": "lagrpo.tasks.gsm8k:score",
    "math": "lagrpo.tasks.math:score",
    "arithmetic": "lagrpo.tasks.arithmetic:score",
    "countdown": "lagrpo.tasks.countdown:score",
    "guess_number": "lagrpo.tasks.guess_number:score",
}
WITH_OPTIONS = {"length": ("", 0), "format": ("",), "llm_judge": None}
"""Built-in rewards that take options, and arguments of a call in which a function checks its options."""
OWN = "task"  # an entry of task.rewards with the task's own reward
OURS, TRL, VERL = (
    "completion",
    "completions",
    "solution_str",
)  # the parameter that tells a signature from the others
STYLES = {OURS: OURS, TRL: TRL, "completion_ids": TRL, VERL: VERL}
PASSED = {
    OURS: ("completion", "answer", "prompt", "row", "finished", "num_tokens", "prefix"),
    TRL: ("prompts", "completions", "completion_ids", "answer"),
    VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
NOT_SCORED = "the reward function returned None"


class UnscorableError(Exception):
    """The answer cannot be scored, for example because the reference answer cannot be read: it has no reward."""


def accept_any(score: Callable[[str, Any], float]) -> Callable[[str, Any], float]:
    """The reward function `score`, for which a list as the answer means any of its entries."""

    @wraps(score)
    def score_any(completion: str, answer: Any) -> float:
        if not isinstance(answer, list):
            return score(completion, answer)
        found, problem = list[float](), UnscorableError("the reference answer is an empty list")
        for each in answer:
            try:
                found.append(score_any(completion, each))
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
    range: Range = (0.0, 1.0)  # its minimum and maximum

    def __post_init__(self) -> None:
        if self.style is None:
            others = "as in TRL (prompts, completions, **columns) or verl (data_source, solution_str, ground_truth)"
            named = f"{self.title}({', '.join(self._parameters)})"
            raise ValueError(f"{named}: name the parameters (completion, answer), or {others}")

    @cached_property
    def style(self) -> Any:
        """OURS, TRL or VERL."""
        return next((STYLES[name] for name in self._parameters if name in STYLES), None)

    @property
    def title(self) -> str:
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

    def check(self, row: Mapping[str, Any] | None) -> None:
        """Raise ValueError if the function needs a parameter that neither lagrpo nor the columns of the data have."""
        known = {*PASSED[self.style], *(row or () if self.style == TRL else ())}
        for name, parameter in self._parameters.items():
            is_needed = parameter.default is parameter.empty
            is_needed &= parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if is_needed and (name not in known or parameter.kind == parameter.POSITIONAL_ONLY):
                passed = f"lagrpo passes {', '.join(sorted(known))} by name.{suggest(name, known)}"
                raise ValueError(f"reward function {self.title!r} takes {name!r}: {passed}")

    def arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """The keyword arguments of each call: one call for each completion, in TRL's signature one for all of them."""
        if self.style == TRL:
            made = [_trl_arguments(prompt, completions)]
        else:
            made = [_arguments_of_one(self.style, prompt, completion) for completion in completions]
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            return made
        return [
            {name: value for name, value in each.items() if name in self._parameters}
            for each in made
        ]


def _arguments_of_one(style: str, prompt: Prompt, c: Completion) -> dict[str, Any]:
    if style == VERL:
        row = prompt.row or {}
        values = row.get("data_source", ""), c.text, prompt.answer, row.get("extra_info", dict(row))
    else:
        asked = [*(prompt.asked or prompt.messages)]
        values = c.text, prompt.answer, asked, prompt.row, c.finished, c.length, prompt.prefix
    return dict(zip(PASSED[style], values, strict=True))


def _trl_arguments(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """Lists with an entry for each completion. Completions are message lists if the prompt of the row is one."""
    columns = {"answer": prompt.answer} | dict(prompt.row or {})
    asked = columns.pop("prompt", None) or [*(prompt.asked or prompt.messages)]
    texts = [c.text for c in completions]
    said = (
        texts
        if isinstance(asked, str)
        else [[{"role": "assistant", "content": text}] for text in texts]
    )
    return {name: [value] * len(texts) for name, value in columns.items()} | {
        "prompts": [asked] * len(texts),
        "completions": said,
        "completion_ids": [c.token_ids.tolist() for c in completions],
    }


@dataclass(frozen=True)
class Rewards:
    """The rewards of a task. A single one without a name has no columns in metrics and records."""

    parts: tuple[Reward, ...]

    @staticmethod
    def from_reward(given: Callable[..., Any] | Rewards) -> Rewards:
        """The rewards of a task, which may have a single function."""
        return given if isinstance(given, Rewards) else Rewards((Reward("", given),))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.parts if reward.name)

    def combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        """The outcome of a completion from the outcomes of its rewards, in order. Rewards that returned None (unscored
        without a reason) are left out of the sum; one that failed leaves the completion unscored. The first of the
        others says whether the completion is correct."""
        if not self.names:
            return (
                outcomes[0] if outcomes[0] != Outcome("unscored") else Outcome.unscored(NOT_SCORED)
            )
        found = list(zip(self.parts, outcomes, strict=True))
        parts = {reward.name: outcome.reward for reward, outcome in found}
        for reward, outcome in found:
            if outcome.reward is None and outcome.reason:
                return Outcome(
                    outcome.kind, reason=f"{outcome.reason} (reward {reward.name!r})", parts=parts
                )
        scored = [
            (reward, outcome.reward) for reward, outcome in found if outcome.reward is not None
        ]
        if not scored:
            return Outcome("unscored", reason=NOT_SCORED, parts=parts)
        total = math.fsum(reward.weight * value for reward, value in scored)
        return Outcome(
            "scored", total, parts=parts, correct=is_correct(scored[0][1], scored[0][0].range)
        )


def sum_ranges(parts: Sequence[tuple[float, Range]]) -> Range:
    """The minimum and maximum of the sum of weight * value with each value in its range.

    >>> sum_ranges([(1.0, (0.0, 1.0)), (-0.5, (0.0, 2.0))])
    (-1.0, 1.0)
    """
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in parts]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)


# ---- from the settings ----


def check_rewards(entries: Sequence[Any]) -> None:
    """Raise ValueError for contradictory entries of task.rewards, without loading the user's functions."""
    names, known = [each.name for each in entries], (OWN, *REWARDS)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"task.rewards: two entries have the name {twice[0]!r}")
    for each in entries:
        where, is_builtin = f"task.rewards, {each.name!r}", ":" not in each.reward
        if is_builtin and each.reward not in known:
            there = f"there are {', '.join(known)} and 'package.module:function'.{suggest(each.reward, known)}"
            raise ValueError(f"{where}: no built-in reward {each.reward!r}; {there}")
        if secret := next(filter(is_secret, each.options), None):
            raise ValueError(
                f"{where}: options.{secret} would be written to disk; use an environment variable"
            )
        if is_builtin and (each.options or each.reward in WITH_OPTIONS):
            load_reward(each, None)


def load_rewards(entries: Sequence[Any], own: Any) -> Rewards:
    """The rewards that the entries of task.rewards name; `own` is the task's own reward."""
    if isinstance(own, Rewards) and any(each.reward == OWN for each in entries):
        raise ValueError(
            f"task.rewards: {OWN!r} stands for one reward, but this task has several; leave it out"
        )
    return Rewards(tuple(load_reward(each, own) for each in entries))


def load_reward(entry: Any, own: Any) -> Reward:
    """One entry. Raises ValueError for options that its function does not take."""
    reference: str = entry.reward
    function: Any = own if reference == OWN else load_function(REWARDS.get(reference) or reference)
    try:
        if inspect.isclass(function):
            function = function(**entry.options)
        elif entry.options:
            inspect.signature(function).bind_partial(**entry.options)
            function = partial(function, **entry.options)
        if arguments := WITH_OPTIONS.get(entry.reward):
            function(*arguments)
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"task.rewards, {entry.name!r}, options: {entry.reward}: {error}"
        ) from error
    except Exception as error:
        raise ValueError(
            f"task.rewards, {entry.name!r}: {entry.reward} raised {describe_raised(error)}"
        ) from error
    return Reward(entry.name, function, entry.weight, entry.range)


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, also in a module of the current directory. Raises ValueError
    for another form, a missing module or attribute, and what cannot be called."""
    function = load_reference(reference)
    if not callable(function):
        raise ValueError(f"{reference!r} is not a function")
    return function
