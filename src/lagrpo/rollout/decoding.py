"""Decoding with shared prefixes: a group's prompt is computed and cached once.

`DecodeState` holds what a set of active completions (*rows*) needs. Active rows are always rows
0 .. R-1: when one ends, the last one moves into its place. One step takes one token per row and
returns the final hidden states. A row that waits for an environment takes no token; its next step
takes all tokens of the reply.

A GPU decodes with `RecordedState` (recorded.py) instead, unless a model's steps cannot be recorded.
`DecodingState` says what both can do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo.cpu import kernels
from lagrpo.cpu.decoder import Layout
from lagrpo.model.attention import Shape
from lagrpo.model.layout import PackedLayout
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.nucleus import keep_nucleus

if TYPE_CHECKING:
    from lagrpo.model.model import Model

# The cache of completions grows by this many tokens, or doubles.
BLOCK = 64
# Most tokens in a step, unless there are more rows. A longer reply takes several steps.
PIECE = 512
# PyTorch's product with one row takes another kernel, which sums in another order.
MIN_ROWS = 2
# Numbers in a vector register: the capacity of a cache is a multiple of it.
MIN_KEYS = 16


class DecodingState(Protocol):
    """Keys and values of the active rows, and the step that gives each row a token."""

    max_rows: int

    @property
    def is_exact(self) -> bool:
        """True if a row gets the same bits, whatever is computed with it."""
        ...

    def fits(self, max_rows: int, max_tokens: int) -> bool:
        """True if it can serve a later batch of so many rows of so many tokens."""
        ...

    def step(
        self,
        ids: np.ndarray,
        counts: np.ndarray,
        prompts: Sequence[Sequence[int]],
        G: int,
        uniform: np.ndarray,
        params: SamplingParams,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the next tokens of the active rows, begins groups, and samples a token for each.

        `ids` is int64 [n], row after row, `counts` int64 [R]: how many of them each row has. A row
        that waits has none. Each of the `prompts` begins a group of G rows behind the active rows.
        `uniform` has a number in [0, 1) for each row that has tokens, then for each new row:
        float64 [S]. Returns the new tokens of these rows, int64 [S], and their log-probs, float32
        [S].
        """
        ...

    def load(
        self,
        prompts: Sequence[Sequence[int]],
        rows_of_group: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Computes keys and values of rows that have begun, which replace the rows before.

        Group g has the prompt prompts[g] and rows_of_group[g] rows. `ids` is int64 [n], what the
        rows have behind their prompts, row after row, and `counts` int64 [R]: how many tokens each
        one has.
        """
        ...

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drops ended rows.

        Returns the moves (from row, to row) that keep the active rows at 0 .. R-1.
        """
        ...


@torch.no_grad()
def sample_tokens(
    model: Model, hidden: Tensor, uniform: np.ndarray, params: SamplingParams
) -> tuple[np.ndarray, np.ndarray]:
    """Samples a token for each of R rows from its hidden state: hidden [R, H], uniform [R].

    Returns the tokens, int64 [R], and their log-probs, float32 [R].
    """
    logits = keep_nucleus(model.logits(hidden), params.tau, params.top_p)  # [R, V]
    numbers = torch.from_numpy(uniform).to(hidden.device)
    tokens, logp = model.backend.sample(logits, params.tau, numbers)
    return tokens.cpu().numpy(), logp.cpu().numpy()


@dataclass(slots=True)
class Cache:
    """Keys and values of a batch: of rows, or of the prompts of groups.

    - `keys`: [layers, batch, Hkv, D, tokens], the tokens of a key side by side
    - `values`: [layers, batch, Hkv, tokens, D]
    - `lanes`: how many numbers one element holds. With 2 (two bfloat16 in one float32), an element
      of `keys` holds neighbors along D, an element of `values` neighbors along the tokens, and that
      dimension is half as long.
    """

    keys: Tensor
    values: Tensor
    lanes: int

    @property
    def capacity(self) -> int:
        """The number of tokens that each entry of the batch has room for."""
        return self.keys.shape[4]

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    def put(self, layer: int, index: int, key: Tensor, value: Tensor) -> None:
        """Writes the first tokens of entry `index`: key and value [tokens, Hkv, D]."""
        if self.lanes == 2:
            key = key.contiguous().view(torch.float32)  # [tokens, Hkv, D / 2]
            # An odd number of tokens gets a zero behind it, so that tokens pair up.
            value = F.pad(value, (0, 0, 0, 0, 0, len(value) % 2))
            value = value.unflatten(0, (-1, 2))  # [pairs, 2, Hkv, D]
            value = value.permute(0, 2, 3, 1).contiguous()  # [pairs, Hkv, D, 2]
            value = value.view(torch.float32).squeeze(-1)  # [pairs, Hkv, D]
        self.keys[layer, index, :, :, : len(key)] = key.permute(1, 2, 0)
        self.values[layer, index, :, : len(value)] = value.transpose(0, 1)

    def move(self, source: Tensor, target: Tensor, tokens: int) -> None:
        """Copies the first `tokens` tokens of the entries `source` to the entries `target`."""
        self.keys[:, target, :, :, :tokens] = self.keys[:, source, :, :, :tokens]
        elements = -(-tokens // self.lanes)
        self.values[:, target, :, :elements] = self.values[:, source, :, :elements]


def plan_moves(num_rows: int, ended: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Plans how the rows that go on come to stand at 0 .. R-1 when others end.

    Returns R, the rows that move, and where they move to.
    """
    ended_rows = set(ended)
    num_active = num_rows - len(ended_rows)
    holes = sorted(row for row in ended_rows if row < num_active)
    movers = [row for row in range(num_active, num_rows) if row not in ended_rows]
    return num_active, movers, holes


def number_tokens(counts: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row of each of n tokens, and its place in the row: int64 [n] each.

    Row r has `counts[r]` tokens. They come one after the other, row after row, and take the places
    starts[r], starts[r] + 1, … Both arguments are int64 [R].
    """
    rows = np.arange(len(counts)).repeat(counts)
    first_of_row = counts.cumsum() - counts  # int64 [R]: index of a row's first token
    places = np.arange(len(rows)) + (starts - first_of_row)[rows]
    return rows, places


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The n tokens of a step, row after row. All tensors are int64 [n] on the CPU."""

    ids: Tensor
    rows: Tensor  # the row of each token
    before: Tensor  # the number of tokens before each one in its row's own cache

    def select(self, indices: Tensor) -> DecodeInputs:
        return DecodeInputs(
            ids=self.ids[indices], rows=self.rows[indices], before=self.before[indices]
        )


class DecodeState:
    """Keys and values of the active rows, `own`, and of the prompts of their groups, `prefix`.

    A group has a place in `prefix` until its last row has ended; then the next new group may take
    that place. Caches grow when rows, prompts or tokens need it.
    """

    # Shapes in the comments below:
    #   R  active rows
    #   n  tokens of a step; m >= n tokens with copies (see _pad)
    #   N  places for prompts, one per group
    #   P  keys of each prompt that a step looks at
    #   K  keys of each row's own cache that a step looks at
    #   H  hidden size

    def __init__(self, model: Model, max_rows: int, max_tokens: int) -> None:
        self.model = model
        self.max_rows = max(max_rows, MIN_ROWS)
        self._shape = Shape.of(model.config.get_text_config())
        self._by_kernels = model.backend.attends_by_kernels(self._shape.d)
        self.own = self._allocate(self.max_rows, min(BLOCK, max_tokens))
        self.prefix = self._allocate(0, MIN_KEYS)

        # int64 [N]: the length of the prompt in each place; 0 if the place is free
        self.prompt_lengths = torch.zeros(0, dtype=torch.long)
        # int64 [R]: the place of the prompt of each row
        self.group_of_row = torch.empty(0, dtype=torch.long)
        # int64 [R]: the number of tokens in each row's own cache
        self.lengths = torch.empty(0, dtype=torch.long)

    def fits(self, max_rows: int, max_tokens: int) -> bool:
        return False  # its caches grow with the completions

    @property
    def rows(self) -> int:
        return len(self.group_of_row)

    def step(
        self,
        ids: np.ndarray,
        counts: np.ndarray,
        prompts: Sequence[Sequence[int]],
        G: int,
        uniform: np.ndarray,
        params: SamplingParams,
    ) -> tuple[np.ndarray, np.ndarray]:
        hidden_of_rows: list[Tensor] = []  # each [rows, H]
        if len(ids) > 0:
            hidden = self.feed(ids, counts)  # [n, H]
            last_of_row = torch.from_numpy(counts[counts > 0].cumsum() - 1)  # int64 [rows]
            hidden_of_rows.append(hidden.index_select(0, last_of_row.to(hidden.device)))
        if prompts:
            hidden_of_rows.append(self.admit(prompts, G).repeat_interleave(G, 0))
        return sample_tokens(self.model, torch.cat(hidden_of_rows), uniform, params)

    def load(
        self,
        prompts: Sequence[Sequence[int]],
        rows_of_group: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        self.retire(range(self.rows))
        self.admit(prompts, torch.from_numpy(rows_of_group))
        for _ in self._feed_pieces(ids, counts):
            pass  # the keys and values stay in the cache

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], G: int | Tensor) -> Tensor:
        """Prefills new groups of G rows each, behind the active rows.

        `G` may also be int64 [prompts], the number of rows of each group. Returns the hidden states
        [prompts, H] of the last prompt tokens, from which the first token of every row is sampled.
        """
        device = self.model.device
        lengths = [len(prompt) for prompt in prompts]
        places = self._places(lengths)
        layout = PackedLayout.build([(length, ()) for length in lengths], device)
        prompt_ids = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
        ids = torch.cat(prompt_ids).to(device)  # int64 [tokens of all prompts]
        prefill = _Prefill(self.model.backend.over(layout), self.prefix, places, lengths)
        hidden = self.model.hidden(ids, layout.position_ids, prefill)  # [tokens, H]

        self.prompt_lengths[places] = torch.tensor(lengths)
        group_of_new_row = torch.tensor(places).repeat_interleave(G)  # int64 [prompts * G]
        self.group_of_row = torch.cat([self.group_of_row, group_of_new_row])
        # The rows of one group share its prompt's place; their own caches are empty.
        self.lengths = F.pad(self.lengths, (0, len(group_of_new_row)))
        return hidden.index_select(0, layout.last_prompt_rows)

    def feed(self, ids: np.ndarray, counts: np.ndarray) -> Tensor:
        """Computes the next tokens of the active rows: ids int64 [n], row after row.

        `counts` is int64 [R]: how many of them each row has. A row that waits has none. Returns
        their final hidden states [n, H].
        """
        return torch.cat(list(self._feed_pieces(ids, counts)))

    def _feed_pieces(self, ids: np.ndarray, counts: np.ndarray) -> Iterator[Tensor]:
        """Yields the hidden states that `feed` returns, in pieces."""
        if len(ids) == 0:
            return
        rows, before = number_tokens(counts, self.lengths.numpy())
        inputs = DecodeInputs(
            ids=torch.from_numpy(ids), rows=torch.from_numpy(rows), before=torch.from_numpy(before)
        )
        for piece in torch.arange(len(rows)).split(max(PIECE, self.rows)):
            yield self._feed(inputs.select(piece))

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drops ended rows. A group whose last row has ended gives its prompt's place back.

        Returns the moves (from row, to row) that keep the active rows at 0 .. R-1.
        """
        num_active, movers, holes = plan_moves(self.rows, rows)
        if holes:
            target = torch.tensor(holes)
            source = torch.tensor(movers)
            self.own.move(source, target, int(self.lengths[source].max()))
            self.group_of_row[target] = self.group_of_row[source]
            self.lengths[target] = self.lengths[source]
        self.group_of_row = self.group_of_row[:num_active]
        self.lengths = self.lengths[:num_active]

        rows_of_group = torch.bincount(self.group_of_row, minlength=self.prefix.batch)  # int64 [N]
        self.prompt_lengths[rows_of_group == 0] = 0
        return list(zip(movers, holes, strict=True))

    @torch.no_grad()
    def _feed(self, inputs: DecodeInputs) -> Tensor:
        """Computes a step of n tokens. Returns their final hidden states [n, H]."""
        num_tokens = len(inputs.ids)
        self._make_room(inputs)
        # Counted before padding: a copy of a token must not make its row longer.
        self.lengths = self.lengths + torch.bincount(inputs.rows, minlength=self.rows)
        inputs = self._pad(inputs)  # m tokens
        group_of_token = self.group_of_row[inputs.rows]  # int64 [m]
        positions = self.prompt_lengths[group_of_token] + inputs.before  # int64 [m]
        longest_sequence = int(positions.max()) + 1  # tokens: a prompt and a row's own
        if self._by_kernels:
            layout = self._kernel_layout(inputs, group_of_token, longest_sequence)
            hidden = self.model.hidden(inputs.ids, positions, layout)  # [m, H]
        else:
            hidden = self._feed_by_torch(inputs, positions, group_of_token, longest_sequence)
        return hidden[:num_tokens]

    @property
    def is_exact(self) -> bool:
        """True if a row gets the same bits, whatever is computed with it.

        PyTorch's attention to these caches does not give them.
        """
        return self.model.exact and self.model.backend.kernels

    def _make_room(self, inputs: DecodeInputs) -> None:
        """Grows the rows' own caches if the new tokens do not fit."""
        longest_row = max(int(self.lengths.max()), int(inputs.before.max())) + 1
        if longest_row > self.own.capacity:
            # Doubling keeps the number of copies logarithmic in the length of a completion.
            tokens = max(longest_row, 2 * self.own.capacity)
            self.own = self._grow(self.own, self.max_rows, tokens)

    def _pad(self, inputs: DecodeInputs) -> DecodeInputs:
        """Adds copies of the first tokens: m >= n tokens. The caller drops the results of copies.

        A copy is safe: it computes the same key and value as its original, for the same slot.
        """
        if self.is_exact:
            # The kernels compute each row in the same way, however many there are.
            return inputs
        num_tokens = len(inputs.ids)
        return inputs.select(torch.arange(max(num_tokens, MIN_ROWS)) % num_tokens)

    def _feed_by_torch(
        self, inputs: DecodeInputs, positions: Tensor, group_of_token: Tensor, longest_sequence: int
    ) -> Tensor:
        """Computes the hidden states [m, H] with PyTorch's operations."""
        prompt_keys = self.prefix.capacity  # P
        own_keys = max(MIN_KEYS, int(inputs.before.max()) + 1)  # K
        prompt_lengths = self.prompt_lengths[group_of_token, None]  # int64 [m, 1]
        sees_prompt = torch.arange(prompt_keys) < prompt_lengths  # bool [m, P]
        sees_own = torch.arange(own_keys) <= inputs.before[:, None]  # bool [m, K]: itself too
        mask = torch.cat([sees_prompt, sees_own], dim=1)[:, None, None]  # bool [m, 1, 1, P + K]

        # Built on the CPU, because `int(….max())` of a tensor on a GPU would wait for its queue.
        device = self.model.device
        layout = StepLayout(
            own=self.own,
            prefix=self.prefix,
            prompt_keys=prompt_keys,
            longest=longest_sequence,
            mask=mask.to(device),
            rows=inputs.rows.to(device),
            slots=inputs.before.to(device),
            groups=group_of_token.to(device),
        )
        return self.model.hidden(inputs.ids.to(device), positions.to(device), layout)

    def _kernel_layout(
        self, inputs: DecodeInputs, group_of_token: Tensor, longest_sequence: int
    ) -> Layout:
        """Returns the layout by which the kernels fill the caches and attend."""
        tokens_of_group = torch.bincount(group_of_token, minlength=self.prefix.batch)  # int64 [N]
        return kernels.Active(
            longest=longest_sequence,
            groups=F.pad(tokens_of_group.cumsum(0), (1, 0)),  # int64 [N + 1]
            members=torch.argsort(group_of_token, stable=True),  # int64 [m]
            prompts=self.prompt_lengths,  # int64 [N]
            lengths=inputs.before,  # int64 [m]
            caches=inputs.rows,  # int64 [m]
            own_keys=self.own.keys,
            own_values=self.own.values,
            prompt_keys=self.prefix.keys,
            prompt_values=self.prefix.values,
        )

    def _places(self, lengths: list[int]) -> list[int]:
        """Returns free places for prompts of these lengths.

        The cache grows if it has too few places, or if they are too small.
        """
        free = (self.prompt_lengths == 0).nonzero().flatten().tolist()
        num_missing = max(0, len(lengths) - len(free))
        if num_missing or max(lengths) > self.prefix.capacity:
            old_batch = self.prefix.batch
            new_batch = old_batch + num_missing
            free += range(old_batch, new_batch)
            tokens = max(self.prefix.capacity, *lengths)
            self.prefix = self._grow(self.prefix, new_batch, tokens)
            self.prompt_lengths = F.pad(self.prompt_lengths, (0, num_missing))
        return free[: len(lengths)]

    def _allocate(self, batch: int, tokens: int) -> Cache:
        """Returns a cache of zeros with room for at least `tokens` tokens in each entry."""
        shape = self._shape
        capacity = self._capacity(tokens)
        lanes = kernels.numbers_in_a_lane(self.model.dtype) if self._by_kernels else 1
        dtype = torch.float32 if lanes > 1 else self.model.dtype
        heads = (shape.layers, batch, shape.kv_heads)
        keys_shape = (*heads, shape.d // lanes, capacity)
        values_shape = (*heads, capacity // lanes, shape.d)
        return Cache(
            keys=torch.zeros(keys_shape, dtype=dtype, device=self.model.device),
            values=torch.zeros(values_shape, dtype=dtype, device=self.model.device),
            lanes=lanes,
        )

    def _capacity(self, tokens: int) -> int:
        """Returns the capacity of a cache for at least `tokens` tokens."""
        return -(-tokens // MIN_KEYS) * MIN_KEYS

    def _grow(self, cache: Cache, batch: int, tokens: int) -> Cache:
        """Returns a larger cache with the contents of `cache`."""
        grown = self._allocate(batch, tokens)
        grown.keys[:, : cache.batch, :, :, : cache.capacity] = cache.keys
        grown.values[:, : cache.batch, :, : cache.values.shape[3]] = cache.values
        return grown


class _Prefill:
    """A layout of packed prompts that also keeps their keys and values in `prefix`."""

    def __init__(
        self, layout: Layout, prefix: Cache, places: list[int], lengths: list[int]
    ) -> None:
        self.longest = layout.longest
        self._layout = layout
        self._prefix = prefix
        self._places = places
        self._lengths = lengths

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        keys_of_prompts = key.split(self._lengths)  # each [prompt tokens, Hkv, D]
        values_of_prompts = value.split(self._lengths)
        for place, prompt_keys, prompt_values in zip(
            self._places, keys_of_prompts, values_of_prompts, strict=True
        ):
            self._prefix.put(layer, place, prompt_keys, prompt_values)
        return self._layout.attend(layer, query, key, value, scaling)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A layout of a step of n tokens, computed by PyTorch's operations.

    Each token's key and value go into its row's own cache. Its query attends to its prompt and to
    its row's own tokens.
    """

    own: Cache
    prefix: Cache
    prompt_keys: int  # P: the number of keys of each prompt that the step looks at
    longest: int  # tokens of the longest sequence
    mask: Tensor  # bool [n, 1, 1, P + K]: what each token sees: P keys of its prompt, K of its row
    rows: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]: where each token goes in its row's own cache
    groups: Tensor  # int64 [n]: the place of each token's prompt

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Returns [n, Hq, D] for a query [n, Hq, D], and a key and a value [n, Hkv, D]."""
        own_keys = self.own.keys[layer]  # [rows, Hkv, D, capacity]
        own_values = self.own.values[layer]  # [rows, Hkv, capacity, D]
        own_keys[self.rows, :, :, self.slots] = key
        own_values[self.rows, :, self.slots] = value

        num_own = self.mask.shape[-1] - self.prompt_keys  # K
        prompt_k = self.prefix.keys[layer][..., : self.prompt_keys][self.groups]  # [n, Hkv, D, P]
        prompt_v = self.prefix.values[layer][:, :, : self.prompt_keys][self.groups]
        own_k = own_keys[self.rows, :, :, :num_own]  # [n, Hkv, D, K]
        own_v = own_values[self.rows, :, :num_own]  # [n, Hkv, K, D]
        k = torch.cat([prompt_k, own_k], 3).mT.contiguous()  # [n, Hkv, P + K, D]
        v = torch.cat([prompt_v, own_v], 2)  # [n, Hkv, P + K, D]
        # The query heads of a key head stand where tokens would: [n, Hkv, Hq / Hkv, D].
        q = query.unflatten(1, (key.shape[1], -1))
        attended = F.scaled_dot_product_attention(q, k, v, self.mask, scale=scaling)
        return attended.flatten(1, 2)
