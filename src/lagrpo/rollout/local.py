"""The local rollout engine: exact samples and exact log-probs, by continuous batching.

The engine keeps a copy of the weights of α, unless α is π at every token. A token is sampled by
inverting the cumulative distribution at a uniform number, keyed by (seed, "sample", batch, epoch,
prompt, completion, position), so a completion is the same whatever is sampled with it. Training has
no top-k and no top-p: the trainer differentiates the distribution that is sampled. `rollout_logp`
is float32, at the sampling temperature.

With an environment, a row whose turn has ended waits while the others continue. If the arithmetic
is exact, the step at which the row continues cannot change its bits. Otherwise rounding depends on
what is computed with the row, so the row continues after a fixed number of steps.

If completions go on after weight syncs, all requests share one batch. After a sync its keys and
values are computed again from the tokens, so what follows is a function of weights and tokens: a
resumed run samples the same, and the log-prob of a token is the one of its version.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy
from lagrpo.rng import uniforms
from lagrpo.rollout.base import EngineDefaults, SamplingParams
from lagrpo.rollout.decoding import DecodeState, DecodingState
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
from lagrpo.tasks.episodes import Episode, Episodes
from lagrpo.types import Completion, Group, Request

# Steps that a row waits for its environment, if rounding depends on what is computed with the row.
PAUSE = 4


class LocalSampler(EngineDefaults):
    """A rollout engine in this process. It samples with `policy`: a copy of the one that learns.

    It may be the policy that learns itself, if no completion is in flight while that changes.

    At most `max_num_seqs` completions are in flight. Each has at most `max_tokens` sampled tokens,
    at temperature `tau` (by default the policy's). The texts in `stop` end a completion. With
    `continues_completions`, weights may be synced while completions are in flight; no prompt is
    then longer than `longest_prompt`.
    """

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
        *,
        continues_completions: bool = False,
        longest_prompt: int = 0,
    ) -> None:
        self.policy = policy
        self.model = policy.model
        self.seed = seed
        self.max_num_seqs = max_num_seqs
        if tau is None:
            tau = policy.tau
        self.params = SamplingParams("sample", tau, max_tokens, episodes, stop=tuple(stop))
        self.continues_completions = continues_completions
        self.longest_prompt = longest_prompt
        # The state of an earlier batch, with its graphs.
        self._idle_state: DecodingState | None = None
        self._keeps_states = True
        # With `continues_completions`: all completions of training that are in flight, and the
        # groups that have ended and were not yielded, by their addresses.
        self._in_flight: ContinuousBatch | None = None
        self._ended: dict[tuple[int, int, int], list[Row]] = {}
        self._state_stays = False  # the state of what is in flight is kept with its graphs
        self._counts = Counter[str]()

    @property
    def version(self) -> int:
        return self.policy.version

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        if weights is not self.policy.weights:
            self.policy.load(weights, version)
        self._drop_state()
        return {}

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.version, dict(self.policy.weights.items())

    def pop_metrics(self) -> Mapping[str, float]:
        """Returns counts since the last call, if completions go on after weight syncs.

        - `rows_in_flight`, `rows`: over all steps, the completions in flight, and the most that
          there is room for
        - `recomputed`: tokens whose keys and values were computed again
        """
        if not self.continues_completions:
            return {}
        names = ("rows_in_flight", "rows", "recomputed")
        counts = {name: self._counts[name] for name in names}
        self._counts.clear()
        return counts

    def close(self) -> None: ...

    def weight_check(self, policy: Policy, requests: Sequence[Request]) -> LocalCheck:
        return LocalCheck(policy, self, requests)

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[Request, Group]]:
        """Returns an iterator that yields each group when its last completion has ended.

        The next request takes the place of ended rows.
        """
        params = params or self.params
        if self.continues_completions and params.purpose == self.params.purpose:
            return self._join(requests, G, params)
        return self._sample_alone(requests, G, params)

    def _sample_alone(
        self, requests: Sequence[Request], G: int, params: SamplingParams
    ) -> Iterator[tuple[Request, Group]]:
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
                if stays and self._keeps_states:
                    self._idle_state = batch.state
                del batch.state
            for rows in complete_groups:
                yield self._group(rows)

    # Completions that go on after weight syncs

    def _join(
        self, requests: Sequence[Request], G: int, params: SamplingParams
    ) -> Iterator[tuple[Request, Group]]:
        """Adds requests to what is in flight, now. Returns the iterator of their groups."""
        if self._in_flight is None:
            state = self._take_state_in_flight(G, params)
            self._in_flight = ContinuousBatch(
                self.policy, self.seed, (), G, state, params, has_fixed_pauses=True
            )
        self._in_flight.add(requests)
        if any(request.begun for request in requests):
            self._drop_state()
        return self._groups_of(self._in_flight, requests)

    def _groups_of(
        self, batch: ContinuousBatch, requests: Sequence[Request]
    ) -> Iterator[tuple[Request, Group]]:
        """Yields the groups of these requests as they end."""
        missing = {request.address for request in requests}
        while missing:
            ended = [address for address in self._ended if address in missing]
            if not ended:
                self._step(batch)
            for address in ended:
                missing.remove(address)
                yield self._group(self._ended.pop(address))

    def _step(self, batch: ContinuousBatch) -> None:
        """Gives each completion in flight a token, with the weights as they are now."""
        raise_if_asked()
        if not batch.has_state:
            state = self._take_state_in_flight(batch.G, batch.params)
            self._counts["recomputed"] += batch.compute_again(state)
        for rows in batch.step():
            self._ended[rows[0].request.address] = rows
        self._counts["rows_in_flight"] += batch.rows_in_last_step
        self._counts["rows"] += batch.max_rows

    def _take_state_in_flight(self, G: int, params: SamplingParams) -> DecodingState:
        """Returns a state for all completions in flight, whose size is the same after every sync.

        A resumed run would otherwise begin groups at other steps.
        """
        max_rows = max(self.max_num_seqs, G)
        state, self._state_stays = self._take_state(max_rows, G, self.longest_prompt, params)
        return state

    def _drop_state(self) -> None:
        """Drops keys and values of what is in flight. The next step computes them again."""
        batch = self._in_flight
        if batch is not None and batch.has_state:
            if self._state_stays and self._keeps_states:
                self._idle_state = batch.state
            batch.drop_state()

    def before_learning(self) -> None:
        self._drop_state()

    def free_idle_memory(self) -> bool:
        self._keeps_states = False
        had_state = self._idle_state is not None
        self._idle_state = None
        return had_state

    def in_flight(self) -> list[Request]:
        batch = self._in_flight
        if batch is None:
            return []
        index_of_row = {row: index for index, row in enumerate(batch.rows.active)}
        requests: list[Request] = []
        for group in [*self._ended.values(), *batch.open]:
            begun: list[Completion] = []
            for row in group:
                if row.has_ended:
                    begun.append(self._complete(row))
                else:
                    begun.append(batch.rows.so_far(index_of_row[row]))
            requests.append(replace(group[0].request, begun=tuple(begun)))
        return requests

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
        is_of_training = params.purpose == self.params.purpose
        return state, self._keeps_states and state.may_stay and is_of_training

    def _group(self, rows: Sequence[Row]) -> tuple[Request, Group]:
        """Returns the group of ended rows, and its request."""
        request = rows[0].request
        completions = tuple(self._complete(row) for row in rows)
        return request, Group(request.prompt, completions, request.epoch)

    def _complete(self, row: Row) -> Completion:
        """Returns the completion of an ended row."""
        if row.completion is not None:
            return row.completion
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
        return Completion(
            token_ids=torch.from_numpy(row.tokens),
            rollout_logp=torch.from_numpy(row.logp),
            versions=torch.from_numpy(row.versions),
            finished=finished,
            text=self.policy.chat.decode(token_ids),
            outcome=outcome,
            sampled=torch.from_numpy(row.is_sampled),
            turns=turns,
            prefix=prefix,
        )


class ContinuousBatch:
    """Groups that are being sampled, with G rows each. True until all groups have ended.

    Requests that wait for room are in `waiting`, groups that have begun and not ended in `open`,
    and their rows that have not ended in `rows`, in the order of the rows of `state`. A step gives
    every row a token; ended rows leave `rows`, and the next group takes their place. With
    `has_fixed_pauses` a row waits for its environment for a fixed number of steps, even if
    arithmetic is exact.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int,
        requests: Sequence[Request],
        G: int,
        state: DecodingState,
        params: SamplingParams,
        *,
        has_fixed_pauses: bool = False,
    ) -> None:
        self.policy = policy
        self.chat = policy.chat
        self.eos_ids = np.array(sorted(policy.chat.eos_ids))
        self.seed = seed
        self.G = G
        self.state = state
        self.has_state = True
        self.max_rows = state.max_rows
        self.has_fixed_pauses = has_fixed_pauses
        self.params = params
        self.waiting = deque(requests)
        self.open: list[list[Row]] = []
        self.rows = Rows(self.max_rows, params.longest)
        self.rows_in_last_step = 0
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
            self.rows.add_sampled(indices, tokens, logp, self.policy.version)
        self.rows_in_last_step = len(self.rows)
        ended += self._end_turns(indices)
        return self._retire(ended)

    def _room(self) -> int:
        """Returns the number of waiting groups that there is room for."""
        free_rows = self.max_rows - len(self.rows)
        return min(len(self.waiting), free_rows // self.G)

    def _begin(self, request: Request) -> list[Row]:
        """Begins a group behind the other rows. Returns its rows."""
        group = self._new_group(request)
        self.rows.begin(group, [self._uniforms(request, index) for index in range(self.G)])
        self.open.append(group)
        return group

    def _new_group(self, request: Request) -> list[Row]:
        """Returns the rows of a group, which are not in flight yet."""
        group: list[Row] = []
        for index in range(self.G):
            episode = None
            if self.params.episodes is not None:
                key = self._key(request, index)
                episode = Episode(self.params.episodes, request.prompt, key)
            group.append(Row(request, episode))
        return group

    def _key(self, request: Request, index: int) -> tuple[str | int, ...]:
        """Returns the key of the random numbers of completion `index` of a group."""
        return (self.seed, self.params.purpose, *request.address, index)

    def _uniforms(self, request: Request, index: int) -> np.ndarray:
        """Returns the random numbers of completion `index` of a group, float64 [longest]."""
        return uniforms(self.params.longest, *self._key(request, index))

    # Weight syncs and checkpoints

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests. Those of earlier batches begin first.

        Groups that had begun go on from their tokens: `compute_again` must come before a step.
        """
        waiting = list(self.waiting)
        for request in requests:
            if not request.begun or not self._resume(request):
                waiting.append(request)
        self.waiting = deque(sorted(waiting, key=lambda request: request.batch))

    def _resume(self, request: Request) -> bool:
        """Puts a group that had begun in flight again.

        Returns False if it is to begin anew, because there is no room on fewer ranks than before,
        or because its environment replies something else now.
        """
        group = self._new_group(request)
        in_flight: dict[int, Completion] = {}
        for index, completion in enumerate(request.begun):
            if completion.has_ended:
                group[index].completion = completion
                group[index].has_ended = True
            else:
                in_flight[index] = completion
        first = len(self.rows)
        has_room = first + len(in_flight) <= self.max_rows
        if not has_room or not all(
            self._replay(group[index], completion) for index, completion in in_flight.items()
        ):
            return False
        self.rows.begin(
            [group[index] for index in in_flight],
            [self._uniforms(request, index) for index in in_flight],
        )
        for index, completion in enumerate(in_flight.values(), start=first):
            self.rows.load(index, completion)
        self.open.append(group)
        # A turn may have ended, and its environment not have replied.
        self._end_turns(np.arange(first, len(self.rows)))
        return True

    def _replay(self, row: Row, completion: Completion) -> bool:
        """Repeats the turns that an environment has replied to. Returns False for other replies."""
        if row.episode is None:
            return True
        is_reply = ~completion.sampled.numpy()
        starts = np.flatnonzero(np.diff(is_reply)) + 1  # of replies and later turns, in turn
        parts = np.split(completion.token_ids.numpy(), starts)
        for turn, reply in zip(parts[0::2], parts[1::2], strict=False):
            tokens: list[int] = turn.tolist()
            is_stopped = completes_stop(self.chat, tokens, self.params.stop)
            row.episode.end_turn(tokens, is_stopped=is_stopped)
            if row.episode.take() != tuple(reply.tolist()):
                return False
        row.turn_start = len(completion.token_ids) - len(parts[-1])
        return True

    def drop_state(self) -> None:
        """Frees keys and values. `compute_again` must come before the next step."""
        del self.state
        self.has_state = False

    def compute_again(self, state: DecodingState) -> int:
        """Computes keys and values of all rows in flight with the weights as they are now.

        Afterwards everything is a function of the weights and the tokens: rows stand in the order
        in which their groups began, and those that wait for their environment wait PAUSE steps.
        Returns the number of tokens.
        """
        self.state = state
        self.has_state = True
        self.clock = 0
        index_of_row = {row: index for index, row in enumerate(self.rows.active)}
        rows_of_groups = [[row for row in group if not row.has_ended] for group in self.open]
        order = [index_of_row[row] for rows in rows_of_groups for row in rows]
        if not order:
            return 0
        self.rows.reorder(order)
        for index in self.rows.indices_waiting():
            self.rows.active[index].resume_at = PAUSE
        prompts = [rows[0].request.prompt.token_ids for rows in rows_of_groups]
        ids, counts = self.rows.fed_tokens()
        state.load(prompts, np.array([len(rows) for rows in rows_of_groups]), ids, counts)
        return sum(map(len, prompts)) + len(ids)

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
        if self.state.is_exact and not self.has_fixed_pauses:
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
