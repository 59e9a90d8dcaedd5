"""Products whose bits for a row do not depend on the rows that are computed with it.

The trainer multiplies whole packed rows, the sampler one token of each sequence. If each row gets
the same bits in both, the importance ratio after a weight sync is exactly 1, a run that is killed
in the middle of sampling resumes to the bit, and completions do not depend on the number of ranks.

Norms, activations, rotary embedding and softmax have this property already (layers.py, softmax.py).
For products cuBLAS chooses a kernel by the number of rows. One that splits the sum of an output
into parts (split-K) adds in another order. Without split-K the kernels that it chooses on Hopper
GPUs added in the same order wherever we looked: none of 49,097 log-probs of two models differed
between trainer and sampler (`probe_kernels.py agree`). NVIDIA does not promise it, so a model's own
products are tried before lagrpo relies on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lagrpo.machine import set_own_variable

# The first rows of a large product are computed again alone. Every product on a GPU has at least 16
# rows (cpu/autograd.py).
ROW_COUNTS = (16, 32, 128, 1000)
# The large product has this many rows. For the head of a model there are fewer, so that the result
# takes at most 1 GiB.
MOST_ROWS = 16_384
MOST_NUMBERS = 1 << 29


def has_exact_products(device: torch.device, dtype: torch.dtype) -> bool:
    """True if products on a device can be made independent of other rows."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or dtype != torch.bfloat16:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == 9


def forbid_split_k() -> None:
    """Lets this process multiply by cuBLASLt without split-K.

    Call it before the first product: the libraries read these variables when they start. vLLM does
    the same on Hopper GPUs for its batch-invariant mode.
    """
    set_own_variable("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_own_variable("CUBLASLT_WORKSPACE_SIZE", "1")
    matmul: Any = torch.backends.cuda.matmul
    # The second value forbids split-K.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    with _without_stderr():
        torch.backends.cuda.preferred_blas_library("cublaslt")


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drops what C++ prints: PyTorch warns once that this choice is experimental."""
    stderr = os.dup(2)
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null_device)


def rows_are_independent(model: nn.Module, device: torch.device) -> bool:
    """True if a few rows get the bits that they get among many, in products of a model's sizes."""
    products: set[_Product] = set()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            outputs, inputs = parameter.shape
            products.add(_Product(outputs, inputs, parameter.dtype))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            # Another kernel may add a bias.
            outputs, inputs = module.weight.shape
            products.add(_Product(outputs, inputs, module.weight.dtype, has_bias=True))
    return all(_is_exact(product, device) for product in products)


class _Product(NamedTuple):
    """The size of a linear layer's product."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    has_bias: bool = False


@cache
@torch.no_grad()
def _is_exact(product: _Product, device: torch.device) -> bool:
    """Tries a product. Which kernel computes it depends on its size alone.

    The terms of each sum come in pairs that cancel, in a random order. So a sum is nothing but
    rounding, and another order of its terms gives other bits almost always.
    """
    outputs, inputs, dtype, has_bias = product
    most_rows = min(MOST_ROWS, MOST_NUMBERS // outputs)
    rng = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=rng, device=device, dtype=dtype)
    x = torch.randn(most_rows, inputs, generator=rng, device=device, dtype=dtype)
    order = torch.randperm(inputs, generator=rng, device=device)
    half = inputs // 2
    first, second = order[:half], order[half : 2 * half]
    weight[:, second] = -weight[:, first]
    x[:, second] = x[:, first]
    if inputs % 2 == 1:
        x[:, order[-1]] = 0
    bias = torch.zeros(outputs, device=device, dtype=dtype) if has_bias else None
    all_rows = F.linear(x, weight, bias)
    return all(
        torch.equal(F.linear(x[:count], weight, bias), all_rows[:count])
        for count in ROW_COUNTS
        if count < most_rows
    )
