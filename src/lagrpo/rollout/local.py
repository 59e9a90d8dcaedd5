"""The local rollout engine: exact samples and exact log-probs, by continuous batching.

The engine keeps a copy of the weights of α. A token is sampled by inverting the cumulative
distribution at a uniform number, keyed by (seed, "sample", batch, epoch, prompt, completion,
position), so a completion is the same whatever is sampled with it. Training has no top-k and no
top-p: the trainer differentiates the distribution that is sampled. `logp_alpha` is float32, at the
sampling temperature.

With an environment, a row whose turn has ended waits while the others continue. If the arithmetic
is exact, the step at which the row continues cannot change its bits. Otherwise rounding depends on
what is computed with the row, so the row continues after a fixed number of steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy
from lagrpo.rng import uniforms
from lagrpo.rollout.base import Request, SamplingParams
from lagrpo.rollout.decoding import DecodeState
from lagrpo.rollout.episodes import Episode, Episodes
from lagrpo.rollout.nucleus import keep_nucleus
from lagrpo.rollout.recorded import RecordedState, cache_fits, records_steps
from lagrpo.rollout.stop import completes_stop
from lagrpo.types import Completion, Group

# Steps that a row waits for its environment, if rounding depends on what is computed with the row.
PAUSE = 4


@dataclass(slots=True)
class _Row:
    """One completion in flight.

    - `uniform`: float64 [longest completion], a random number for each token
    - `tokens`, `logp`, `sampled`: what the completion has so far. Tokens of an environment's reply
      are not sampled, and their log-prob is NaN.
    - `next_tokens`: the tokens that the next step feeds to the model; none while the row waits for
      its environment
    """

    request: Request
    uniform: np.ndarray
    episode: Episode | None
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    num_sampled: int = 0
    turn_start: int = 0  # where the policy's current turn begins in `tokens`
    next_tokens: Sequence[int] = ()
    is_stopped: bool = False  # its last token completed a stop text
    resume_at: int = 0  # the step at which a row that waits continues, unless arithmetic is exact
    ended: bool = False

    def add_sampled(self, token: int, logp: float) -> None:
        self.tokens.append(token)
        self.logp.append(logp)
        self.sampled.append(True)
        self.num_sampled += 1
        self.next_tokens = [token]

    def add_reply(self, reply: Sequence[int]) -> None:
        """Appends an environment's reply. The policy's next turn begins behind it."""
        # The last token of the turn has not been fed yet: the row was waiting.
        self.next_tokens = [self.tokens[-1], *reply]
        self.tokens += reply
        self.logp += [math.nan] * len(reply)
        self.sampled += [False] * len(reply)
        self.turn_start = len(self.tokens)


class LocalSampler:
    """A rollout engine in this process. It samples with `policy`, a copy of the one that learns.

    At most `max_num_seqs` completions are in flight. Each has at most `max_tokens` sampled tokens,
    at temperature `tau` (by default the policy's). The texts in `stop` end a completion.
    """

    syncs_in_flight = False

    def __init__(
        self,
        policy: Policy,
        seed: int,
        max_tokens: int,
        max_num_seqs: int,
        tau: float | None = None,
        episodes: Episodes | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.model = policy.model
        self.seed = seed
        self.max_num_seqs = max_num_seqs
        if tau is None:
            tau = policy.tau
        self.params = SamplingParams("sample", tau, max_tokens, episodes, stop=tuple(stop))
        # The state of an earlier batch, with its graphs.
        self._idle_state: RecordedState | None = None

    @property
    def version(self) -> int:
        return self.policy.version

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        self.policy.load(weights, version)
        return {}

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.version, dict(self.policy.weights.items())

    def pop_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[Request, Group]]:
        """Yields each group when its last completion has ended.

        The next request takes the place of ended rows.
        """
        params = params or self.params
        # A group begins as a whole, so there is room for at least one.
        max_rows = min(max(self.max_num_seqs, G), G * len(requests))
        longest_prompt = max((len(r.prompt.token_ids) for r in requests), default=0)
        state, stays = self._take_state(max_rows, longest_prompt, params)
        batch = ContinuousBatch(self.policy, self.seed, requests, G, state, params)
        # The batch alone holds the state, so that memory is free as soon as the batch drops it.
        del state
        while batch:
            # The weight-sync check is short, and ranks make it together.
            if params.purpose != "probe":
                raise_if_asked()
            complete_groups = batch.step()
            if not batch:
                # Before the last yield: the caller may never come back after the last group.
                if stays and isinstance(batch.state, RecordedState):
                    self._idle_state = batch.state
                del batch.state
            for rows in complete_groups:
                request = rows[0].request
                completions = tuple(self._complete(row) for row in rows)
                yield request, Group(request.prompt, completions, request.epoch)

    def _take_state(
        self, max_rows: int, longest_prompt: int, params: SamplingParams
    ) -> tuple[DecodeState | RecordedState, bool]:
        """Returns the state of an earlier batch if it has room, else a new one.

        Also returns True if the state stays for the next batch, with its graphs. A new state stays
        if it was made for training: an evaluation or a check may not come again.
        """
        idle_state = self._idle_state
        self._idle_state = None
        max_tokens = longest_prompt + params.longest
        # Recorded steps sample from the whole distribution.
        is_recorded = params.top_p == 1 and records_steps(self.model)
        if not is_recorded or not cache_fits(self.model, max_rows, max_tokens):
            return DecodeState(self.model, max_rows, params.longest), False
        if idle_state is not None and idle_state.fits(max_rows, max_tokens):
            return idle_state, True
        # Frees the old cache before there is a new one.
        del idle_state
        state = RecordedState(self.model, max_rows, max_tokens)
        return state, state.may_stay and params.purpose == self.params.purpose

    def _complete(self, row: _Row) -> Completion:
        """Returns the completion of an ended row."""
        episode = row.episode
        if episode is None:
            finished = row.is_stopped or row.tokens[-1] in self.policy.chat.eos_ids
            outcome = None
            turns = ()
        else:
            finished = episode.finished
            outcome = episode.outcome
            turns = tuple(episode.turns)
        sampled = torch.tensor(row.sampled)  # bool [tokens]
        return Completion(
            token_ids=torch.tensor(row.tokens),
            logp_alpha=torch.tensor(row.logp, dtype=torch.float32),
            # One version for all tokens: weights are not synced while completions are in flight.
            versions=torch.where(sampled, self.version, -1),
            finished=finished,
            text=self.policy.chat.decode(row.tokens),
            outcome=outcome,
            sampled=sampled,
            turns=turns,
        )


class ContinuousBatch:
    """Groups that are being sampled, with G rows each. True until all groups have ended.

    Requests that wait for room are in `waiting`, groups that have begun and not ended in `open`,
    and their rows that have not ended in `active`. A step gives every row a token; ended rows leave
    `active`, and the next group takes their place.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int,
        requests: Sequence[Request],
        G: int,
        state: DecodeState | RecordedState,
        params: SamplingParams,
    ) -> None:
        self.model = policy.model
        self.chat = policy.chat
        self.seed = seed
        self.G = G
        self.state = state
        self.params = params
        self.waiting = deque(requests)
        self.open: list[list[_Row]] = []
        self.active: list[_Row] = []  # in the order of the rows of `state`
        self.clock = 0  # steps

    def __bool__(self) -> bool:
        return bool(self.waiting or self.active)

    def step(self) -> list[list[_Row]]:
        """Adds a token to every row that does not wait, and begins groups as far as there is room.

        Returns the groups that are complete.
        """
        self.clock += 1
        self._take_replies()

        stepping_rows = [row for row in self.active if row.next_tokens]
        hidden_of_rows: list[Tensor] = []  # each [rows, H]
        rows_to_sample: list[_Row] = []  # rows whose next token is sampled from these states
        if stepping_rows and isinstance(self.state, RecordedState):
            self._feed_and_sample(self.state, stepping_rows)
        elif stepping_rows:
            hidden_of_rows.append(self._feed(stepping_rows))
            rows_to_sample += stepping_rows

        new_groups = [self._begin(self.waiting.popleft()) for _ in range(self._room())]
        if new_groups:
            hidden_of_rows.append(self._admit(new_groups))
            for rows in new_groups:
                stepping_rows += rows
                rows_to_sample += rows

        if rows_to_sample:
            self._sample_tokens(torch.cat(hidden_of_rows), rows_to_sample)
        for row in stepping_rows:
            self._end_turn(row)
        return self._retire()

    def _room(self) -> int:
        """Returns the number of waiting groups that there is room for."""
        free_rows = self.state.max_rows - len(self.active)
        return min(len(self.waiting), free_rows // self.G)

    def _begin(self, request: Request) -> list[_Row]:
        """Returns the rows of a new group."""
        rows: list[_Row] = []
        for index in range(self.G):
            address = (self.seed, self.params.purpose, *request.address, index)
            episode = None
            if self.params.episodes is not None:
                episode = Episode(self.params.episodes, request.prompt, address)
            rows.append(_Row(request, uniforms(self.params.longest, *address), episode))
        return rows

    def _admit(self, groups: list[list[_Row]]) -> Tensor:
        """Prefills new groups behind the active rows.

        Returns the hidden states [groups * G, H] from which their first tokens are sampled.
        """
        prompts = [rows[0].request.prompt.token_ids for rows in groups]
        hidden = self.state.admit(prompts, self.G)  # [groups, H]
        self.open += groups
        for rows in groups:
            self.active += rows
        return hidden.repeat_interleave(self.G, 0)

    def _feed(self, stepping_rows: list[_Row]) -> Tensor:
        """Feeds the next tokens of the rows that continue.

        Returns the hidden states [rows, H] of the last token of each.
        """
        # An entry for each row of the state; a row that waits for its environment feeds no token.
        hidden = self.state.feed([row.next_tokens for row in self.active])  # [tokens, H]
        num_tokens = torch.tensor([len(row.next_tokens) for row in stepping_rows])  # int64 [rows]
        last_of_row = num_tokens.cumsum(0) - 1  # int64 [rows]: index of a row's last token
        return hidden.index_select(0, last_of_row.to(hidden.device))

    def _feed_and_sample(self, state: RecordedState, stepping_rows: list[_Row]) -> None:
        """Feeds the next tokens of the rows that continue, and samples one more for each."""
        tokens, logp = state.feed_and_sample(
            tokens=[row.next_tokens for row in self.active],
            uniform=[row.uniform[len(row.tokens)] for row in stepping_rows],
            tau=self.params.tau,
        )
        for row, token, token_logp in zip(stepping_rows, tokens, logp, strict=True):
            row.add_sampled(token, token_logp)

    @torch.no_grad()
    def _sample_tokens(self, hidden: Tensor, rows: list[_Row]) -> None:
        """Samples a token for each row from its hidden state: hidden [rows, H]."""
        numbers = [row.uniform[len(row.tokens)] for row in rows]
        uniform = torch.tensor(numbers, dtype=torch.float64).to(hidden.device)  # [rows]
        logits = self.model.logits(hidden)  # [rows, V]
        logits = keep_nucleus(logits, self.params.tau, self.params.top_p)
        tokens, logp = self.model.backend.sample(logits, self.params.tau, uniform)
        for row, token, token_logp in zip(rows, tokens.tolist(), logp.tolist(), strict=True):
            row.add_sampled(token, token_logp)

    def _take_replies(self) -> None:
        """Continues or ends rows whose environment has replied.

        Waits for a reply if nothing else can be done.
        """
        for row in self._rows_to_continue():
            assert row.episode is not None
            reply = row.episode.take()
            if row.episode.outcome is not None:
                row.ended = True
            else:
                row.add_reply(reply)

    def _rows_to_continue(self) -> list[_Row]:
        """Returns the waiting rows whose replies are taken at this step."""
        waiting_rows = [row for row in self.active if not row.next_tokens]
        is_idle = len(waiting_rows) == len(self.active) and not self._room()
        if self.model.exact:
            ready = [row for row in waiting_rows if row.episode is not None and row.episode.ready()]
            if is_idle and not ready:
                # Nothing else to do: `take` blocks until the environment of this row has replied.
                return waiting_rows[:1]
            return ready
        if is_idle and waiting_rows:
            # Nothing happens before the first row continues: go to that step.
            first_step = min(row.resume_at for row in waiting_rows)
            self.clock = max(self.clock, first_step)
        return [row for row in waiting_rows if row.resume_at <= self.clock]

    def _end_turn(self, row: _Row) -> None:
        """Asks the environment if the policy's turn has ended; ends the row if there is none."""
        at_limit = row.num_sampled >= self.params.max_tokens
        if self.params.stop:
            turn = row.tokens[row.turn_start :]
            row.is_stopped = completes_stop(self.chat, turn, self.params.stop)
        if not at_limit and not row.is_stopped and row.tokens[-1] not in self.chat.eos_ids:
            return
        row.next_tokens = ()
        if row.episode is None:
            row.ended = True
        else:
            turn = row.tokens[row.turn_start :]
            row.episode.end_turn(turn, is_stopped=row.is_stopped)
            row.resume_at = self.clock + PAUSE

    def _retire(self) -> list[list[_Row]]:
        """Takes ended rows out. Returns the groups that are then complete."""
        ended = [index for index, row in enumerate(self.active) if row.ended]
        if not ended:
            return []
        for source, target in self.state.retire(ended):
            self.active[target] = self.active[source]
        del self.active[self.state.rows :]

        complete_groups: list[list[_Row]] = []
        open_groups: list[list[_Row]] = []
        for rows in self.open:
            if all(row.ended for row in rows):
                complete_groups.append(rows)
            else:
                open_groups.append(rows)
        self.open = open_groups
        return complete_groups
