"""The local rollout engine: exact samples and exact log-probs, by continuous batching.

The engine keeps a copy of the weights of α. A token is sampled by inverting the cumulative
distribution at a uniform number, keyed by (seed, "sample", batch, epoch, prompt, completion,
position), so a completion is the same whatever is sampled with it. Training has no top-k and no
top-p: the trainer differentiates the distribution that is sampled. `rollout_logp` is float32, at
the sampling temperature.

With an environment, a row whose turn has ended waits while the others continue. If the arithmetic
is exact, the step at which the row continues cannot change its bits. Otherwise rounding depends on
what is computed with the row, so the row continues after a fixed number of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy
from lagrpo.rng import uniforms
from lagrpo.rollout.base import EngineDefaults, Request, SamplingParams
from lagrpo.rollout.decoding import DecodeState, DecodingState
from lagrpo.rollout.episodes import Episode, Episodes
from lagrpo.rollout.recorded import (
    KEPT_SHARE,
    LARGEST_SHARE,
    RecordedState,
    records_steps,
    rows_that_fit,
)
from lagrpo.rollout.rows import Row, Rows
from lagrpo.rollout.stop import completes_stop
from lagrpo.rollout.sync_check import LocalCheck
from lagrpo.types import Completion, Group

# Steps that a row waits for its environment, if rounding depends on what is computed with the row.
PAUSE = 4


class LocalSampler(EngineDefaults):
    """A rollout engine in this process. It samples with `policy`, a copy of the one that learns.

    At most `max_num_seqs` completions are in flight. Each has at most `max_tokens` sampled tokens,
    at temperature `tau` (by default the policy's). The texts in `stop` end a completion.
    """

    syncs_in_flight = False
    computes_as_trainer = True

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
        self._idle_state: DecodingState | None = None

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

    def weight_check(self, policy: Policy, requests: Sequence[Request]) -> LocalCheck:
        return LocalCheck(policy, self, requests)

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
        state, stays = self._take_state(max_rows, G, longest_prompt, params)
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
                if stays:
                    self._idle_state = batch.state
                del batch.state
            for rows in complete_groups:
                request = rows[0].request
                completions = tuple(self._complete(row) for row in rows)
                yield request, Group(request.prompt, completions, request.epoch)

    def _take_state(
        self, max_rows: int, G: int, longest_prompt: int, params: SamplingParams
    ) -> tuple[DecodingState, bool]:
        """Returns the state of an earlier batch if it has room, else a new one.

        Also returns True if the state stays for the next batch, with its graphs. A new state stays
        if it was made for training: an evaluation or a check may not come again.
        """
        idle_state = self._idle_state
        self._idle_state = None
        max_tokens = longest_prompt + params.longest
        # Recorded steps sample from the whole distribution.
        is_recorded = params.top_p == 1 and records_steps(self.model)
        if is_recorded:
            if self.model.exact:
                # Completions do not depend on how many are sampled at a time, while `DecodeState`
                # rounds differently from the trainer on a GPU.
                kept_rows = rows_that_fit(self.model, max_tokens, KEPT_SHARE)
                max_rows = min(max_rows, max(G, kept_rows))
            is_recorded = max_rows <= rows_that_fit(self.model, max_tokens, LARGEST_SHARE)
        if not is_recorded:
            return DecodeState(self.model, max_rows, params.longest), False
        if idle_state is not None and idle_state.fits(max_rows, max_tokens):
            return idle_state, True
        # Frees the old cache before there is a new one.
        del idle_state
        state = RecordedState(self.model, max_rows, max_tokens)
        return state, state.may_stay and params.purpose == self.params.purpose

    def _complete(self, row: Row) -> Completion:
        """Returns the completion of an ended row."""
        token_ids = row.tokens.tolist()
        episode = row.episode
        if episode is None:
            finished = row.is_stopped or token_ids[-1] in self.policy.chat.eos_ids
            outcome = None
            turns = ()
            prefix = None
        else:
            finished = episode.finished
            outcome = episode.outcome
            turns = tuple(episode.turns)
            prefix = episode.prefix
        sampled = torch.from_numpy(row.is_sampled)  # bool [tokens]
        return Completion(
            token_ids=torch.from_numpy(row.tokens),
            rollout_logp=torch.from_numpy(row.logp),
            # One version for all tokens: weights are not synced while completions are in flight.
            versions=torch.where(sampled, self.version, -1),
            finished=finished,
            text=self.policy.chat.decode(token_ids),
            outcome=outcome,
            sampled=sampled,
            turns=turns,
            prefix=prefix,
        )


class ContinuousBatch:
    """Groups that are being sampled, with G rows each. True until all groups have ended.

    Requests that wait for room are in `waiting`, groups that have begun and not ended in `open`,
    and their rows that have not ended in `rows`, in the order of the rows of `state`. A step gives
    every row a token; ended rows leave `rows`, and the next group takes their place.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int,
        requests: Sequence[Request],
        G: int,
        state: DecodingState,
        params: SamplingParams,
    ) -> None:
        self.model = policy.model
        self.chat = policy.chat
        self.eos_ids = np.array(sorted(policy.chat.eos_ids))
        self.seed = seed
        self.G = G
        self.state = state
        self.params = params
        self.waiting = deque(requests)
        self.open: list[list[Row]] = []
        self.rows = Rows(state.max_rows, params.longest)
        self.clock = 0  # steps

    def __bool__(self) -> bool:
        return len(self.waiting) > 0 or len(self.rows) > 0

    def step(self) -> list[list[Row]]:
        """Adds a token to every row that does not wait, and begins groups while there is room.

        Returns the groups that are complete.
        """
        self.clock += 1
        ended = self._take_replies()

        ids, counts = self.rows.next_tokens()
        continuing = self.rows.indices_to_feed()
        first_new_row = len(self.rows)
        new_groups = [self._begin(self.waiting.popleft()) for _ in range(self._room())]
        new_rows = np.arange(first_new_row, len(self.rows))
        indices = np.concatenate([continuing, new_rows])  # the rows that get a token
        if len(indices) > 0:
            prompts = [rows[0].request.prompt.token_ids for rows in new_groups]
            uniform = self.rows.next_uniform(indices)
            tokens, logp = self.state.step(ids, counts, prompts, self.G, uniform, self.params)
            self.rows.add_sampled(indices, tokens, logp)
        ended += self._end_turns(indices)
        return self._retire(ended)

    def _room(self) -> int:
        """Returns the number of waiting groups that there is room for."""
        free_rows = self.state.max_rows - len(self.rows)
        return min(len(self.waiting), free_rows // self.G)

    def _begin(self, request: Request) -> list[Row]:
        """Begins a group behind the other rows. Returns its rows."""
        group: list[Row] = []
        uniform: list[np.ndarray] = []
        for index in range(self.G):
            address = (self.seed, self.params.purpose, *request.address, index)
            episode = None
            if self.params.episodes is not None:
                episode = Episode(self.params.episodes, request.prompt, address)
            group.append(Row(request, episode))
            uniform.append(uniforms(self.params.longest, *address))
        self.rows.begin(group, uniform)
        self.open.append(group)
        return group

    # Environments

    def _take_replies(self) -> list[int]:
        """Continues rows whose environment has replied. Returns the rows that it has ended.

        Waits for a reply if nothing else can be done.
        """
        if self.params.episodes is None:
            return []
        ended: list[int] = []
        for index in self._rows_to_continue():
            episode = self.rows.active[index].episode
            assert episode is not None
            reply = episode.take()
            if episode.outcome is not None:
                ended.append(index)
            else:
                self.rows.add_reply(index, reply)
        return ended

    def _rows_to_continue(self) -> list[int]:
        """Returns the waiting rows whose replies are taken at this step."""
        active = self.rows.active
        waiting = self.rows.indices_waiting()
        is_idle = len(waiting) == len(active) and not self._room()
        if self.state.is_exact:
            ready: list[int] = []
            for index in waiting:
                episode = active[index].episode
                if episode is not None and episode.ready():
                    ready.append(index)
            if is_idle and not ready:
                # Nothing else to do: `take` blocks until the environment of this row has replied.
                return waiting[:1]
            return ready
        if is_idle and waiting:
            # Nothing happens before the first row continues: go to that step.
            first_step = min(active[index].resume_at for index in waiting)
            self.clock = max(self.clock, first_step)
        return [index for index in waiting if active[index].resume_at <= self.clock]

    # Ends

    def _end_turns(self, indices: np.ndarray) -> list[int]:
        """Passes turns that have ended on to the environment.

        `indices` are the rows that have got a token at this step. Returns the rows that have ended
        because there is no environment.
        """
        is_over = self.rows.num_sampled[indices] >= self.params.max_tokens
        is_over |= np.isin(self.rows.last_tokens(indices), self.eos_ids)
        if self.params.stop:
            is_over |= self._find_stops(indices)
        ended: list[int] = []
        for index in indices[is_over].tolist():
            row = self.rows.active[index]
            if row.episode is None:
                ended.append(index)
            else:
                row.episode.end_turn(self.rows.turn(index), is_stopped=row.is_stopped)
                row.resume_at = self.clock + PAUSE
                self.rows.num_next[index] = 0
        return ended

    def _find_stops(self, indices: np.ndarray) -> np.ndarray:
        """Returns True for each of these rows whose last token completes a stop text."""
        for index in indices.tolist():
            turn = self.rows.turn(index)
            row = self.rows.active[index]
            row.is_stopped = completes_stop(self.chat, turn, self.params.stop)
        return np.array([self.rows.active[index].is_stopped for index in indices], dtype=np.bool_)

    def _retire(self, ended: list[int]) -> list[list[Row]]:
        """Takes ended rows out. Returns the groups that are then complete."""
        if not ended:
            return []
        moves = self.state.retire(ended)
        self.rows.retire(ended, moves)

        complete_groups: list[list[Row]] = []
        open_groups: list[list[Row]] = []
        for rows in self.open:
            if all(row.has_ended for row in rows):
                complete_groups.append(rows)
            else:
                open_groups.append(rows)
        self.open = open_groups
        return complete_groups
