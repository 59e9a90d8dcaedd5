"""The interval of the random number that samples a token: how `lagrpo verify` replays a sample."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import tensor

from lagrpo.verify.tokens import read_tokens


def test_distance_of_a_random_number_from_its_token_by_hand():
    """With p = (1/2, 1/4, 1/4) the tokens have the intervals [0, 1/2), [1/2, 3/4) and [3/4, 1)."""
    logits = tensor([4.0, 2.0, 2.0], dtype=torch.float64).log().repeat(3, 1)  # [T, V]
    tokens = tensor([0, 1, 2])
    uniforms = tensor([0.6, 0.6, 0.75], dtype=torch.float64)
    read = read_tokens(logits, tokens, uniforms)

    assert read.logp.exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert read.expected.tolist() == [1, 1, 2]
    # In log-odds: 0.6 is as far outside of token 0 as it is inside of token 1, odds of 3/2 against
    # 1 at their common edge 1/2; 0.75 is the edge of token 2.
    assert read.outside.tolist() == pytest.approx([log(1.5), -log(1.5), 0.0], abs=1e-12)
