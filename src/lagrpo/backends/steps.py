"""Decoding: the caches of keys and values, and one step for the sequences that are being generated.

`Steps` takes a step by PyTorch's operations, on any device; the CPU's and the GPU's backends replace what they do
better. A step reads the keys and values of each sequence's own tokens and of its group's prompt. A prompt's are kept
once per group. Most steps take one token of every sequence. A step may leave sequences out, and take several tokens of
one that an environment has replied to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo.backends.attention import Layout, Shape
from lagrpo.backends.parts import MIN_KEYS, fold_queries, merge, part, unfold_queries

MIN_ROWS = 2  # PyTorch's product with one row takes another kernel, with another order of summation


@dataclass(slots=True)
class Cache:
    """Keys [layers, batch, Hkv, D, tokens], their tokens side by side, and values [layers, batch, Hkv, tokens, D]; the
    batch is rows, or groups. `lanes` is how many numbers one element holds: with 2 (two bfloat16 in a float32)
    neighbors along D of a key, and along the tokens of a value, are one element, and these dimensions half as long."""

    keys: Tensor
    values: Tensor
    lanes: int

    @staticmethod
    def empty(shape: Shape, batch: int, tokens: int, dtype: torch.dtype, device: torch.device, lanes: int) -> Cache:
        room = -(-tokens // MIN_KEYS) * MIN_KEYS
        made = {"dtype": torch.float32 if lanes > 1 else dtype, "device": device}
        sizes = ((shape.d // lanes, room), (room // lanes, shape.d))
        keys, values = (torch.zeros(shape.layers, batch, shape.kv_heads, *size, **made) for size in sizes)
        return Cache(keys, values, lanes)

    @property
    def room(self) -> int:
        return self.keys.shape[4]

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    def put(self, layer: int, at: int, key: Tensor, value: Tensor) -> None:
        """The first tokens of one of the batch: key and value [tokens, Hkv, D]."""
        if self.lanes == 2:
            key = key.contiguous().view(torch.float32)
            value = F.pad(value, (0, 0, 0, 0, 0, len(value) % 2)).unflatten(0, (-1, 2))
            value = value.permute(0, 2, 3, 1).contiguous().view(torch.float32).squeeze(-1)
        self.keys[layer, at, :, :, : len(key)] = key.permute(1, 2, 0)
        self.values[layer, at, :, : len(value)] = value.transpose(0, 1)

    def copy(self, source: Cache) -> None:
        """Take over a smaller cache."""
        self.keys[:, : source.batch, :, :, : source.room] = source.keys
        self.values[:, : source.batch, :, : source.values.shape[3]] = source.values

    def move(self, source: Tensor, to: Tensor, tokens: int) -> None:
        """Copy the first tokens of some of the batch over others."""
        self.keys[:, to, :, :, :tokens] = self.keys[:, source, :, :, :tokens]
        used = -(-tokens // self.lanes)
        self.values[:, to, :, :used] = self.values[:, source, :, :used]


@dataclass(frozen=True, slots=True)
class Fed:
    """The n tokens of a step, those of one row one after the other. All int64 [n] on the CPU."""

    ids: Tensor
    rows: Tensor  # the row of each
    before: Tensor  # how many tokens the row's own cache has before it

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, chosen: Tensor) -> Fed:
        return Fed(self.ids[chosen], self.rows[chosen], self.before[chosen])


class Rows(Protocol):
    """What a step reads of the sequences being generated (see rollout/decode.py)."""

    own: Cache
    prefix: Cache
    prompt_lengths: Tensor
    group_of_row: Tensor
    lengths: Tensor
    max_rows: int

    @property
    def rows(self) -> int: ...
    def inputs(self, fed: Fed) -> tuple[Tensor, Tensor]: ...


class Steps:
    """Decoding steps of a model (lagrpo.model.model.Model)."""

    lanes = 1  # of the caches

    def __init__(self, model: Any) -> None:
        self.model = model
        self._least = 1 if model.exact else MIN_ROWS  # a lone row is computed twice

    def cache(self, batch: int, tokens: int) -> Cache:
        shape = Shape.of(self.model.config.get_text_config())
        return Cache.empty(shape, batch, tokens, self.model.dtype, self.model.device, self.lanes)

    def step(self, state: Rows, fed: Fed) -> Tensor:
        """Final hidden states [at least n, H] of the tokens."""
        fed = fed.of(torch.arange(max(len(fed), self._least)) % len(fed))
        return self.model.hidden(*state.inputs(fed), self.layout(state, fed))

    def layout(self, state: Rows, fed: Fed) -> Layout:
        """Who attends to whom in a step."""
        return StepLayout(state, fed, self.model.device)


class StepLayout:
    """Each token's key and value go into its row's own cache, its query to both parts of parts.py."""

    def __init__(self, state: Rows, fed: Fed, device: torch.device):
        group_of_row, lengths = state.group_of_row[fed.rows], fed.before
        self.own, self.prefix, self.rows = state.own, state.prefix, len(lengths)
        self.every = torch.equal(fed.rows, torch.arange(len(fed)))
        self.longest = int((state.prompt_lengths[group_of_row] + lengths).max()) + 1
        grid, place = pair_rows_with_groups(group_of_row, state.prefix.batch)
        self.keys = max(MIN_KEYS, int(lengths.max()) + 1)
        own_hidden = torch.arange(self.keys)[None, :] > lengths[:, None]
        prefix_hidden = torch.arange(state.prefix.room)[None, :] >= state.prompt_lengths[:, None]
        masks = (h[:, None, None].to(device) if bool(h.any()) else None for h in (own_hidden, prefix_hidden))
        self.own_hidden, self.prefix_hidden = masks
        self.row_index = (torch.arange(self.rows) if self.every else fed.rows).to(device)
        self.slot, self.grid, self.place = lengths.to(device), grid.to(device), place.to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.own.keys[layer], self.own.values[layer]
        keys[self.row_index, :, :, self.slot], values[self.row_index, :, self.slot] = key, value
        heads = key.shape[1]
        chosen = slice(self.rows) if self.every else self.row_index
        k = keys[chosen, :, :, : self.keys].flatten(0, 1).mT
        v = values[chosen, :, : self.keys].flatten(0, 1)
        own = part(fold_queries(query.unsqueeze(1), heads), k, v, self.own_hidden, scaling)
        groups, width = self.grid.shape
        gathered = query.index_select(0, self.grid.flatten()).view(groups, width, *query.shape[1:])
        k, v = self.prefix.keys[layer].flatten(0, 1).mT, self.prefix.values[layer].flatten(0, 1)
        prefix = part(fold_queries(gathered, heads), k, v, self.prefix_hidden, scaling)
        placed = (unfold_queries(t, groups, width).index_select(0, self.place) for t in prefix)
        return merge(*(unfold_queries(t, self.rows, 1) for t in own), *placed)


def pair_rows_with_groups(group_of_row: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """grid [groups, c], the rows of each group (row 0 where there are fewer than c), and place [R], where in the
    flattened grid each row stands."""
    counts = torch.bincount(group_of_row, minlength=groups)
    width = int(counts.max())
    order = torch.argsort(group_of_row, stable=True)
    within = torch.empty_like(order)
    within[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[group_of_row[order]]
    place = group_of_row * width + within
    grid = torch.zeros(groups, width, dtype=torch.long)
    grid.view(-1)[place] = torch.arange(len(order))
    return grid, place
