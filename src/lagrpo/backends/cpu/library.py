"""The C kernels: loaded once per process, compiled before that once per machine, and how Python calls them.

C sees tensors as addresses: the caller keeps them alive, contiguous where kernels.h says so, and on the CPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lagrpo.backends.cpu.build import ISA, NoKernels, isa_level, load_library

VECTOR = 16  # numbers in one vector of the kernels

_library: Any = None
_reason: str | None = None  # why there is none, once that is known
_compiler = _level = ""  # what compiled it, for which instructions


def why_not() -> str | None:
    """Load the kernels at the first call. None where they are loaded, else the reason."""
    global _library, _reason, _compiler, _level
    if _library is None and _reason is None:
        try:
            _level = isa_level()
            _library, _compiler = load_library()
            _library.pack_bytes.restype = ctypes.c_int64
        except NoKernels as error:
            _reason = str(error)
    return _reason


def check_level() -> None:
    """Raise NoKernels where LAGRPO_CPU_ISA names no level of this processor, or another one than this process has."""
    level = isa_level()
    if _library is not None and level != _level:
        raise NoKernels(f"this process computes with the instructions {_level}; for {ISA} = {level} start another one")


def describe() -> str:
    return f"C kernels ({_compiler})"


def call(name: str, *arguments: Tensor | Arguments | float | int | None) -> int:
    """Call a function of the library: tensors go as their addresses, structs by reference, int as int64."""
    return getattr(_library, name)(*map(_as_c, arguments))


def _as_c(value: Tensor | Arguments | float | int | None) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, Arguments):
        return ctypes.byref(value)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value or 0)  # None: a null pointer


class Arguments(ctypes.Structure):
    """A struct of kernels.h, filled by the names of its fields, others 0 or NULL. `half`: a tensor is bfloat16."""

    def __init__(self, **values: Tensor | float | int | None) -> None:
        half = any(isinstance(v, Tensor) and v.dtype == torch.bfloat16 for v in values.values())
        given = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in values.items()}
        super().__init__(**given, half=half)


def struct(counts: str, pointers: str, floats: str = "", half: str = "half") -> type[Arguments]:
    """A struct of kernels.h by the names of its fields: all structs keep this order."""
    kinds = ((counts, ctypes.c_int64), (pointers, ctypes.c_void_p), (floats, ctypes.c_float), (half, ctypes.c_int))
    return type("Struct", (Arguments,), {"_fields_": [(name, kind) for names, kind in kinds for name in names.split()]})
