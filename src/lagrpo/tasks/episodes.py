"""Multi-turn rollouts: after each turn of the policy an environment replies or ends the episode.

A reply is appended as tokens that were not sampled (`model/replies.py`). If a limit ends an
episode, the episode gets the reward that it had by then, and the reason of its outcome names the
limit. That is not a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lagrpo.model.replies import Replies, RewritingError
from lagrpo.rewards.pool import Job, WorkerPool
from lagrpo.tasks import Key, StepResult
from lagrpo.tasks.environments import take_turn
from lagrpo.types import JsonObject, JsonView, Outcome, OutcomeKind, Prompt

MAIN_TASK = ""
"""Name of the environment of the run's task; an evaluation set's environment has the set's name."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """The environment of a task and the limits of its episodes.

    - `pool`: worker processes that have loaded the function that makes environments
    - `turns`: the most turns of the policy
    - `sampled`: the most tokens that the policy samples
    - `replied`: the most tokens of all replies
    - `tools`: JSON schemas for the chat template; None without tools, or if the template ignores
      them
    - `deadline`: seconds for a turn of the environment
    """

    pool: WorkerPool
    replies: Replies
    turns: int
    sampled: int
    replied: int
    tools: list[JsonObject] | None = None
    deadline: float = 5.0

    def open(self, prompt: Prompt, key: Key) -> tuple[JsonView, ...]:
        """Returns the messages with which an episode begins.

        Raises ValueError if it cannot begin.
        """
        job = self.pool.submit(take_turn, None, prompt, key, None, deadline=self.deadline)
        turn = self.pool.result(job)
        if isinstance(turn, Outcome):
            raise ValueError(f"its environment did not start: {turn.reason}")
        opening, _ = turn
        return tuple(opening.messages)


class Episode:
    """One completion's conversation.

    - `turns`: the texts so far, of the policy and the environment in turn
    - `outcome`: how the episode ended, with its reward unless this is for reward functions to give;
      None before the end
    - `finished`: True if no limit ended it
    - `prefix`: the beginning of the policy's turn that the prompt, or the last reply, ends with

    Nothing is computed before the first turn has ended.
    """

    def __init__(self, episodes: Episodes, prompt: Prompt, key: Key) -> None:
        self.turns: list[str] = []
        self.outcome: Outcome | None = None
        self.finished = False
        self.prefix = prompt.prefix
        self._episodes = episodes
        # The environment needs no tokens, and arguments travel to another process.
        self._prompt = replace(prompt, token_ids=())
        self._key = key
        self._environment: bytes | None = None  # pickled; None before its first turn
        self._job: Job | None = None  # the environment's turn, while it is under way
        self._num_sampled = 0
        self._num_replied = 0
        self._limit_reason = ""  # why the episode ends with this turn, if a limit ends it
        # True if the last turn of the policy has an end token, or ended with a stop text.
        self._turn_finished = False
        self._is_stopped = False  # True if it ended with a stop text

    def end_turn(self, token_ids: Sequence[int], *, is_stopped: bool = False) -> None:
        """Passes the policy's turn on to the environment.

        `token_ids` are the tokens that the policy has sampled since the last reply. `is_stopped`:
        the last one completed a stop text.
        """
        chat = self._episodes.replies.chat
        self._num_sampled += len(token_ids)
        self._is_stopped = is_stopped
        limit_reason = self._limit_of_turn(last_token=token_ids[-1])
        if limit_reason:
            self._limit_reason = limit_reason
        self._turn_finished = is_stopped or token_ids[-1] in chat.eos_ids
        text = chat.decode(token_ids)
        self.turns.append(text)
        # A new environment begins with the prompt and the key.
        is_first = self._environment is None
        self._job = self._episodes.pool.submit(
            take_turn,
            self._environment,
            self._prompt if is_first else None,
            self._key if is_first else None,
            text,
            self.prefix,
            deadline=self._episodes.deadline,
        )

    def ready(self) -> bool:
        """True if `take` need not wait."""
        return self._job is None or self._job.future.done()

    def take(self) -> tuple[int, ...]:
        """Waits for the environment's reply. Returns its tokens, none if the episode has ended.

        The environment ends an episode, or a limit does, or a reply that cannot be tokenized.
        Raises RewritingError if the chat template cannot render the reply.
        """
        assert self._job is not None
        job = self._job
        self._job = None
        turn = self._episodes.pool.result(job)
        if isinstance(turn, Outcome):
            self.outcome = turn
            return ()
        reply, self._environment = turn
        if reply.done:
            self.outcome = self._last_outcome(reply)
            self.finished = self._turn_finished
            return ()

        tokens = ()
        if not self._limit_reason:
            try:
                tokens = self._episodes.replies.tokens(reply.messages)
            except RewritingError:
                # It is a ValueError, but it concerns the chat template, not this reply.
                raise
            except ValueError as error:
                reason = f"the environment's reply cannot be tokenized: {error}"
                self.outcome = Outcome.unscored(reason)
                return ()
            if self._is_stopped:
                # The policy did not sample the end of its turn, which the chat template expects.
                tokens = (self._episodes.replies.end_id, *tokens)
        limit = self._episodes.replied
        if self._num_replied + len(tokens) > limit:
            self._limit_reason = f"cut: the environment replied with more than {limit} tokens"
        if self._limit_reason:
            self.outcome = Outcome(OutcomeKind.SCORED, reply.reward, self._limit_reason)
            return ()
        self._num_replied += len(tokens)
        chat = self._episodes.replies.chat
        self.prefix = chat.find_opened_tag(chat.decode(tokens))
        contents = [str(message.get("content") or "") for message in reply.messages]
        self.turns.append("\n".join(contents))
        return tokens

    def _last_outcome(self, reply: StepResult) -> Outcome:
        """Returns the outcome of an episode that the environment ends with this reply."""
        reasons = [reply.reason]
        if not self._turn_finished:
            reasons.append(self._limit_reason)
        reason = "; ".join(filter(None, reasons))
        if reply.is_answer:
            return Outcome(OutcomeKind.ANSWERED, reason=reason)
        return Outcome(OutcomeKind.SCORED, reply.reward, reason)

    def _limit_of_turn(self, last_token: int) -> str:
        """Returns why the episode ends with the policy's turn; "" if no limit ends it."""
        limits = self._episodes
        if self._num_sampled >= limits.sampled:
            return f"cut after {limits.sampled} sampled tokens (rollout.max_completion_length)"
        if last_token != limits.replies.end_id and not self._is_stopped:
            return "cut: the turn ended with an unexpected end token"
        turn_number = len(self.turns) // 2 + 1
        if turn_number >= limits.turns:
            return f"cut after {limits.turns} turns (task.max_turns)"
        return ""
