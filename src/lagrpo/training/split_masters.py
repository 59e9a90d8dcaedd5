"""float32 masters of bfloat16 weights, kept in 16 + 16 bits: the weight, and the low bits.

A weight is its master rounded to nearest, ties to even. With u the bits of the master, w the bits
of the weight, and l the low 16 bits of u as a signed number,

    u = 2^16 w + l    since w is u / 2^16 rounded up exactly if l < 0

unless l = -2^15: such a master is halfway between two weights, and may have been rounded down. One
master in 65,536 is, and is kept whole. Masters are joined a block at a time, for the optimizer.

Masters are split on a GPU, where memory is the limit. On a CPU time is: an update with them took
1.5 times as long by C kernels, 2.3 times by PyTorch, so masters are whole there.
"""

# Some functions of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lagrpo.training.master_weights import Span

SPLIT_ON = ("cuda",)
"""The types of devices whose masters are split."""
NUMBERS_AT_ONCE = 2**24
"""Masters of a block: 64 MiB, because every block costs the host half a millisecond."""
# The low bits of masters halfway between two weights.
HALFWAY = -(2**15)
# A span is cut at multiples of this many numbers, so that the optimizer's vectors are the same.
UNIT = 16


def is_split(weight: Tensor) -> bool:
    """True if a weight is half of its master."""
    return weight.dtype == torch.bfloat16 and weight.device.type in SPLIT_ON


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers of a weight in a block.

    - `index`: the position of the weight's span among all spans
    - `span`: these numbers
    - `weight`: bfloat16 [n], flat, in the weight's memory
    - `in_span`, `in_block`: the positions of these numbers in the weight's span, and in the block
    """

    index: int
    span: Span
    weight: Tensor
    in_span: slice
    in_block: slice


class Block:
    """Masters of one or several weights, all matrices or all vectors."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.size: int = pieces[-1].in_block.stop
        device = pieces[0].weight.device
        self._low_bits = torch.zeros(self.size, dtype=torch.int16, device=device)
        # The masters that are kept whole, and their positions in the block.
        self._halfway = torch.zeros(0, dtype=torch.int64, device=device)
        self._halfway_masters = torch.zeros(0, dtype=torch.float32, device=device)

    def join(self, window: Tensor) -> Tensor:
        """Returns the masters, float32 [size]: the beginning of `window`, which they overwrite."""
        masters = window[: self.size]
        for piece in self.pieces:
            masters[piece.in_block].copy_(piece.weight)
        masters.view(torch.int32).add_(self._low_bits)
        masters[self._halfway] = self._halfway_masters
        return masters

    def split(self, masters: Tensor) -> None:
        """Rounds masters, float32 [size], to their weights, and keeps their low bits."""
        for piece in self.pieces:
            piece.weight.copy_(masters[piece.in_block])
        self._low_bits.copy_(masters.view(torch.int32))  # keeps the low bits
        self._halfway = (self._low_bits == HALFWAY).nonzero().view(-1)
        self._halfway_masters = masters[self._halfway]


def make_blocks(spans: Sequence[Span], weights: Sequence[Tensor]) -> list[Block]:
    """Returns blocks of all spans whose masters are split.

    `weights` are the numbers of each span. The masters begin as the weights themselves.
    """
    blocks: list[Block] = []
    for is_matrix in (True, False):
        chosen = [
            index
            for index, span in enumerate(spans)
            if is_split(weights[index]) and span.is_matrix == is_matrix
        ]
        pieces: list[Piece] = []
        end = 0  # of the pieces in their block
        for index in chosen:
            span = spans[index]
            flat_weight = weights[index].detach().view(-1)
            start = 0
            while start < len(flat_weight):
                stop = min(len(flat_weight), start + NUMBERS_AT_ONCE - end)
                pieces.append(
                    Piece(
                        index,
                        replace(span, start=span.start + start, stop=span.start + stop),
                        flat_weight[start:stop],
                        in_span=slice(start, stop),
                        in_block=slice(end, end + stop - start),
                    )
                )
                end += -(-(stop - start) // UNIT) * UNIT
                start = stop
                if end == NUMBERS_AT_ONCE:
                    blocks.append(Block(pieces))
                    pieces = []
                    end = 0
        if pieces:
            blocks.append(Block(pieces))
    return blocks


def fill_blocks(blocks: Sequence[Block], masters_of: Callable[[Span], Tensor]) -> None:
    """Makes `masters_of` a span its masters: float32, in any shape."""
    window = new_window(blocks)
    for block in blocks:
        masters = window[: block.size]
        for piece in block.pieces:
            masters[piece.in_block].copy_(masters_of(piece.span).view(-1))
        block.split(masters)


def new_window(blocks: Sequence[Block]) -> Tensor:
    """Returns memory for the masters of one block at a time, float32, with anything in it."""
    if not blocks:
        return torch.empty(0)
    device = blocks[0].pieces[0].weight.device
    size = max(block.size for block in blocks)
    return torch.empty(size, dtype=torch.float32, device=device)


def step_blocks(
    optimizer: torch.optim.AdamW,
    blocks: Sequence[Block],
    parameters: Sequence[nn.Parameter],
    window: Tensor,
) -> None:
    """Makes a step of AdamW for the masters of `blocks`, and drops their gradients.

    `parameters`, one for each span, have gradients, and moments in `optimizer`, which may be in the
    host's memory: they visit the device a block at a time.
    """
    group_of = {
        parameter: group for group in optimizer.param_groups for parameter in group["params"]
    }
    stepped = {piece.index: parameters[piece.index] for block in blocks for piece in block.pieces}
    for parameter in stepped.values():
        optimizer.state[parameter]["step"] += 1
    for block in blocks:
        masters = block.join(window)
        # All parameters of a block are in one group.
        group = group_of[parameters[block.pieces[0].index]]
        _step_block(optimizer, group, block, parameters, masters)
        block.split(masters)
    for parameter in stepped.values():
        parameter.grad = None


def _step_block(
    optimizer: torch.optim.AdamW,
    group: dict[str, Any],
    block: Block,
    parameters: Sequence[nn.Parameter],
    masters: Tensor,
) -> None:
    """Makes a step of AdamW for joined masters, whose step count is the new one."""
    gradients: list[Tensor] = []
    steps: list[Tensor] = []
    moments: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": []}
    visitors: list[tuple[Tensor, Tensor]] = []  # moments of the host, and their copies
    for piece in block.pieces:
        parameter = parameters[piece.index]
        assert parameter.grad is not None
        gradients.append(parameter.grad.view(-1)[piece.in_span])
        state = optimizer.state[parameter]
        steps.append(state["step"])
        for name, parts in moments.items():
            moment = state[name].view(-1)[piece.in_span]
            on_device = moment.to(masters.device)
            parts.append(on_device)
            if on_device is not moment:
                visitors.append((moment, on_device))
    # What `AdamW.step` calls. It looks at every parameter, which takes longer than a block.
    torch._fused_adamw_(  # pyright: ignore
        [masters[piece.in_block] for piece in block.pieces],
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
    for moment, on_device in visitors:
        moment.copy_(on_device)
