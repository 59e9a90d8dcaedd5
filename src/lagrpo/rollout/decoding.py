"""Decoding with shared prefixes: prompt keys and values once per group, completions' in one growing block.

`DecodeState` holds what a set of active completions (*rows*) needs. Active rows are always rows 0 .. R-1: when one
ends, the last one moves into its place. One step takes one token per row and returns the final hidden states. A row
that waits for an environment takes none; the next step that it is in takes all tokens of the reply.

A GPU records the steps that come often as CUDA graphs. The number of keys in such a step is rounded up, so that few
graphs are needed. The number depends on the rows of the step alone, and not on the capacity of the caches: these may
come from an earlier batch, and a resumed run, which has new ones, must round as the run that never stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo.cpu import kernels
from lagrpo.cpu.decoder import Layout, is_reproduced
from lagrpo.model.attention import Shape
from lagrpo.model.layout import PackedLayout

if TYPE_CHECKING:
    from lagrpo.model.model import Model

BLOCK = 64  # the own cache grows by this many tokens, or doubles
PIECE = 512  # tokens of a step, at most, unless there are more rows: a longer reply takes several
MIN_ROWS = 2  # PyTorch's product with one row takes another kernel, with another order of summation
OFTEN = 4  # steps of the same shapes after which a GPU records them
MIN_KEYS = 16  # numbers in a vector register: caches hold a multiple of it
KEPT_BYTES = (
    4 << 30
)  # keys and values that a GPU may hold from batch to batch, while the policy learns


@dataclass(slots=True)
class Cache:
    """Keys [layers, batch, Hkv, D, tokens], their tokens side by side, and values [layers, batch, Hkv, tokens, D]; the
    batch is rows, or groups. `lanes` is how many numbers one element holds: with 2 (two bfloat16 in a float32)
    neighbors along D of a key, and along the tokens of a value, are one element, and these dimensions half as long."""

    keys: Tensor
    values: Tensor
    lanes: int

    @property
    def capacity(self) -> int:
        """Tokens of each in the batch."""
        return self.keys.shape[4]

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    def put(self, layer: int, at: int, key: Tensor, value: Tensor) -> None:
        """The first tokens of one in the batch: key and value [tokens, Hkv, D]."""
        if self.lanes == 2:
            key = key.contiguous().view(torch.float32)
            value = F.pad(value, (0, 0, 0, 0, 0, len(value) % 2)).unflatten(0, (-1, 2))
            value = value.permute(0, 2, 3, 1).contiguous().view(torch.float32).squeeze(-1)
        self.keys[layer, at, :, :, : len(key)] = key.permute(1, 2, 0)
        self.values[layer, at, :, : len(value)] = value.transpose(0, 1)

    def move(self, source: Tensor, to: Tensor, tokens: int) -> None:
        """Copy the first tokens of some in the batch over others."""
        self.keys[:, to, :, :, :tokens] = self.keys[:, source, :, :, :tokens]
        used = -(-tokens // self.lanes)
        self.values[:, to, :, :used] = self.values[:, source, :, :used]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The n tokens of a step, row after row. All int64 [n] on the CPU."""

    ids: Tensor
    rows: Tensor  # the row of each
    before: Tensor  # how many tokens the row's own cache has before it

    def select(self, chosen: Tensor) -> DecodeInputs:
        return DecodeInputs(self.ids[chosen], self.rows[chosen], self.before[chosen])


