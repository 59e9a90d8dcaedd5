"""Episodes: completions of several turns. After each turn of the policy an environment says something or ends the
episode.

What it says is appended as tokens that nobody sampled (`model/chat.py`). Where a limit ends an episode, it is
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
    has ended, `outcome` says what became of it, and `finished` that no limit ended it."""

    def __init__(self, of: Episodes, prompt: Prompt, address: Address) -> None:
        self._of, self._begin = of, (replace(prompt, token_ids=()), address)
        self._state: bytes | None = None
        self._job: Any = None
        self._cut = ""
        self._sampled = self._replied = 0
        self.turns: list[str] = []
        self.outcome: Outcome | None = None
        self.finished = False

    def end_turn(self, token_ids: Sequence[int]) -> None:
        """The policy has sampled these tokens since the last reply, and is not to go on: hand them over."""
        limits, chat = self._of.limits, self._of.replies.chat
        self._sampled += len(token_ids)
        if self._sampled >= limits.sampled:
            self._cut = f"cut after {limits.sampled} sampled tokens (sampling.max_tokens)"
        elif token_ids[-1] != self._of.replies.end_id:
            self._cut = "cut: the turn ended with another token than the one that ends a turn"
        elif len(self.turns) // 2 + 1 >= limits.turns:
            self._cut = f"cut after {limits.turns} turns (environment.max_turns)"
        self._ended = token_ids[-1] in chat.eos_ids
        self.turns.append(chat.decode(token_ids))
        begin = self._begin if self._state is None else (None, None)
        self._job = self._of.environments.submit(self._state, *begin, self.turns[-1])

    def ready(self) -> bool:
        """Whether `take` need not wait."""
        return self._job.done()

    def take(self) -> tuple[int, ...]:
        """Wait for what the environment says; returns its tokens, none where the episode has ended. Raises
        RewritingError where the chat template cannot say it."""
        job, self._job = self._job, None
        kind, said = self._of.environments.result(job)
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
        """Nobody wants the rest of it."""
        if self._job is not None:
            self._of.environments.forget(self._job)

    def _tokens(self, messages: Any) -> tuple[int, ...]:
        """The messages in tokens; they are part of the conversation if they fit."""
        try:
            tokens = self._of.replies.tokens(messages)
        except RewritingError:
            raise
        except (TemplateError, ValueError) as error:
            self.outcome = Outcome.unscored(f"the environment's reply cannot be said: {error}")
            return ()
        if self._replied + len(tokens) > self._of.limits.replied:
            self._cut = f"cut: the environment said more than {self._of.limits.replied} tokens (environment.max_tokens)"
            return ()
        self._replied += len(tokens)
        self.turns.append("\n".join(str(message.get("content") or "") for message in messages))
        return tokens
