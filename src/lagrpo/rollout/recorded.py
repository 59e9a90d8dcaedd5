"""Decoding on a GPU: steps from token ids to sampled tokens, recorded as CUDA graphs.

A step of a hundred rows is many small launches, so most of its time is not the GPU's. Here a step
is one copy to the GPU, one replay and one copy back. What makes that possible:

- The cache has its full size from the start. Each row holds its prompt too, so all that a token
  sees lies in one place, and FlashAttention reads it there.
- A graph depends on the number of tokens of a step alone, which is rounded up. So few graphs serve
  all steps, and `LocalSampler` keeps them from batch to batch: weights are loaded in place.
- Logits and sampling are part of the graph.

The price is a prompt's keys and values once for each of its completions, where `DecodeState` has
them once for a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lagrpo.cpu.decoder import Layout, is_reproduced
from lagrpo.gpu.cached_attention import attend_by_flash, attend_by_mask, flash_reads_caches
from lagrpo.gpu.graphs import Graphs
from lagrpo.model.attention import Shape
from lagrpo.model.layout import PackedLayout
from lagrpo.rollout.decoding import plan_moves

if TYPE_CHECKING:
    from lagrpo.model.model import Model

# Most tokens in a step, unless there are more rows. A longer reply of an environment takes several.
PIECE = 512
# Most prompt tokens that are prefilled together, unless one prompt is longer. The activations of a
# packed row of all new prompts would have no bound.
PREFILL_TOKENS = 8192
# Capacities are multiples of this many tokens, so that a longer prompt in a later batch seldom
# needs a new cache, which loses all graphs.
KEY_STEP = 128
# Most bytes of keys and values that a GPU may hold from batch to batch, while the policy learns.
KEPT_BYTES = 4 << 30


def records_steps(model: Model) -> bool:
    """True if decoding steps of a model can be recorded.

    A graph cannot wait for the GPU inside a step. Families that are not reproduced may do that, and
    a rotary embedding whose frequencies depend on the longest sequence does.
    """
    text_config = model.config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    reads_length = rope.get("rope_type") in ("dynamic", "longrope")
    reproduced = is_reproduced(model.lm, Shape.of(text_config).d)
    return model.device.type == "cuda" and reproduced and not reads_length


def cache_fits(model: Model, max_rows: int, max_tokens: int) -> bool:
    """True if a cache of full size leaves half of the GPU's memory.

    Else `DecodeState` decodes, whose cache grows with the completions. The rule looks at the memory
    that the GPU has, not at what is free, so that a resumed run decodes as the run before it.
    """
    shape = Shape.of(model.config.get_text_config())
    numbers = 2 * shape.layers * max_rows * max_tokens * shape.kv_heads * shape.d
    return numbers * model.dtype.itemsize <= total_memory(model.device) // 2


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory that a GPU has."""
    return torch.cuda.get_device_properties(device).total_memory


