"""The local rollout engine: α's own copy of the weights, exact samples, exact log-probs, continuous batching.

A token is sampled by inverting the cumulative distribution at a uniform number, keyed by (seed, "sample", batch, epoch,
prompt, completion, position), so a completion is the same whatever is sampled with it. There is no top-k and no top-p:
the trainer differentiates the distribution that is sampled. `logp_alpha` is float32 at the sampling temperature.

With an environment, a row whose turn has ended waits while the others continue. When it continues cannot change its
bits if the arithmetic is exact; otherwise rounding depends on what is computed with it, so there it continues after a
fixed number of steps.
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
from lagrpo.types import Completion, Group

PAUSE = 4  # steps that a row waits for its environment at least, if rounding depends on what is computed with it


@dataclass(slots=True)
class _Row:
    """One completion in flight."""

    request: Request
    uniform: np.ndarray  # a random number for each token
    episode: Episode | None
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    num_sampled: int = 0
    turn: int = 0  # where the policy's current turn begins
    next: Sequence[
        int
    ] = ()  # what the next step feeds to the model; nothing while it waits for its environment
    resume_at: int = 0  # the step at which it continues
    ended: bool = False

    def add(self, tokens: Sequence[int], logp: Sequence[float], sampled: bool) -> None:
        self.tokens += tokens
        self.logp += logp
        self.sampled += [sampled] * len(tokens)
        self.num_sampled += len(tokens) if sampled else 0
        self.next = tokens


class LocalSampler:
    """Samples with its own policy (a copy of the one that learns): at most `max_num_seqs` completions at a time, each
    of at most `max_tokens` tokens, at temperature `tau` (the policy's unless given)."""

    syncs_in_flight = False

    def __init__(
        self,
        policy: Policy,
        seed: int,
        max_tokens: int,
        max_num_seqs: int,
        tau: float | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        self.policy, self.model, self.seed, self.max_num_seqs = (
            policy,
            policy.model,
            seed,
            max_num_seqs,
        )
        self.params = SamplingParams(
            "sample", policy.tau if tau is None else tau, max_tokens, episodes
        )
        self._idle: DecodeState | None = None  # of an earlier batch, with its graphs

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
        """Yield each group when its last completion has ended. The next request takes the place of ended rows."""
        params = params or self.params
        rows = min(max(self.max_num_seqs, G), G * len(requests))
        state = self._take_state(rows, params)
        batch = ContinuousBatch(self.policy, self.seed, requests, G, state, params)
        del state
        while batch:
            # the weight-sync check is short, and ranks make it together
            if params.purpose != "probe":
                raise_if_asked()
            complete = batch.step()
            if not batch:  # the caller may never come back after the last group
                self._give_back(batch.state, params)
                del batch.state
            for group in complete:
                request, completions = group[0].request, tuple(map(self._complete, group))
                yield request, Group(request.prompt, completions, request.epoch)

    def _take_state(self, rows: int, params: SamplingParams) -> DecodeState:
        """The decoding state of an earlier batch if it has room for `rows` rows, else a new one."""
        idle, self._idle = self._idle, None
        if idle is not None and rows <= idle.max_rows:
            return idle
        del idle  # before there are new caches
        return DecodeState(self.model, rows, params.longest)

    def _give_back(self, state: DecodeState, params: SamplingParams) -> None:
        """Keep the state for the next batch of training. An evaluation or a check may not come again."""
        if params is self.params and state.may_stay:
            self._idle = state

    def _complete(self, row: _Row) -> Completion:
        sampled, episode = torch.tensor(row.sampled), row.episode
        return Completion(
            token_ids=torch.tensor(row.tokens),
            logp_alpha=torch.tensor(row.logp, dtype=torch.float32),
            versions=torch.where(sampled, self.version, -1),
            finished=row.tokens[-1] in self.policy.chat.eos_ids
            if episode is None
            else episode.finished,
            text=self.policy.chat.decode(row.tokens),
            outcome=None if episode is None else episode.outcome,
            sampled=sampled,
            turns=() if episode is None else tuple(episode.turns),
        )


class ContinuousBatch:
    """Groups that are being sampled: `waiting` for room, or `open`, with G rows each. A step gives every row a token;
    ended rows leave `active`, and the next group takes their place."""

    def __init__(
        self,
        policy: Policy,
        seed: int,
        requests: Sequence[Request],
        G: int,
        state: DecodeState,
        params: SamplingParams,
    ) -> None:
        self.model = policy.model
        self.eos_ids = policy.chat.eos_ids
        self.seed = seed
        self.G = G
        self.state = state
        self.params = params
        self.waiting, self.open, self.active = deque(requests), list[list[_Row]](), list[_Row]()
        self.clock = 0  # steps

    def __bool__(self) -> bool:
        return bool(self.waiting or self.active)

    def step(self) -> list[list[_Row]]:
        """One more token for every row that does not wait for its environment, and the first ones of groups that there
        is room for. Returns the groups that are complete."""
        self.clock += 1
        self._take_replies()
        stepping = [row for row in self.active if row.next]
        hidden = [self._feed(stepping)] if stepping else []
        if opened := [self._begin(self.waiting.popleft()) for _ in range(self._room())]:
            prompts = [rows[0].request.prompt.token_ids for rows in opened]
            hidden.append(self.state.admit(prompts, self.G).repeat_interleave(self.G, 0))
            self.open += opened
            for rows in opened:
                self.active += rows
                stepping += rows
        if stepping:
            self._sample_tokens(torch.cat(hidden), stepping)
        for row in stepping:
            self._end_turn(row)
        return self._retire()

    def _room(self) -> int:
        """How many waiting groups there is room for."""
        return min(len(self.waiting), (self.state.max_rows - len(self.active)) // self.G)

    def _begin(self, request: Request) -> list[_Row]:
        """The rows of a group."""
        rows, episodes = [], self.params.episodes
        for index in range(self.G):
            address = (self.seed, self.params.purpose, *request.address, index)
            episode = Episode(episodes, request.prompt, address) if episodes is not None else None
            rows.append(_Row(request, uniforms(self.params.longest, *address), episode))
        return rows

    def _feed(self, stepping: list[_Row]) -> Tensor:
        """The next tokens into the rows that continue; hidden [rows, H] of the last one of each."""
        hidden = self.state.feed([row.next for row in self.active])
        last = torch.tensor([len(row.next) for row in stepping]).cumsum(0) - 1
        return hidden.index_select(0, last.to(hidden.device))

    @torch.no_grad()
    def _sample_tokens(self, hidden: Tensor, rows: list[_Row]) -> None:
        uniform = torch.tensor(
            [row.uniform[len(row.tokens)] for row in rows], dtype=torch.float64
        ).to(hidden.device)
        tokens, logp = self.model.backend.sample(
            self.model.logits(hidden), self.params.tau, uniform
        )
        for row, token, value in zip(rows, tokens.tolist(), logp.tolist(), strict=True):
            row.add([token], [value], sampled=True)

    def _take_replies(self) -> None:
        """Continue or end rows whose environment has replied. Wait for a reply if nothing else can be done."""
        waits = [row for row in self.active if not row.next]
        idle = len(waits) == len(self.active) and not self._room()
        if self.model.exact:
            ready = [row for row in waits if row.episode is not None and row.episode.ready()]
            ready = ready or waits[:1] if idle else ready
        else:
            self.clock = (
                max(self.clock, min(row.resume_at for row in waits))
                if waits and idle
                else self.clock
            )
            ready = [row for row in waits if row.resume_at <= self.clock]
        for row in ready:
            assert row.episode is not None
            reply = row.episode.take()
            row.ended = row.episode.outcome is not None
            if not row.ended:
                last, row.turn = row.tokens[-1], len(row.tokens) + len(reply)
                row.add(reply, [math.nan] * len(reply), sampled=False)
                row.next = [last, *reply]

    def _end_turn(self, row: _Row) -> None:
        """After a token: if the policy's turn has ended, ask the environment, or end the row if there is none."""
        if row.num_sampled < self.params.max_tokens and row.tokens[-1] not in self.eos_ids:
            return
        row.next = ()
        if row.episode is None:
            row.ended = True
        else:
            row.episode.end_turn(row.tokens[row.turn :])
            row.resume_at = self.clock + PAUSE

    def _retire(self) -> list[list[_Row]]:
        """Take ended rows out; returns the groups that are then complete."""
        if not (ended := [r for r, row in enumerate(self.active) if row.ended]):
            return []
        for source, to in self.state.retire(ended):
            self.active[to] = self.active[source]
        del self.active[self.state.rows :]
        complete = [rows for rows in self.open if all(row.ended for row in rows)]
        self.open = [rows for rows in self.open if not all(row.ended for row in rows)]
        return complete
