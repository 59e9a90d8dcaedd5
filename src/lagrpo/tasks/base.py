"""What a task is: prompts, and a judge of completions.

This module and the tasks beside it are imported by the verifier's worker processes, so nothing here imports torch or
numpy before it is needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lagrpo.types import Prompt

Judge = Callable[[str, Any], float]
"""`judge(text, gold) -> reward`: picklable by reference, so a function at the top level of a module. Any finite number
is a reward. Raises `Unjudgeable` when there is no verdict to give; any other exception is taken so too."""

Messages = Sequence[Mapping[str, str]]


class Unjudgeable(Exception):  # noqa: N818 - not an error of the program: it is one of a completion's three outcomes
    """The answer cannot be scored, for example because the gold answer cannot be read. The completion is *unscored*:
    it has no reward, which is not a reward of 0."""


@runtime_checkable
class Task(Protocol):
    """Prompts in two splits, "train" and "test", and the judge of their completions."""

    @property
    def name(self) -> str: ...

    @property
    def judge(self) -> Judge: ...

    def size(self, split: str) -> int:
        """How many prompts the split holds."""
        ...

    def prompt(self, split: str, index: int) -> Prompt:
        """Prompt `index` (0 .. size - 1) of a split: its key is the index, its token_ids are empty."""
        ...


class TaskSettings(Protocol):
    """What `load_task` reads of the settings; None where a setting is not given."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> str | None: ...
    @property
    def train_split(self) -> str | None: ...
    @property
    def test_split(self) -> str | None: ...
    @property
    def prompt_column(self) -> str | None: ...
    @property
    def answer_column(self) -> str | None: ...
    @property
    def reward(self) -> str | None: ...
    @property
    def system_prompt(self) -> str | None: ...
    @property
    def operations(self) -> tuple[str, ...] | None: ...
    @property
    def digits(self) -> int | None: ...
    @property
    def words(self) -> bool | None: ...
    @property
    def numbers(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class RowTask:
    """A task made of rows: `ask(row)` gives a row's question (a text, or chat messages) and its gold answer.

    >>> task = RowTask("sums", {"train": [(2, 3)], "test": []}, lambda row: (f"{row[0]} + {row[1]}?", "5"), print)
    >>> task.prompt("train", 0).messages
    ({'role': 'user', 'content': '2 + 3?'},)
    """

    name: str
    rows: Mapping[str, Sequence[Any]]
    ask: Callable[[Any], tuple[str | Messages, Any]]
    judge: Judge
    system_prompt: str | None = None

    def size(self, split: str) -> int:
        return len(self._split(split))

    def prompt(self, split: str, index: int) -> Prompt:
        from lagrpo.types import Prompt

        question, gold = self.ask(self._split(split)[index])
        return Prompt(index, chat(question, self.system_prompt), gold)

    def _split(self, split: str) -> Sequence[Any]:
        if split not in self.rows:
            raise ValueError(f"a task has the splits {', '.join(self.rows)}; there is no split {split!r}")
        return self.rows[split]


def chat(question: str | Messages, system_prompt: str | None = None) -> tuple[Mapping[str, str], ...]:
    """The messages for the chat template: the question as the user's turn (or messages as they are), after the system
    prompt if there is one ("" is none). Raises ValueError for what is neither a text nor a list of messages, and where
    the messages bring a system turn of their own."""
    turns = ({"role": "user", "content": question},) if isinstance(question, str) else question
    if not _are_messages(turns):
        raise ValueError(
            f"its prompt is {question!r:.80}: a prompt is a text, or a list of messages such as {{'role': 'user', "
            "'content': '...'}, the last of which has a text"
        )
    turns = tuple(turns)
    if not system_prompt:
        return turns
    if turns and turns[0].get("role") == "system":
        raise ValueError("the prompt has a system turn of its own: leave task.system_prompt unset for this data")
    return ({"role": "system", "content": system_prompt}, *turns)


def _are_messages(turns: Any) -> bool:
    """Whether these are messages, each with a role, the last with a text."""
    if not isinstance(turns, list | tuple) or not turns:
        return False
    return all(isinstance(t, Mapping) and isinstance(t.get("role"), str) for t in turns) and isinstance(
        turns[-1].get("content"), str
    )


def prompt_order(seed: int, epoch: int, size: int) -> list[int]:
    """The order in which an epoch visits the `size` prompts of a split: a permutation that is a pure function of
    (seed, epoch, size)."""
    from lagrpo.rng import permutation

    return permutation(size, seed, "prompt order", epoch).tolist()


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the known name most like `name`, or nothing when none is like it: the end of an error
    message."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
