"""Masters and moments that the processes of a group have between them (ZeRO-1, arXiv:1910.02054).

Every rank has the whole working copy of the weights, and for its own rows the gradient of all of them, in float32. An
update sums the gradients of all ranks, each rank steps on its shard of the masters, and an all-gather of the rounded
shards brings the new weights to all. The sum is a plain one: the weights of completions have the normalizer of the
whole batch. Waits for other ranks have the timeout of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lagrpo.model.masters import Start, are_exact, chunks, round_, start_master, trained
from lagrpo.model.spans import Span

ALIGNED = 64  # bytes: a line of the cache, and the widest vector
SAID = 1000  # bytes of what a rank says
CHUNK = 2**22  # numbers that are received at a time from each rank: they stay in the cache until they are added


class Flat:
    """The trained weights of one dtype side by side, each at a multiple of ALIGNED bytes, and the whole filled up to
    one equal part for each rank. Weights keep their own memory: what computes by them may hold its addresses. Cuts
    between parts are at multiples of ALIGNED bytes too, so an update of a number goes through the same instructions
    wherever they are.

    `gradient` is this rank's sum over its rows, float32 (float64 for weights in float64), None where there is none."""

    def __init__(self, weights: Mapping[str, nn.Parameter], ranks: dist.ProcessGroup) -> None:
        self.weights, self._ranks = weights, ranks
        first = next(iter(weights.values()))
        self.dtype, self.device = first.dtype, first.device
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32  # of gradient and masters
        unit, end, self._starts = ALIGNED // first.element_size(), 0, dict[str, int]()
        for name, weight in weights.items():
            self._starts[name] = end
            end += -(-weight.numel() // unit) * unit
        self.part = -(-end // (unit * ranks.size())) * unit  # numbers of each rank
        self.size = self.part * ranks.size()
        self.gradient: Tensor | None = None
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(partial(self._take_gradient, name))

    def spans(self) -> Iterator[Span]:
        """What of the weights is in the part of this rank, in the order of the weights."""
        first = self._ranks.rank() * self.part
        for name, weight in self.weights.items():
            start, stop = (min(max(n - self._starts[name], 0), weight.numel()) for n in (first, first + self.part))
            if start < stop:
                yield Span(name, weight.shape, start, stop)

    def within(self, part: Tensor, span: Span) -> Tensor:
        """The numbers of a span in the part of this rank, flat: a view."""
        first = self._starts[span.name] + span.start - self._ranks.rank() * self.part
        return part[first : first + span.stop - span.start]

    def sum_gradients(self) -> Tensor:
        """The part of this rank in the sum of all ranks' gradients, which is then no longer kept."""
        given, self.gradient = self._zeros() if self.gradient is None else self.gradient, None
        return reduce_scatter(given, self._ranks)

    def gather(self, part: Tensor) -> None:
        """Every weight becomes what the ranks have of it in their parts."""
        everything = part.new_empty(self.size)
        all_gather(everything, part, self._ranks)
        for name, weight in self.weights.items():
            weight.copy_(everything[self._starts[name] :][: weight.numel()].view_as(weight))

    def _zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.wide, device=self.device)

    def _take_gradient(self, name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        if self.gradient is None:
            self.gradient = self._zeros()
        self.gradient[self._starts[name] :][: weight.numel()].add_(weight.grad.reshape(-1))
        weight.grad = None


class ShardedMasters:
    """`Masters` (masters.py) over the ranks of a group. `parameters` is what the optimizer of this rank steps on: of
    each weight the span that this rank has, if any, as a float32 master, or the weight's own numbers where the whole
    model is float32 or float64. Masters start as the same numbers on any number of ranks, and go on as the same where
    the gradients are. All ranks must start from the same weights."""

    def __init__(self, model: nn.Module, start: Start, seed: int, ranks: dist.ProcessGroup) -> None:
        by_dtype: defaultdict[torch.dtype, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, weight in trained(model).items():
            by_dtype[weight.dtype][name] = weight
        self._ranks = ranks
        self._flats = [Flat(weights, ranks) for weights in by_dtype.values()]
        self._exact = are_exact(trained(model).values())
        self._held = [(flat, span) for flat in self._flats for span in flat.spans()]
        self.spans = [span for _, span in self._held]
        self.parameters = [
            nn.Parameter(span.of(weight) if self._exact else start_master(span, weight, start, seed))
            for span, weight in ((span, flat.weights[span.name].detach()) for flat, span in self._held)
        ]

    def collect(self) -> None:
        """Give every master the gradient of the whole batch: the sum over all ranks. Collective."""
        sums = {flat: flat.sum_gradients() for flat in self._flats}
        for (flat, span), master in zip(self._held, self.parameters, strict=True):
            master.grad = flat.within(sums[flat], span).view_as(master)

    def norm(self) -> Tensor:
        """The norm of what all ranks collected, a tensor of one number, the same on all. Collective."""
        return norm_over(self._ranks, self.parameters, self._flats[0].device)

    def discard(self) -> None:
        """Drop the gradients."""
        for flat in self._flats:
            flat.gradient = None
        for master in self.parameters:
            master.grad = None

    @torch.no_grad()
    def round(self) -> float | None:
        """Every weight becomes its master on all ranks, rounded to nearest, ties to even. Returns the share of the
        weights whose bits changed; None where nothing is rounded. Collective."""
        moved = torch.zeros((), dtype=torch.long, device=self._flats[0].device)
        for flat in self._flats:
            part = torch.zeros(flat.part, dtype=flat.dtype, device=flat.device)
            for (of, span), master in zip(self._held, self.parameters, strict=True):
                if of is flat:
                    new = flat.within(part, span)
                    new.copy_(span.of(flat.weights[span.name].detach()).reshape(-1))
                    for old, exact in zip(chunks(new), chunks(master.view(-1)), strict=True):
                        moved += round_(old, exact)
            flat.gather(part)
        if self._exact:
            return None
        dist.all_reduce(moved, group=self._ranks)
        return moved.item() / sum(weight.numel() for flat in self._flats for weight in flat.weights.values())


def norm_over(ranks: dist.ProcessGroup, masters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The norm of the gradients that the ranks have between them, a tensor of one number. Collective."""
    own = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None]).to(device)
    norms = torch.empty(ranks.size(), dtype=torch.float64, device=device)
    all_gather(norms, own.to(norms).view(1), ranks)
    return norms.square().sum().sqrt().to(torch.float64 if own.dtype == torch.float64 else torch.float32)


def say_largest(ranks: dist.ProcessGroup, size: float, said: str, device: torch.device) -> tuple[str, int]:
    """What the rank with the largest `size` says, and its number, on all ranks; of several the first. Collective."""
    text = said.encode()[:SAID].ljust(SAID, b"\0")
    sizes = torch.empty(ranks.size(), dtype=torch.float64, device=device)
    texts = torch.empty(ranks.size() * SAID, dtype=torch.uint8, device=device)
    all_gather(sizes, torch.tensor([size], dtype=torch.float64, device=device), ranks)
    all_gather(texts, torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), ranks)
    largest = max(range(ranks.size()), key=sizes.tolist().__getitem__)
    return bytes(texts.view(-1, SAID)[largest].tolist()).rstrip(b"\0").decode(errors="ignore"), largest


def all_gather(everything: Tensor, part: Tensor, ranks: dist.ProcessGroup) -> None:
    """The parts of all ranks, [n] each, in their order: [ranks · n]."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(everything, part, group=ranks)


def reduce_scatter(everything: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """This rank's part [n] of the sum over all ranks of [ranks · n], which is overwritten; on a CPU a view of it."""
    n = len(everything) // ranks.size()
    if everything.device.type == "cpu":
        return _reduce_scatter_by_gloo(everything.view(ranks.size(), n), ranks)
    part = everything.new_empty(n)
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(part, everything, group=ranks)
    return part


def _reduce_scatter_by_gloo(everything: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """From [ranks, n]. gloo's own way is to reduce all of it and forget the rest: twice the traffic."""
    own = everything[ranks.rank()]
    others = [rank for rank in range(ranks.size()) if rank != ranks.rank()]
    received = own.new_empty(len(others), min(len(own), CHUNK))
    for start in range(0, len(own), CHUNK):
        part = own[start : start + CHUNK]
        moves = [
            move
            for rank, buffer in zip(others, received, strict=True)
            for move in (
                dist.isend(everything[rank, start : start + CHUNK], group=ranks, group_dst=rank),
                dist.irecv(buffer[: len(part)], group=ranks, group_src=rank),
            )
        ]
        for move in moves:
            assert move is not None
            move.wait()
        for buffer in received:
            part.add_(buffer[: len(part)])
    return own
