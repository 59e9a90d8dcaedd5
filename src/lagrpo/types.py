"""The data that passes through Algorithm 1: Request, Prompt, Completion, Group.

Shape suffixes, used everywhere:

    N   prompts of a batch
    G   completions of a group
    C   completions of a batch (N * G, fewer if some were not scored)
    T   completion tokens of the whole batch, flat: no padding anywhere
    V   vocabulary

`rewards_G` is one group's rewards, `logp_T` the log-probs of all completion tokens of a batch, one
after the other, `completion_T` the index (0 .. C-1) of the completion that each token belongs to.

Policies, and the names of their log-probs:

    π       the policy that learns                   logp
    π_k     π before the updates on batch k          old_logp
    α       the policy that sampled the completion   rollout_logp
    π_ref   the reference of the KL term             ref_logp

The columns of a file of rollouts are old_logprobs and rollout_logprobs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, cast

# Only for annotations: reward workers import this module and must start fast.
if TYPE_CHECKING:
    import signal
    from pathlib import Path

    import torch


JsonObject = dict[str, Any]
"""An object as `json` reads and writes it, or a row of a Parquet file."""

JsonView = Mapping[str, Any]
"""A JsonObject for code that only reads it."""

THOUGHT_BEGIN = re.compile(
    r"<[\w:]*(?:think|thought|reason)\w*>|\[THINK\]|<\|channel\|>analysis(?:<\|message\|>)?"
)
"""The beginning of an assistant's thinking: <think>, <seed:think>, [THINK], gpt-oss's channel …"""

THOUGHT_END = re.compile(
    r"</[\w:]*(?:think|thought|reason)\w*>|\[/THINK\]|<\|channel\|>final<\|message\|>"
)
"""The end of an assistant's thinking: </think>, </seed:think>, [/THINK], gpt-oss's channel …"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task."""

    key: int
    """its index in its split, which keys its random numbers"""
    messages: tuple[Mapping[str, str], ...]
    """the messages that the chat template renders"""
    answer: Any
    """the reference answer for rewards: a value that JSON can hold"""
    token_ids: tuple[int, ...] = ()
    """the rendered prompt; empty until it is tokenized"""
    task_messages: tuple[Mapping[str, str], ...] = ()
    """the task's messages, if an environment opens with other ones"""
    row: Mapping[str, Any] | None = None
    """the row of the data, with the task's prompt as "prompt": a text, or messages"""
    prefix: str = ""
    """the beginning of the answer that the tokenized prompt ends with: a last message of the
    assistant, or a <think>"""
    place: str = ""
    """the row's file and line: data.jsonl, line 3, for example"""
    tools: tuple[Mapping[str, Any], ...] = ()
    """the functions that the chat template shows, as JSON schemas"""
    reference_token_ids: tuple[int, ...] = ()
    """the prompt that the reference sees; empty if it sees `token_ids`"""


class OutcomeKind(StrEnum):
    """What became of a completion, as the column `outcome` has it."""

    ANSWERED = "answered"
    """its episode ended with an answer that the reward functions are still to score"""
    SCORED = "scored"
    """it has a reward"""
    UNSCORED = "unscored"
    """its answer could not be scored"""
    FAILED = "failed"
    """the sampler crashed"""


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


Range = tuple[float, float]
"""The smallest and the largest reward of a task."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a completion: scored, unscored or failed.

        answered  an episode that is still to be scored
        scored    it has a reward
        unscored  its answer could not be scored
        failed    the rollout engine crashed

    Only scored completions enter group statistics and the loss; a failure is never a reward of 0.
    """

    kind: OutcomeKind
    reward: float | None = None
    reason: str = ""
    parts: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    """each of several rewards by its name, unweighted; None for one that did not score"""
    correct: bool | None = None
    """the decision of the first of several rewards; None: unknown, because it did not score"""

    @staticmethod
    def scored(reward: float) -> Outcome:
        return Outcome(OutcomeKind.SCORED, reward=reward)

    @staticmethod
    def unscored(reason: str) -> Outcome:
        return Outcome(OutcomeKind.UNSCORED, reason=reason)

    @staticmethod
    def failed(reason: str) -> Outcome:
        return Outcome(OutcomeKind.FAILED, reason=reason)


