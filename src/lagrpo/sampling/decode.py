"""Decoding with group attention: prompt keys and values once per group, completions' in one growing block.

`DecodeState` holds what a set of live completions (*rows*) needs: for each group its prompt's keys and values, for each
row the keys and values of its own tokens. Live rows are always rows 0 .. R-1: when one ends, the last one moves into
its place. One step takes one token per row and returns the final hidden states, by the same attention as the learner:
that of the kernels, or the two parts of policy/attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo import kernels
from lagrpo.policy.attention import MIN_KEYS, Layout, fold_queries, merge, part, unfold_queries
from lagrpo.policy.layout import PackedLayout
from lagrpo.policy.model import Policy

BLOCK = 64  # the own cache grows by this many tokens, or doubles
MIN_ROWS = 2  # a matrix product with one row takes another kernel, with another order of summation


@dataclass(slots=True)
class Cache:
    """Keys [layers, batch, Hkv, D, tokens], their tokens side by side, and values [layers, batch, Hkv, tokens, D]; the
    batch is rows, or groups. Where the kernels attend, `lanes` is how many numbers one float32 holds: with 2 (bfloat16)
    neighbours along D of a key, and along the tokens of a value, are one, and these dimensions half as long. Elsewhere
    it is 0."""

    keys: Tensor
    values: Tensor
    lanes: int

    @staticmethod
    def empty(policy: Policy, batch: int, tokens: int) -> Cache:
        text = policy.model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        d = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        like = torch.empty(1, 1, d, dtype=policy.dtype, device=policy.device)
        lanes = kernels.numbers_in_a_lane(policy.dtype) if kernels.attend_on(like) else 0
        pair, dtype = (lanes, torch.float32) if lanes else (1, policy.dtype)
        room = -(-tokens // MIN_KEYS) * MIN_KEYS
        shape = (text.num_hidden_layers, batch, heads)
        keys, values = (like.new_zeros(*shape, *size, dtype=dtype) for size in ((d // pair, room), (room // pair, d)))
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


class DecodeState:
    """Keys and values of the live rows, `own`, and of the prompts of their groups, `prefix`; who belongs to whom."""

    def __init__(self, policy: Policy, max_rows: int, max_tokens: int) -> None:
        self.policy = policy
        self.max_rows = max(max_rows, MIN_ROWS)
        self.own = Cache.empty(policy, self.max_rows, min(BLOCK, max_tokens))
        self.prefix = Cache.empty(policy, 0, MIN_KEYS)
        self.prompt_lengths = torch.empty(0, dtype=torch.long)  # of each group
        self.group_of_row = torch.empty(0, dtype=torch.long)
        self.lengths = torch.empty(0, dtype=torch.long)  # tokens in each row's own cache

    @property
    def rows(self) -> int:
        return len(self.group_of_row)

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], G: int) -> Tensor:
        """Prefill new groups of G rows each, behind the live ones; returns hidden [prompts, H] of the last prompt
        tokens, from which the first token of every row is drawn."""
        kept = self.prefix
        self.prefix = Cache.empty(self.policy, kept.batch + len(prompts), max(kept.room, *map(len, prompts)))
        self.prefix.copy(kept)
        layout = PackedLayout.build([(len(p), ()) for p in prompts], self.policy.device)
        ids = torch.cat([torch.tensor(p, dtype=torch.long) for p in prompts]).to(self.policy.device)
        lengths = [*map(len, prompts)]
        hidden = self.policy.hidden(ids, layout.position_ids, _Prefill(layout, self.prefix, kept.batch, lengths))
        self.prompt_lengths = torch.cat([self.prompt_lengths, torch.tensor(lengths)])
        members = torch.arange(kept.batch, self.prefix.batch).repeat_interleave(G)
        self.group_of_row = torch.cat([self.group_of_row, members])
        self.lengths = torch.cat([self.lengths, torch.zeros(len(members), dtype=torch.long)])
        return hidden.index_select(0, layout.last_prompt_rows)

    @torch.no_grad()
    def step(self, token_ids: Tensor) -> Tensor:
        """One token per live row, int64 [R] -> final hidden states [R, H]."""
        longest = int(self.lengths.max()) + 1
        if longest > self.own.room:
            grown = Cache.empty(self.policy, self.max_rows, max(longest, 2 * self.own.room))
            grown.copy(self.own)
            self.own = grown
        copies = torch.arange(max(self.rows, MIN_ROWS)) % self.rows  # a lone row is computed twice
        group_of_row, lengths = self.group_of_row[copies], self.lengths[copies]
        positions = (self.prompt_lengths[group_of_row] + lengths).to(self.policy.device)
        layout = decoding(self, group_of_row, lengths)
        hidden = self.policy.hidden(token_ids[copies].to(self.policy.device), positions, layout)
        self.lengths += 1
        return hidden[: self.rows]

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drop ended rows; returns the moves (from row, to row) that keep the live ones at 0 .. R-1. A group whose
        last row has ended gives its prompt's place back."""
        ended = set(rows)
        live = self.rows - len(ended)
        holes = sorted(r for r in ended if r < live)
        movers = [r for r in range(live, self.rows) if r not in ended]
        if holes:
            to, source = torch.tensor(holes), torch.tensor(movers)
            used = int(self.lengths[source].max())
            self.own.keys[:, to, :, :, :used] = self.own.keys[:, source, :, :, :used]
            used = -(-used // max(1, self.own.lanes))
            self.own.values[:, to, :, :used] = self.own.values[:, source, :, :used]
            self.group_of_row[to], self.lengths[to] = self.group_of_row[source], self.lengths[source]
        self.group_of_row, self.lengths = self.group_of_row[:live], self.lengths[:live]
        self._drop_empty_groups()
        return list(zip(movers, holes, strict=True))

    def _drop_empty_groups(self) -> None:
        alive = torch.unique(self.group_of_row)
        if len(alive) == self.prefix.batch:
            return
        kept, at = self.prefix, alive.to(self.policy.device)
        self.prompt_lengths = self.prompt_lengths[alive]
        self.prefix = Cache.empty(self.policy, len(alive), int(self.prompt_lengths.max()) if len(alive) else MIN_KEYS)
        self.prefix.keys[:] = kept.keys[:, at, :, :, : self.prefix.room]
        self.prefix.values[:] = kept.values[:, at, :, : self.prefix.values.shape[3]]
        renumbered = torch.full((int(alive.max()) + 1 if len(alive) else 0,), -1)
        renumbered[alive] = torch.arange(len(alive))
        self.group_of_row = renumbered[self.group_of_row]


class _Prefill:
    """Packed prompts whose keys and values are kept."""

    def __init__(self, layout: PackedLayout, prefix: Cache, first: int, lengths: list[int]) -> None:
        self.layout, self.prefix, self.first, self.lengths = layout, prefix, first, lengths
        self.longest = layout.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        row = 0
        for group, length in enumerate(self.lengths, start=self.first):
            self.prefix.put(layer, group, key[row : row + length], value[row : row + length])
            row += length
        return self.layout.attend(layer, query, key, value, scaling)


def decoding(state: DecodeState, group_of_row: Tensor, lengths: Tensor) -> Layout:
    """The layout of one token per row: by the kernels, or by PyTorch's operations."""
    return (_KernelDecode if state.own.lanes else _Decode)(state, group_of_row, lengths)


class _KernelDecode:
    """One token per live row, by the kernels: attention, or all layers at once (policy/replica.py)."""

    def __init__(self, state: DecodeState, group_of_row: Tensor, lengths: Tensor) -> None:
        self.longest = int((state.prompt_lengths[group_of_row] + lengths).max()) + 1
        counts = torch.bincount(group_of_row, minlength=state.prefix.batch)
        groups = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        self.live = kernels.Live(
            groups, torch.argsort(group_of_row, stable=True), state.prompt_lengths, lengths,
            state.own.keys, state.own.values, state.prefix.keys, state.prefix.values,
        )  # fmt: skip

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return kernels.decode(self.live, layer, query, key, value, scaling)


class _Decode:
    """One token per live row: its key and value go into the own cache, its query to both parts."""

    def __init__(self, state: DecodeState, group_of_row: Tensor, lengths: Tensor) -> None:
        device = state.policy.device
        self.own, self.prefix, self.rows = state.own, state.prefix, len(lengths)
        self.keys = max(MIN_KEYS, int(lengths.max()) + 1)
        self.longest = int((state.prompt_lengths[group_of_row] + lengths).max()) + 1
        self.row_index = torch.arange(self.rows, device=device)
        self.slot = lengths.to(device)
        own_hidden = torch.arange(self.keys)[None, :] > lengths[:, None]
        self.own_hidden = _per_batch(own_hidden, device)
        prefix_hidden = torch.arange(state.prefix.room)[None, :] >= state.prompt_lengths[:, None]
        self.prefix_hidden = _per_batch(prefix_hidden, device)
        grid, place = pair_rows_with_groups(group_of_row, state.prefix.batch)
        self.grid, self.place = grid.to(device), place.to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.own.keys[layer], self.own.values[layer]
        keys[self.row_index, :, :, self.slot], values[self.row_index, :, self.slot] = key, value
        heads = key.shape[1]
        k = keys[: self.rows, :, :, : self.keys].flatten(0, 1).mT
        v = values[: self.rows, :, : self.keys].flatten(0, 1)
        own, lse_own = part(fold_queries(query.unsqueeze(1), heads), k, v, self.own_hidden, scaling)
        groups, width = self.grid.shape
        gathered = query.index_select(0, self.grid.flatten()).view(groups, width, *query.shape[1:])
        k, v = self.prefix.keys[layer].flatten(0, 1).mT, self.prefix.values[layer].flatten(0, 1)
        pre, lse_pre = part(fold_queries(gathered, heads), k, v, self.prefix_hidden, scaling)
        return merge(
            unfold_queries(own, self.rows, 1),
            unfold_queries(lse_own.unsqueeze(-1), self.rows, 1).squeeze(-1),
            unfold_queries(pre, groups, width).index_select(0, self.place),
            unfold_queries(lse_pre.unsqueeze(-1), groups, width).squeeze(-1).index_select(0, self.place),
        )[0]


def _per_batch(hidden: Tensor, device: torch.device) -> Tensor | None:
    """[B, K] as the mask that `part` takes, [B, 1, 1, K], or None where nothing is hidden."""
    return hidden[:, None, None].to(device) if bool(hidden.any()) else None


def pair_rows_with_groups(group_of_row: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """grid [groups, c], the rows of each group (row 0 where there are fewer than c), and place [R], where in the
    flattened grid each row stands."""
    counts = torch.bincount(group_of_row, minlength=groups)
    order = torch.argsort(group_of_row, stable=True)
    within = torch.empty_like(order)
    within[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[group_of_row[order]]
    place = group_of_row * int(counts.max()) + within
    grid = torch.zeros(groups, int(counts.max()), dtype=torch.long)
    grid.view(-1)[place] = torch.arange(len(order))
    return grid, place
