"""Tokens for a decoding state, written as a list for each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def flat(tokens: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of a state's `feed`: token ids [n], and their number in each row."""
    ids = [token for row_tokens in tokens for token in row_tokens]
    counts = [len(row_tokens) for row_tokens in tokens]
    return np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64)