class DecodeState:
    """Keys and values of the active rows, `own`, and of the prompts of their groups, `prefix`; which row belongs to
    which group. A group has a place in `prefix` until its last row has ended; the next new group takes that place.
    Caches grow when rows, prompts or tokens need it. If steps are recorded, `own` has room for `max_tokens` from the
    start, because a graph reads the caches that it was recorded with, and is lost when one of them grows."""

    def __init__(self, model: Model, max_rows: int, max_tokens: int) -> None:
        self.model, self._shape = model, Shape.of(model.config.get_text_config())
        self._by_kernels = model.backend.attends_by_kernels(self._shape.d)
        self._recorded = RecordedSteps(model.device) if records_steps(model) else None
        self.max_rows = max(max_rows, MIN_ROWS)
        capacity = min(BLOCK, max_tokens)
        if self._recorded and self._bytes(self.max_rows, max_tokens) <= KEPT_BYTES:
            capacity = max_tokens
        self.own = self._cache(self.max_rows, capacity)
        self.prefix = self._cache(0, MIN_KEYS)
        self.prompt_lengths = torch.zeros(0, dtype=torch.long)  # in each place; 0: free
        self.group_of_row = torch.empty(0, dtype=torch.long)  # its place
        self.lengths = torch.empty(0, dtype=torch.long)  # tokens in each row's own cache

    @property
    def rows(self) -> int:
        return len(self.group_of_row)

    @property
    def may_stay(self) -> bool:
        """True if this may serve the next batch: steps are recorded, which saves recording them again, and the caches
        leave room for learning. The graphs stay right because weights are loaded in place."""
        size = self._bytes(self.own.batch, self.own.capacity)
        size += self._bytes(self.prefix.batch, self.prefix.capacity)
        return self._recorded is not None and size <= KEPT_BYTES

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
        self.group_of_row = torch.cat(
            [self.group_of_row, torch.tensor(places).repeat_interleave(G)]
        )
        self.lengths = F.pad(self.lengths, (0, len(places) * G))
        return hidden.index_select(0, layout.last_prompt_rows)

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The next tokens of each active row, none of a row that waits -> their final hidden states [., H]."""
        counts = torch.tensor([len(row_tokens) for row_tokens in tokens])
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        before = self.lengths[rows] + torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        ids = torch.tensor([token for row_tokens in tokens for token in row_tokens])
        inputs = DecodeInputs(ids, rows, before)
        pieces = torch.arange(len(rows)).split(max(PIECE, self.rows))
        return torch.cat([self._feed(inputs.select(piece)) for piece in pieces])

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
            self.group_of_row[to], self.lengths[to] = (
                self.group_of_row[source],
                self.lengths[source],
            )
        self.group_of_row, self.lengths = self.group_of_row[:active], self.lengths[:active]
        self.prompt_lengths[torch.bincount(self.group_of_row, minlength=self.prefix.batch) == 0] = 0
        return list(zip(movers, holes, strict=True))

    @torch.no_grad()
    def _feed(self, inputs: DecodeInputs) -> Tensor:
        count, device = len(inputs.rows), self.model.device
        longest = max(int(self.lengths.max()), int(inputs.before.max())) + 1
        if longest > self.own.capacity:
            self.own = self._grow(self.own, self.max_rows, max(longest, 2 * self.own.capacity))
        self.lengths = self.lengths + torch.bincount(inputs.rows, minlength=self.rows)
        if not self.model.exact:  # some rows are computed twice
            padded = 1 << (count - 1).bit_length() if self._recorded else count
            inputs = inputs.select(torch.arange(max(padded, MIN_ROWS)) % count)
        group_of_row = self.group_of_row[inputs.rows]
        positions = self.prompt_lengths[group_of_row] + inputs.before
        longest = int(positions.max()) + 1
        if self._by_kernels:
            layout = self._kernel_layout(inputs, group_of_row, longest)
            return self.model.hidden(inputs.ids, positions, layout)[:count]

        prompt_keys, own_keys = self._count_keys(inputs)

        def compute(ids: Tensor, positions: Tensor, *step: Tensor) -> Tensor:
            layout = StepLayout(self.own, self.prefix, prompt_keys, longest, *step)
            return self.model.hidden(ids, positions, layout)

        in_prompt = torch.arange(prompt_keys) < self.prompt_lengths[group_of_row, None]
        in_own = torch.arange(own_keys) <= inputs.before[:, None]
        mask = torch.cat([in_prompt, in_own], 1)[:, None, None]
        tensors = (inputs.ids, positions, mask, inputs.rows, inputs.before, group_of_row)
        if self._recorded:
            return self._recorded(compute, (prompt_keys, own_keys), *tensors)[:count]
        return compute(*(tensor.to(device) for tensor in tensors))[:count]

    def _count_keys(self, inputs: DecodeInputs) -> tuple[int, int]:
        """The keys that a step looks at: of each prompt, and of each row's own cache."""
        own = int(inputs.before.max()) + 1
        if self._recorded:
            return round_up_keys(int(self.prompt_lengths.max())), round_up_keys(own)
        return self.prefix.capacity, max(MIN_KEYS, own)

    def _kernel_layout(self, inputs: DecodeInputs, group_of_row: Tensor, longest: int) -> Layout:
        """Who attends to whom in a step, which also puts the new keys and values into the caches."""
        own, prefix = self.own, self.prefix
        groups = F.pad(torch.bincount(group_of_row, minlength=prefix.batch).cumsum(0), (1, 0))
        members = torch.argsort(group_of_row, stable=True)
        caches = own.keys, own.values, prefix.keys, prefix.values
        return kernels.Active(
            longest, groups, members, self.prompt_lengths, inputs.before, inputs.rows, *caches
        )

    def _places(self, lengths: list[int]) -> list[int]:
        """Free places for prompts of these lengths; the cache grows if it has too few, or too small ones."""
        free = (self.prompt_lengths == 0).nonzero().flatten().tolist()
        missing = max(0, len(lengths) - len(free))
        if missing or max(lengths) > self.prefix.capacity:
            batch = self.prefix.batch
            free += range(batch, batch + missing)
            self.prefix = self._grow(
                self.prefix, batch + missing, max(self.prefix.capacity, *lengths)
            )
            self.prompt_lengths = F.pad(self.prompt_lengths, (0, missing))
        return free[: len(lengths)]

    def _cache(self, batch: int, tokens: int) -> Cache:
        shape, model, capacity = self._shape, self.model, self._capacity(tokens)
        lanes = kernels.numbers_in_a_lane(model.dtype) if self._by_kernels else 1
        made = {"dtype": torch.float32 if lanes > 1 else model.dtype, "device": model.device}
        sizes = ((shape.d // lanes, capacity), (capacity // lanes, shape.d))
        keys, values = (
            torch.zeros(shape.layers, batch, shape.kv_heads, *size, **made) for size in sizes
        )
        return Cache(keys, values, lanes)

    def _capacity(self, tokens: int) -> int:
        """Tokens that a cache for at least `tokens` has room for."""
        if self._recorded:
            return round_up_keys(tokens)
        return -(-tokens // MIN_KEYS) * MIN_KEYS

    def _bytes(self, batch: int, tokens: int) -> int:
        """Bytes of the keys and values of a cache."""
        shape = self._shape
        numbers = 2 * shape.layers * batch * shape.kv_heads * self._capacity(tokens) * shape.d
        return numbers * self.model.dtype.itemsize

    def _grow(self, cache: Cache, batch: int, tokens: int) -> Cache:
        grown = self._cache(batch, tokens)
        grown.keys[:, : cache.batch, :, :, : cache.capacity] = cache.keys
        grown.values[:, : cache.batch, :, : cache.values.shape[3]] = cache.values
        if self._recorded:
            self._recorded = RecordedSteps(self.model.device)  # the old graphs use the old cache
        return grown


def round_up_keys(tokens: int) -> int:
    """The smallest of 64, 96, 128, 192, 256, 384, … that is not less than `tokens`."""
    power = 1 << max(BLOCK - 1, tokens - 1).bit_length()
    return power * 3 // 4 if tokens <= power * 3 // 4 and power > BLOCK else power


class _Prefill:
    """Packed prompts whose keys and values are kept."""

    def __init__(self, row: Layout, prefix: Cache, places: list[int], lengths: list[int]) -> None:
        self.row, self.prefix, self.places, self.lengths = row, prefix, places, lengths
        self.longest = row.longest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        split = zip(self.places, key.split(self.lengths), value.split(self.lengths), strict=True)
        for place, keys, values in split:
            self.prefix.put(layer, place, keys, values)
        return self.row.attend(layer, query, key, value, scaling)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step by PyTorch's operations: each token's key and value go into its row's own cache, and its query attends to
    its prompt and its own tokens."""

    own: Cache
    prefix: Cache
    prompt_keys: int  # how many keys of a prompt the step looks at
    longest: int
    mask: Tensor  # bool [n, 1, 1, keys]: what each token sees of its prompt's place, then of its row's own cache
    rows: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]: where it goes in the row's own cache
    groups: Tensor  # int64 [n]: the place of its prompt

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys, values = self.own.keys[layer], self.own.values[layer]
        keys[self.rows, :, :, self.slots] = key
        values[self.rows, :, self.slots] = value
        own_keys = self.mask.shape[-1] - self.prompt_keys
        prompt_k = self.prefix.keys[layer][..., : self.prompt_keys][self.groups]
        prompt_v = self.prefix.values[layer][:, :, : self.prompt_keys][self.groups]
        k = torch.cat([prompt_k, keys[self.rows, :, :, :own_keys]], 3).mT.contiguous()
        v = torch.cat([prompt_v, values[self.rows, :, :own_keys]], 2)
        # the query heads of a key head, as if they were tokens
        q = query.unflatten(1, (key.shape[1], -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask, scale=scaling).flatten(1, 2)


def records_steps(model: Model) -> bool:
    """True if decoding steps of a model can be recorded. A graph cannot wait for the GPU inside a step, as families
    may that are not reproduced, and a rotary embedding that grows with the sequence does."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    reproduced = is_reproduced(model.lm, Shape.of(text).d) and rope.get("rope_type") != "dynamic"
    return model.device.type == "cuda" and reproduced


class RecordedSteps:
    """CUDA graphs of decoding steps, one for each shape that comes often: a replay is one launch, the step itself a
    thousand. A graph reads and writes the caches that it was recorded with, and reads the weights where they lay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen = Counter[tuple[int, ...]]()
        self.made = dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]]()
        self.memory = torch.cuda.graph_pool_handle()

    def __call__(
        self, compute: Callable[..., Tensor], keys: tuple[int, int], *tensors: Tensor
    ) -> Tensor:
        """compute(*tensors) on the device. The tensors [n, ...] lie on the CPU; `keys` completes their shapes."""
        shape = (len(tensors[0]), *keys)
        self.seen[shape] += 1
        if self.seen[shape] < OFTEN:
            return compute(*(tensor.to(self.device) for tensor in tensors))
        if shape not in self.made:
            inputs = [tensor.to(self.device, copy=True) for tensor in tensors]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.memory, capture_error_mode="thread_local"):
                out = compute(*inputs)
            self.made[shape] = graph, inputs, out
        graph, inputs, out = self.made[shape]
        for buffer, tensor in zip(inputs, tensors, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        # All graphs share their memory: the next replay, of this graph or of another one, writes over `out`.
        return out.clone()
