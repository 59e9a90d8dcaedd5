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

import numpy as np
import torch
from torch import Tensor

from lagrpo.cpu.decoder import Layout, has_fixed_angles, is_reproduced
from lagrpo.gpu.cached_attention import attend_by_flash, attend_by_mask, flash_reads_caches
from lagrpo.gpu.graphs import Graphs
from lagrpo.model.attention import Shape
from lagrpo.model.layout import PackedLayout
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.decoding import number_tokens, plan_moves, sample_tokens

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
# The largest share of a GPU's memory that a cache of full size takes.
LARGEST_SHARE = 0.5
# The share of a GPU's memory that keys and values may hold from batch to batch, while the policy
# learns. Without them all steps of the next batch are recorded again, which takes seconds.
KEPT_SHARE = 0.2


def records_steps(model: Model) -> bool:
    """True if decoding steps of a model can be recorded.

    A graph cannot wait for the GPU inside a step. Families that are not reproduced may do that, and
    a rotary embedding whose frequencies depend on the longest sequence does.
    """
    text_config = model.config.get_text_config()
    reproduced = is_reproduced(model.lm, Shape.of(text_config).d)
    return model.device.type == "cuda" and reproduced and has_fixed_angles(text_config)


def rows_that_fit(model: Model, max_tokens: int, share: float) -> int:
    """Returns the number of rows whose cache of full size takes a share of the GPU's memory.

    The rule looks at the memory that the GPU has, not at what is free, so that a resumed run
    decodes as the run before it.
    """
    shape = Shape.of(model.config.get_text_config())
    numbers = 2 * shape.layers * round_up_keys(max_tokens) * shape.kv_heads * shape.d
    return int(share * total_memory(model.device)) // (numbers * model.dtype.itemsize)


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

    It is the capacity of a cache for these tokens, and the number of keys that a step reads if
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
        self.lengths = np.empty(0, dtype=np.int64)
        self._by_flash = flash_reads_caches(
            model.device, model.dtype, shape.heads, shape.kv_heads, shape.d
        )
        self._graphs = Graphs(model.device)
        # A step's input [4, m] and its samples [2, m]. The GPU copies pinned memory without a
        # detour, and without a wait before the step.
        most_tokens = round_up_tokens(max(PIECE, max_rows))
        on_gpu = model.device.type == "cuda"
        self._input = torch.empty(4 * most_tokens, dtype=torch.float64, pin_memory=on_gpu)
        self._samples = torch.empty(2 * most_tokens, dtype=torch.float64, pin_memory=on_gpu)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def may_stay(self) -> bool:
        """True if this state may serve the next batch: its cache leaves room for learning."""
        num_bytes = self.keys.nbytes + self.values.nbytes
        return num_bytes <= KEPT_SHARE * total_memory(self.model.device)

    @property
    def is_exact(self) -> bool:
        """True if a row gets the same bits, whatever is computed with it."""
        return self.model.exact

    def fits(self, max_rows: int, max_tokens: int) -> bool:
        """True if the cache has room for these rows, each of this many tokens."""
        return max_rows <= self.max_rows and max_tokens <= self.capacity

    # New groups

    @torch.no_grad()
    def load(
        self,
        prompts: Sequence[Sequence[int]],
        rows_of_group: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        self.retire(range(self.rows))
        # Each row holds its prompt, so a whole row is prefilled as a group of one.
        tokens_of_row = iter(np.split(ids, counts.cumsum()[:-1]))
        rows: list[Sequence[int]] = []
        for prompt, num_rows in zip(prompts, rows_of_group.tolist(), strict=True):
            rows += [[*prompt, *next(tokens_of_row).tolist()] for _ in range(num_rows)]
        for piece in split_prompts(rows):
            self._prefill(piece, 1)

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
        starts = np.cumsum(lengths) - lengths  # int64 [prompts]: a prompt's first token
        new_lengths = np.repeat(lengths, G)  # int64 [prompts * G]
        _, sources = number_tokens(new_lengths, np.repeat(starts, G))
        first_places = (self.rows + np.arange(len(new_lengths))) * self.capacity
        _, places = number_tokens(new_lengths, first_places)
        prefill = _Prefill(
            layout=self.model.backend.over(layout),
            keys=self.keys,
            values=self.values,
            sources=torch.from_numpy(sources).to(device),
            places=torch.from_numpy(places).to(device),
        )
        hidden = self.model.hidden(ids, layout.position_ids, prefill)  # [tokens, H]
        self.lengths = np.concatenate([self.lengths, new_lengths])
        return hidden.index_select(0, layout.last_prompt_rows)

    # Steps

    def step(
        self,
        ids: np.ndarray,
        counts: np.ndarray,
        prompts: Sequence[Sequence[int]],
        G: int,
        uniform: np.ndarray,
        params: SamplingParams,
    ) -> tuple[np.ndarray, np.ndarray]:
        num_fed = int(np.count_nonzero(counts))
        samples: list[tuple[np.ndarray, np.ndarray]] = []
        if num_fed > 0:
            samples.append(self.feed_and_sample(ids, counts, uniform[:num_fed], params.tau))
        if prompts:
            hidden = self.admit(prompts, G).repeat_interleave(G, 0)  # [new rows, H]
            samples.append(sample_tokens(self.model, hidden, uniform[num_fed:], params))
        tokens, logp = zip(*samples, strict=True)
        return np.concatenate(tokens), np.concatenate(logp)

    def feed(self, ids: np.ndarray, counts: np.ndarray) -> Tensor:
        """Computes the next tokens of the active rows: ids int64 [n], row after row.

        `counts` is int64 [R]: how many of them each row has. A row that waits has none. Returns
        their final hidden states [n, H].
        """
        hidden: list[Tensor] = []
        for piece in self._pieces(ids, counts, np.zeros(len(ids))):
            output = self._run(piece, tau=None)  # [m, H]
            # A copy on the CPU: the next step writes over its input and over the result.
            hidden.append(output[: piece.shape[1]].to("cpu", copy=True))
        return torch.cat(hidden).to(self.model.device)

    def feed_and_sample(
        self, ids: np.ndarray, counts: np.ndarray, uniform: np.ndarray, tau: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the next tokens of the active rows, and samples one more for rows that have any.

        `ids` and `counts` are as in `feed`. `uniform` has a number in [0, 1) for each row that has
        tokens: float64 [S]. Returns the new tokens of these rows, int64 [S], and their log-probs,
        float32 [S].
        """
        # Only the last token of a row is followed by a sampled one.
        last_of_row = counts[counts > 0].cumsum() - 1  # int64 [S]
        uniform_of_token = np.zeros(len(ids))
        uniform_of_token[last_of_row] = uniform
        samples: list[np.ndarray] = []  # float64 [2, n of the piece] each
        for piece in self._pieces(ids, counts, uniform_of_token):
            output = self._run(piece, tau)  # float64 [2, m]
            on_cpu = self._samples[: output.numel()].view(2, -1)
            on_cpu.copy_(output)  # waits for the step
            # A copy, because the next step writes over the samples.
            samples.append(on_cpu.numpy()[:, : piece.shape[1]].copy())
        tokens, logp = np.concatenate(samples, axis=1)[:, last_of_row]
        return tokens.astype(np.int64), logp.astype(np.float32)

    def _pieces(
        self, ids: np.ndarray, counts: np.ndarray, uniform_of_token: np.ndarray
    ) -> list[np.ndarray]:
        """Returns the inputs of the steps that compute these tokens: float64 [4, n] each.

        They are token ids, rows, places in the row, and uniform numbers. All of them are whole
        numbers below 2^53 or doubles, so one array holds them exactly, and is copied at once.
        """
        rows, slots = number_tokens(counts, self.lengths)
        self.lengths = self.lengths + counts
        inputs = np.stack([ids, rows, slots, uniform_of_token])  # float64 [4, n]
        most_tokens = max(PIECE, self.rows)
        return [
            inputs[:, start : start + most_tokens] for start in range(0, len(rows), most_tokens)
        ]

    @torch.no_grad()
    def _run(self, inputs: np.ndarray, tau: float | None) -> Tensor:
        """Computes a step of n tokens, as m >= n. The next step writes over the result.

        Returns sampled tokens and their log-probs, float64 [2, m]; without tau it returns hidden
        states [m, H]. The next step may begin when the CPU has read the result.
        """
        num_tokens = inputs.shape[1]
        longest = int(inputs[2].max()) + 1
        num_keys = self.capacity if self._by_flash else round_up_keys(longest)
        padded_tokens = round_up_tokens(num_tokens)
        padded = self._input[: 4 * padded_tokens].view(4, -1)  # [4, m]
        on_cpu = padded.numpy()
        on_cpu[:, :num_tokens] = inputs
        # Copies of the first token. A copy computes the same key and value as its original, for
        # the same place, so it changes nothing; its result is dropped.
        on_cpu[:, num_tokens:] = inputs[:, :1]

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

        return self._graphs((padded_tokens, num_keys, tau), compute, padded)

    # Rows that have ended

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drops ended rows.

        Returns the moves (from row, to row) that keep the active rows at 0 .. R-1.
        """
        num_active, movers, holes = plan_moves(self.rows, rows)
        if holes:
            source, target = torch.tensor([movers, holes]).to(self.model.device)
            tokens = int(self.lengths[movers].max())
            self.keys[:, target, :tokens] = self.keys[:, source, :tokens]
            self.values[:, target, :tokens] = self.values[:, source, :tokens]
            self.lengths[holes] = self.lengths[movers]
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
