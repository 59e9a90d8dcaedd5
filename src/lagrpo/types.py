"""The data that passes through Algorithm 1: Prompt, Completion, Group.

Shape suffixes, used everywhere:

    N   prompts of a batch
    G   completions of a group
    C   completions of a batch (N * G, fewer if some were not scored)
    T   completion tokens of the whole batch, flat: no padding anywhere
    V   vocabulary

`rewards_G` is one group's rewards, `logp_T` the log-probs of all completion tokens of a batch, one after the other,
`completion_T` the index (0 .. C-1) of the completion that each of those tokens belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # annotations only: reward workers import this module and must start fast
    import signal
    from pathlib import Path

    import torch


JsonObject = dict[str, Any]
"""An object as `json` reads and writes it, or a row of a Parquet file."""

JsonView = Mapping[str, Any]
"""Such an object, where it is only read."""

THOUGHT_END = re.compile(r"</[\w:]*(?:think|thought|reason)\w*>|\[/THINK\]")
"""The end of an assistant's thinking: </think>, </thought>, </seed:think>, [/THINK] and the like."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task.

    `key` is its index in its split, and keys its random numbers. `messages` is what the chat template gets.
    """

    key: int
    messages: tuple[Mapping[str, str], ...]
    answer: Any
    """what a reward compares with, as JSON can hold it"""
    token_ids: tuple[int, ...] = ()
    """the templated prompt; empty until it is tokenized"""
    task_messages: tuple[Mapping[str, str], ...] = ()
    """the task's messages, if an environment opens with other ones; else empty"""
    row: Mapping[str, Any] | None = None
    """the row of the data, whose "prompt" is the question: a text, or messages"""
    prefix: str = ""
    """how the tokenized prompt begins the answer: a last message of the assistant, or a <think>"""
    place: str = ""  # the row's file and line, such as "data.jsonl, line 3"


class OutcomeKind(StrEnum):
    """What became of a completion, as the column `outcome` has it."""

    SCORED = "scored"
    """it has a reward"""
    UNSCORED = "unscored"
    """its answer could not be scored"""
    FAILED = "failed"
    """the sampler died"""


class ExcludedReason(StrEnum):
    """Why a completion is not in the objective, as the column `excluded_reason` has it."""

    NOT_EXCLUDED = ""
    ZERO_VARIANCE = "zero_variance"
    """all rewards of its group are equal, and the recipe masks such groups"""
    UNSCORED = "unscored"
    FAILED = "failed"


class SyncReason(StrEnum):
    """Why the sampler gets new weights before a batch, as events.jsonl has it."""

    NOT_DUE = ""
    """it does not get them"""
    START = "start"
    """the initial policy, before the first batch"""
    SCHEDULE = "schedule"
    """line 8 of Algorithm 1, or a constant lag"""
    BUDGET = "budget"
    """the estimated KL passed its limit"""
    CAP = "cap"
    """the most batches between two syncs have passed, and the KL budget is not spent"""


Range = tuple[float, float]  # the smallest and the largest reward of a task


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a completion. Only scored ones enter group statistics and the loss; a failure is never a reward
    of 0."""

    kind: OutcomeKind
    reward: float | None = None
    reason: str = ""
    parts: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    """each of several rewards by its name, unweighted; None for one that did not score"""
    correct: bool | None = None  # of such a task; None: the reward decides (`is_correct`)

    @staticmethod
    def scored(reward: float) -> Outcome:
        return Outcome(OutcomeKind.SCORED, reward=reward)

    @staticmethod
    def unscored(reason: str) -> Outcome:
        return Outcome(OutcomeKind.UNSCORED, reason=reason)

    @staticmethod
    def failed(reason: str) -> Outcome:
        return Outcome(OutcomeKind.FAILED, reason=reason)


def is_correct(reward: float, reward_range: Range, decided: bool | None = None) -> bool:
    """Whether a scored completion counts as correct: `decided`, by a task with several rewards, or else whether its
    reward is the maximum of `reward_range`."""
    return reward >= reward_range[1] if decided is None else decided


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of t tokens (with the end-of-sequence token if it was sampled). Tokens that were not sampled,
    such as an environment's reply, are context: the model reads them, and no count, sum or loss does."""

    token_ids: torch.Tensor  # int64 [t]
    logp_alpha: torch.Tensor
    """float32 [t], log-probs under the policy that sampled the tokens, nats, at the sampling temperature"""
    versions: torch.Tensor  # int64 [t], which version of the policy sampled each token
    finished: bool  # False when it was cut at the token limit
    text: str  # without special tokens
    outcome: Outcome | None = None  # None until it has been scored
    sampled: torch.Tensor = field(default=None)  # type: ignore[assignment]
    """bool [t], whether the policy sampled the token; by default all true"""
    turns: tuple[str, ...] = ()
    """texts of the policy and its environment in turn, without special tokens; empty for a single turn"""

    def __post_init__(self) -> None:
        if (
            self.sampled is None
        ):  # written so because importing torch would slow down reward workers
            object.__setattr__(self, "sampled", self.token_ids == self.token_ids)

    @property
    def length(self) -> int:
        """How many of its tokens were sampled."""
        return int(self.sampled.sum())

    @property
    def has_logp(self) -> bool:
        """Whether the log-prob of every sampled token is known."""
        return not bool((self.logp_alpha.isnan() & self.sampled).any())

    @property
    def policy_turns(self) -> int:
        """How many turns the policy had."""
        return len(self.turns[::2]) or 1

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if self.outcome is not None else None


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G completions, all sampled for the same batch. `epoch` counts passes over the prompts (negative:
    this prompt replaces another); `source` is "sampler" for the run's own completions, "file" for offline data."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    epoch: int = 0
    source: Literal["sampler", "file"] = "sampler"

    @property
    def scored(self) -> tuple[Completion, ...]:
        return tuple(
            completion
            for completion in self.completions
            if completion.outcome is not None and completion.outcome.kind == OutcomeKind.SCORED
        )

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the scored completions, in their order."""
        return tuple(
            c.outcome.reward for c in self.scored if c.outcome and c.outcome.reward is not None
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What `lagrpo.train` returns: `run` is the run's directory, `weights` the model directory (None if nothing was
    trained), `version` the number of updates, `batches` the number of batches, `interrupted` the signal that stopped
    the run. `before` and `after` are the first evaluation set's summaries, such as after["pass@1"] (0 to 1) with
    after["pass@1_low"] and after["pass@1_high"]; `evaluations` has all summaries by the names of their files."""

    run: Path
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    weights: Path | None
    version: int
    batches: int
    interrupted: signal.Signals | None
    evaluations: Mapping[str, dict[str, Any]] = field(default_factory=dict)
