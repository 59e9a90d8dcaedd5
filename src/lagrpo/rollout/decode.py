"""Decoding with shared prefixes: prompt keys and values once per group, completions' in one growing block.

`DecodeState` holds what a set of active completions (*rows*) needs: for each group its prompt's keys and values, for
each row the keys and values of its own tokens. Active rows are always rows 0 .. R-1: when one ends, the last one moves
into its place. One step takes one token per row and returns the final hidden states; the model's backend takes it. A
row that waits for an environment is left out of steps; the next step that it is in takes all tokens of the reply.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo.backends.backend import RowLayout
from lagrpo.backends.layout import PackedLayout
from lagrpo.backends.parts import MIN_KEYS
from lagrpo.backends.steps import MIN_ROWS, Cache, Fed
from lagrpo.model.model import Model

BLOCK = 64  # the own cache grows by this many tokens, or doubles
PIECE = 512  # tokens of a step, at most: a longer reply takes several


class DecodeState:
    """Keys and values of the active rows, `own`, and of the prompts of their groups, `prefix`; which row belongs to
    which group. A group has a place in `prefix` until its last row has ended; the next new group takes that place.
    Caches grow when rows, prompts or tokens need it."""

    def __init__(self, model: Model, max_rows: int, max_tokens: int) -> None:
        self.model, self._steps = model, model.backend.steps(model)
        self.max_rows = max(max_rows, MIN_ROWS)
        self.own = self._steps.cache(self.max_rows, min(BLOCK, max_tokens))
        self.prefix = self._steps.cache(0, MIN_KEYS)
        self.prompt_lengths = torch.zeros(0, dtype=torch.long)  # in each place; 0: free
        self.group_of_row = torch.empty(0, dtype=torch.long)  # its place
        self.lengths = torch.empty(0, dtype=torch.long)  # tokens in each row's own cache

    @property
    def rows(self) -> int:
        return len(self.group_of_row)

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], G: int) -> Tensor:
        """Prefill new groups of G rows each, behind the active ones; returns hidden [prompts, H] of the last prompt
        tokens, from which the first token of every row is sampled."""
        lengths = [*map(len, prompts)]
        places = self._places(lengths)
        layout = PackedLayout.build([(length, ()) for length in lengths], self.model.device)
        ids = torch.cat([torch.tensor(p, dtype=torch.long) for p in prompts]).to(self.model.device)
        prefill = _Prefill(self.model.backend.over(layout), self.prefix, places, lengths)
        hidden = self.model.hidden(ids, layout.position_ids, prefill)
        self.prompt_lengths[places] = torch.tensor(lengths)
        self.group_of_row = torch.cat([self.group_of_row, torch.tensor(places).repeat_interleave(G)])
        self.lengths = torch.cat([self.lengths, torch.zeros(len(places) * G, dtype=torch.long)])
        return hidden.index_select(0, layout.last_prompt_rows)

    def _places(self, lengths: list[int]) -> list[int]:
        """Free places for prompts of these lengths; the cache grows where it has too few, or too small ones."""
        free = (self.prompt_lengths == 0).nonzero().flatten().tolist()
        missing = max(0, len(lengths) - len(free))
        if missing or max(lengths) > self.prefix.room:
            free += range(self.prefix.batch, self.prefix.batch + missing)
            grown = self._steps.cache(self.prefix.batch + missing, max(self.prefix.room, *lengths))
            grown.copy(self.prefix)
            self.prefix, self.prompt_lengths = grown, F.pad(self.prompt_lengths, (0, missing))
        return free[: len(lengths)]

    def step(self, token_ids: Tensor) -> Tensor:
        """One token per active row, int64 [R] -> final hidden states [R, H]."""
        return self._feed(Fed(token_ids, torch.arange(self.rows), self.lengths))

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The next tokens of each active row, none of a row that waits -> their final hidden states [., H]."""
        counts = torch.tensor([len(of_row) for of_row in tokens])
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        within = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        fed = Fed(torch.tensor([token for of_row in tokens for token in of_row]), rows, self.lengths[rows] + within)
        return torch.cat([self._feed(fed.of(piece)) for piece in torch.arange(len(fed)).split(PIECE)])

    @torch.no_grad()
    def _feed(self, fed: Fed) -> Tensor:
        longest = max(int(self.lengths.max()), int(fed.before.max())) + 1
        if longest > self.own.room:
            grown = self._steps.cache(self.max_rows, max(longest, 2 * self.own.room))
            grown.copy(self.own)
            self.own = grown
        hidden = self._steps.step(self, fed)
        self.lengths = self.lengths + torch.bincount(fed.rows, minlength=self.rows)
        return hidden[: len(fed)]

    def inputs(self, fed: Fed) -> tuple[Tensor, Tensor]:
        """Tokens and positions, on the model's device."""
        positions = self.prompt_lengths[self.group_of_row[fed.rows]] + fed.before
        return fed.ids.to(self.model.device), positions.to(self.model.device)

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drop ended rows; returns the moves (from row, to row) that keep the active ones at 0 .. R-1. A group whose
        last row has ended gives its prompt's place back."""
        ended = set(rows)
        active = self.rows - len(ended)
        holes = sorted(r for r in ended if r < active)
        movers = [r for r in range(active, self.rows) if r not in ended]
        if holes:
            to, source = torch.tensor(holes), torch.tensor(movers)
            self.own.move(source, to, int(self.lengths[source].max()))
            self.group_of_row[to], self.lengths[to] = self.group_of_row[source], self.lengths[source]
        self.group_of_row, self.lengths = self.group_of_row[:active], self.lengths[:active]
        self.prompt_lengths[torch.bincount(self.group_of_row, minlength=self.prefix.batch) == 0] = 0
        return list(zip(movers, holes, strict=True))


class _Prefill:
    """Packed prompts whose keys and values are kept."""

    def __init__(self, row: RowLayout, prefix: Cache, places: list[int], lengths: list[int]) -> None:
        self.row, self.prefix, self.places, self.lengths = row, prefix, places, lengths
        self.longest = row.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        row = 0
        for place, length in zip(self.places, self.lengths, strict=True):
            self.prefix.put(layer, place, key[row : row + length], value[row : row + length])
            row += length
        return self.row.attend(layer, query, key, value, scaling)
