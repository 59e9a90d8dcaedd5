"""Log-probs of tokens by PyTorch's operations: chunks of a GPU compute what chunks of a CPU do."""

from __future__ import annotations

import pytest
import torch
from rounding import rounding
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lagrpo.model import logprobs
from lagrpo.model.logprobs import ON_GPU, Chunks, add_product, token_logp

VOCABULARY = 103
WIDTH = 32
ROWS = 41
TAU = 0.7


OF_LOGP = torch.linspace(-1, 1, ROWS)
OF_ENTROPY = torch.linspace(2, -1, ROWS)
"""The weights of log-probs and entropies in a loss."""


def head_and_hidden(dtype=torch.float32, bias=False):
    """A head, hidden states and tokens."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    # Tokens in another order than the rows, so that an index of the wrong kind shows.
    ids = torch.arange(ROWS) * 7 % VOCABULARY
    return head, hidden, ids


def gradients(dtype, sizes: Chunks | None, bias=False):
    """Log-probs, and the gradients of a weighted sum of them: of the hidden states, the weight and
    the bias."""
    head, hidden, ids = head_and_hidden(dtype, bias)
    if sizes is None:
        logits = hidden.double() @ head.weight.double().T
        if bias:
            logits = logits + head.bias.double()
        logp = (logits / TAU).log_softmax(-1)[torch.arange(ROWS), ids]
    else:
        logp = token_logp(hidden, head, ids, TAU, sizes=sizes)
    (logp * OF_LOGP).sum().backward()
    return [logp.detach(), hidden.grad, *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kept_rows", [0, 5], ids=["none kept", "5 rows kept"])
@pytest.mark.parametrize(
    ("softmax", "product"),
    [
        pytest.param(1, 1, id="a row at a time"),
        pytest.param(3, 10, id="four softmaxes for a product"),
        pytest.param(40, 40, id="a last chunk of one row"),
        pytest.param(100, 100, id="one chunk"),
    ],
)
def test_chunks_of_any_size_give_the_gradient_of_float64(
    monkeypatch, softmax, product, kept_rows, bias
):
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", kept_rows * VOCABULARY)
    sizes = Chunks(softmax * VOCABULARY, product * VOCABULARY, sums_in_product=True)
    in_chunks = gradients(torch.float32, sizes, bias)
    expected = gradients(torch.float64, None, bias)
    for ours, exact in zip(in_chunks, expected, strict=True):
        # The gradient of the weight adds ROWS terms; 16 roundings for each.
        bound = rounding(torch.float32, exact.abs().max().item(), 16 * ROWS)
        torch.testing.assert_close(ours.double(), exact.double(), rtol=0, atol=bound)


def weighted_entropies(hidden, weight, ids):
    """A sum of entropies and log-probs with weights of both signs, in float64."""
    logp = (hidden @ weight.T / TAU).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    of_token = logp[torch.arange(ROWS), ids]
    return (OF_ENTROPY * entropy + OF_LOGP * of_token).sum()


@pytest.mark.parametrize("kept_rows", [0, 5, ROWS], ids="{} kept".format)
@pytest.mark.parametrize("product", [1, 10, 100], ids="{} rows at a time".format)
def test_entropy_has_the_gradient_of_float64(monkeypatch, product, kept_rows):
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", kept_rows * VOCABULARY)
    sizes = Chunks(3 * VOCABULARY, product * VOCABULARY, sums_in_product=True)
    head, hidden, ids = head_and_hidden()
    entropy = torch.empty(ROWS)
    logp = token_logp(hidden, head, ids, TAU, entropy, sizes=sizes)
    (OF_ENTROPY * entropy + OF_LOGP * logp).sum().backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = head.weight.detach().double().requires_grad_()
    weighted_entropies(exact_hidden, exact_weight, ids).backward()
    for ours, exact in ((hidden, exact_hidden), (head.weight, exact_weight)):
        assert ours.grad is not None
        assert exact.grad is not None
        bound = rounding(torch.float32, exact.grad.abs().max().item(), 16 * ROWS)
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=0, atol=bound)


def test_gradient_of_the_entropy_is_its_finite_difference():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def entropy_of(logits):
        p = (logits / TAU).softmax(-1)
        return torch.special.entr(p).sum(-1)

    def gradient():
        """By the formula of logp_backward, in float64 but for its own roundings."""
        lse = (logits / TAU).logsumexp(-1).float()
        zeros, ones = torch.zeros(3), torch.ones(3)
        entropy = entropy_of(logits).float()
        ids = torch.zeros(3, dtype=torch.long)
        return logprobs.logp_backward(
            logits.clone(), ids, TAU, lse, zeros, entropy, ones, chunk=100
        )

    step = 1e-6
    for index in range(5):
        nudge = torch.zeros(5, dtype=torch.float64)
        nudge[index] = step
        difference = (entropy_of(logits + nudge) - entropy_of(logits - nudge)) / (2 * step)
        torch.testing.assert_close(gradient()[:, index], difference, rtol=0, atol=1e-6)


def test_loss_without_the_entropy_has_the_same_gradient_whether_it_is_computed_or_not():
    head, hidden, ids = head_and_hidden()
    gradients_of_hidden = []
    for entropy in (None, torch.empty(ROWS)):
        logp = token_logp(hidden, head, ids, TAU, entropy)
        gradients_of_hidden += torch.autograd.grad((OF_LOGP * logp).sum(), hidden)
    assert torch.equal(*gradients_of_hidden)


def test_product_is_added_without_rounding_it_to_bfloat16():
    total = torch.tensor([[2.0]])
    a = torch.tensor([[1.0, 2**-9]]).bfloat16()
    b = torch.tensor([[1.0], [1.0]]).bfloat16()
    assert (a @ b).item() == 1.0  # bfloat16 has 8 binary digits
    add_product(total, a, b)
    assert total.item() == 3 + 2**-9


class OperationNames(TorchDispatchMode):
    """Collects the names of the operations that are computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_backward_pass_adds_nothing_up_by_index():
    """On a GPU such a sum sorts the indices if its order must be fixed."""
    with OperationNames() as operations:
        gradients(torch.float32, ON_GPU)
    assert "aten::gather" in operations.names
    assert not {name for name in operations.names if "scatter" in name or "index_add" in name}
