"""Out of memory: where the run was, and which setting to lower."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

SIGNS = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How PyTorch's RuntimeErrors say that memory ran out, if they are not a torch.OutOfMemoryError."""
LEARNING = (
    "lower optimizer.micro_batch_tokens, which cannot change the gradient, or set optimizer.gradient_checkpointing = "
    "true; on a GPU optimizer.offload_optimizer, too"
)
SAMPLING = "lower rollout.max_num_seqs, or rollout.max_completion_length"
REMEDIES = {
    "loading": "take a smaller model, or model.dtype = 'bfloat16'",
    **dict.fromkeys(("sampling", "evaluation", "weight sync"), SAMPLING),
}


class NoMemoryError(MemoryError):
    """There was not enough memory; the message says where, and which setting to lower."""


@contextmanager
def explained(where: Callable[[], str], remedies: Mapping[str, str] = REMEDIES) -> Iterator[None]:
    """Turn an error for lack of memory inside into a NoMemoryError. `where()` says what was being done; the remedy is
    the first whose key it contains, else the one for learning."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        lacks = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)
        if isinstance(error, NoMemoryError) or not (lacks or getattr(error, "errno", None) == errno.ENOMEM):
            raise
        place = where()
        remedy = next((text for key, text in remedies.items() if key in place), LEARNING)
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise NoMemoryError(f"out of memory ({place}): {remedy}. {said}") from error
