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
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Rows of products that are compared with the same rows of a larger product. Decoding steps have
# multiples of 16 rows, packed rows and prompts have any number.
ROW_COUNTS = (16, 128, 1000)
# The larger product has so many rows, or fewer if the numbers of its result are too many: that of
# the head of a model takes 1 GiB.
MOST_ROWS = 16_384
MOST_NUMBERS = 1 << 29


def has_exact_products(device: torch.device, dtype: torch.dtype) -> bool:
    """True if products on a device can be made independent of other rows."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == 9


def forbid_split_k() -> None:
    """Lets this process multiply by cuBLASLt without split-K.

    Call it before the first product: the libraries read these variables when they start. vLLM does
    the same on Hopper GPUs for its batch-invariant mode.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    matmul: Any = torch.backends.cuda.matmul
    # The second value forbids split-K.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    with _without_stderr():
        torch.backends.cuda.preferred_blas_library("cublaslt")


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drops what C++ prints: PyTorch warns once that this choice is experimental."""
    stderr = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def rows_are_independent(model: nn.Module, device: torch.device) -> bool:
    """True if a few rows get the bits that they get among many, in products of a model's sizes."""
    sizes = {(*p.shape, p.dtype) for p in model.parameters() if p.dim() == 2}
    return all(_product_is_exact(*size, device) for size in sizes)


@cache
@torch.no_grad()
def _product_is_exact(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Tries a product with random numbers: which kernel computes it depends on its size alone."""
    most_rows = min(MOST_ROWS, MOST_NUMBERS // outputs)
    rng = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=rng, device=device).to(dtype)
    x = torch.randn(most_rows, inputs, generator=rng, device=device).to(dtype)
    all_rows = F.linear(x, weight)
    return all(
        torch.equal(F.linear(x[:count], weight), all_rows[:count])
        for count in ROW_COUNTS
        if count < most_rows
    )
