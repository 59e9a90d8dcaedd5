"""The questions whether Triton's kernels are to be used here, and whether they run."""

from __future__ import annotations

import os
from functools import cache

import torch

# To be set once `benchmarks/gpu_session.py` has run on a GPU: its tests pass, and an update with
# the kernels is faster. They have run in Triton's interpreter on a CPU so far.
MEASURED_ON_A_GPU = False


def is_default() -> bool:
    """True if a model on a GPU takes the Triton kernels unless something else is chosen."""
    return MEASURED_ON_A_GPU or os.environ.get("LAGRPO_KERNELS") == "triton"


@cache
def why_not() -> str | None:
    """Returns None if a kernel of this package runs on the GPU, else the reason.

    Triton compiles a small C program that launches a kernel. It needs a C compiler and Python.h.
    """
    try:
        from lagrpo.gpu.softmax import token_logp

        logits = torch.zeros(1, 1, device="cuda")
        token_logp(logits, torch.zeros(1, dtype=torch.long, device="cuda"), tau=1.0)
        # A launch does not wait for the kernel: errors of the kernel itself come here.
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever fails, PyTorch computes instead
        message = str(error).strip() or "no message"
        return f"{type(error).__name__}: {message.splitlines()[0]}"
    return None
