"""Multi-turn rollouts: after each turn of the policy an environment replies or ends the episode.

A reply is appended as tokens that were not sampled (`model/chat.py`). If a limit ends an episode, the episode is
scored with what it was worth by then, and its reason says which limit: an outcome, not a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lagrpo.model.chat import Replies, RewritingError, TemplateError
from lagrpo.types import Outcome, Prompt

Address = tuple[int | str, ...]


class Environments(Protocol):
    """What runs environments: tasks/environments.py."""

    def submit(self, state: bytes | None, prompt: Prompt | None, key: Address | None, text: str | None) -> Any: ...
    def result(self, job: Any) -> tuple[str, Any]: ...
    def forget(self, job: Any) -> None: ...
    def open(self, prompt: Prompt, key: Address) -> tuple[Mapping[str, Any], ...]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an episode."""

    turns: int  # of the policy
    sampled: int  # tokens that the policy samples
    replied: int  # tokens that the environment says


@dataclass(frozen=True, slots=True)
class Episodes:
    """Makes completions episodes."""

    environments: Environments
    replies: Replies
    limits: Limits

    def begin(self, prompt: Prompt, address: Address) -> Episode:
        """An episode; nothing is computed before the policy's first turn has ended."""
        return Episode(self, prompt, address)


class Episode:
    """One completion's conversation. `turns` are the texts so far, the policy's and the environment's in turn. Once it
    has ended, `outcome` says how, and `finished` that no limit ended it."""

    def __init__(self, made_by: Episodes, prompt: Prompt, address: Address) -> None:
        self._made_by, self._begin = made_by, (replace(prompt, token_ids=()), address)
        self._state: bytes | None = None
        self._job: Any = None
        self._cut = ""
        self._sampled = self._replied = 0
        self.turns: list[str] = []
        self.outcome: Outcome | None = None
        self.finished = False

    def end_turn(self, token_ids: Sequence[int]) -> None:
        """Hand over the tokens that the policy has sampled since the last reply; its turn has ended."""
        limits, replies = self._made_by.limits, self._made_by.replies
        self._sampled += len(token_ids)
        if self._sampled >= limits.sampled:
            self._cut = f"cut after {limits.sampled} sampled tokens (rollout.max_completion_length)"
        elif token_ids[-1] != replies.end_id:
            self._cut = "cut: the turn ended with another token than the one that ends a turn"
        elif len(self.turns) // 2 + 1 >= limits.turns:
            self._cut = f"cut after {limits.turns} turns (environment.max_turns)"
        self._ended = token_ids[-1] in replies.chat.eos_ids
        self.turns.append(replies.chat.decode(token_ids))
        begin = self._begin if self._state is None else (None, None)
        self._job = self._made_by.environments.submit(self._state, *begin, self.turns[-1])

    def ready(self) -> bool:
        """Whether `take` need not wait."""
        return self._job.done()

    def take(self) -> tuple[int, ...]:
        """Wait for the environment's reply; returns its tokens, none if the episode has ended. Raises RewritingError
        if the chat template cannot render it."""
        job, self._job = self._job, None
        kind, said = self._made_by.environments.result(job)
        if kind == "turn":
            messages, reward, self._state = said
            tokens = self._tokens(messages) if not self._cut else ()
            if self.outcome is None and self._cut:
                self.outcome = Outcome("scored", reward, self._cut)
            return tokens if self.outcome is None else ()
        if kind == "final":
            reason = "; ".join(filter(None, (said[1], "" if self._ended else self._cut)))
            self.outcome, self.finished = Outcome("scored", said[0], reason), self._ended
        else:
            self.outcome = Outcome.unscored(str(said))
        return ()

    def forget(self) -> None:
        """The rest is not needed."""
        if self._job is not None:
            self._made_by.environments.forget(self._job)

    def _tokens(self, messages: Any) -> tuple[int, ...]:
        """The messages in tokens; they are part of the conversation if they fit."""
        try:
            tokens = self._made_by.replies.tokens(messages)
        except (TemplateError, ValueError) as error:
            if isinstance(error, RewritingError):
                raise
            self.outcome = Outcome.unscored(f"the environment's reply cannot be said: {error}")
            return ()
        limit = self._made_by.limits.replied
        if self._replied + len(tokens) > limit:
            self._cut = f"cut: the environment said more than {limit} tokens (environment.max_tokens)"
            return ()
        self._replied += len(tokens)
        self.turns.append("\n".join(str(message.get("content") or "") for message in messages))
        return tokens
