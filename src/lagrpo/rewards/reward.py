"""Reward functions: their signatures, the built-in ones, and the weighted sum of several.

The names of its parameters tell which signature a function has:

    ours   f(completion, answer) -> float
           optionally also prompt, row, finished, num_tokens, prefix
    TRL    f(prompts, completions, **columns) -> list[float | None]
           one call for all completions of a prompt
    verl   f(data_source, solution_str, ground_truth, extra_info=None)
           -> float or {"score": float, ...}

Each may be a coroutine function. None means that this function does not score the completion.
"""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from numbers import Real
from typing import Any

from lagrpo.errors import suggest
from lagrpo.rewards.texts import find_accepted
from lagrpo.types import Completion, Outcome, OutcomeKind, Prompt, Range, is_correct

# A signature is named after the parameter that tells it from the others.
OURS = "completion"
TRL = "completions"
VERL = "solution_str"
STYLES = {OURS: OURS, TRL: TRL, "completion_ids": TRL, VERL: VERL}
"""The signature that a function with this parameter has."""

PASSED = {
    OURS: ("completion", "answer", "prompt", "row", "finished", "num_tokens", "prefix"),
    TRL: ("prompts", "completions", "completion_ids", "answer"),
    VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Names of the arguments that lagrpo passes in each signature, without the columns of the data."""

LOGGERS_OF_TRL = ("log_extra", "log_metric")
"""Arguments by which reward functions log in TRL. lagrpo does not pass them."""

AS_PROMPTS = "prompt"
"""The column that TRL's signature gets as `prompts`."""

NOT_SCORED = "the reward function returned None"

RewardFunction = Callable[..., Any]
RewardKwargs = dict[str, Any]  # the keyword arguments of one call of a reward function


class UnscorableError(Exception):
    """The answer cannot be scored, so it has no reward: its reference answer is empty, say."""


def accept_any(score: Callable[[str, Any, str], float]) -> Callable[..., float]:
    """Returns a reward function that scores a list as the answer by its best entry.

    A text that lists accepted answers (`lagrpo.rewards.texts.find_accepted`) counts as a list of
    them and of itself. The function raises UnscorableError if no entry can be scored. Its attribute
    `compares_texts` is True: it scores no table.
    """

    @wraps(score)
    def score_any(completion: str, answer: Any, prefix: str = "") -> float:
        if isinstance(answer, list):
            entries = [(score_any, entry) for entry in answer]
        else:
            listed_answers = find_accepted(answer) if isinstance(answer, str) else []
            entries = [(score, entry) for entry in (answer, *listed_answers)]
        rewards: list[float] = []
        problem = UnscorableError("the reference answer is an empty list")
        for score_entry, entry in entries:
            try:
                rewards.append(score_entry(completion, entry, prefix))
            except UnscorableError as error:
                problem = error
        if not rewards:
            raise problem
        return max(rewards)

    score_any.compares_texts = True  # pyright: ignore
    return score_any


@dataclass(frozen=True)
class Reward:
    """One reward of a completion: `lagrpo.Reward(function, weight=0.2, range=(-1, 1))`.

    - `function`: anything that is called, but for a class: an object of it
    - `weight`: the reward of a completion is the sum of weight x value
    - `range`: the smallest and the largest value, before weighting
    - `name`: the name in metrics and records; `lagrpo.train` takes the function's if it is empty
    - `is_of_environment`: True if the environment of a completion may give the value; if it leaves
      the answer to be scored, the function gives the value

    Raises ValueError for something else than a function, for a function whose signature is none of
    the three, and for a weight or range that cannot be used.
    """

    function: RewardFunction
    weight: float = 1.0
    range: Range = (0.0, 1.0)
    name: str = ""
    is_of_environment: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.function, type):
            raise ValueError(
                f"{self.function.__name__} is a class: give an object, "
                f"such as {self.function.__name__}()"
            )
        if not callable(self.function):
            raise ValueError(
                f"{self.function!r:.80} is not a function; a table gives a built-in reward a "
                'weight: {"reward": "exact", "weight": 0.2}'
            )
        check_signature(self.title, self._parameters)
        is_pair = isinstance(self.range, tuple | list) and len(self.range) == 2
        if not is_pair or not _are_finite(self.weight, *self.range):
            raise ValueError(
                f"reward {self.title!r}: the weight is a number and the range two numbers, "
                f"not {self.weight!r} and {self.range!r}"
            )
        lowest, highest = self.range
        if not lowest < highest:
            raise ValueError(
                f"the range of reward {self.title!r} goes from the smallest to the largest value, "
                f"not {self.range}"
            )

    @cached_property
    def style(self) -> str:
        """The signature of the function: OURS, TRL or VERL."""
        return next(STYLES[name] for name in self._parameters if name in STYLES)

    @property
    def title(self) -> str:
        """The name of the reward in messages."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return parameters_of(self.function)

    @property
    def is_async(self) -> bool:
        """True if a call returns a coroutine."""
        # The method of an object that is called, not the question whether it can be called.
        call = getattr(type(self.function), "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @cached_property
    def is_importable(self) -> bool:
        """True if a worker process can load the function.

        Workers can load neither lambdas and closures nor functions of the main script.
        """
        try:
            return b"__main__" not in pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return False

    def check(self, row: Mapping[str, object] | None) -> None:
        """Raises ValueError if the function needs an argument that it will not get.

        lagrpo passes the arguments in PASSED, and in TRL's signature the columns of `row` too.
        """
        passed_names = set(PASSED[self.style])
        if self.style == TRL and row is not None:
            passed_names.update(row.keys() - {AS_PROMPTS})
        for name, parameter in self._parameters.items():
            if not _is_required(parameter):
                continue
            if name in LOGGERS_OF_TRL and name not in passed_names:
                raise ValueError(
                    f"reward function {self.title!r} takes {name!r}, which only TRL passes: give "
                    "it the default None, and log by `measure` of a callback"
                )
            if name not in passed_names or parameter.kind == parameter.POSITIONAL_ONLY:
                raise ValueError(
                    f"reward function {self.title!r} takes {name!r}: lagrpo passes "
                    f"{', '.join(sorted(passed_names))} by name, and its options."
                    f"{suggest(name, passed_names)}"
                )

    def arguments(self, prompt: Prompt, completions: Sequence[Completion]) -> list[RewardKwargs]:
        """Returns the keyword arguments of each call that scores these completions of a prompt.

        There is one call per completion. TRL's signature has one call for all of them.
        """
        if self.style == TRL:
            calls = [_trl_kwargs(prompt, completions)]
        elif self.style == VERL:
            calls = [_verl_kwargs(prompt, completion) for completion in completions]
        else:
            calls = [_lagrpo_kwargs(prompt, completion) for completion in completions]
        return [self._select_accepted(kwargs) for kwargs in calls]

    def _select_accepted(self, kwargs: RewardKwargs) -> RewardKwargs:
        """Returns the arguments that the function names, or all if it takes **kwargs.

        Options that a partial function has bound stay as they are.
        """
        kinds = [parameter.kind for parameter in self._parameters.values()]
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        bound_names = getattr(self.function, "keywords", {})
        return {
            name: value
            for name, value in kwargs.items()
            if name not in bound_names and (takes_all or name in self._parameters)
        }


def _are_finite(*numbers: object) -> bool:
    return all(isinstance(number, Real) and math.isfinite(number) for number in numbers)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; none for some functions that are written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def check_signature(title: str, parameters: Collection[str]) -> None:
    """Raises ValueError for a function whose parameters fit no signature."""
    if not any(name in STYLES for name in parameters):
        raise ValueError(
            f"{title}({', '.join(parameters)}): name the parameters "
            "(completion, answer), or as in TRL (prompts, completions, **columns) or verl "
            "(data_source, solution_str, ground_truth)"
        )


def check_class(kind: type) -> None:
    """Raises ValueError for a class whose objects cannot be called as a reward.

    No object is made, because making one may act: subprocess.Popen starts a program.
    """
    # Every class has an attribute __call__, which may come from its metaclass.
    has_call = any("__call__" in vars(base) for base in kind.__mro__)
    parameters = parameters_of(kind.__call__) if has_call else {}
    names = [name for name in parameters if name != "self"]
    check_signature(kind.__name__, names)


def _is_required(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    return parameter.default is parameter.empty


# PASSED repeats the keys of these dictionaries: before a run starts, `Reward.check` compares them
# with the parameters of the function.


def _lagrpo_kwargs(prompt: Prompt, completion: Completion) -> RewardKwargs:
    return {
        "completion": completion.answer_text,
        "answer": prompt.answer,
        "prompt": _task_messages(prompt),
        "row": prompt.row,
        "finished": completion.finished,
        "num_tokens": completion.length,
        "prefix": prompt.prefix if completion.prefix is None else completion.prefix,
    }


def _verl_kwargs(prompt: Prompt, completion: Completion) -> RewardKwargs:
    row = prompt.row or {}
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": completion.answer_text,
        "ground_truth": prompt.answer,
        # verl's data has a column of this name. Other data passes its whole row.
        "extra_info": row.get("extra_info", dict(row)),
    }


def _trl_kwargs(prompt: Prompt, completions: Sequence[Completion]) -> RewardKwargs:
    """Returns lists with one entry per completion; columns of the data are repeated.

    Completions have the form of the prompt in the data: texts, or lists of messages.
    """
    columns: RewardKwargs = {"answer": prompt.answer}
    columns.update(prompt.row or {})
    prompt_column = columns.pop(AS_PROMPTS, None)
    trl_prompt = prompt_column or _task_messages(prompt)
    trl_completions: list[object] = [completion.answer_text for completion in completions]
    if not isinstance(trl_prompt, str):
        trl_completions = [[{"role": "assistant", "content": text}] for text in trl_completions]
    kwargs: RewardKwargs = {name: [value] * len(completions) for name, value in columns.items()}
    # These come last: a column of the data must not replace what was sampled.
    kwargs["prompts"] = [trl_prompt] * len(completions)
    kwargs["completions"] = trl_completions
    kwargs["completion_ids"] = [completion.token_ids.tolist() for completion in completions]
    return kwargs


def _task_messages(prompt: Prompt) -> list[Mapping[str, str]]:
    """Returns the task's messages, even if an environment has opened with other messages."""
    return list(prompt.task_messages or prompt.messages)


