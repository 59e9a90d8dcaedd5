"""What a task is: prompts, and a judge of completions, or an environment that they talk to.

The verifier's worker processes import this module and the tasks beside it, so nothing here imports torch, numpy or
pydantic at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lagrpo.types import Prompt

Options = TypeVar("Options", bound="DataclassInstance")

Judge = Callable[[str, Any], float]
"""`judge(text, gold) -> reward`, any finite number. Workers get it by reference, so it is a function at the top level
of a module. It raises `Unjudgeable` when it has no verdict; any other exception counts as that, too."""

Messages = Sequence[Mapping[str, Any]]
Ask = Callable[[Any], tuple[str | Messages, Any]]
"""From a row to its question (a text, or chat messages) and its gold answer."""


class Unjudgeable(Exception):  # noqa: N818 - not an error of the program: it is one of a completion's three outcomes
    """The answer cannot be scored, for example because the gold answer cannot be read. The completion is *unscored*: it
    has no reward, which is not a reward of 0."""


Address = tuple[int | str, ...]
"""Of random numbers: `lagrpo.rng.uniforms(count, *address)` gives the same ones on every rank and after a resume."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment says: chat messages ({"role": "user", "content": …}, or a tool's). `reward` is what the
    episode is worth if a limit ends it here: so many tokens, so many turns."""

    messages: tuple[Mapping[str, Any], ...]
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Final:
    """The end of an episode: its reward, any finite number, and why it ended, for the one who reads it."""

    reward: float
    reason: str = ""


class Environment(Protocol):
    """One episode: a completion of several turns, text in and text out.

    It runs in the verifier's worker processes, with their deadline for every turn. Between two turns it is pickled, as
    another process may take the next one, so it holds nothing that cannot be. Where it raises, or exceeds the deadline,
    the completion is *unscored*. `Unjudgeable` is for what has no reward."""

    def start(self, prompt: Prompt, address: Address) -> Turn:
        """Begin. The turn holds all messages that the policy sees first, such as `prompt.messages`. They are a function
        of the prompt alone, because the completions of a group share them; what comes later may depend on random
        numbers at `address`."""
        ...

    def reply(self, text: str) -> Turn | Final:
        """The answer to what the policy said in its turn, without special tokens."""
        ...


Make = Callable[[], Environment]
"""Makes the environment of an episode: a class or a function at the top level of a module, or an object; pickled."""


@runtime_checkable
class Task(Protocol):
    """Prompts in two splits, "train" and "test", and the judge of their completions."""

    @property
    def name(self) -> str: ...

    @property
    def judge(self) -> Any:
        """A Judge, or several Rewards."""
        ...

    def size(self, split: str) -> int:
        """Count the prompts of the split."""
        ...

    def prompt(self, split: str, index: int) -> Prompt:
        """Prompt `index` (0 .. size - 1) of a split: its key is the index, its token_ids are empty."""
        ...


class RewardSettings(Protocol):
    """The settings of one of several rewards (settings/rewards.py)."""

    @property
    def name(self) -> str: ...
    @property
    def reward(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def range(self) -> tuple[float, float]: ...
    @property
    def right(self) -> bool: ...
    @property
    def batch(self) -> bool: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


@runtime_checkable
class TaskWithEnvironment(Task, Protocol):
    """A task whose completions are episodes of an environment. Its judge is for completions that a file brings."""

    @property
    def environment(self) -> Make: ...


class TaskSettings(Protocol):
    """The settings that every task reads; None where one is not given. A task reads its own options with
    `read_options`."""

    @property
    def name(self) -> str: ...
    @property
    def reward(self) -> str | None: ...
    @property
    def rewards(self) -> Sequence[RewardSettings]: ...
    @property
    def system_prompt(self) -> str | None: ...


def option(default: Any, help: str, least: int | None = None, most: int | None = None) -> Any:
    """A field of a task's `Options`: its default, its text in --help, and its range where it is a number."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


def read_options(kind: type[Options], settings: Any) -> Options:
    """A task's options: those that the settings give, and the defaults of the others. Raises ValueError for a number
    out of its range."""
    given = {option.name: getattr(settings, option.name) for option in fields(kind)}
    for option in fields(kind):
        value, least, most = given[option.name], option.metadata["least"], option.metadata["most"]
        if value is not None and least is not None and not least <= value <= most:
            raise ValueError(f"task.{option.name} is {value}; it is from {least} to {most}")
    return kind(**{name: value for name, value in given.items() if value is not None})


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
    judge: Any
    """a Judge, or several Rewards"""
    system_prompt: str | None = None

    def size(self, split: str) -> int:
        return len(self._split(split))

    def prompt(self, split: str, index: int) -> Prompt:
        from lagrpo.types import Prompt

        question, gold = self.ask(self._split(split)[index])
        return Prompt(index, build_messages(question, self.system_prompt), gold)

    def _split(self, split: str) -> Sequence[Any]:
        if split not in self.rows:
            raise ValueError(f"a task has the splits {', '.join(self.rows)}; there is no split {split!r}")
        return self.rows[split]


@dataclass(frozen=True, slots=True)
class EpisodeTask(RowTask):
    """A task made of rows whose completions talk to an environment."""

    environment: Make = field(kw_only=True)


def build_messages(question: str | Messages, system_prompt: str | None = None) -> tuple[Mapping[str, str], ...]:
    """The messages for the chat template: the system prompt if there is one ("" is none), then the question as the
    user's turn, or the given messages. Raises ValueError for a question that is neither a text nor a list of messages,
    and for messages that have a system turn already."""
    turns = ({"role": "user", "content": question},) if isinstance(question, str) else question
    listed: Any = turns if isinstance(turns, list | tuple) else ()
    if not (listed and all(map(_has_role, listed)) and isinstance(listed[-1].get("content"), str)):
        raise ValueError(
            f"its prompt is {question!r:.80}: a prompt is a text, or a list of messages such as {{'role': 'user', "
            "'content': '...'}, the last of which has a text"
        )
    turns = tuple(turns)
    if not system_prompt:
        return turns
    if turns[0]["role"] == "system":
        raise ValueError("the prompt has a system turn of its own: leave task.system_prompt unset for this data")
    return ({"role": "system", "content": system_prompt}, *turns)


def _has_role(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str)


def order_prompts(seed: int, epoch: int, size: int) -> list[int]:
    """The order in which an epoch visits the `size` prompts of a split: a permutation, a function of its arguments."""
    from lagrpo.rng import permutation

    return permutation(size, seed, "prompt order", epoch).tolist()
