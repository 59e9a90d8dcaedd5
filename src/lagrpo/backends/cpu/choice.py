"""Which computes in this process: the C kernels or PyTorch's own operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lagrpo.backends.cpu import library
from lagrpo.backends.cpu.build import ISA, NoKernels, isa_level
from lagrpo.backends.cpu.library import VECTOR
from lagrpo.backends.cpu.panels import choose_products

Choice = Literal["auto", "c", "torch"]

_choice: Choice = "auto"
_reason: str | None = None  # why there are no kernels, once that is known
_compiler = ""
_level = ""  # the instructions that the library was compiled for
_products: str | None = None  # what computes the products of bfloat16


def select(choice: Choice, device: str = "cpu", say: Callable[[str], None] | None = None) -> None:
    """Choose for this process: the kernels where they are available (auto), the kernels or an error (c), or PyTorch's
    plain operations alone (torch; on a GPU also without FlexAttention and CUDA graphs). `say` is told of a compilation
    (default: standard error).

    Raises:
        NoKernels: "c" on a machine where the kernels are not available, or for another device than the CPU.
    """
    global _choice
    level = isa_level()  # a wrong LAGRPO_CPU_ISA is an error whatever computes
    if library.is_loaded() and level != _level:
        raise NoKernels(f"this process computes with the instructions {_level}; for {ISA} = {level} start another one")
    if choice == "c" and device != "cpu":
        raise NoKernels(f"the kernels are for the CPU, the model is on {device}")
    if choice == "c" and not _load(say):
        raise NoKernels(f"the kernels are not available: {_reason}")
    _choice = choice


def chosen() -> Choice:
    """What `select` chose for this process."""
    return _choice


def describe() -> str:
    """Say what computes besides PyTorch's matrix products in this process; compiles the kernels if they are to run."""
    if _choice == "torch":
        return "PyTorch (as chosen)"
    return f"C kernels ({_compiler})" if _load() else f"PyTorch (no C kernels: {_reason})"


def run_on(*tensors: Tensor) -> bool:
    """Whether the kernels run and take these tensors: on the CPU, all float32 or all bfloat16."""
    first = tensors[0]
    if first.dtype not in (torch.float32, torch.bfloat16) or _choice == "torch":
        return False
    return all(t.device.type == "cpu" and t.dtype == first.dtype for t in tensors) and _load()


def attend_on(query: Tensor, *others: Tensor) -> bool:
    """Whether the kernels attend with these: [rows, heads, D] each."""
    return query.shape[-1] % VECTOR == 0 and run_on(query, *others)


def products() -> str | None:
    """What computes the forward products of bfloat16 in this process: AMX, AVX512-BF16, vectors (bfloat16 without
    instructions for it); None where PyTorch does."""
    return _products if _choice != "torch" and _load() else None


def _load(say: Callable[[str], None] | None = None) -> bool:
    """Load the kernels at their first use; whether they are there."""
    global _reason, _compiler, _products, _level
    if not library.is_loaded() and _reason is None:
        say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        try:
            _level = isa_level()
            _compiler = library.load(say)
            _products = choose_products(say)
        except NoKernels as error:
            _reason = str(error)
    return library.is_loaded()