def round_up_tokens(tokens: int) -> int:
    """Returns the number of tokens that a step of `tokens` tokens computes.

    Below 256 it is a multiple of 16, above of an eighth of a power of two. So at most 12.5 % of a
    large step are wasted, and each doubling has at most 8 graphs.
    """
    power_of_two = 1 << (tokens.bit_length() - 1)  # the largest that is not above `tokens`
    step = max(16, power_of_two // 8)
    return -(-tokens // step) * step


def round_up_keys(keys: int) -> int:
    """Returns the next multiple of KEY_STEP.

    It is the capacity of a cache for so many tokens, and the number of keys that a step looks at if
    FlashAttention does not read the cache. That number must not depend on the capacity: a cache may
    come from an earlier batch with longer prompts, while a resumed run has a new one, and must
    round like the run that never stopped.
    """
    return -(-keys // KEY_STEP) * KEY_STEP


class RecordedState:
    """Keys and values of the active rows on a GPU.

    Active rows are always rows 0 .. R-1: when one ends, the last one moves into its place. A row
    that waits for an environment takes no token; its next step takes all tokens of the reply.
    """

    # Shapes in the comments below:
    #   R  active rows
    #   n  tokens of a step; m >= n tokens with copies (see _run)
    #   H  hidden size

    def __init__(self, model: Model, max_rows: int, max_tokens: int) -> None:
        """`max_tokens`: of the longest prompt and the longest completion together."""
        self.model = model
        self.max_rows = max_rows
        self.capacity = round_up_keys(max_tokens)
        shape = Shape.of(model.config.get_text_config())
        size = (shape.layers, max_rows, self.capacity, shape.kv_heads, shape.d)
        self.keys = torch.zeros(size, dtype=model.dtype, device=model.device)
        self.values = torch.zeros(size, dtype=model.dtype, device=model.device)
        # int64 [R]: the number of tokens in each row's cache, the prompt's included
        self.lengths = torch.empty(0, dtype=torch.long)
        self._by_flash = flash_reads_caches(
            model.device, model.dtype, shape.heads, shape.kv_heads, shape.d
        )
        self._graphs = Graphs(model.device)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def may_stay(self) -> bool:
        """True if this state may serve the next batch: its cache leaves room for learning."""
        return self.keys.nbytes + self.values.nbytes <= KEPT_BYTES

    def fits(self, max_rows: int, max_tokens: int) -> bool:
        """True if the cache has room for so many rows of so many tokens."""
        return max_rows <= self.max_rows and max_tokens <= self.capacity

    # ---- new groups ----

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], G: int) -> Tensor:
        """Prefills new groups of G rows each, behind the active rows.

        Returns the hidden states [prompts, H] of the last prompt tokens, from which the first token
        of every row is sampled.
        """
        return torch.cat([self._prefill(piece, G) for piece in split_prompts(prompts)])

    def _prefill(self, prompts: Sequence[Sequence[int]], G: int) -> Tensor:
        device = self.model.device
        lengths = [len(prompt) for prompt in prompts]
        layout = PackedLayout.build([(length, ()) for length in lengths], device)
        ids = torch.tensor([token for prompt in prompts for token in prompt]).to(device)

        # Each token of a prompt goes to the G rows of its group.
        sources: list[Tensor] = []
        places: list[Tensor] = []
        row = self.rows
        first_token = 0
        for length in lengths:
            tokens = torch.arange(length)
            for _ in range(G):
                sources.append(first_token + tokens)
                places.append(row * self.capacity + tokens)
                row += 1
            first_token += length
        prefill = _Prefill(
            layout=self.model.backend.over(layout),
            keys=self.keys,
            values=self.values,
            sources=torch.cat(sources).to(device),
            places=torch.cat(places).to(device),
        )
        hidden = self.model.hidden(ids, layout.position_ids, prefill)  # [tokens, H]
        new_lengths = torch.tensor(lengths).repeat_interleave(G)
        self.lengths = torch.cat([self.lengths, new_lengths])
        return hidden.index_select(0, layout.last_prompt_rows)

    # ---- steps ----

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Computes the next tokens of each active row; a row that waits has none.

        Returns their final hidden states [n, H], row after row.
        """
        uniform = [0.0] * sum(1 for row_tokens in tokens if row_tokens)
        pieces = self._pieces(tokens, uniform)
        # A copy, because the next replay writes over the result.
        return torch.cat([self._run(piece, tau=None).clone() for piece in pieces])

    def feed_and_sample(
        self, tokens: Sequence[Sequence[int]], uniform: Sequence[float], tau: float
    ) -> tuple[list[int], list[float]]:
        """Computes the next tokens of each active row, and samples one more for rows that have any.

        `uniform` has a number in [0, 1) for each of these rows. Returns their new tokens and the
        log-probs of these.
        """
        pieces = self._pieces(tokens, uniform)
        # float64 [2, n], copied piece by piece: the next one writes over the result.
        sampled = torch.cat([self._run(piece, tau).to("cpu", copy=True) for piece in pieces], dim=1)
        counts = torch.tensor([len(row_tokens) for row_tokens in tokens if row_tokens])
        last_of_row = counts.cumsum(0) - 1
        new_tokens, logp = sampled[:, last_of_row]
        return new_tokens.long().tolist(), logp.tolist()

    def _pieces(
        self, tokens: Sequence[Sequence[int]], uniform: Sequence[float]
    ) -> tuple[Tensor, ...]:
        """Returns the inputs of the steps that compute `tokens`: float64 [4, n] each.

        They are token ids, rows, places in the row, and uniform numbers. All of them are whole
        numbers below 2^53 or doubles, so one tensor holds them exactly, and is copied at once.
        """
        counts = torch.tensor([len(row_tokens) for row_tokens in tokens])  # int64 [R]
        rows = torch.arange(len(counts)).repeat_interleave(counts)  # int64 [n]
        first_of_row = counts.cumsum(0) - counts  # int64 [R]: index of a row's first token
        offset_in_row = torch.arange(len(rows)) - first_of_row[rows]  # int64 [n]
        slots = self.lengths[rows] + offset_in_row  # int64 [n]
        ids = torch.tensor([token for row_tokens in tokens for token in row_tokens])
        # Only the last token of a row is followed by a sampled one.
        uniform_of_token = torch.zeros(len(rows), dtype=torch.float64)
        last_of_row = counts[counts > 0].cumsum(0) - 1
        uniform_of_token[last_of_row] = torch.tensor(uniform, dtype=torch.float64)
        self.lengths = self.lengths + counts
        inputs = torch.stack([ids.double(), rows.double(), slots.double(), uniform_of_token])
        return inputs.split(max(PIECE, self.rows), dim=1)

    @torch.no_grad()
    def _run(self, inputs: Tensor, tau: float | None) -> Tensor:
        """Computes a step of n tokens. The next step writes over the result.

        Returns sampled tokens and their log-probs, float64 [2, n]; without tau it returns hidden
        states [n, H].
        """
        num_tokens = inputs.shape[1]
        longest = int(inputs[2].max()) + 1
        num_keys = self.capacity if self._by_flash else round_up_keys(longest)
        # Copies of the first tokens. A copy computes the same key and value as its original, for
        # the same place, so it changes nothing; its result is dropped.
        padded = torch.arange(round_up_tokens(num_tokens)) % num_tokens
        inputs = inputs[:, padded]  # [4, m]

        def compute(inputs: Tensor) -> Tensor:
            ids, rows, slots = inputs[:3].long().unbind()  # int64 [m] each
            layout = CachedLayout(
                self.keys, self.values, rows, slots, self._by_flash, num_keys, longest
            )
            hidden = self.model.hidden(ids, slots, layout)  # [m, H]
            if tau is None:
                return hidden
            logits = self.model.logits(hidden)  # [m, V]
            tokens, logp = self.model.backend.sample(logits, tau, inputs[3].contiguous())
            return torch.stack([tokens.double(), logp.double()])

        result = self._graphs((inputs.shape[1], num_keys, tau), compute, inputs)
        return result[:num_tokens] if tau is None else result[:, :num_tokens]

    # ---- rows that have ended ----

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drops ended rows.

        Returns the moves (from row, to row) that keep the active rows at 0 .. R-1.
        """
        num_active, movers, holes = plan_moves(self.rows, rows)
        if holes:
            target = torch.tensor(holes)
            source = torch.tensor(movers)
            tokens = int(self.lengths[source].max())
            self.keys[:, target, :tokens] = self.keys[:, source, :tokens]
            self.values[:, target, :tokens] = self.values[:, source, :tokens]
            self.lengths[target] = self.lengths[source]
        self.lengths = self.lengths[:num_active]
        return list(zip(movers, holes, strict=True))


def split_prompts(prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Returns the prompts in pieces of at most PREFILL_TOKENS tokens, or of one prompt."""
    pieces: list[list[Sequence[int]]] = []
    num_tokens = 0
    for prompt in prompts:
        if not pieces or num_tokens + len(prompt) > PREFILL_TOKENS:
            pieces.append([])
            num_tokens = 0
        pieces[-1].append(prompt)
        num_tokens += len(prompt)
    return pieces


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A layout of packed prompts that also puts their keys and values into the cache."""

    layout: Layout
    keys: Tensor  # [layers, rows, capacity, Hkv, D]
    values: Tensor
    sources: Tensor  # int64: the token of the packed prompts for each place
    places: Tensor  # int64: row · capacity + position

    @property
    def longest(self) -> int:
        return self.layout.longest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Shapes as in `CachedLayout.attend`."""
        for cache, new in ((self.keys, key), (self.values, value)):
            copies = new.index_select(0, self.sources)
            cache[layer].flatten(0, 1).index_copy_(0, self.places, copies)
        return self.layout.attend(layer, query, key, value, scaling)


@dataclass(frozen=True, slots=True)
class CachedLayout:
    """A layout of a step of m tokens.

    Each token joins its row's cache, and sees the row up to itself.
    """

    keys: Tensor  # [layers, rows, capacity, Hkv, D]
    values: Tensor
    rows: Tensor  # int64 [m]
    slots: Tensor  # int64 [m]: the place of each token in its row
    by_flash: bool
    num_keys: int  # keys of each row that are looked at, if FlashAttention does not read them
    longest: int  # tokens of the longest row

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Returns [m, Hq, D] for a query [m, Hq, D], and a key and a value [m, Hkv, D]."""
        keys, values = self.keys[layer], self.values[layer]  # [rows, capacity, Hkv, D]
        places = self.rows * keys.shape[1] + self.slots
        keys.flatten(0, 1).index_copy_(0, places, key)
        values.flatten(0, 1).index_copy_(0, places, value)
        num_seen = self.slots + 1
        if self.by_flash:
            return attend_by_flash(query, keys, values, self.rows, num_seen, scaling)
        return attend_by_mask(query, keys, values, self.rows, num_seen, scaling, self.num_keys)
