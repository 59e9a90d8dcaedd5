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


def gradients(dtype, sizes: Chunks | None, bias=False):
    """Log-probs, and the gradients of a weighted sum of them: of the hidden states, the weight and
    the bias."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    # Tokens in another order than the rows, so that an index of the wrong kind shows.
    ids = torch.arange(ROWS) * 7 % VOCABULARY
    if sizes is None:
        logits = hidden.double() @ head.weight.double().T
        if bias:
            logits = logits + head.bias.double()
        logp = (logits / TAU).log_softmax(-1)[torch.arange(ROWS), ids]
    else:
        logp = token_logp(hidden, head, ids, TAU, sizes=sizes)
    (logp * torch.linspace(-1, 1, ROWS)).sum().backward()
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
