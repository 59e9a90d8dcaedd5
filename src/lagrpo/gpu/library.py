"""Checks that Triton's kernels run here."""

from __future__ import annotations

from functools import cache

import torch


@cache
def why_not(dtype: torch.dtype = torch.float32) -> str | None:
    """Returns None if a kernel of this package runs on the GPU in a dtype, else the reason.

    Triton compiles a small C program that launches a kernel. It needs a C compiler and Python.h.
    """
    try:
        from lagrpo.gpu.softmax import token_logp

        logits = torch.zeros(1, 1, device="cuda", dtype=dtype)
        token_logp(logits, torch.zeros(1, dtype=torch.long, device="cuda"), tau=1.0)
        # A launch does not wait for the kernel: errors of the kernel itself come here.
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever fails, PyTorch computes instead
        message = str(error).strip() or "no message"
        return f"{type(error).__name__}: {message.splitlines()[0]}"
    return None
