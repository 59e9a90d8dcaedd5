"""Multi-turn rollouts: after each turn of the policy an environment replies or ends the episode.

A reply is appended as tokens that were not sampled (`model/chat.py`). If a limit ends an episode, the episode is
scored with what it was worth by then, and its reason says which limit: an outcome, not a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lagrpo.errors import as_settings_error
from lagrpo.model.chat import OPENING, Chat, Replies, RewritingError, TemplateError
from lagrpo.rewards.pool import Job, WorkerPool
from lagrpo.settings.schema import Settings
from lagrpo.tasks import Key, Task, environment_of
from lagrpo.tasks.environments import Tools, system_text, take_turn
from lagrpo.types import Outcome, Prompt

MAIN_TASK = ""
"""Name of the environment of the run's task; an evaluation set's environment has the set's name."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """Makes completions episodes. `pool` has loaded what makes environments, and `deadline` is in seconds for a turn;
    `tools` are JSON schemas for the chat template, None without tools or if it does not take them."""

    pool: WorkerPool
    replies: Replies
    turns: int  # of the policy, at most
    sampled: int  # tokens that the policy samples, at most
    replied: int  # tokens that the environment says, at most
    tools: list[dict[str, Any]] | None = None
    deadline: float = 5.0

    def open(self, prompt: Prompt, key: Key) -> tuple[Mapping[str, Any], ...]:
        """The messages with which an episode begins. Raises ValueError if it cannot begin."""
        found = self.pool.result(
            self.pool.submit(take_turn, None, prompt, key, None, seconds=self.deadline)
        )
        if isinstance(found, Outcome):
            raise ValueError(f"its environment did not start: {found.reason}")
        return tuple(found[0].messages)


def build_episodes(settings: Settings, task: Task, chat: Chat) -> Episodes | None:
    """The task's environment in processes; None for completions of one turn. Raises SettingsError for tools that do
    not say how they are called, what cannot be sent to processes, and a chat template that changes earlier turns."""
    make, tools = environment_of(task), None
    if make is None:
        return None
    with as_settings_error("task", TypeError, TemplateError):
        if isinstance(make, Tools):
            tools = make.schemas()
            opening = chat.render(OPENING, tools)
            if not all(f'"{name}"' in opening for name in make.functions):
                make, tools = replace(make, system=system_text(tools)), None
        replies, sampled = Replies(chat), settings.rollout.max_completion_length
        replies.check([{"role": "tool" if isinstance(make, Tools) else "user", "content": "5"}])
        limits = settings.task.max_turns, sampled, settings.reply_limit
        return Episodes(WorkerPool(make), replies, *limits, tools, settings.task.reward_timeout)


def max_reply_tokens(settings: Settings, *tasks: Task) -> int:
    """The most tokens that an environment says in a completion of these tasks; 0 without one."""
    has_environment = any(environment_of(task) is not None for task in tasks)
    return settings.reply_limit if has_environment else settings.replied


class Episode:
    """One completion's conversation. `turns` are the texts so far, the policy's and the environment's in turn. Nothing
    is computed before the first turn has ended. `outcome` says how it ended, `finished` that no limit ended it."""

    def __init__(self, episodes: Episodes, prompt: Prompt, key: Key) -> None:
        self._episodes, self._begin = episodes, (replace(prompt, token_ids=()), key)
        self._state: bytes | None = None
        self._job: Job | None = None
        self._cut = ""
        self._sampled = self._replied = 0
        self.turns: list[str] = []
        self.outcome: Outcome | None = None
        self.finished = False

    def end_turn(self, token_ids: Sequence[int]) -> None:
        """Hand over the tokens that the policy has sampled since the last reply; its turn has ended."""
        limits, replies = self._episodes, self._episodes.replies
        self._sampled += len(token_ids)
        if self._sampled >= limits.sampled:
            self._cut = f"cut after {limits.sampled} sampled tokens (rollout.max_completion_length)"
        elif token_ids[-1] != replies.end_id:
            self._cut = "cut: the turn ended with an unexpected end token"
        elif len(self.turns) // 2 + 1 >= limits.turns:
            self._cut = f"cut after {limits.turns} turns (task.max_turns)"
        self._ended = token_ids[-1] in replies.chat.eos_ids
        self.turns.append(replies.chat.decode(token_ids))
        given = self._state, *(self._begin if self._state is None else (None, None)), self.turns[-1]
        self._job = self._episodes.pool.submit(take_turn, *given, seconds=self._episodes.deadline)

    def ready(self) -> bool:
        """Whether `take` need not wait."""
        return self._job is None or self._job.future.done()

    def take(self) -> tuple[int, ...]:
        """Wait for the environment's reply; returns its tokens, none if the episode has ended, be it because a limit
        ends it here or the reply cannot be tokenized. Raises RewritingError if the chat template cannot render it."""
        assert self._job is not None
        job, self._job = self._job, None
        found = self._episodes.pool.result(job)
        if isinstance(found, Outcome):
            self.outcome = found
            return ()
        said, self._state = found
        if said.done:
            reason = "; ".join(filter(None, (said.reason, "" if self._ended else self._cut)))
            self.outcome, self.finished = Outcome("scored", said.reward, reason), self._ended
            return ()
        tokens, limit = (), self._episodes.replied
        try:
            if not self._cut:
                tokens = self._episodes.replies.tokens(said.messages)
        except RewritingError:
            raise
        except ValueError as error:
            self.outcome = Outcome.unscored(f"the environment's reply cannot be tokenized: {error}")
            return ()
        if self._replied + len(tokens) > limit:
            self._cut = f"cut: the environment replied with more than {limit} tokens"
        if self._cut:
            self.outcome = Outcome("scored", said.reward, self._cut)
            return ()
        self._replied += len(tokens)
        self.turns.append("\n".join(str(message.get("content") or "") for message in said.messages))
        return tokens
