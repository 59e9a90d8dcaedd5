"""The C kernels are loaded once per process, and compiled before that once per machine."""

from __future__ import annotations

from lagrpo.backends.cpu import library
from lagrpo.backends.cpu.build import ISA, NoKernels, isa_level
from lagrpo.backends.cpu.panels import choose_products

_reason: str | None = None  # why there are no kernels, once that is known
_compiler = ""
_level = ""  # the instructions that the library was compiled for
_products: str | None = None  # what computes the products of bfloat16


def check_level() -> None:
    """Raise NoKernels where LAGRPO_CPU_ISA names no level of this processor's instructions, or another one than this
    process computes with."""
    level = isa_level()
    if library.is_loaded() and level != _level:
        raise NoKernels(f"this process computes with the instructions {_level}; for {ISA} = {level} start another one")


def why_not() -> str | None:
    """Load the kernels at the first call. None where they are loaded, else the reason."""
    global _reason, _compiler, _products, _level
    if not library.is_loaded() and _reason is None:
        try:
            _level, _compiler = isa_level(), library.load()
            _products = choose_products()
        except NoKernels as error:
            _reason = str(error)
    return _reason


def describe() -> str:
    return f"C kernels ({_compiler})"


def products() -> str | None:
    """What computes the forward products of bfloat16: AMX, AVX512-BF16 or vectors; None where none of these is right on
    this processor."""
    return _products
