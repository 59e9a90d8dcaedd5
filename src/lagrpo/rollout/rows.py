"""The completions in flight, as arrays with an entry for each row of the decoding state.

A step of a thousand rows is a few operations on arrays. Python looks at a single row only when that
row begins or ends, waits for its environment, or may complete a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lagrpo.rollout.decoding import number_tokens
from lagrpo.tasks.episodes import Episode
from lagrpo.types import Completion, Request


@dataclass(slots=True, eq=False)
class Row:
    """One completion.

    Its tokens are in the arrays of `Rows` until it has ended, and then in `tokens`, `logp`,
    `is_sampled` and `versions`, which are unset before. If a checkpoint had the ended completion,
    it is in `completion` instead.
    """

    request: Request
    episode: Episode | None
    turn_start: int = 0  # where the policy's current turn begins in the completion
    is_stopped: bool = False  # its last token completed a stop text
    resume_at: int = 0  # the step at which a row that waits continues, unless arithmetic is exact
    has_ended: bool = False
    completion: Completion | None = None
    tokens: np.ndarray = field(init=False)  # int64 [t]
    logp: np.ndarray = field(init=False)  # float32 [t]
    is_sampled: np.ndarray = field(init=False)  # bool [t]
    versions: np.ndarray = field(init=False)  # int64 [t]


class Rows:
    """The rows in flight, in the order of the decoding state's rows.

    Each array has room for the most rows, and for the longest completion. The first `lengths[r]`
    tokens of row r are what its completion has so far.

    - `active`: the rows in flight
    - `uniform`: float64 [rows, longest], a random number for each token
    - `tokens`: int64 [rows, longest]
    - `logp`: float32 [rows, longest], NaN for tokens of an environment's reply
    - `is_sampled`: bool [rows, longest], False for tokens of a reply
    - `versions`: int64 [rows, longest], of the weights that sampled each token; -1 in a reply
    - `lengths`: int64 [rows]
    - `num_sampled`: int64 [rows], the tokens that are not of a reply
    - `num_next`: int64 [rows], the number of a row's last tokens that the next step feeds to the
      model; 0 while the row waits for its environment
    """

    def __init__(self, max_rows: int, longest: int) -> None:
        self.active: list[Row] = []
        size = (max_rows, longest)
        self.uniform = np.zeros(size, dtype=np.float64)
        self.tokens = np.zeros(size, dtype=np.int64)
        self.logp = np.zeros(size, dtype=np.float32)
        self.is_sampled = np.zeros(size, dtype=np.bool_)
        self.versions = np.zeros(size, dtype=np.int64)
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.num_sampled = np.zeros(max_rows, dtype=np.int64)
        self.num_next = np.zeros(max_rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.active)

    def begin(self, rows: Sequence[Row], uniform: Sequence[np.ndarray]) -> None:
        """Adds rows without tokens behind the others.

        `uniform` has the random numbers of each: float64 [longest].
        """
        first = len(self.active)
        self.active += rows
        new = slice(first, len(self.active))
        self.uniform[new] = uniform
        self.is_sampled[new] = True
        self.lengths[new] = 0
        self.num_sampled[new] = 0
        self.num_next[new] = 0

    def load(self, index: int, completion: Completion) -> None:
        """Gives a row that has just begun the tokens of a completion that has not ended."""
        count = len(completion.token_ids)
        self.tokens[index, :count] = completion.token_ids.numpy()
        self.logp[index, :count] = completion.rollout_logp.numpy()
        self.is_sampled[index, :count] = completion.sampled.numpy()
        self.versions[index, :count] = completion.versions.numpy()
        self.lengths[index] = count
        self.num_sampled[index] = completion.length
        # Between two steps the last token is a sampled one, and has not been fed.
        self.num_next[index] = 1

    def so_far(self, index: int) -> Completion:
        """Returns the completion of a row that has not ended, without its text."""
        length = self.lengths[index]
        return Completion(
            token_ids=torch.from_numpy(self.tokens[index, :length].copy()),
            rollout_logp=torch.from_numpy(self.logp[index, :length].copy()),
            versions=torch.from_numpy(self.versions[index, :length].copy()),
            finished=False,
            text="",
            sampled=torch.from_numpy(self.is_sampled[index, :length].copy()),
            has_ended=False,
        )

    def reorder(self, order: Sequence[int]) -> None:
        """Puts row order[r] at r, for all rows."""
        self.active = [self.active[index] for index in order]
        for array in self._arrays:
            array[: len(order)] = array[order]

    # The input of the next step

    def next_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens that the next step feeds, row after row, and their number in each row.

        They are int64 [n] and int64 [active rows].
        """
        counts = self.num_next[: len(self)]
        rows, places = number_tokens(counts, self.lengths[: len(self)] - counts)
        return self.tokens[rows, places], counts

    def fed_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens that steps have fed, row after row, and their number in each row.

        They are int64 [n] and int64 [active rows].
        """
        # A row that waits for its environment has not fed its last token.
        counts = self.lengths[: len(self)] - self.num_next[: len(self)].clip(1)
        rows, places = number_tokens(counts, np.zeros_like(counts))
        return self.tokens[rows, places], counts

    def next_uniform(self, indices: np.ndarray) -> np.ndarray:
        """Returns the random numbers of the next tokens of these rows: float64 [indices]."""
        return self.uniform[indices, self.lengths[indices]]

    def indices_to_feed(self) -> np.ndarray:
        """Returns the indices of the rows that the next step feeds: all but those that wait."""
        return np.flatnonzero(self.num_next[: len(self)])

    def indices_waiting(self) -> list[int]:
        """Returns the indices of the rows that wait for their environment."""
        return np.flatnonzero(self.num_next[: len(self)] == 0).tolist()

    def last_tokens(self, indices: np.ndarray) -> np.ndarray:
        """Returns the last token of each of these rows: int64 [indices]."""
        return self.tokens[indices, self.lengths[indices] - 1]

    def turn(self, index: int) -> list[int]:
        """Returns the tokens of the policy's current turn."""
        start = self.active[index].turn_start
        return self.tokens[index, start : self.lengths[index]].tolist()

    # New tokens, and rows that end

    def add_sampled(
        self, indices: np.ndarray, tokens: np.ndarray, logp: np.ndarray, version: int
    ) -> None:
        """Appends a token that π_version has sampled to each of these rows."""
        lengths = self.lengths[indices]
        self.tokens[indices, lengths] = tokens
        self.logp[indices, lengths] = logp
        self.versions[indices, lengths] = version
        self.lengths[indices] = lengths + 1
        self.num_sampled[indices] += 1
        self.num_next[indices] = 1

    def add_reply(self, index: int, reply: Sequence[int]) -> None:
        """Appends an environment's reply. The policy's next turn begins behind it."""
        start = int(self.lengths[index])
        end = start + len(reply)
        self.tokens[index, start:end] = reply
        self.logp[index, start:end] = np.nan
        self.is_sampled[index, start:end] = False
        self.versions[index, start:end] = -1
        self.lengths[index] = end
        # The last token of the turn has not been fed yet: the row was waiting.
        self.num_next[index] = 1 + len(reply)
        self.active[index].turn_start = end

    def retire(self, ended: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Takes ended rows out, with their tokens.

        `moves` come from the decoding state: (from row, to row) each.
        """
        for index in ended:
            row = self.active[index]
            length = self.lengths[index]
            row.has_ended = True
            row.tokens = self.tokens[index, :length].copy()
            row.logp = self.logp[index, :length].copy()
            row.is_sampled = self.is_sampled[index, :length].copy()
            row.versions = self.versions[index, :length].copy()
        if moves:
            sources, targets = np.array(moves).T
            for array in self._arrays:
                array[targets] = array[sources]
        for source, target in moves:
            self.active[target] = self.active[source]
        del self.active[len(self.active) - len(ended) :]

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that have an entry for each row."""
        return (
            self.uniform,
            self.tokens,
            self.logp,
            self.is_sampled,
            self.versions,
            self.lengths,
            self.num_sampled,
            self.num_next,
        )
