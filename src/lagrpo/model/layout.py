"""Packed rows: prompts and completions side by side in one row, without padding.

A packed row holds, group after group, the prompt once and then its completions:

    [prompt_1 | y_11 | y_12 | … | prompt_2 | y_21 | …]
    positions: 0 .. P-1 in a prompt of P tokens, then P .. in each of its completions

Each prompt and each completion is a *segment* of the row. Nobody needs what the last token of a
completion predicts, so that token is left out of the row. The log-prob of a completion's first
token comes from its prompt's last row, the log-prob of its token j from row j - 1 of the
completion. A layout is data; the backend attends along it (backend.py).

Shapes: S segments, N groups, T completion tokens of all groups.
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
    """The places of prompts and completions in one packed row.

    - `rows`: the number of tokens in the row
    - `longest`: the tokens of the longest prompt and completion
    - `position_ids`: int64 [rows], the position of each token in its own sequence
    - `logit_rows`: int64 [T], the row whose logits predict each completion token
    - `last_prompt_rows`: int64 [N], the last row of each prompt
    - `segments`: int64 [S, 4] on the CPU, in the order of the row: first row, length, first row of
      the prompt that it also sees, and that prompt's length. A prompt sees itself only: 0 and 0.
    - `groups`: int64 [N + 1] on the CPU, the number of segments before each group
    """

    rows: int
    longest: int
    position_ids: Tensor
    logit_rows: Tensor
    last_prompt_rows: Tensor
    segments: Tensor
    groups: Tensor

    @cached_property
    def seen_rows(self) -> Tensor:
        """The rows that each segment sees, [prompt, own], segment after segment: int64 [K]."""
        pieces: list[Tensor] = []
        for first, length, prompt_first, prompt_length in self.segments.tolist():
            pieces.append(torch.arange(prompt_first, prompt_first + prompt_length))
            pieces.append(torch.arange(first, first + length))
        return torch.cat(pieces).to(self.position_ids.device)

    @cached_property
    def seen_by(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The segments that see each row: int32 [rows] three times, then int32 [S].

        - the first segment that sees the row
        - how many segments see it; they follow one another, since completions follow their prompt
        - the row's place in what each of these segments sees
        - where in `seen_rows` begins what each segment sees
        """
        length, prompt_length = self.segments[:, 1], self.segments[:, 3]  # int64 [S] each
        number = torch.arange(len(length))
        num_seen = length + prompt_length
        starts = num_seen.cumsum(0) - num_seen
        end_of_group = self.groups[1:].repeat_interleave(self.groups.diff())  # int64 [S]
        # A prompt and its completions read the prompt's keys; only a completion reads its own keys.
        num_segments = torch.where(prompt_length == 0, end_of_group - number, 1)  # int64 [S]
        first_row = length.cumsum(0) - length  # int64 [S]
        row_in_segment = torch.arange(self.rows) - first_row.repeat_interleave(length)
        place = row_in_segment + prompt_length.repeat_interleave(length)  # int64 [rows]
        device = self.position_ids.device
        return (
            number.repeat_interleave(length).int().to(device),
            num_segments.repeat_interleave(length).int().to(device),
            place.int().to(device),
            starts.int().to(device),
        )

    @cached_property
    def most_queries(self) -> int:
        """The rows of the longest segment."""
        return int(self.segments[:, 1].max())

    @cached_property
    def most_keys(self) -> int:
        """The most rows that a segment sees, its prompt's included."""
        return int(self.segments[:, [1, 3]].sum(1).max())

    @cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """The numbers of rows and of `seen_rows` before each segment: int32 [S + 1] each."""
        num_queries = self.segments[:, 1].tolist()
        num_keys = self.segments[:, [1, 3]].sum(1).tolist()
        return self._sums_before(num_queries), self._sums_before(num_keys)

    def _sums_before(self, numbers: list[int]) -> Tensor:
        sums = [*accumulate(numbers, initial=0)]
        return torch.tensor(sums, dtype=torch.int32).to(self.position_ids.device)

    @staticmethod
    def build(
        groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """Returns the layout of groups of (prompt length, [completion lengths]).

        Lengths are in tokens, at least 1.
        """
        segments: list[tuple[int, int, int, int]] = []
        segments_before_group = [0]
        last_prompt_rows: list[int] = []
        # An empty tensor in front, because torch.cat needs one, and sets the dtype.
        positions = [torch.empty(0, dtype=torch.long)]
        logit_rows = [torch.empty(0, dtype=torch.long)]
        rows = 0
        longest = 0
        for prompt_length, completion_lengths in groups:
            prompt_first = rows
            last_prompt_row = prompt_first + prompt_length - 1
            segments.append((prompt_first, prompt_length, 0, 0))
            positions.append(torch.arange(prompt_length))
            last_prompt_rows.append(last_prompt_row)
            rows += prompt_length
            for length in completion_lengths:
                # The last token is not an input: nothing of the completion comes after it.
                num_inputs = length - 1
                if num_inputs > 0:
                    segments.append((rows, num_inputs, prompt_first, prompt_length))
                    positions.append(torch.arange(prompt_length, prompt_length + num_inputs))
                input_rows = range(rows, rows + num_inputs)
                logit_rows.append(torch.tensor([last_prompt_row, *input_rows]))  # [length]
                rows += num_inputs
            segments_before_group.append(len(segments))
            longest = max(longest, prompt_length + max(completion_lengths, default=0))
        return PackedLayout(
            rows=rows,
            longest=longest,
            position_ids=torch.cat(positions).to(device),
            logit_rows=torch.cat(logit_rows).to(device),
            last_prompt_rows=torch.tensor(last_prompt_rows, dtype=torch.long).to(device),
            segments=torch.tensor(segments, dtype=torch.long).view(-1, 4),
            groups=torch.tensor(segments_before_group),
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row ready for the model.

    - `input_ids`: int64 [rows], the tokens of the row
    - `token_ids`: int64 [T], the completion tokens, the last ones included
    """

    layout: PackedLayout
    input_ids: Tensor
    token_ids: Tensor

    @staticmethod
    def build(
        groups: Sequence[tuple[Sequence[int], Sequence[Tensor]]], device: torch.device | str = "cpu"
    ) -> Packed:
        """Returns the row of groups of (prompt token ids, [completion token ids, int64 [t]])."""
        lengths = [
            (len(prompt_ids), [len(completion) for completion in completions])
            for prompt_ids, completions in groups
        ]
        input_ids: list[Tensor] = []
        # An empty tensor in front, because torch.cat needs one.
        token_ids = [torch.empty(0, dtype=torch.long)]
        for prompt_ids, completions in groups:
            input_ids.append(torch.tensor(prompt_ids, dtype=torch.long))
            input_ids += [completion[:-1] for completion in completions]
            token_ids += completions
        return Packed(
            layout=PackedLayout.build(lengths, device),
            input_ids=torch.cat(input_ids).to(device),
            token_ids=torch.cat(token_ids).to(device),
        )
