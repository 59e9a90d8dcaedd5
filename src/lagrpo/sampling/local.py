"""The in-process sampler: α's own copy of the weights, exact samples, exact log-probs.

A token is sampled by inverting the cumulative distribution at a uniform number. The address of that number is (seed,
"sample", batch, epoch, prompt, completion, position), so a completion is the same whatever is sampled beside it. There
is no top-k and no top-p: the learner differentiates the distribution that is sampled. `logp_alpha` is float32 at the
sampling temperature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lagrpo.interrupts import whole
from lagrpo.policy.model import Policy, Weights
from lagrpo.policy.replica import Replica
from lagrpo.rng import uniforms
from lagrpo.sampling.base import Item, Manner, Request
from lagrpo.sampling.decode import DecodeState, Room
from lagrpo.types import Completion, Group


@dataclass(slots=True)
class _Row:
    """One completion under way. `uniform` [max_tokens] its random numbers."""

    group: _Open
    index: int
    uniform: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


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
    address of every random number, so that an evaluation does not repeat the random numbers of training."""

    servers = ("the in-process sampler",)
    spans = False

    def __init__(
        self,
        policy: Policy | Replica,
        seed: int,
        max_tokens: int,
        max_num_seqs: int,
        tau: float | None = None,
        purpose: str = "sample",
    ) -> None:
        self.policy, self.model = policy, policy.model
        self.seed, self.max_tokens, self.max_num_seqs, self.purpose = seed, max_tokens, max_num_seqs, purpose
        self.tau = policy.tau if tau is None else tau
        self.stopped: Callable[[], bool] = lambda: False
        """whether nobody wants the rest of what is being sampled"""
        self._under_way = 0
        self._kept: DecodeState | None = None
        self._room: Room | None = None  # what the last one had grown to

    @property
    def manner(self) -> Manner:
        return Manner(self.purpose, self.tau, self.max_tokens)

    def adopt(self, manner: Manner) -> None:
        """Sample so from now on. Only while nothing is being sampled."""
        self.purpose, self.tau, self.max_tokens = manner.purpose, manner.tau, manner.max_tokens

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
        with whole():
            self.policy.weights.load(weights, version)
        return {}

    def served(self) -> tuple[int, Mapping[str, Tensor]]:
        return self.version, dict(self.policy.weights.items())

    def rest(self) -> None:
        """Completions under way keep their caches, and the steps recorded on them."""
        if not self._under_way:
            self._forget()

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
        state = self._state(min(rows, G * len(waiting)), max_tokens)
        active: list[_Row] = []
        tokens = torch.empty(0, dtype=torch.long)
        self._under_way = len(waiting)
        try:
            while (waiting or active) and not self.stopped():
                tokens, full = self._step(state, waiting, active, tokens, G)
                if not waiting and not active:
                    del state  # nobody may ever ask for what comes behind the last group
                for group in full:
                    self._under_way -= 1
                    completions = tuple(group.done[g] for g in range(G))
                    yield group.request, Group(group.request.prompt, completions, group.request.epoch)
        finally:
            self._under_way = 0

    def _step(
        self, state: DecodeState, waiting: deque[_Open], active: list[_Row], tokens: Tensor, G: int
    ) -> tuple[Tensor, list[_Open]]:
        """Sample one more token of every active row, and the first tokens of groups that there is room for. Returns the
        last token of each row that is active now, and the groups that are complete."""
        hidden = state.step(tokens) if active else None
        admitted = self._admit(waiting, state, active, G)
        tokens = self._sample_tokens(torch.cat([h for h in (hidden, admitted) if h is not None]), active)
        ended = [r for r, row in enumerate(active) if self._has_eos(row) or len(row.tokens) == row.group.max_tokens]
        if not ended:
            return tokens, []
        full = [group for r in ended if len((group := self._close(active[r])).done) == G]
        for source, to in state.retire(ended):
            active[to], tokens[to] = active[source], tokens[source]
        del active[state.rows :]
        return tokens[: state.rows], full

    def _state(self, rows: int, tokens: int) -> DecodeState:
        """An empty state for so many rows: the last one again where its steps are recorded, which takes time."""
        if self._kept is None or self._kept.rows or self._kept.max_rows < rows:
            self._forget()  # gives its memory back before the next one takes its own
            state = DecodeState(self.model, rows, tokens, self._room)
            self._kept = state if state.records else None
            return state
        return self._kept

    def _forget(self) -> None:
        if self._kept is not None:
            self._room, self._kept = self._kept.room, None

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        """As the parity check asks; training samples under other addresses."""
        generated = self._sample(requests, G, max(self.max_num_seqs, G), max_tokens, "probe")
        groups = {request.prompt.key: group for request, group in generated}
        return [groups[request.prompt.key] for request in requests]

    @torch.no_grad()
    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        """By the path that samples, decoding steps and the head. An item that has ended gets its last token again."""
        longest = max(len(tokens) for _, tokens in items)
        fed = torch.tensor([[tokens[min(t, len(tokens) - 1)] for _, tokens in items] for t in range(longest)])
        state = self._state(len(items), longest)
        hidden = state.admit([prompt_ids for prompt_ids, _ in items], 1)
        found = []
        for t, token_ids in enumerate(fed):
            logits = self.model.logits(hidden)  # at once: a recorded step overwrites its hidden states
            found.append(self.model.backend.logp(logits, token_ids.to(self.model.device), 1.0).cpu())
            hidden = state.step(token_ids) if t + 1 < longest else hidden
        state.retire(range(len(items)))
        logp = torch.stack(found, 1)
        return [[row[: len(tokens)].tolist() for row, (_, tokens) in zip(logp, items, strict=True)]]

    def _admit(self, waiting: deque[_Open], state: DecodeState, active: list[_Row], G: int) -> Tensor | None:
        """Open the waiting groups that there is room for. Returns hidden [new rows, H] for their first tokens."""
        groups = [waiting.popleft() for _ in range(min(len(waiting), (state.max_rows - len(active)) // G))]
        if not groups:
            return None
        for group in groups:
            active += [_Row(group, g, uniforms(group.max_tokens, *group.address, g)) for g in range(G)]
        hidden = state.admit([group.request.prompt.token_ids for group in groups], G)
        return hidden.repeat_interleave(G, 0)

    def _sample_tokens(self, hidden: Tensor, active: list[_Row]) -> Tensor:
        uniform = torch.tensor([row.uniform[len(row.tokens)] for row in active], dtype=torch.float64).to(hidden.device)
        with torch.no_grad():
            tokens, logp = self.model.backend.sample(self.model.logits(hidden), self.tau, uniform)
        for row, token, value in zip(active, tokens.tolist(), logp.tolist(), strict=True):
            row.tokens.append(token)
            row.logp.append(value)
        return tokens.cpu()

    def _has_eos(self, row: _Row) -> bool:
        return row.tokens[-1] in self.policy.chat.eos_ids

    def _close(self, row: _Row) -> _Open:
        row.group.done[row.index] = Completion(
            token_ids=torch.tensor(row.tokens),
            logp_alpha=torch.tensor(row.logp, dtype=torch.float32),
            versions=torch.full((len(row.tokens),), self.version),
            finished=self._has_eos(row),
            text=self.policy.chat.decode(row.tokens),
        )
        return row.group


class BorrowingSampler(LocalSampler):
    """Samples by a copy, `policy`, of the policy `source`, which is set before its first use. The copy has weights from
    `borrow` to `rest`, and else no memory for them. `in_step` has all ranks gather them together."""

    source: Policy

    def __init__(self, in_step: Callable[[Callable[[], None]], None], policy: Replica, *given: Any) -> None:
        super().__init__(policy, *given)
        self._in_step, self._copy = in_step, policy
        self._give_memory()

    def borrow(self) -> None:
        """Take the weights of the source as they are now. Collective."""
        self._in_step(self._load)

    def rest(self) -> None:
        super().rest()
        self._give_memory()

    def _load(self) -> None:
        for storage, size in self._storages():
            storage.resize_(size)
        self._copy.load(self.source.weights, self.source.version)

    def _give_memory(self) -> None:
        for storage, _ in self._storages():
            storage.resize_(0)

    def _storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        """What holds the copy's weights, and its size; panels keep theirs."""
        if not isinstance(self._copy.weights, Weights):
            return []
        own = [p.detach() for p in self._copy.model.lm.parameters()]
        return [(p.untyped_storage(), p.numel() * p.element_size()) for p in own]