def is_correct(reward: float | None, reward_range: Range) -> bool | None:
    """True if a reward is the maximum of its range, so that its completion is correct.

    None if there is no reward. With several rewards, the first one decides (`Outcome.correct`).
    """
    if reward is None:
        return None
    largest = reward_range[1]
    return reward >= largest


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of t tokens, with the end-of-sequence token if it was sampled.

    Tokens that were not sampled, such as an environment's reply, are context: the model reads them,
    but counts, sums and losses leave them out.
    """

    token_ids: torch.Tensor
    """int64 [t]"""
    rollout_logp: torch.Tensor
    """float32 [t], log-probs under the policy that sampled the tokens, nats, at the sampling
    temperature"""
    versions: torch.Tensor
    """int64 [t], the policy version that sampled each token"""
    finished: bool
    """False if it was cut at the token limit"""
    text: str
    """without special tokens"""
    outcome: Outcome | None = None
    """None until it has been scored"""
    sampled: torch.Tensor = field(default=cast("torch.Tensor", None))
    """bool [t], True if the policy sampled the token; without a value, True for all"""
    turns: tuple[str, ...] = ()
    """texts of the policy and its environment in turn, without special tokens; empty for a single
    turn"""
    prefix: str | None = None
    """the beginning of the policy's last turn that a reply ends with, such as a <think>; None: as
    the prompt has it"""
    has_ended: bool = True
    """False while it is being sampled, with the tokens that it has so far"""

    def __post_init__(self) -> None:
        if self.sampled is None:
            # All true, without torch.ones: importing torch would slow down reward workers.
            all_true = self.token_ids == self.token_ids
            object.__setattr__(self, "sampled", all_true)

    @property
    def length(self) -> int:
        """The number of sampled tokens."""
        return int(self.sampled.sum())

    @property
    def answer_text(self) -> str:
        """The text that reward functions score: of the policy's last turn, if there are several."""
        return self.turns[-1] if self.turns else self.text

    @property
    def has_logp(self) -> bool:
        """True if the log-prob of every sampled token is known."""
        return not bool((self.rollout_logp.isnan() & self.sampled).any())

    @property
    def policy_turns(self) -> int:
        """The number of the policy's turns."""
        turns_of_policy = self.turns[::2]
        return len(turns_of_policy) or 1

    @property
    def reward(self) -> float | None:
        """The reward, None without one."""
        return self.outcome.reward if self.outcome is not None else None

    @property
    def is_scored(self) -> bool:
        """True if it has a reward, so that it enters group statistics and the loss."""
        return self.outcome is not None and self.outcome.kind == OutcomeKind.SCORED


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G completions, all sampled for the same batch."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    epoch: int = 0
    """number of the pass over the prompts; negative: this prompt replaces another"""
    source: Literal["sampler", "file"] = "sampler"
    """sampler for completions of the run itself, file for offline data"""

    @property
    def has_ended(self) -> bool:
        """False while one of the completions is being sampled."""
        return all(completion.has_ended for completion in self.completions)

    @property
    def scored(self) -> tuple[Completion, ...]:
        """The scored completions, in their order."""
        return tuple(completion for completion in self.completions if completion.is_scored)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the scored completions, in their order."""
        rewards = [completion.reward for completion in self.scored]
        return tuple(reward for reward in rewards if reward is not None)


@dataclass(frozen=True, slots=True)
class Request:
    """G completions of a prompt for a batch.

    `epoch` is the pass over the split that the prompt comes from. Where two passes meet, a batch
    can hold a prompt twice. `begun` has the completions of a group in flight; those that have not
    ended go on from the tokens that they have.
    """

    batch: int
    epoch: int
    prompt: Prompt
    """tokenized"""
    begun: tuple[Completion, ...] = ()

    @property
    def address(self) -> tuple[int, int, int]:
        """The key of the group's random numbers, within a seed and a purpose."""
        return self.batch, self.epoch, self.prompt.key


@dataclass(frozen=True, slots=True)
class Result:
    """The result of `lagrpo.train`."""

    run: Path
    """the run's directory; after a dry run without run.name, the directory that would hold it"""
    before: dict[str, Any] | None
    """summary of the first evaluation set before training, such as before["pass@1"] (0 to 1), with
    before["pass@1_low"] and before["pass@1_high"]"""
    after: dict[str, Any] | None
    """the same after training"""
    weights: Path | None
    """the model directory; None if nothing was trained"""
    version: int
    """number of updates"""
    batches: int
    """number of batches"""
    interrupted: signal.Signals | None
    """the signal that stopped the run"""
    evaluations: Mapping[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """all summaries by the names of their files"""

    def __repr__(self) -> str:
        """A line for each fact: a notebook shows it under the cell."""
        lines = {
            "run": self.run,
            "length": f"batches {self.batches}, updates {self.version}",
            "before": _pass_at_1(self.before),
            "after": _pass_at_1(self.after),
            "weights": self.weights or "none",
        }
        if self.interrupted is not None:
            lines["length"] = f"{lines['length']}, stopped by {self.interrupted.name}"
        return "\n".join(f"{name:<8} {text}" for name, text in lines.items())


def _pass_at_1(summary: JsonView | None) -> str:
    if summary is None or "pass@1" not in summary:
        return "not evaluated"
    ends = f"{summary['pass@1_low']:.1%} to {summary['pass@1_high']:.1%}"
    return f"pass@1 {summary['pass@1']:.1%}, 95 % interval {ends}"
