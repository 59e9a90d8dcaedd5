"""The Triton kernels of a decoder layer give what transformers, float64 and the C kernels give.

On a GPU the kernels are compiled; elsewhere Triton's interpreter runs them. In bfloat16 the forward
pass rounds where transformers rounds, so almost all bits are the same; a sum in another order moves
a few numbers to the next bfloat16.
"""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE

from lagrpo.cpu import kernels as in_c
from lagrpo.gpu import layers as in_triton

pytestmark = [
    pytest.mark.triton,
    # The interpreter computes with NumPy, which warns of infinite numbers.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


class Tolerance(TypedDict):
    """Arguments of torch.testing.assert_close."""

    rtol: float
    atol: float


F32, BF16 = torch.float32, torch.bfloat16
# Sums of up to 2,050 numbers of about 1 in float32; one rounding to 8 binary digits in bfloat16.
FORWARD: dict[torch.dtype, Tolerance] = {
    F32: {"rtol": 2e-6, "atol": 2e-6},
    BF16: {"rtol": 2**-7, "atol": 1e-6},
}
BACKWARD: dict[torch.dtype, Tolerance] = {
    F32: {"rtol": 2e-5, "atol": 5e-6},
    BF16: {"rtol": 2**-6, "atol": 1e-3},
}
# The share of bfloat16 numbers that may differ in the last bit.
FEW = 2e-3
EPS = 1e-6


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = F32):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(DEVICE, dtype)


def norm_weight(width: int, dtype: torch.dtype):
    return 1 + normal(width, seed=2, scale=0.2, dtype=dtype)


def assert_same_bits_but_few(ours, theirs):
    """Two results in bfloat16."""
    if ours.numel() == 0:
        return
    difference = ours.cpu().view(torch.int16).int() - theirs.cpu().view(torch.int16).int()
    assert (difference != 0).double().mean() <= FEW
    assert difference.abs().max() <= 1


# RMS norm


def norm_of_transformers(total, weight):
    x = total.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * x.to(total.dtype)


SIZES = [
    pytest.param(5, 37, id="5 rows of 37"),
    pytest.param(17, 128, id="heads of 128"),
    pytest.param(9, 896, id="hidden size 896"),
    pytest.param(4, 1536, id="hidden size 1536"),
    pytest.param(1, 2050, id="one row of 2050"),
    pytest.param(0, 64, id="no rows"),
]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("adds", [False, True], ids=["norm", "addition and norm"])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_norm_equals_that_of_transformers_and_c(rows, width, adds, dtype):
    x, weight = normal(rows, width, dtype=dtype), norm_weight(width, dtype)
    delta = normal(rows, width, seed=1, dtype=dtype) if adds else None
    total, y, rstd = in_triton.norm(x, delta, weight, EPS)

    assert torch.equal(total, x if delta is None else x + delta)
    expected_rstd = torch.rsqrt(total.float().pow(2).mean(-1) + EPS)
    torch.testing.assert_close(rstd, expected_rstd, **FORWARD[F32])
    expected_y = norm_of_transformers(total, weight)
    torch.testing.assert_close(y, expected_y, **FORWARD[dtype])
    if rows > 0:
        total_c, y_c, rstd_c = in_c.norm(
            x.cpu(), None if delta is None else delta.cpu(), weight.cpu(), EPS
        )
        assert torch.equal(total.cpu(), total_c)
        torch.testing.assert_close(rstd.cpu(), rstd_c, **FORWARD[F32])
        torch.testing.assert_close(y.cpu(), y_c, **FORWARD[dtype])
        if dtype == BF16:
            assert_same_bits_but_few(y, expected_y)
            assert_same_bits_but_few(y, y_c)


@pytest.mark.parametrize("width", [37, 1536])
def test_norm_of_a_row_does_not_depend_on_the_rows_around_it(width):
    x, delta = normal(33, width), normal(33, width, seed=1)
    weight = norm_weight(width, F32)
    together = in_triton.norm(x, delta, weight, EPS)
    alone = in_triton.norm(x[5:6], delta[5:6], weight, EPS)
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one, many[5:6])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("adds", [False, True], ids=["norm", "addition and norm"])
@pytest.mark.parametrize(
    ("rows", "width"), [*SIZES, pytest.param(1700, 37, id="more rows than slices")]
)
def test_gradient_of_norm_equals_that_of_float64_and_c(rows, width, adds, dtype):
    x, grad_y = normal(rows, width, dtype=dtype), normal(rows, width, seed=1, dtype=dtype)
    weight = norm_weight(width, dtype)
    grad_total = normal(rows, width, seed=2, dtype=dtype) if adds else None
    rstd = in_triton.norm(x, None, weight, EPS)[2]
    grad_x, grad_weight = in_triton.norm_backward(x, weight, rstd, grad_y, grad_total)

    leaf_x, leaf_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    normed = leaf_x * torch.rsqrt(leaf_x.pow(2).mean(-1, keepdim=True) + EPS)
    (leaf_weight * normed).backward(grad_y.double())
    expected_x, expected_weight = leaf_x.grad, leaf_weight.grad
    assert expected_x is not None
    assert expected_weight is not None
    if grad_total is not None:
        expected_x = expected_x + grad_total.double()
    torch.testing.assert_close(grad_x, expected_x.to(dtype), **BACKWARD[dtype])
    # Σ over the rows of products, of which one factor was rounded to the dtype.
    spread = 1e-4 if dtype == F32 else 3e-2 * max(1, rows) ** 0.5
    torch.testing.assert_close(
        grad_weight, expected_weight.to(dtype), rtol=BACKWARD[dtype]["rtol"], atol=spread
    )
    if rows > 0:
        grad_x_c, grad_weight_c = in_c.norm_backward(
            x.cpu(),
            weight.cpu(),
            rstd.cpu(),
            grad_y.cpu(),
            None if grad_total is None else grad_total.cpu(),
        )
        torch.testing.assert_close(grad_x.cpu(), grad_x_c, **BACKWARD[dtype])
        torch.testing.assert_close(
            grad_weight.cpu(), grad_weight_c, rtol=BACKWARD[dtype]["rtol"], atol=1e-4
        )


