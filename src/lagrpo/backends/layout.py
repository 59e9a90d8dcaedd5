"""PackedLayout: prompts and completions side by side in one row, without padding.

A packed row holds, group after group, the prompt once and then its completions:

    [prompt_1 | y_11 | y_12 | … | prompt_2 | y_21 | …]        positions: 0..P-1, then P.. in every completion

The last token of a completion predicts nothing that is needed and is left out of the row. The log-prob of a
completion's first token comes from its prompt's last row, of token j from row j - 1 of the completion.

On a CPU the kernels (lagrpo.backends.cpu.kernels) attend along the row as it is, a few queries at a time; on a GPU flex
attention does (backends/flex.py). Elsewhere segments of similar length are put into *tiles*, small batches with a
little padding inside the attention only; the linear layers, the loss and the disk never see a padded token. A tile
holds at most TILE_SCORES scores per head, so long sequences are cut into blocks of queries. No [T, T] matrix is ever
stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lagrpo.backends import flex
from lagrpo.backends.attention import MIN_KEYS, fold_keys, fold_queries, merge, part, part_backward, unfold_queries
from lagrpo.backends.cpu import kernels
from lagrpo.threads import team

TILE_SCORES = 1 << 21  # scores per head in one tile: 8 MiB in float32
PADDING = 1.25  # a tile's longest segment may be this many times its shortest


@dataclass(frozen=True, slots=True)
class Tile:
    """A batch of B blocks of t queries against K keys. Indices point into the packed row; padding points at row 0.

    queries [B, t], keys [B, K], hidden [B or 1, 1, t or 1, K] True where a key must not be seen (None: all are seen),
    slots [n] the positions in B·t that are real queries and rows [n] where each of those lives in the packed row;
    key_slots [n] the positions in B·K of the same rows, where a tile holds whole segments with their own keys."""

    queries: Tensor
    keys: Tensor
    hidden: Tensor | None
    slots: Tensor
    rows: Tensor
    key_slots: Tensor | None


@dataclass(frozen=True)
class PackedLayout:
    """Layout of one packed row. `position_ids` [rows]; `logit_rows` [T] the row whose logits predict each completion
    token; `last_prompt_rows` [N]; `longest` prompt + completion in tokens; `segments` int64 [S, 4], prompts and
    completions in the order of the row (first row, length, first row of the prefix, its length) and `groups` int64
    [N + 1], how many of them come before each group; both on the CPU."""

    rows: int
    longest: int
    position_ids: Tensor
    logit_rows: Tensor
    last_prompt_rows: Tensor
    segments: Tensor
    groups: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
        team.look()
        if flex.attends(query, key):
            return flex.attend(self, query, key, value, scaling)
        function = _KernelAttention if kernels.attend_on(query, key, value) else _PackedAttention
        return function.apply(query, key, value, self, scaling)  # type: ignore[return-value]

    @cached_property
    def block_mask(self) -> Any:
        """For flex attention."""
        return flex.block_mask(self)

    @cached_property
    def own(self) -> tuple[Tile, ...]:
        """Tiles of each segment against itself."""
        segments = [range(first, first + length) for first, length, _, _ in self.segments.tolist()]
        return tuple(_move(tile, self.position_ids.device) for tile in _own_tiles(segments))

    @cached_property
    def prefix(self) -> tuple[Tile, ...]:
        """Tiles of the completions of each group against its prompt."""
        prefixes: list[tuple[range, range]] = []
        segments, bounds = self.segments.tolist(), self.groups.tolist()
        for start, stop in pairwise(bounds):
            (first, length, _, _), last = segments[start], segments[stop - 1]
            prompt, completions = range(first, first + length), range(first + length, last[0] + last[1])
            if completions:
                prefixes.append((completions, prompt))
        return tuple(_move(tile, self.position_ids.device) for tile in _prefix_tiles(prefixes))

    @staticmethod
    def build(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu") -> PackedLayout:
        """From (prompt length ≥ 1, [completion lengths ≥ 1]) of each group, in tokens.

        Raises:
            ValueError: a prompt or a completion without tokens.
        """
        segments: list[tuple[int, int, int, int]] = []
        bounds, positions, logit_rows, last_prompt_rows = [0], [], [], []
        row, longest = 0, 0
        for prompt_length, lengths in groups:
            if prompt_length < 1 or any(length < 1 for length in lengths):
                raise ValueError(
                    f"a prompt of {prompt_length} and completions of {list(lengths)} tokens: each needs one"
                )
            prompt = range(row, row + prompt_length)
            segments.append((prompt.start, prompt_length, 0, 0))
            positions.append(torch.arange(prompt_length))
            last_prompt_rows.append(prompt[-1])
            row = prompt.stop
            for length in lengths:
                inputs = range(row, row + length - 1)
                if len(inputs):
                    segments.append((inputs.start, len(inputs), prompt.start, prompt_length))
                    positions.append(torch.arange(prompt_length, prompt_length + length - 1))
                logit_rows.append(torch.tensor([prompt[-1], *inputs]))
                row = inputs.stop
            bounds.append(len(segments))
            longest = max(longest, prompt_length + max(lengths, default=0))
        cat = lambda tensors: torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.long)  # noqa: E731
        return PackedLayout(
            rows=row,
            longest=longest,
            position_ids=cat(positions).to(device),
            logit_rows=cat(logit_rows).to(device),
            last_prompt_rows=torch.tensor(last_prompt_rows, dtype=torch.long).to(device),
            segments=torch.tensor(segments, dtype=torch.long).view(-1, 4),
            groups=torch.tensor(bounds),
        )


def _move(tile: Tile, device: torch.device | str) -> Tile:
    tensors = {field.name: getattr(tile, field.name) for field in dataclasses.fields(tile)}
    moved: dict[str, Any] = {name: t if t is None else t.to(device) for name, t in tensors.items()}
    return Tile(**moved)


def _batches(items: list, size, cost) -> list[list]:
    """Items sorted by size, longest first, cut into batches whose sizes are alike and whose cost stays in bounds."""
    batches: list[list] = []
    for item in sorted(items, key=size, reverse=True):
        head = batches[-1] if batches else None
        if head and size(head[0]) <= max(PADDING * size(item), MIN_KEYS) and cost([*head, item]) <= TILE_SCORES:
            head.append(item)
        else:
            batches.append([item])
    return batches


def _index(blocks: Sequence[range], width: int) -> Tensor:
    """[B, width] row numbers, each block's rows first and zeros behind."""
    index = torch.zeros(len(blocks), width, dtype=torch.long)
    for b, block in enumerate(blocks):
        index[b, : len(block)] = torch.arange(block.start, block.stop)
    return index


