"""The Triton kernel adds up gradients of gathered keys as PyTorch does.

On a GPU the kernel is compiled; elsewhere Triton's interpreter runs it.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE

from lagrpo.gpu.keys import gather_keys_backward
from lagrpo.model.attention import attend, gather_keys
from lagrpo.model.layout import PackedLayout

pytestmark = pytest.mark.triton

LAYOUTS = [
    pytest.param([(3, [2, 5, 1])], id="one group"),
    pytest.param(
        [(4, []), (2, [7, 3]), (1, [1, 1]), (5, [2] * 9)],
        id="a prompt alone and completions that have no row",
    ),
    pytest.param([(70, [33, 41])], id="long completions"),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # Sums of up to ten numbers.
        pytest.param(torch.float32, 1e-6, id="float32"),
        # Summed in float32, rounded once to 8 binary digits.
        pytest.param(torch.bfloat16, 2**-7, id="bfloat16"),
    ],
)
@pytest.mark.parametrize("groups", LAYOUTS)
def test_gradient_of_keys_is_that_of_pytorch(groups, dtype, tolerance):
    layout = PackedLayout.build(groups, DEVICE)
    key = normal(layout.rows, 2, 24, dtype=dtype).requires_grad_()
    seen = gather_keys(layout, key)
    grad = normal(*seen.shape, seed=1, dtype=dtype)
    seen.backward(grad)
    assert key.grad is not None
    ours = gather_keys_backward(grad, *layout.seen_by)
    torch.testing.assert_close(ours, key.grad, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("groups", LAYOUTS)
def test_attention_and_its_gradient_are_those_of_pytorch(groups):
    layout = PackedLayout.build(groups, DEVICE)
    query = normal(layout.rows, 4, 24).requires_grad_()
    key = normal(layout.rows, 2, 24, seed=1).requires_grad_()
    value = normal(layout.rows, 2, 24, seed=2).requires_grad_()
    weight = normal(layout.rows, 4, 24, seed=3)
    results = []
    for by_triton in (True, False):
        attended = attend(layout, query, key, value, 24**-0.5, by_triton=by_triton)
        gradients = torch.autograd.grad((attended * weight).sum(), (query, key, value))
        results.append([attended.detach(), *gradients])
    for ours, by_pytorch in zip(*results, strict=True):
        torch.testing.assert_close(ours, by_pytorch, rtol=1e-5, atol=1e-5)
