"""The local rollout engine: exact samples and exact log-probs, by continuous batching.

The engine keeps a copy of the weights of α, unless α is π at every token. A token is sampled by
inverting the cumulative distribution at a uniform number, keyed by (seed, "sample", batch, epoch,
prompt, completion, position), so a completion is the same whatever is sampled with it. Training has
no top-k and no top-p: the trainer differentiates the distribution that is sampled. `rollout_logp`
is float32, at the sampling temperature.

If completions go on after weight syncs, all requests share one batch. After a sync its keys and
values are computed again from the tokens, so what follows is a function of weights and tokens: a
resumed run samples the same, and the log-prob of a token is the one of its version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy
from lagrpo.rollout.base import EngineDefaults, SamplingParams
from lagrpo.rollout.continuous import ContinuousBatch
from lagrpo.rollout.decoding import DecodeState, DecodingState
from lagrpo.rollout.recorded import (
    KEPT_SHARE,
    LARGEST_SHARE,
    RecordedState,
    records_steps,
    rows_that_fit,
)
from lagrpo.rollout.rows import Row
from lagrpo.rollout.sync_check import LocalCheck
from lagrpo.tasks.episodes import Episodes
from lagrpo.types import Completion, Group, Request


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
