"""The Triton kernels of the softmax give what float64, PyTorch's operations and the C kernels give.

On a GPU the kernels are compiled; elsewhere Triton's interpreter runs them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE
from torch import nn

from lagrpo.cpu import kernels as in_c
from lagrpo.gpu import softmax as in_triton
from lagrpo.gpu.softmax import BLOCK
from lagrpo.model import logprobs
from lagrpo.model.logprobs import ON_CPU, Chunks, SoftmaxKernels, token_logp

pytestmark = [
    pytest.mark.triton,
    # The interpreter computes with NumPy, which warns of infinite numbers.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

F32, BF16 = torch.float32, torch.bfloat16
# Log-probs and log-sum-exps of up to 150,000 logits of about 20: float32 has 24 binary digits, and
# the sum has a depth of about 40 roundings.
CLOSE: dict[str, Any] = {"rtol": 2e-6, "atol": 4e-6}
SIZES = [
    pytest.param(3, 7, 1.0, id="a few tokens"),
    pytest.param(2, BLOCK, 0.7, id="one block"),
    pytest.param(3, BLOCK + 1, 1.0, id="one block and a token"),
    pytest.param(2, 10_001, 1.3, id="three blocks"),
    pytest.param(1, 151_936, 1.0, id="Qwen's vocabulary"),
    pytest.param(0, 100, 1.0, id="no rows"),
]


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = F32):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(DEVICE, dtype)


def token_ids(rows: int, vocabulary: int):
    rng = torch.Generator().manual_seed(7)
    return torch.randint(0, vocabulary, (rows,), generator=rng).to(DEVICE)


def exact_log_softmax(logits, tau: float):
    return (logits.double() / tau).log_softmax(-1)


# Log-probs


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "vocabulary", "tau"), SIZES)
def test_log_probs_and_entropy_equal_those_of_float64(rows, vocabulary, tau, dtype):
    logits = normal(rows, vocabulary, scale=4, dtype=dtype)
    tokens = token_ids(rows, vocabulary)
    entropy = torch.empty(rows, device=DEVICE)
    logp, log_sum_exp = in_triton.token_logp(logits, tokens, tau, entropy)
    exact = exact_log_softmax(logits, tau)
    torch.testing.assert_close(logp, exact.gather(1, tokens[:, None])[:, 0].float(), **CLOSE)
    exact_sum = (logits.double() / tau).logsumexp(-1).float()
    torch.testing.assert_close(log_sum_exp, exact_sum, **CLOSE)
    exact_entropy = -(exact.exp() * exact).sum(-1).float()
    torch.testing.assert_close(entropy, exact_entropy, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "vocabulary", "tau"), SIZES[:-1])
def test_log_probs_equal_those_of_pytorch_and_c(rows, vocabulary, tau, dtype):
    logits = normal(rows, vocabulary, scale=4, dtype=dtype)
    tokens = token_ids(rows, vocabulary)
    ours = in_triton.token_logp(logits, tokens, tau)
    by_pytorch = logprobs.logp_forward(logits, tokens, tau, None, ON_CPU.softmax)
    by_c = in_c.token_logp(logits.cpu(), tokens.cpu(), tau)
    for other in (by_pytorch, by_c):
        for our_values, other_values in zip(ours, other, strict=True):
            torch.testing.assert_close(our_values.cpu(), other_values.cpu(), **CLOSE)


def test_log_probs_have_the_same_bits_with_and_without_entropy():
    logits, tokens = normal(3, 10_001, scale=4), token_ids(3, 10_001)
    entropy = torch.empty(3, device=DEVICE)
    with_entropy = in_triton.token_logp(logits, tokens, 1.3, entropy)
    without = in_triton.token_logp(logits, tokens, 1.3)
    assert torch.equal(with_entropy[0], without[0])
    assert torch.equal(with_entropy[1], without[1])


def test_log_probs_of_a_row_do_not_depend_on_the_rows_around_it():
    logits, tokens = normal(5, 10_001, scale=4), token_ids(5, 10_001)
    together = in_triton.token_logp(logits, tokens, 1.0)
    alone = in_triton.token_logp(logits[3:4], tokens[3:4], 1.0)
    assert torch.equal(alone[0], together[0][3:4])
    assert torch.equal(alone[1], together[1][3:4])


# The gradient of logits


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # e^x from 2^x has a relative error of about |x| · 2^-24.
        pytest.param(F32, 2e-5, id="float32"),
        # The result is rounded to 8 binary digits.
        pytest.param(BF16, 2**-8, id="bfloat16"),
    ],
)
@pytest.mark.parametrize(("rows", "vocabulary", "tau"), [SIZES[0], SIZES[2], SIZES[3], SIZES[5]])
def test_gradient_of_logits_is_onehot_minus_softmax(rows, vocabulary, tau, dtype, tolerance):
    logits = normal(rows, vocabulary, scale=4, dtype=dtype)
    tokens, grad = token_ids(rows, vocabulary), normal(rows, seed=5)
    log_sum_exp = in_triton.token_logp(logits, tokens, tau)[1]
    p = exact_log_softmax(logits, tau).exp()
    expected = (F.one_hot(tokens, vocabulary).double() - p) * (grad.double() / tau)[:, None]
    result = in_triton.token_logp_backward(logits, tokens, tau, log_sum_exp, grad)
    assert result is logits
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param(F32, 2e-5, id="float32"), pytest.param(BF16, 2**-8, id="bfloat16")],
)
@pytest.mark.parametrize(("rows", "vocabulary", "tau"), [SIZES[0], SIZES[2], SIZES[3], SIZES[5]])
def test_gradient_of_logits_has_the_gradient_of_the_entropy(
    rows, vocabulary, tau, dtype, tolerance
):
    logits = normal(rows, vocabulary, scale=4, dtype=dtype)
    logits[:, vocabulary // 2] = -math.inf
    tokens, grad, grad_entropy = token_ids(rows, vocabulary), normal(rows, seed=5), normal(rows)
    entropy = torch.empty(rows, device=DEVICE)
    log_sum_exp = in_triton.token_logp(logits, tokens, tau, entropy)[1]
    by_c = in_c.token_logp_backward(
        logits.clone().cpu(),
        tokens.cpu(),
        tau,
        log_sum_exp.cpu(),
        grad.cpu(),
        entropy.cpu(),
        grad_entropy.cpu(),
    )
    logp = exact_log_softmax(logits, tau)
    p = logp.exp()
    slope = torch.where(p == 0, 0.0, p * (logp + torch.special.entr(p).sum(-1, keepdim=True)))
    expected = (F.one_hot(tokens, vocabulary).double() - p) * (grad.double() / tau)[:, None]
    expected -= slope * (grad_entropy.double() / tau)[:, None]
    result = in_triton.token_logp_backward(
        logits, tokens, tau, log_sum_exp, grad, entropy, grad_entropy
    )
    # The terms may cancel: the tolerance is relative to the largest number.
    largest = float(expected.abs().max()) if rows else 0.0
    close: dict[str, Any] = {"rtol": tolerance, "atol": 1e-7 + tolerance * largest}
    torch.testing.assert_close(result.double(), expected, **close)
    torch.testing.assert_close(result.cpu(), by_c, **close)


@pytest.mark.parametrize("num_kept", [0, 5], ids=["none kept", "5 rows kept"])
def test_head_and_softmax_have_the_gradient_of_pytorch(monkeypatch, num_kept):
    """41 rows in chunks of 10, with the entropy in the loss."""
    rows, width, vocabulary, tau = 41, 32, 103, 0.7
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", num_kept * vocabulary)
    sizes = Chunks(softmax=10 * vocabulary, product=10 * vocabulary, sums_in_product=True)
    head = nn.Linear(width, vocabulary).to(DEVICE)
    hidden = normal(rows, width).requires_grad_()
    tokens = token_ids(rows, vocabulary)
    choices: list[SoftmaxKernels | None] = [in_triton, None]
    results = []
    for softmax in choices:
        entropy = torch.empty(rows, device=DEVICE)
        logp = token_logp(hidden, head, tokens, tau, entropy, softmax, sizes=sizes)
        loss = (logp * torch.linspace(-1, 1, rows, device=DEVICE) + entropy / rows).sum()
        gradients = torch.autograd.grad(loss, (hidden, head.weight, head.bias))
        results.append([logp.detach(), *gradients])
    for ours, by_pytorch in zip(*results, strict=True):
        torch.testing.assert_close(ours, by_pytorch, rtol=1e-5, atol=1e-5)


# Logits that are infinite, huge or NaN


@pytest.mark.parametrize(
    ("logits", "token", "log_sum_exp", "entropy"),
    [
        pytest.param({(0, BLOCK): -math.inf}, BLOCK, math.log(BLOCK), math.log(BLOCK), id="block"),
        pytest.param({(1, None): -math.inf}, 0, 0.0, 0.0, id="one token possible"),
        pytest.param({(0, 1): 2.0**127}, 0, 2.0**127, 0.0, id="one token certain"),
        pytest.param(
            {(0, BLOCK): -3.4028234663852886e38}, BLOCK, math.log(BLOCK), None, id="least"
        ),
        pytest.param({(5, 6): math.inf}, 5, math.nan, math.nan, id="infinity"),
        pytest.param({(5, 6): math.nan}, 5, math.nan, math.nan, id="NaN"),
    ],
)
def test_strange_logits(logits, token, log_sum_exp, entropy):
    """Two blocks of logits 0, but for those that are given: from first to last."""
    row = torch.zeros(1, 2 * BLOCK, device=DEVICE)
    for (first, stop), value in logits.items():
        row[0, first:stop] = value
    tokens, entropies = torch.tensor([token], device=DEVICE), torch.empty(1, device=DEVICE)
    logp, log_sums = in_triton.token_logp(row, tokens, 1.0, entropies)
    expected = float(row[0, token]) - log_sum_exp
    assert float(log_sums) == pytest.approx(log_sum_exp, rel=1e-6, abs=1e-6, nan_ok=True)
    assert float(logp) == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)
    if entropy is not None:
        assert float(entropies) == pytest.approx(entropy, rel=1e-6, abs=1e-6, nan_ok=True)


def test_log_sum_exp_is_minus_infinity_if_no_token_is_possible():
    logits = torch.full((1, 100), -math.inf, device=DEVICE)
    logp, log_sum_exp = in_triton.token_logp(logits, torch.tensor([3], device=DEVICE), 1.0)
    assert float(log_sum_exp) == -math.inf
    assert logp.isnan().all()


# Sampling


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("vocabulary", "tau"), [(5, 1.0), (BLOCK, 0.7), (BLOCK + 1, 1.0), (20_011, 1.3)]
)
def test_sampled_tokens_hold_their_uniform_number_in_the_cdf(vocabulary, tau, dtype):
    rows = 24
    logits = normal(rows, vocabulary, scale=2, dtype=dtype)
    logits[:, vocabulary // 2] = -math.inf
    rng = torch.Generator().manual_seed(1)
    uniform = torch.rand(rows, dtype=torch.float64, generator=rng)
    uniform[0] = 0.0
    # The largest float64 below 1.
    uniform[1] = 1 - 2**-53
    uniform = uniform.to(DEVICE)
    tokens, logp = in_triton.sample_tokens(logits, tau, uniform)

    assert torch.equal(logp, in_triton.token_logp(logits, tokens, tau)[0])
    cdf = exact_log_softmax(logits, tau).exp().cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    end = cdf.gather(1, tokens[:, None])[:, 0]
    start = torch.where(tokens > 0, cdf.gather(1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    assert (uniform >= start - 1e-6).all()
    assert (uniform <= end + 1e-6).all()
    # A uniform number within rounding of an edge may fall to the other side.
    by_pytorch = logprobs.sample_tokens(logits, tau, uniform)[0]
    by_c = in_c.sample_tokens(logits.cpu(), tau, uniform.cpu())[0]
    assert int((tokens != by_pytorch).sum()) <= 1
    assert int((tokens.cpu() != by_c).sum()) <= 1


def test_uniform_numbers_beside_each_edge_sample_the_tokens_beside_it():
    vocabulary = 9
    logits = normal(1, vocabulary, scale=2).expand(2 * (vocabulary - 1), vocabulary).contiguous()
    edges = exact_log_softmax(logits[:1], 1.0).exp().cumsum(-1)[0, :-1]
    # Farther from an edge than the rounding of sums in float32, nearer than any other edge.
    uniform = torch.cat([edges - 3e-7, edges + 3e-7])
    tokens = in_triton.sample_tokens(logits, 1.0, uniform)[0]
    lower, upper = torch.arange(vocabulary - 1), torch.arange(1, vocabulary)
    assert torch.equal(tokens.cpu(), torch.cat([lower, upper]))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["least", "largest"])
def test_no_impossible_token_is_sampled(number):
    logits = normal(2, 2 * BLOCK + 1, scale=3)
    logits[0, :BLOCK] = -math.inf
    logits[0, 2 * BLOCK :] = -math.inf
    logits[1, :] = -math.inf
    logits[1, 2 * BLOCK] = 2.0  # the only token
    uniform = torch.full((2,), number, dtype=torch.float64, device=DEVICE)
    tokens = in_triton.sample_tokens(logits, 1.0, uniform)[0].tolist()
    assert tokens == [BLOCK if number == 0.0 else 2 * BLOCK - 1, 2 * BLOCK]


def test_no_rows_give_no_tokens():
    tokens, logp = in_triton.sample_tokens(
        torch.empty(0, 9, device=DEVICE), 1.0, torch.empty(0, dtype=torch.float64, device=DEVICE)
    )
    assert (len(tokens), len(logp)) == (0, 0)
