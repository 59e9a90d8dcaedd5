"""What FlexAttention is asked to compute on a GPU, tried without one; its gradient is in test_gpu.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import dense_attention
from torch.nn.attention.flex_attention import flex_attention

from lagrpo.backends import flex
from lagrpo.backends.layout import PackedLayout

SHAPES = st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 200), max_size=5)), min_size=1, max_size=4)


def seen(layout: PackedLayout) -> torch.Tensor:
    """Every pair of rows, asked one by one."""
    q, k = torch.meshgrid(torch.arange(layout.rows), torch.arange(layout.rows), indexing="ij")
    return flex.block_mask(layout).mask_mod(torch.tensor(0), torch.tensor(0), q, k)


@settings(max_examples=15, deadline=None)
@given(SHAPES)
def test_the_blocks_that_are_read_are_those_in_which_something_is_seen(shape):
    layout = PackedLayout.build(shape)
    pairs, padding = seen(layout), -layout.rows % flex.BLOCK
    blocks = torch.nn.functional.pad(pairs, (0, padding, 0, padding)).unflatten(0, (-1, flex.BLOCK))
    needed = blocks.unflatten(2, (-1, flex.BLOCK)).any(1).any(2)
    assert torch.equal(flex.needed_blocks(layout), needed)
    mask = flex.block_mask(layout)
    for block, count in enumerate(mask.kv_num_blocks[0, 0].tolist()):
        assert set(mask.kv_indices[0, 0, block, :count].tolist()) == set(needed[block].nonzero().flatten().tolist())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_is_asked_for_shared_prefix_attention(monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    layout = PackedLayout.build([(7, (3, 9, 1)), (130, (1, 60)), (1, (4, 4, 30)), (5, ())])
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(layout.rows, heads, 32, generator=rng) for heads in (6, 2, 2))
    expected, _ = dense_attention(layout, q, k, v, 0.2)
    torch.testing.assert_close(flex.attend(layout, q, k, v, 0.2), expected, rtol=0, atol=2e-6)


def test_without_a_gpu_it_is_not_used():
    q = torch.zeros(3, 2, 32, dtype=torch.bfloat16)
    assert flex.why_not(q.device, q.dtype, 2, 2, 32) == "no GPU"