@dataclass(frozen=True)
class Rewards:
    """The rewards of a task. A single reward without a name has no columns in metrics and records.

    `parts` are in the order of task.rewards.
    """

    parts: tuple[Reward, ...]

    @staticmethod
    def from_reward(reward: RewardFunction | Rewards) -> Rewards:
        """Returns the rewards of a task, whose `reward` may be a single function."""
        if isinstance(reward, Rewards):
            return reward
        return Rewards((Reward(reward),))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rewards; empty for a single reward without a name."""
        return tuple(reward.name for reward in self.parts if reward.name)

    @property
    def have_environment(self) -> bool:
        """True if an environment gives one of several rewards."""
        return any(reward.is_of_environment for reward in self.parts)

    def combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Combines a completion's outcomes of the rewards, one per reward in order.

        The reward is the weighted sum. A reward that returned None (unscored without a reason) is
        left out of the sum. A reward that failed leaves the completion unscored. The first reward
        decides whether the completion is correct; if it returned None, that is unknown.
        """
        if not self.names:
            return _give_reason(outcomes[0])
        outcomes_of_rewards = list(zip(self.parts, outcomes, strict=True))
        values = {reward.name: outcome.reward for reward, outcome in outcomes_of_rewards}
        for reward, outcome in outcomes_of_rewards:
            if outcome.reward is None and outcome.reason:
                reason = f"{outcome.reason} (reward {reward.name!r})"
                return Outcome(outcome.kind, reason=reason, parts=values)
        scored = [
            (reward, outcome.reward)
            for reward, outcome in outcomes_of_rewards
            if outcome.reward is not None
        ]
        if not scored:
            return Outcome(OutcomeKind.UNSCORED, reason=NOT_SCORED, parts=values)
        total = math.fsum(reward.weight * value for reward, value in scored)
        correct = is_correct(outcomes[0].reward, self.parts[0].range)
        return Outcome(OutcomeKind.SCORED, total, parts=values, correct=correct)

    def describe_outside(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Returns a warning for each reward that lies outside its range in one of the outcomes.

        The sum is checked instead for outcomes without the rewards that it is made of.
        """
        warnings: list[str] = []
        sums = [outcome.reward for outcome in outcomes if not outcome.parts]
        range_of_sum = sum_ranges([(reward.weight, reward.range) for reward in self.parts])
        if self.parts and _lie_outside(sums, range_of_sum):
            warnings.append(_warn_of_range("rewards", range_of_sum, "pass@1 is wrong"))
        for index, reward in enumerate(self.parts):
            values = [outcome.parts.get(reward.name) for outcome in outcomes]
            if not _lie_outside(values, reward.range):
                continue
            subject = f"values of the reward {reward.name!r}"
            if index == 0:
                warnings.append(_warn_of_range(subject, reward.range, "pass@1 is wrong"))
            elif reward.weight != 0:
                effect = "the metric improvement may be missing"
                warnings.append(_warn_of_range(subject, reward.range, effect))
        return warnings


def _lie_outside(values: Iterable[float | None], reward_range: Range) -> bool:
    low, high = reward_range
    return any(not low <= value <= high for value in values if value is not None)


def _warn_of_range(subject: str, reward_range: Range, effect: str) -> str:
    low, high = reward_range
    return (
        f"{subject} lie outside [{low:g}, {high:g}], so {effect}: "
        "set range in task.rewards, or give lagrpo.Reward(function, range=(low, high))"
    )


def _give_reason(outcome: Outcome) -> Outcome:
    """Returns the outcome, with a reason if the function returned None."""
    if outcome == Outcome(OutcomeKind.UNSCORED):
        return Outcome.unscored(NOT_SCORED)
    return outcome


def sum_ranges(parts: Sequence[tuple[float, Range]]) -> Range:
    """Returns the minimum and maximum of the sum of weight * value with each value in its range.

    >>> sum_ranges([(1.0, (0.0, 1.0)), (-0.5, (0.0, 2.0))])
    (-1.0, 1.0)
    """
    # A negative weight swaps the ends of a range.
    weighted_ranges = [sorted((weight * low, weight * high)) for weight, (low, high) in parts]
    minimum = math.fsum(low for low, _ in weighted_ranges)
    maximum = math.fsum(high for _, high in weighted_ranges)
    return minimum, maximum
