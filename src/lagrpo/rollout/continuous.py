"""Continuous batching: groups begin while there is room, and ended rows make room.

With an environment, a row whose turn has ended waits while the others continue. If the arithmetic
is exact, the step at which the row continues cannot change its bits. Otherwise rounding depends on
what is computed with the row, so the row continues after a fixed number of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from lagrpo.model.model import Policy
from lagrpo.rng import uniforms
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.decoding import DecodingState
from lagrpo.rollout.rows import Row, Rows
from lagrpo.rollout.stop import completes_stop
from lagrpo.tasks.episodes import Episode
from lagrpo.types import Completion, Request

# Steps that a row waits for its environment, if rounding depends on what is computed with the row.
PAUSE = 4


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
