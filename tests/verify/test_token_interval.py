"""The interval of the random number that samples a token: how `lagrpo verify` replays a sample."""

from __future__ import annotations

from math import log, sqrt

import pytest
import torch
from tiny import tiny_model
from torch import tensor

from lagrpo.verify.noise import hidden_noise
from lagrpo.verify.tokens import read_tokens


def test_distance_of_a_random_number_from_its_token_by_hand():
    """With p = (1/2, 1/4, 1/4) the tokens have the intervals [0, 1/2), [1/2, 3/4) and [3/4, 1).

    Logits have the deviation e s, so the log-odds of F = 1/2 have e s sqrt(1 + 1/2): the squares of
    p below and above are 1/4 and 1/8, and both sides have the probability 1/2.
    """
    logits = tensor([4.0, 2.0, 2.0], dtype=torch.float64).log().repeat(3, 1)  # [T, V]
    tokens = tensor([0, 1, 2])
    uniforms = tensor([0.6, 0.6, 0.75], dtype=torch.float64)
    e = 0.01
    read = read_tokens(logits, tokens, uniforms, hidden=e, dtype="float32")
    s = log(2) / sqrt(3)  # logits log 4, log 2, log 2

    assert read.logp.exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert read.expected.tolist() == [1, 1, 2]
    assert read.expected_logp.exp().tolist() == pytest.approx([0.25, 0.25, 0.25])
    assert read.entropy.tolist() == pytest.approx([1.5 * log(2)] * 3)
    # In log-odds: 0.6 is as far outside of token 0 as it is inside of token 1, odds of 3/2 against
    # 1 at their common edge 1/2; 0.75 is the edge of token 2.
    distance = log(1.5) / (e * s * sqrt(1.5))
    assert read.outside.tolist() == pytest.approx([distance, -distance, 0.0], abs=1e-9)
    # A log-prob is off by 1 - p of the log-odds, which compare two logits.
    noise = sqrt(2) * e * s
    expected = [noise / 2, noise * 3 / 4, noise * 3 / 4]
    assert read.deviation.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "products", "terms"),
    [
        # A layer has products of 32 terms (queries, keys, values, gate, up), 128 and 48.
        pytest.param("llama", 2 * 7 + 1, 2 * (5 * 32 + 128 + 48 + 10) + 32, id="llama"),
        # Queries, keys and values are one product, and products have another class.
        pytest.param("gpt2", 2 * 4 + 1, 2 * (3 * 32 + 128 + 10) + 32, id="gpt2"),
    ],
)
def test_noise_of_a_hidden_state_counts_products_and_terms(kind, products, terms):
    """Attention adds up ten tokens in each of two layers, and the head comes last."""
    model = tiny_model(kind)
    square = 2.0**-48 * terms
    assert hidden_noise(model, "float32", 10) == pytest.approx(sqrt(square))
    square += 2 / 3 * products * 2.0**-18
    assert hidden_noise(model, "bfloat16", 10) == pytest.approx(sqrt(square))
