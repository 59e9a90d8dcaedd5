"""Packed rows: prompts and completions side by side in one row, without padding.

A packed row holds, group after group, the prompt once and then its completions:

    [prompt_1 | y_11 | y_12 | … | prompt_2 | y_21 | …]        positions: 0..P-1, then P.. in every completion

Each prompt and each completion is a *segment* of the row. What the last token of a completion predicts is not needed,
so that token is left out of the row. The log-prob of a completion's first token comes from its prompt's last row, the
log-prob of token j from row j - 1 of the completion. A layout is data; the backend attends along it (backend.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where prompts and completions lie in one packed row."""

    rows: int  # tokens in the row
    longest: int  # tokens of the longest prompt + completion
    position_ids: Tensor  # int64 [rows]: the position of each token in its own sequence
    logit_rows: Tensor  # int64 [T]: the row whose logits predict each completion token
    last_prompt_rows: Tensor  # int64 [N]: the last row of each prompt
    segments: Tensor
    """int64 [S, 4] on the CPU, in the order of the row: first row, length, first row of the prompt that it also sees,
    and that prompt's length (0 for a prompt itself)."""
    groups: Tensor  # int64 [N + 1] on the CPU: the number of segments before each group

    @cached_property
    def seen_rows(self) -> Tensor:
        """int64 [K]: the rows that each segment sees, [prompt, own], segment after segment."""
        spans = [
            span for own, t, prompt, p in self.segments.tolist() for span in ((prompt, p), (own, t))
        ]
        return torch.cat([torch.arange(start, start + length) for start, length in spans]).to(
            self.position_ids.device
        )

    @cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """int32 [S + 1] each: the number of rows before each segment, and of those before it in `seen_rows`."""
        lengths = self.segments[:, 1].tolist(), self.segments[:, [1, 3]].sum(1).tolist()
        ends = [torch.tensor([*accumulate(n, initial=0)], dtype=torch.int32) for n in lengths]
        return ends[0].to(self.position_ids.device), ends[1].to(self.position_ids.device)

    @staticmethod
    def build(
        groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """From (prompt length, [completion lengths]) of each group, in tokens. All are at least 1."""
        segments: list[tuple[int, int, int, int]] = []
        bounds, last_prompt_rows, row, longest = [0], [], 0, 0
        positions, logit_rows = (
            [torch.empty(0, dtype=torch.long)],
            [torch.empty(0, dtype=torch.long)],
        )
        for prompt_length, lengths in groups:
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
        return PackedLayout(
            rows=row,
            longest=longest,
            position_ids=torch.cat(positions).to(device),
            logit_rows=torch.cat(logit_rows).to(device),
            last_prompt_rows=torch.tensor(last_prompt_rows, dtype=torch.long).to(device),
            segments=torch.tensor(segments, dtype=torch.long).view(-1, 4),
            groups=torch.tensor(bounds),
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row ready for the model: its layout, `input_ids` [rows] and the completion tokens `token_ids` [T]."""

    layout: PackedLayout
    input_ids: Tensor
    token_ids: Tensor

    @staticmethod
    def build(
        groups: Sequence[tuple[Sequence[int], Sequence[Tensor]]], device: torch.device | str = "cpu"
    ) -> Packed:
        """From (prompt token ids, [completion token ids int64 [t]]) of each group."""
        layout = PackedLayout.build([(len(p), [len(c) for c in cs]) for p, cs in groups], device)
        rows, tokens = [], [torch.empty(0, dtype=torch.long)]
        for prompt_ids, completions in groups:
            rows += [torch.tensor(prompt_ids, dtype=torch.long), *(c[:-1] for c in completions)]
            tokens += completions
        return Packed(layout, torch.cat(rows).to(device), torch.cat(tokens).to(device))