def test_gradient_of_a_norms_weight_has_the_same_bits_every_time():
    x, grad_y, weight = normal(1700, 37), normal(1700, 37, seed=1), norm_weight(37, F32)
    rstd = in_triton.norm(x, None, weight, EPS)[2]
    first = in_triton.norm_backward(x, weight, rstd, grad_y, None)[1]
    second = in_triton.norm_backward(x, weight, rstd, grad_y, None)[1]
    assert torch.equal(first, second)


# Gated activation


def gate_and_up(rows: int, width: int, packed: bool, dtype: torch.dtype):
    """The halves of one tensor, or two tensors. The first gates are as large as they get."""
    both = normal(rows, 2 * width, scale=3, dtype=dtype)
    both[:1, :3] = torch.tensor([-100.0, 100.0, -3e38])
    gate, up = both.split(width, 1)
    if packed:
        return gate, up
    return gate.contiguous(), up.contiguous()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("packed", [False, True], ids=["two tensors", "halves of one"])
@pytest.mark.parametrize(("rows", "width"), [(3, 5), (2, 1024), (3, 1025), (1, 8960), (0, 64)])
def test_gated_activation_and_its_gradient(rows, width, packed, dtype):
    gate, up = gate_and_up(rows, width, packed, dtype)
    grad_y = normal(rows, width, seed=1, dtype=dtype)
    y = in_triton.swiglu(gate, up)
    y_again, grad_gate, grad_up = in_triton.swiglu_backward(gate, up, grad_y)
    assert torch.equal(y, y_again)

    expected = F.silu(gate) * up
    torch.testing.assert_close(y, expected, **FORWARD[dtype])
    leaf_gate = gate.double().contiguous().requires_grad_()
    leaf_up = up.double().contiguous().requires_grad_()
    (F.silu(leaf_gate) * leaf_up).backward(grad_y.double())
    for ours, leaf in ((grad_gate, leaf_gate), (grad_up, leaf_up)):
        assert leaf.grad is not None
        torch.testing.assert_close(ours, leaf.grad.to(dtype), **BACKWARD[dtype])
    if rows > 0 and not packed:
        results_c = in_c.swiglu_backward(gate.cpu(), up.cpu(), grad_y.cpu())
        for ours, theirs in zip((y, grad_gate, grad_up), results_c, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, **BACKWARD[dtype])
        if dtype == BF16:
            assert_same_bits_but_few(y, expected)
            assert_same_bits_but_few(y, results_c[0])


# Rotary embedding


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turned_by_transformers(x, cosine, sine):
    return x * cosine[:, None] + rotate_half(x) * sine[:, None]


def angles(rows: int, d: int, dtype: torch.dtype):
    half = d // 2
    angle = torch.arange(rows)[:, None].float() * 10_000 ** (-torch.arange(half) / half)
    both = torch.cat((angle, angle), -1)
    return both.cos().to(DEVICE, dtype), both.sin().to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "heads", "d"),
    [(3, 5, 32), (4, 14, 64), (2, 1, 128), (3, 7, 96), (2, 3, 6), (0, 2, 64)],
)
def test_rotary_embedding_has_the_bits_of_transformers_and_c(rows, heads, d, dtype):
    # Queries in front of keys and values, in one packed row.
    packed = normal(rows, (heads + 2) * d, dtype=dtype)
    x = packed[:, : heads * d].unflatten(1, (heads, d))
    cosine, sine = angles(rows, d, dtype)
    y = in_triton.rotary(x, cosine, sine)
    assert torch.equal(y, turned_by_transformers(x, cosine, sine))
    # The C kernels take heads of whole vectors; in float32 a C compiler contracts to FMA.
    if rows > 0 and d % 32 == 0 and dtype == BF16:
        assert torch.equal(y.cpu(), in_c.rotary(x.cpu(), cosine.cpu(), sine.cpu()))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "heads", "d"), [(3, 5, 32), (4, 14, 64), (2, 3, 6)])
def test_rotary_embedding_turned_back_is_its_gradient(rows, heads, d, dtype):
    cosine, sine = angles(rows, d, dtype)
    grad = normal(rows, heads, d, seed=4, dtype=dtype)
    leaf = normal(rows, heads, d, dtype=F32).double().requires_grad_()
    turned_by_transformers(leaf, cosine.double(), sine.double()).backward(grad.double())
    assert leaf.grad is not None
    ours = in_triton.rotary(grad, cosine, sine, back=True)
    tolerance = 1e-6 if dtype == F32 else 2e-2
    torch.testing.assert_close(ours, leaf.grad.to(dtype), rtol=tolerance, atol=tolerance)
    if d % 32 == 0 and dtype == BF16:
        by_c = in_c.rotary(grad.cpu(), cosine.cpu(), sine.cpu(), back=True)
        assert torch.equal(ours.cpu(), by_c)
