"""Products whose bits for a row do not depend on the rows that are computed with it.

The trainer multiplies whole packed rows, the sampler one token of each sequence. If each row gets
the same bits in both, the importance ratio after a weight sync is exactly 1, a run that is killed
in the middle of sampling resumes to the bit, and completions do not depend on the number of ranks.

Norms, activations, rotary embedding and softmax have this property already (layers.py, softmax.py).
For products cuBLAS chooses a kernel by the number of rows. Without split-K, which cuts the sum of
an output into parts, the kernels that it chooses may still add in different orders: NVIDIA promises
nothing. So a GPU has to show it: `python benchmarks/probe_kernels.py exact`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

# To be set once `probe_kernels.py exact` has run on such a GPU and found no log-prob of the trainer
# that differs from the sampler's. It has not run yet.
EXACT_ON_HOPPER = False


def has_exact_products(device: torch.device, dtype: torch.dtype) -> bool:
    """True if products on a device have been shown to be independent of other rows."""
    if not EXACT_ON_HOPPER or device.type != "cuda" or dtype != torch.bfloat16:
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
    torch.backends.cuda.preferred_blas_library("cublaslt")