def _tile(queries: Sequence[range], keys: Sequence[range], hidden: Tensor | None) -> Tile:
    t = max(map(len, queries))
    k = max(MIN_KEYS, *map(len, keys))
    rows = torch.cat([torch.arange(block.start, block.stop) for block in queries])
    own = _slots(queries, k) if queries == keys else None
    return Tile(_index(queries, t), _index(keys, k), hidden, _slots(queries, t), rows, own)


def _slots(blocks: Sequence[range], width: int) -> Tensor:
    """Where the rows of the blocks stand in a flattened [B, width]."""
    return torch.cat([torch.arange(b * width, b * width + len(block)) for b, block in enumerate(blocks)])


def _own_tiles(segments: list[range]) -> list[Tile]:
    """Causal tiles: queries first..last of each segment against its keys 0..last."""
    tiles = []
    for batch in _batches(segments, len, lambda b: len(b) * len(b[0]) ** 2):
        longest = len(batch[0])
        step = max(1, min(longest, TILE_SCORES // (len(batch) * longest)))
        for first in range(0, longest, step):
            stop = min(first + step, longest)
            active = [s for s in batch if len(s) > first]
            queries = [s[first:stop] for s in active]
            keys = [s[:stop] for s in active]
            k = max(MIN_KEYS, stop)
            hidden = torch.arange(k)[None, :] > torch.arange(first, stop)[:, None]
            tiles.append(_tile(queries, keys, hidden[None, None]))
    return tiles


def _prefix_tiles(prefixes: list[tuple[range, range]]) -> list[Tile]:
    """Tiles of a group's completion rows against all keys of its prompt."""
    cut: list[tuple[range, range]] = []
    for queries, prompt in prefixes:
        step = max(1, TILE_SCORES // max(MIN_KEYS, len(prompt)))
        cut += [(queries[i : i + step], prompt) for i in range(0, len(queries), step)]
    tiles = []
    for alike in _batches(cut, lambda item: len(item[1]), lambda b: len(b) * len(b[0][1]) * max(len(q) for q, _ in b)):
        for batch in _batches(alike, lambda item: len(item[0]), lambda b: 0):
            queries, keys = [q for q, _ in batch], [p for _, p in batch]
            k = max(MIN_KEYS, *map(len, keys))
            hidden = torch.arange(k)[None, :] >= torch.tensor([len(p) for p in keys])[:, None]
            tiles.append(_tile(queries, keys, hidden[:, None, None] if bool(hidden.any()) else None))
    return tiles


class _KernelAttention(torch.autograd.Function):
    """Along the row, on a CPU; scores are recomputed in backward, never stored."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))
        out, lse = kernels.attention(layout.segments, query, key, value, scaling)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[override]
        team.look()
        query, key, value, out, lse = ctx.saved_tensors
        layout, grad_out = ctx.layout, grad_out.contiguous()
        grads = kernels.attention_backward(
            layout.groups, layout.segments, query, key, value, ctx.scaling, out, lse, grad_out
        )
        return *grads, None, None


class _PackedAttention(torch.autograd.Function):
    """Forward and backward of the two parts over a packed row; scores are recomputed in backward, never stored."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float) -> Tensor:
        out, lse = (
            torch.empty_like(query, memory_format=torch.contiguous_format),
            query.new_empty(query.shape[:2], dtype=torch.float32),
        )
        for tile in layout.own:
            tile_out, tile_lse = _tile_forward(tile, query, key, value, scaling)
            out.index_copy_(0, tile.rows, tile_out)
            lse.index_copy_(0, tile.rows, tile_lse)
        for tile in layout.prefix:
            tile_out, tile_lse = _tile_forward(tile, query, key, value, scaling)
            merged, merged_lse = merge(out[tile.rows], lse[tile.rows], tile_out, tile_lse)
            out.index_copy_(0, tile.rows, merged)
            lse.index_copy_(0, tile.rows, merged_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[override]
        team.look()
        query, key, value, out, lse = ctx.saved_tensors
        inner = (out.float() * grad_out.float()).sum(-1)
        # float32: a prompt's keys gather gradients from several tiles
        grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)]
        for tile in (*ctx.layout.own, *ctx.layout.prefix):
            _tile_backward(tile, query, key, value, ctx.scaling, lse, grad_out, inner, grads)
        return *(grad.to(query.dtype) for grad in grads), None, None


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """[rows, H, D] at [B, n] -> [B, n, H, D]."""
    return source.index_select(0, index.reshape(-1)).view(*index.shape, *source.shape[1:])


def _tile_forward(tile: Tile, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """out [n, Hq, D] and lse [n, Hq] of the tile's real queries."""
    b, t = tile.queries.shape
    q = fold_queries(_gather(query, tile.queries), key.shape[1])
    k, v = fold_keys(_gather(key, tile.keys)), fold_keys(_gather(value, tile.keys))
    out, lse = part(q, k, v, tile.hidden, scaling)
    out, lse = unfold_queries(out, b, t), unfold_queries(lse.unsqueeze(-1), b, t).squeeze(-1)
    return _take(out, tile.slots), _take(lse, tile.slots)


def _spread(source: Tensor, tile: Tile, padding: float) -> Tensor:
    """The tile's queries of [rows, H, …] as [B, t, H, …], with `padding` where a query is not real."""
    b, t = tile.queries.shape
    if len(tile.slots) == b * t:
        return source.index_select(0, tile.rows).view(b, t, *source.shape[1:])
    spread = source.new_full((b * t, *source.shape[1:]), padding)
    return spread.index_copy_(0, tile.slots, source.index_select(0, tile.rows)).view(b, t, *source.shape[1:])


def _take(source: Tensor, slots: Tensor) -> Tensor:
    """The rows at `slots` of [B·t, H, …]; all of them are usually wanted."""
    return source if len(slots) == len(source) else source.index_select(0, slots)


def _tile_backward(tile, query, key, value, scaling, lse, grad_out, inner, grads) -> None:
    """Adds one tile's share to grads = [query, key, value]. A padded query has probabilities exp(s - inf) = 0 and no
    gradient of its own, so nothing flows from it into the keys."""
    b, t = tile.queries.shape
    heads = key.shape[1]
    q, do = fold_queries(_gather(query, tile.queries), heads), fold_queries(_spread(grad_out, tile, 0.0), heads)
    k, v = fold_keys(_gather(key, tile.keys)), fold_keys(_gather(value, tile.keys))
    tile_lse = fold_queries(_spread(lse, tile, float("inf")).unsqueeze(-1), heads).squeeze(-1)
    tile_inner = fold_queries(_spread(inner, tile, 0.0).unsqueeze(-1), heads).squeeze(-1)
    dq, dk, dv = part_backward(q, k, v, tile.hidden, scaling, tile_lse, do, tile_inner)
    _add_rows(grads[0], tile.rows, _take(unfold_queries(dq, b, t), tile.slots))
    for grad, folded in ((grads[1], dk), (grads[2], dv)):
        rows = folded.view(b, heads, -1, folded.shape[-1]).transpose(1, 2).reshape(-1, heads, folded.shape[-1])
        if tile.key_slots is not None:
            _add_rows(grad, tile.rows, _take(rows, tile.key_slots))
        else:  # keys that several queries of the tile share, and padding
            grad.index_add_(0, tile.keys.reshape(-1), rows.float())


def _add_rows(grad: Tensor, rows: Tensor, share: Tensor) -> None:
    """grad[rows] += share for rows without repetition: several times faster than index_add on a CPU."""
    grad.index_copy_(0, rows, grad.index_select(0, rows).add_(share))
