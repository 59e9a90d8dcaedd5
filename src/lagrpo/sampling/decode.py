"""Decoding with shared-prefix attention: prompt keys and values once per group, completions' in one growing block.

`DecodeState` holds what a set of active completions (*rows*) needs: for each group its prompt's keys and values, for
each row the keys and values of its own tokens. Active rows are always rows 0 .. R-1: when one ends, the last one moves
into its place. One step takes one token per row and returns the final hidden states, by the same attention as the
learner: that of the kernels, or the two parts of backends/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lagrpo.backends.attention import MIN_KEYS, Layout, Shape, fold_queries, merge, part, unfold_queries
from lagrpo.backends.cpu import kernels
from lagrpo.backends.layout import PackedLayout
from lagrpo.policy.model import Policy
from lagrpo.threads import team

BLOCK = 64  # the own cache grows by this many tokens, or doubles
ROWS_RECORDED = 16  # a CUDA graph is recorded for each multiple of so many rows
MIN_ROWS = 2  # PyTorch's product with one row takes another kernel, with another order of summation


@dataclass(slots=True)
class Cache:
    """Keys [layers, batch, Hkv, D, tokens], their tokens side by side, and values [layers, batch, Hkv, tokens, D]; the
    batch is rows, or groups. Where the kernels attend, `lanes` is how many numbers one float32 holds: with 2 (bfloat16)
    neighbors along D of a key, and along the tokens of a value, are one, and these dimensions half as long. Elsewhere
    it is 0."""

    keys: Tensor
    values: Tensor
    lanes: int

    @staticmethod
    def empty(policy: Policy, batch: int, tokens: int) -> Cache:
        layers, _, heads, d = Shape.of(policy.model.config.get_text_config())
        like = torch.empty(1, 1, d, dtype=policy.dtype, device=policy.device)
        lanes = kernels.numbers_in_a_lane(policy.dtype) if kernels.attend_on(like) else 0
        pair, dtype = (lanes, torch.float32) if lanes else (1, policy.dtype)
        room = -(-tokens // MIN_KEYS) * MIN_KEYS
        shape = (layers, batch, heads)
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


@dataclass(frozen=True, slots=True)
class Room:
    """What a state has room for: rows, and tokens of each; prompts, and tokens of each; rows of a group."""

    rows: int
    tokens: int
    prompts: int
    prompt_tokens: int
    widest: int


class DecodeState:
    """Keys and values of the active rows, `own`, and of the prompts of their groups, `prefix`; who belongs to whom. A
    group has a place in `prefix` until its last row has ended; the next group that comes takes it.

    Room grows with what comes. Where steps are recorded, each growth is the end of the recordings: a state that is to
    do what another one did begins with the room that it had grown to, `room`."""

    def __init__(self, policy: Policy, max_rows: int, max_tokens: int, room: Room | None = None) -> None:
        self.policy = policy
        self._graphs = Graphs(policy) if graphs_on(policy.device) else None
        if room is None or not self.records:
            room = Room(0, 0, 0, MIN_KEYS, 0)
        self.max_rows = max(max_rows, room.rows, MIN_ROWS)
        self.own = Cache.empty(policy, self.max_rows, max(min(BLOCK, max_tokens), room.tokens))
        self.prefix = Cache.empty(policy, room.prompts, room.prompt_tokens)
        self.prompt_lengths = torch.zeros(room.prompts, dtype=torch.long)  # in each place; 0: free
        self.group_of_row = torch.empty(0, dtype=torch.long)  # its place
        self.lengths = torch.empty(0, dtype=torch.long)  # tokens in each row's own cache
        self.widest = room.widest  # rows of a group, at the most

    @property
    def rows(self) -> int:
        return len(self.group_of_row)

    @property
    def room(self) -> Room:
        """What it has grown to."""
        return Room(self.max_rows, self.own.room, self.prefix.batch, self.prefix.room, self.widest)

    @property
    def records(self) -> bool:
        """Whether steps are recorded, for the next ones of the same shape."""
        return self._graphs is not None

    @torch.no_grad()
    def admit(self, prompts: Sequence[Sequence[int]], G: int) -> Tensor:
        """Prefill new groups of G rows each, behind the active ones; returns hidden [prompts, H] of the last prompt
        tokens, from which the first token of every row is sampled."""
        lengths = [*map(len, prompts)]
        places = self._places(lengths)
        layout = PackedLayout.build([(length, ()) for length in lengths], self.policy.device)
        ids = torch.cat([torch.tensor(p, dtype=torch.long) for p in prompts]).to(self.policy.device)
        hidden = self.policy.hidden(ids, layout.position_ids, _Prefill(layout, self.prefix, places, lengths))
        self.prompt_lengths[places] = torch.tensor(lengths)
        self.group_of_row = torch.cat([self.group_of_row, torch.tensor(places).repeat_interleave(G)])
        self.lengths = torch.cat([self.lengths, torch.zeros(len(places) * G, dtype=torch.long)])
        self.widest = max(self.widest, G)
        return hidden.index_select(0, layout.last_prompt_rows)

    def _places(self, lengths: list[int]) -> list[int]:
        """For prompts of these lengths, in a larger cache where the one there has too few or too small ones."""
        free = (self.prompt_lengths == 0).nonzero().flatten().tolist()
        missing = max(0, len(lengths) - len(free))
        if missing or max(lengths) > self.prefix.room:
            free += range(self.prefix.batch, self.prefix.batch + missing)
            grown = Cache.empty(self.policy, self.prefix.batch + missing, max(self.prefix.room, *lengths))
            grown.copy(self.prefix)
            self.prefix, self.prompt_lengths = grown, F.pad(self.prompt_lengths, (0, missing))
        return free[: len(lengths)]

    @torch.no_grad()
    def step(self, token_ids: Tensor) -> Tensor:
        """One token per active row, int64 [R] -> final hidden states [R, H]. Where steps are recorded, the next one
        overwrites them."""
        team.look()
        longest = int(self.lengths.max()) + 1
        if longest > self.own.room:
            grown = Cache.empty(self.policy, self.max_rows, max(longest, 2 * self.own.room))
            grown.copy(self.own)
            self.own = grown
        if self._graphs is not None:
            hidden = self._graphs.step(self, token_ids)
        else:
            least = 1 if self.policy.own_products else MIN_ROWS  # there a lone row is computed twice
            copies = torch.arange(max(self.rows, least)) % self.rows
            layout = decoding(self, self.group_of_row[copies], self.lengths[copies])
            hidden = self.policy.hidden(*self.inputs(token_ids, copies), layout)
        self.lengths += 1
        return hidden[: self.rows]

    def inputs(self, token_ids: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and positions of the rows `copies`, on the policy's device."""
        positions = self.prompt_lengths[self.group_of_row[copies]] + self.lengths[copies]
        return token_ids[copies].to(self.policy.device), positions.to(self.policy.device)

    def retire(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drop ended rows; returns the moves (from row, to row) that keep the active ones at 0 .. R-1. A group whose
        last row has ended gives its prompt's place back."""
        ended = set(rows)
        active = self.rows - len(ended)
        holes = sorted(r for r in ended if r < active)
        movers = [r for r in range(active, self.rows) if r not in ended]
        if holes:
            to, source = torch.tensor(holes), torch.tensor(movers)
            used = int(self.lengths[source].max())
            self.own.keys[:, to, :, :, :used] = self.own.keys[:, source, :, :, :used]
            used = -(-used // max(1, self.own.lanes))
            self.own.values[:, to, :, :used] = self.own.values[:, source, :, :used]
            self.group_of_row[to], self.lengths[to] = self.group_of_row[source], self.lengths[source]
        self.group_of_row, self.lengths = self.group_of_row[:active], self.lengths[:active]
        self.prompt_lengths[torch.bincount(self.group_of_row, minlength=self.prefix.batch) == 0] = 0
        return list(zip(movers, holes, strict=True))


class _Prefill:
    """Packed prompts whose keys and values are kept."""

    def __init__(self, layout: PackedLayout, prefix: Cache, places: list[int], lengths: list[int]) -> None:
        self.layout, self.prefix, self.places, self.lengths = layout, prefix, places, lengths
        self.longest = layout.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        row = 0
        for place, length in zip(self.places, self.lengths, strict=True):
            self.prefix.put(layer, place, key[row : row + length], value[row : row + length])
            row += length
        return self.layout.attend(layer, query, key, value, scaling)


def decoding(state: DecodeState, group_of_row: Tensor, lengths: Tensor) -> Layout:
    """The layout of one token per row: by the kernels, or by PyTorch's operations."""
    return (_KernelDecode if state.own.lanes else _Decode)(state, group_of_row, lengths)


class _KernelDecode:
    """One token per active row, by the kernels: attention, or all layers at once (policy/replica.py)."""

    def __init__(self, state: DecodeState, group_of_row: Tensor, lengths: Tensor) -> None:
        self.longest = int((state.prompt_lengths[group_of_row] + lengths).max()) + 1
        counts = torch.bincount(group_of_row, minlength=state.prefix.batch)
        groups = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        self.active = kernels.Active(
            groups, torch.argsort(group_of_row, stable=True), state.prompt_lengths, lengths,
            state.own.keys, state.own.values, state.prefix.keys, state.prefix.values,
        )  # fmt: skip

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return kernels.decode(self.active, layer, query, key, value, scaling)


class _Decode:
    """One token per active row: its key and value go into the own cache, its query to both parts. With `padded` shapes
    depend on nothing but the caches' and that number of rows, of which those behind the active ones are of no use."""

    def __init__(self, state: DecodeState, group_of_row: Tensor, lengths: Tensor, padded: int = 0) -> None:
        device = state.policy.device
        self.own, self.prefix, self.rows = state.own, state.prefix, padded or len(lengths)
        self.longest = int((state.prompt_lengths[group_of_row] + lengths).max()) + 1
        grid, place = pair_rows_with_groups(group_of_row, state.prefix.batch, state.widest if padded else 0)
        place, lengths = (F.pad(t, (0, self.rows - len(t))) for t in (place, lengths))
        self.keys = state.own.room if padded else max(MIN_KEYS, int(lengths.max()) + 1)
        own_hidden = torch.arange(self.keys)[None, :] > lengths[:, None]
        prefix_hidden = torch.arange(state.prefix.room)[None, :] >= state.prompt_lengths[:, None]
        masks = (h[:, None, None].to(device) if padded or bool(h.any()) else None for h in (own_hidden, prefix_hidden))
        self.own_hidden, self.prefix_hidden = masks
        self.row_index = torch.arange(self.rows, device=device)
        self.slot, self.grid, self.place = lengths.to(device), grid.to(device), place.to(device)

    def take_over(self, other: _Decode) -> None:
        """What is to be attended to in another step of the same shapes, in the tensors of this one."""
        for name in ("slot", "grid", "place", "own_hidden", "prefix_hidden"):
            getattr(self, name).copy_(getattr(other, name))

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


def pair_rows_with_groups(group_of_row: Tensor, groups: int, width: int = 0) -> tuple[Tensor, Tensor]:
    """grid [groups, c], the rows of each group (row 0 where there are fewer than c, which is at least `width`), and
    place [R], where in the flattened grid each row stands."""
    counts = torch.bincount(group_of_row, minlength=groups)
    width = max(width, int(counts.max()))
    order = torch.argsort(group_of_row, stable=True)
    within = torch.empty_like(order)
    within[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[group_of_row[order]]
    place = group_of_row * width + within
    grid = torch.zeros(groups, width, dtype=torch.long)
    grid.view(-1)[place] = torch.arange(len(order))
    return grid, place


class Graphs:
    """Decoding steps as CUDA graphs: the hundreds of small launches of a step are recorded once for each shape and then
    replayed as one. Shapes repeat: rows are filled up to a multiple of ROWS_RECORDED, and caches grow rarely."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._caches: tuple[int, ...] = ()
        self._recorded: dict[tuple[int, int], tuple[Tensor, Tensor, _Decode, Callable[[], Tensor]]] = {}

    def step(self, state: DecodeState, token_ids: Tensor) -> Tensor:
        """Hidden states [at least R, H], until the next step."""
        caches = (state.own.keys, state.own.values, state.prefix.keys, state.prefix.values)
        if self._caches != (addresses := tuple(t.data_ptr() for t in caches)):
            self._caches, self._recorded = addresses, {}
        padded = min(-(-state.rows // ROWS_RECORDED) * ROWS_RECORDED, state.max_rows)
        layout = _Decode(state, state.group_of_row, state.lengths, padded)
        given = state.inputs(token_ids, torch.arange(padded) % state.rows)
        shape = (padded, state.widest)
        if shape not in self._recorded:
            replay = record(lambda: self.policy.hidden(*given, layout))
            self._recorded[shape] = *given, layout, replay
        tokens, positions, known, replay = self._recorded[shape]
        tokens.copy_(given[0])
        positions.copy_(given[1])
        known.take_over(layout)
        return replay()


def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of `compute`, as a function that replays it and returns the tensor that it fills.

    Raises:
        RuntimeError: something in it cannot be recorded (dynamic rotary scaling waits for the GPU, for example).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is set up at the first call must not be recorded
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            made = compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"a decoding step of this model cannot be recorded as a CUDA graph ({error}); set model.kernels = 'torch'"
        ) from error

    def replay() -> Tensor:
        graph.replay()
        return made

    return replay


def graphs_on(device: torch.device) -> bool:
    """Whether decoding steps are recorded: on a GPU, unless PyTorch's plain operations were chosen."""
    return device.type == "cuda" and kernels.chosen() != "torch"
