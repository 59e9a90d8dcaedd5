"""The in-process sampler: α's own copy of the weights, exact samples, exact log-probs.

A token is sampled by inverting the cumulative distribution at a uniform number. The address of that number is (seed,
"sample", batch, epoch, prompt, completion, position), so a completion is the same whatever is sampled beside it. There
is no top-k and no top-p: the learner differentiates the distribution that is sampled. `logp_alpha` is float32 at the
sampling temperature.

With `episodes`, a row whose turn has ended waits for its environment while the others go on. The reply's tokens are fed
to it behind those that its cache has. When it goes on cannot change its bits where the grade is exact; elsewhere
rounding depends on what is computed beside it, so there it goes on after a fixed number of steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy, PolicyCopy, Weights
from lagrpo.rng import uniforms
from lagrpo.rollout.base import Item, Manner, Request
from lagrpo.rollout.decode import DecodeState
from lagrpo.rollout.episodes import Episode, Episodes
from lagrpo.types import Completion, Group

PAUSE = 4
"""Steps that a row waits for its environment at least, where rounding depends on what is computed beside it."""


@dataclass(slots=True)
class _Row:
    """One completion under way. `uniform` [max_tokens] its random numbers."""

    group: _Open
    index: int
    uniform: np.ndarray
    episode: Episode | None = None
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    drawn: int = 0
    """tokens that were sampled"""
    turn: int = 0
    """where the last turn of the policy begins"""
    fed: Sequence[int] = ()
    """what the next step feeds to the model; nothing while it waits for its environment"""
    due: int = 0
    """the step at which it goes on"""
    ended: bool = False

    def add(self, tokens: Sequence[int], logp: Sequence[float], sampled: bool) -> None:
        self.tokens += tokens
        self.logp += logp
        self.sampled += [sampled] * len(tokens)
        self.drawn += len(tokens) if sampled else 0
        self.fed = tokens

    @property
    def waits(self) -> bool:
        return not self.fed and not self.ended


@dataclass(slots=True)
class _Open:
    """A group, the address of its random numbers, the most tokens of each completion, and those that have ended."""

    request: Request
    address: tuple[int | str, ...]
    max_tokens: int
    done: dict[int, Completion] = field(default_factory=dict)


class LocalSampler:
    """Sampler over a policy of its own (a copy of the one that learns): at most `max_num_seqs` completions at a time,
    each of at most `max_tokens` tokens, at temperature `tau` (the policy's unless given). `purpose` is part of the
    address of every random number, so that an evaluation does not repeat the random numbers of training. `episodes`
    is set where completions talk to an environment; `known` has those that an evaluation can name."""

    servers = ("the in-process sampler",)
    spans = False

    def __init__(
        self,
        policy: Policy | PolicyCopy,
        seed: int,
        max_tokens: int,
        max_num_seqs: int,
        tau: float | None = None,
        purpose: str = "sample",
    ) -> None:
        self.policy, self.model = policy, policy.model
        self.seed, self.max_tokens, self.max_num_seqs, self.purpose = seed, max_tokens, max_num_seqs, purpose
        self.tau = policy.tau if tau is None else tau
        self.episodes: Episodes | None = None
        self.known: Mapping[str, Episodes] = {}
        self._environment: str | None = None
        self._under_way = 0
        self._clock = 0  # steps

    @property
    def manner(self) -> Manner:
        return Manner(self.purpose, self.tau, self.max_tokens, self._environment)

    def adopt(self, manner: Manner) -> None:
        """Sample so from now on. Only while nothing is being sampled."""
        self.purpose, self.tau, self.max_tokens = manner.purpose, manner.tau, manner.max_tokens
        self._environment, found = manner.environment, None
        if manner.environment is not None:
            found = self.known[manner.environment]
            found = replace(found, limits=replace(found.limits, sampled=manner.max_tokens))
        self.episodes = found

    @property
    def version(self) -> int:
        return self.policy.version

    def describe_versions(self) -> str:
        return f"{self.servers[0]}: {self.version}"

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        if self._under_way:
            raise RuntimeError(
                f"version {version} was synced while {self._under_way} groups of version {self.version} are open"
            )
        self.policy.weights.load(weights, version)
        return {}

    def served(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.version, dict(self.policy.weights.items())

    def rest(self) -> None:
        pass

    def read(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """Yield each group when its last completion has ended. Rows that have ended make room for the next request."""
        if self.max_num_seqs < G:
            raise ValueError(f"a group of G = {G} completions does not fit sampling.max_num_seqs = {self.max_num_seqs}")
        yield from self._sample(requests, G, self.max_num_seqs, self.max_tokens, self.purpose)

    def _sample(
        self, requests: Sequence[Request], G: int, rows: int, max_tokens: int, purpose: str
    ) -> Iterator[tuple[Request, Group]]:
        waiting = deque(_Open(request, (self.seed, purpose, *request.address), max_tokens) for request in requests)
        state = DecodeState(self.model, min(rows, G * len(waiting)), max_tokens)
        active: list[_Row] = []
        self._under_way, self._clock = len(waiting), 0
        try:
            while waiting or active:
                if purpose == self.purpose:  # the parity check is short, and ranks make it together
                    raise_if_asked()
                full = self._step(state, waiting, active, G)
                if not waiting and not active:
                    del state  # nobody may ever ask for what comes behind the last group
                for group in full:
                    self._under_way -= 1
                    completions = tuple(group.done[g] for g in range(G))
                    yield group.request, Group(group.request.prompt, completions, group.request.epoch)
        finally:
            self._under_way = 0
            for episode in (row.episode for row in active if row.episode is not None):
                episode.forget()

    def _step(self, state: DecodeState, waiting: deque[_Open], active: list[_Row], G: int) -> list[_Open]:
        """Sample one more token of every active row that does not wait, and the first tokens of groups that there is
        room for. Returns the groups that are complete."""
        self._clock += 1
        if self.episodes is not None:
            self._take_replies(active, bool(waiting) and len(active) + G <= state.max_rows)
        going = [row for row in active if row.fed]
        hidden = [self._feed(state, active, going)] if going else []
        first = len(active)
        if (admitted := self._admit(waiting, state, active, G)) is not None:
            hidden.append(admitted)
            going += active[first:]
        if going:
            self._sample_tokens(torch.cat(hidden), going)
        for row in going:
            self._end_turn(row)
        ended = [r for r, row in enumerate(active) if row.ended]
        if not ended:
            return []
        full = [group for r in ended if len((group := self._close(active[r])).done) == G]
        for source, to in state.retire(ended):
            active[to] = active[source]
        del active[state.rows :]
        return full

    def _feed(self, state: DecodeState, active: list[_Row], going: list[_Row]) -> Tensor:
        """The next tokens into the rows that go on; hidden [rows, H] of the last one of each."""
        if len(going) == len(active) and all(len(row.fed) == 1 for row in going):
            return state.step(torch.tensor([row.fed[0] for row in going]))
        hidden = state.feed([row.fed for row in active])
        last = torch.tensor([len(row.fed) for row in going]).cumsum(0) - 1
        return hidden.index_select(0, last.to(hidden.device))

    def _take_replies(self, active: list[_Row], busy: bool) -> None:
        """Have rows go on, or end, whose environment has replied. Where nothing else is to be done, wait for it."""
        waits = [row for row in active if row.waits]
        idle = bool(waits) and not busy and not any(row.fed for row in active)
        if self.model.exact:
            ready = [row for row in waits if row.episode is not None and row.episode.ready()]
            ready = ready or waits[:1] if idle else ready
        else:
            self._clock = max(self._clock, min(row.due for row in waits)) if idle else self._clock
            ready = [row for row in waits if row.due <= self._clock]
        for row in ready:
            assert row.episode is not None
            tokens = row.episode.take()
            row.ended = row.episode.outcome is not None
            if not row.ended:
                last, row.turn = row.tokens[-1], len(row.tokens) + len(tokens)
                row.add(tokens, [math.nan] * len(tokens), sampled=False)
                row.fed = [last, *tokens]

    def _end_turn(self, row: _Row) -> None:
        """After a token: where the policy's turn has ended, ask the environment, or end the row where there is none."""
        if row.drawn < row.group.max_tokens and not self._has_eos(row):
            return
        row.fed = ()
        if row.episode is None:
            row.ended = True
        else:
            row.episode.end_turn(row.tokens[row.turn :])
            row.due = self._clock + PAUSE

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        """As the parity check asks; training samples under other addresses."""
        generated = self._sample(requests, G, max(self.max_num_seqs, G), max_tokens, "probe")
        groups = {request.prompt.key: group for request, group in generated}
        return [groups[request.prompt.key] for request in requests]

    @torch.no_grad()
    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        """By the path that samples, decoding steps and the head. An item that has ended gets its last token again. With
        episodes, the second half of the tokens is fed at once, as replies are. Items of one prompt share it, where they
        stand side by side and all prompts have as many."""
        longest = max(len(tokens) for _, tokens in items)
        fed = torch.tensor([[tokens[min(t, len(tokens) - 1)] for _, tokens in items] for t in range(longest)])
        state = DecodeState(self.model, len(items), longest)
        groups = [(prompt_ids, len([*group])) for prompt_ids, group in groupby(items, key=itemgetter(0))]
        if len({G for _, G in groups}) > 1:
            groups = [(prompt_ids, 1) for prompt_ids, _ in items]
        G = groups[0][1]
        hidden = state.admit([prompt_ids for prompt_ids, _ in groups], G).repeat_interleave(G, 0)
        steps = longest if self.episodes is None else -(-longest // 2)
        found = []
        for t, token_ids in enumerate(fed[:steps]):
            found.append(self._logp(hidden, token_ids))
            hidden = state.step(token_ids) if t + 1 < steps else hidden
        if steps < longest:
            hidden = state.feed(fed[steps - 1 : -1].T.tolist())
            found += self._logp(hidden, fed[steps:].T.flatten()).view(len(items), -1).unbind(1)
        logp = torch.stack(found, 1)
        return [[row[: len(tokens)].tolist() for row, (_, tokens) in zip(logp, items, strict=True)]]

    def _logp(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """At temperature 1, on the CPU."""
        return self.model.backend.logp(self.model.logits(hidden), token_ids.to(self.model.device), 1.0).cpu()

    def _admit(self, waiting: deque[_Open], state: DecodeState, active: list[_Row], G: int) -> Tensor | None:
        """Open the waiting groups that there is room for. Returns hidden [new rows, H] for their first tokens."""
        groups = [waiting.popleft() for _ in range(min(len(waiting), (state.max_rows - len(active)) // G))]
        if not groups:
            return None
        for group in groups:
            active += [self._begin(group, g) for g in range(G)]
        hidden = state.admit([group.request.prompt.token_ids for group in groups], G)
        return hidden.repeat_interleave(G, 0)

    def _begin(self, group: _Open, index: int) -> _Row:
        if self.episodes is None or group.address[1] != self.purpose:  # the parity check's completions have one turn
            return _Row(group, index, uniforms(group.max_tokens, *group.address, index))
        address, most = (*group.address, index), group.max_tokens + self.episodes.limits.replied
        return _Row(group, index, uniforms(most, *address), self.episodes.begin(group.request.prompt, address))

    def _sample_tokens(self, hidden: Tensor, rows: list[_Row]) -> None:
        uniform = torch.tensor([row.uniform[len(row.tokens)] for row in rows], dtype=torch.float64).to(hidden.device)
        with torch.no_grad():
            tokens, logp = self.model.backend.sample(self.model.logits(hidden), self.tau, uniform)
        for row, token, value in zip(rows, tokens.tolist(), logp.tolist(), strict=True):
            row.add([token], [value], sampled=True)

    def _has_eos(self, row: _Row) -> bool:
        return row.tokens[-1] in self.policy.chat.eos_ids

    def _close(self, row: _Row) -> _Open:
        sampled, episode = torch.tensor(row.sampled), row.episode
        row.group.done[row.index] = Completion(
            token_ids=torch.tensor(row.tokens),
            logp_alpha=torch.tensor(row.logp, dtype=torch.float32),
            versions=torch.where(sampled, self.version, -1),
            finished=self._has_eos(row) if episode is None else episode.finished,
            text=self.policy.chat.decode(row.tokens),
            outcome=None if episode is None else episode.outcome,
            sampled=sampled,
            turns=() if episode is None else tuple(episode.turns),
        )
        return row.group


class BorrowingSampler(LocalSampler):
    """Samples by a copy, `policy`, of the policy `source`, which is set before its first use. The copy has weights from
    `borrow` to `rest`, and else no memory for them."""

    source: Policy

    def __init__(self, policy: PolicyCopy, *given: Any) -> None:
        super().__init__(policy, *given)
        self._copy = policy
        self._storages = self._find_storages()
        self._give_memory()

    def borrow(self) -> None:
        """Take the weights of the source as they are now. Collective."""
        for storage, size in self._storages:
            storage.resize_(size)
        self._copy.load(self.source.all_weights, self.source.version)

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        self.borrow()
        yield from super().sample(requests, G)

    def rest(self) -> None:
        super().rest()
        self._give_memory()

    def _give_memory(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def _find_storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        """What holds the copy's weights, and its size; panels keep theirs."""
        if not isinstance(self._copy.weights, Weights):
            return []
        own = [p.detach() for p in self._copy.model.lm.parameters()]
        return [(p.untyped_storage(), p.numel() * p.element_size()) for p in own]
