"""What a run says when its memory does not suffice: where it was, and which setting to lower."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lagrpo.training.observers import Observer

SIGNS = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""By which RuntimeErrors of PyTorch say that there was no memory, where they are not a torch.OutOfMemoryError."""
LEARNING = (
    "lower optimizer.micro_batch_tokens, which cannot change the gradient, or set optimizer.activation_checkpointing = "
    "true; on a GPU optimizer.offload_moments, too"
)
SAMPLING = "lower sampling.max_num_seqs, or sampling.max_tokens"
LOADING = "take a smaller model, or model.dtype = 'bfloat16'"
WHAT_TO_DO = {"loading": LOADING, "sampling": SAMPLING, "evaluation": SAMPLING, "weight sync": SAMPLING}


class NoMemoryError(MemoryError):
    """The memory does not suffice; the message says where, and which setting to lower."""


class Place(Observer):
    """Keeps what a run is doing."""

    def __init__(self) -> None:
        self.now = "start"

    def phase(self, name: str) -> None:
        self.now = name

    def at(self, batches: int) -> str:
        """Where a run with so many finished batches is: "batch 3, learning"."""
        return self.now if self.now.startswith("evaluation") else f"batch {batches + 1}, {self.now}"


@contextmanager
def explained(where: Callable[[], str], remedies: dict[str, str] = WHAT_TO_DO) -> Iterator[None]:
    """Turn an error for want of memory inside into a NoMemoryError. `where()` says what was being done; the remedy is
    the one whose key it has in it, that of learning where it has none."""
    try:
        yield
    except NoMemoryError:
        raise
    except (MemoryError, RuntimeError, OSError) as error:
        if not lacks_memory(error):
            raise
        place = where()
        remedy = next((text for key, text in remedies.items() if key in place), LEARNING)
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise NoMemoryError(f"out of memory ({place}): {remedy}. {said}") from error


def lacks_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)
