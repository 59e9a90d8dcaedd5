"""What a task is: prompts, and a reward for completions or an environment that they talk to.

Worker processes import this module and the tasks, so nothing here imports torch, numpy or pydantic at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lagrpo.types import Prompt

Messages = Sequence[Mapping[str, Any]]
Ask = Callable[[Any], tuple[str | Messages, Any]]
"""From a row to its question (a text, or chat messages) and its reference answer."""
Key = tuple[int | str, ...]
"""Of random numbers: `lagrpo.rng.uniforms(count, *key)` gives the same ones on every rank and after a resume."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's reply: chat messages ({"role": "user", "content": …}, or a tool's), and the reward so far, which
    counts if the episode is done or a limit (of tokens or turns) ends it here. `reason` tells people why it is done."""

    messages: Messages = ()
    reward: float = 0.0
    done: bool = False
    reason: str = ""


class Environment(Protocol):
    """One episode: a completion of several turns, text in and text out.

    It runs in worker processes, with their deadline for every turn. lagrpo pickles it between turns, because another
    process may take the next one. If it raises or exceeds the deadline, the completion is *unscored*."""

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        """Begin. Returns all messages that the policy sees first, such as `prompt.messages`. They may depend on the
        prompt alone, because the completions of a group share them; later messages may use random numbers of `key`."""
        ...

    def step(self, text: str) -> StepResult:
        """Answer to the policy's turn, which is given without special tokens."""
        ...


Make = Callable[[], Environment]
"""Makes the environment of an episode: a class or a function at the top level of a module, or an object; pickled."""


@runtime_checkable
class Task(Protocol):
    """Prompts in two splits, "train" and "test", and the reward of their completions. With an attribute `environment`
    (what makes one, or None) completions are episodes, and the reward is for completions that a file brings."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> Any:
        """A reward function, or several `lagrpo.rewards.reward.Rewards`."""
        ...

    def size(self, split: str) -> int:
        """Count the prompts of the split."""
        ...

    def prompt(self, split: str, index: int) -> Prompt:
        """Prompt `index` (0 .. size - 1) of a split: its key is the index, its token_ids are empty."""
        ...


def environment_of(task: Task) -> Make | None:
    """What makes the environments of a task's completions; None if they have one turn."""
    return getattr(task, "environment", None)


def option(default: Any, help: str, least: int | None = None, most: int | None = None) -> Any:
    """A field of a task's `Options`: its default, its text in --help, and the range of a number."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class RowTask:
    """A task made of rows, by split.

    >>> task = RowTask("sums", {"train": [(2, 3)], "test": []}, lambda row: (f"{row[0]} + {row[1]}?", "5"), print)
    >>> task.prompt("train", 0).messages
    ({'role': 'user', 'content': '2 + 3?'},)
    """

    name: str
    rows: Mapping[str, Sequence[Any]]
    ask: Ask
    reward: Any
    """a reward function, or several Rewards"""
    system_prompt: str | None = None
    environment: Make | None = None
    """for completions of several turns"""

    def size(self, split: str) -> int:
        return len(self.rows[split])

    def prompt(self, split: str, index: int) -> Prompt:
        row = self.rows[split][index]
        question, answer = self.ask(row)
        columns = dict(row) | {"prompt": question} if isinstance(row, Mapping) else None
        return Prompt(index, build_messages(question, self.system_prompt), answer, row=columns)


def build_messages(question: str | Messages, system_prompt: str | None = None) -> tuple[Mapping[str, Any], ...]:
    """The messages for the chat template: the system prompt if there is one ("" is none), then the question as the
    user's turn, or the given messages, with the text parts of each joined. Raises ValueError for a question that is
    neither a text nor a list of messages, for parts other than text, and for messages that have a system turn already.
    """
    given: Any = [{"role": "user", "content": question}] if isinstance(question, str) else question
    listed = given if isinstance(given, list | tuple) else ()
    has_roles = all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in listed)
    turns = [_join_parts(turn) for turn in listed] if has_roles else []
    if not turns or not isinstance(turns[-1].get("content"), str):
        raise ValueError(
            f"its prompt is {question!r:.80}: a prompt is a text, or a list of messages such as {{'role': 'user', "
            "'content': '...'}, the last of which has a text"
        )
    if not system_prompt:
        return tuple(turns)
    if turns[0]["role"] == "system":
        raise ValueError("the prompt has a system turn: leave task.system_prompt unset for this data")
    return ({"role": "system", "content": system_prompt}, *turns)


def _join_parts(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without keys that are None, which Parquet adds, and with its text parts as one text."""
    turn = {key: value for key, value in turn.items() if value is not None}
    if not isinstance(parts := turn.get("content"), list):
        return turn
    if strange := [part for part in parts if not isinstance(part, Mapping) or part.get("type") != "text"]:
        raise ValueError(f"a message has the part {strange[0]!r:.80}: only parts of type text are supported")
    return turn | {"content": "".join(part["text"] for part in parts)}


def order_prompts(seed: int, epoch: int, size: int) -> list[int]:
    """The order in which an epoch visits the `size` prompts of a split: a permutation, a function of its arguments."""
    from lagrpo.rng import permutation

    return permutation(size, seed, "prompt order", epoch).tolist()
