"""The C kernels as a library: compiled once per machine by its C compiler, loaded once per process.

The cache directory has one library for each kind of machine. C sees tensors as addresses: the
caller keeps them alive until a call returns, contiguous if kernels.h says so, and on the CPU.

LAGRPO_CPU_ISA names the instructions that may be used, to see what another processor would compute:
native (all, the default), avx512_bf16 (all but AMX), avx512 (no bfloat16 products), avx2, or
baseline.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor

from lagrpo.machine import cache_directory, is_own

logger = logging.getLogger("lagrpo")

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.c")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-std=gnu11", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi", "-O3")
# Numbers in one vector of the kernels: vectors.h's LANES.
VECTOR = 16
# Seconds that the compiler may take.
DEADLINE = 300
ISA = "LAGRPO_CPU_ISA"


class Level(NamedTuple):
    """A level of instructions that the kernels may be compiled for.

    - `flags`: the compiler's flags
    - `needs`: the features that /proc/cpuinfo must list
    - `bf16`: True if kernels of this level may use the processor's bfloat16 products
    """

    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    bf16: bool = True


V3 = frozenset({"avx2", "fma", "bmi2", "f16c"})
V4 = V3 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
LEVELS = {
    "native": Level(("-march=native",)),
    "avx512_bf16": Level(("-march=native", *NO_AMX), V4 | {"avx512_bf16"}),
    "avx512": Level(("-march=x86-64-v4",), V4, bf16=False),
    "avx2": Level(("-march=x86-64-v3",), V3, bf16=False),
    "baseline": Level(("-march=x86-64",), bf16=False),
    # AMX's instructions in plain C, for tests; far too slow for anything else. -O1 halves the time
    # of the compiler.
    "emulated_tiles": Level(("-march=native", "-DEMULATED_TILES", "-O1")),
}


class NoKernels(RuntimeError):  # noqa: N818
    """The kernels are not available on this machine; the message is the reason."""


# The processor


def isa_level() -> str:
    """Returns the level that LAGRPO_CPU_ISA names.

    Raises NoKernels for an unknown name, and for a level that this processor lacks.
    """
    name = (os.environ.get(ISA) or "native").lower()
    if name not in LEVELS:
        raise NoKernels(f"{ISA} = {name!r} is not an instruction set: use {', '.join(LEVELS)}")
    missing = LEVELS[name].needs - cpu_flags()
    if missing:
        raise NoKernels(f"{ISA} = {name!r}: this processor lacks {', '.join(sorted(missing))}")
    return name


def cpu_flags() -> frozenset[str]:
    """Returns the processor's features by their names in /proc/cpuinfo; none on other systems."""
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        # The first is x86's name of the list, the second ARM's.
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


# Loading


def why_not() -> str | None:
    """Loads the kernels at the first call. Returns None, or the reason why there are none."""
    library, compiler_or_reason = _library()
    return compiler_or_reason if library is None else None


def describe() -> str:
    """Returns the name of the kernels, with their compiler."""
    _, compiler = _library()
    return f"C kernels ({compiler})"


@cache
def _library() -> tuple[Any, str]:
    """Returns the library and its compiler, or None and the reason why there is none."""
    try:
        return load_library()
    except NoKernels as error:
        return None, str(error)


def load_library() -> tuple[ctypes.CDLL, str]:
    """Returns the library, compiled unless the cache has it, and its compiler's version line.

    Raises NoKernels.
    """
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        raise NoKernels("they need Linux and a PyTorch built with OpenMP")
    if _openmp() is None:
        raise NoKernels("PyTorch's OpenMP is not GNU's, and two OpenMP libraries would conflict")
    flags = [*FLAGS, *_level_flags()]
    compiler = _compiler()
    version = _run([*compiler, "--version"]).partition("\n")[0]
    try:
        target = cache_directory() / "kernels" / f"{_fingerprint(compiler, version, flags)}.so"
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        _require_own(target.parent)
        if not target.is_file():
            # Processes that start together, as ranks do, wait for the one that compiles.
            with FileLock(target.with_suffix(".lock")):
                if not target.is_file():
                    logger.info("compiling the C kernels for this processor, once: %s", target)
                    _compile(compiler, flags, target)
        _require_own(target)
        library = ctypes.CDLL(str(target))
        # ctypes cuts results to 32 bits unless it knows their type.
        library.pack_bytes.restype = ctypes.c_int64
        return library, version
    except NoKernels:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        raise NoKernels(
            f"cannot save or load the library ({error}); set LAGRPO_CACHE to another directory"
        ) from error


def _require_own(path: Path) -> None:
    """Raises NoKernels if the path belongs to another user."""
    if not is_own(path):
        raise NoKernels(
            f"{path} belongs to another user; set LAGRPO_CACHE to a directory of your own"
        )


def _level_flags() -> list[str]:
    """Returns the compiler's flags for the level.

    Flags that turn off what the processor lacks anyway are left out, so that two levels with the
    same instructions share a library.
    """
    flags = LEVELS[isa_level()].flags
    if "amx_tile" in cpu_flags():
        return list(flags)
    return [flag for flag in flags if flag not in NO_AMX]


def _compiler() -> list[str]:
    """Returns the command of the C compiler: the user's ($CC), else gcc, else cc."""
    users_compiler = os.environ.get("CC")
    if users_compiler:
        return shlex.split(users_compiler)
    path = shutil.which("gcc") or shutil.which("cc")
    if path is None:
        raise NoKernels("no C compiler found (gcc, cc or $CC)")
    return [path]


def _fingerprint(compiler: list[str], version: str, flags: list[str]) -> str:
    """Returns a digest of everything that decides what the library computes and where it runs."""
    sources = [path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS)]
    # Of the first processor: the others are like it.
    processor = [
        line for line in _cpuinfo() if line.startswith(("flags", "Features", "model name"))
    ][:2]
    openmp = _openmp()
    # By its name: the library finds it by the name, in whichever environment PyTorch has loaded it.
    openmp_name = openmp.name if openmp is not None else ""
    parts = [
        *sources,
        *compiler,
        version,
        *flags,
        openmp_name,
        platform.machine(),
        *processor,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _openmp() -> Path | None:
    """Returns PyTorch's own OpenMP library; None if it has another one than GNU's."""
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


def _compile(compiler: list[str], flags: list[str], target: Path) -> None:
    """Compiles all files at once.

    The files have temporary names. The library gets its name when it is complete, so that no other
    process loads a part of it.
    """
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        library = Path(scratch) / target.name
        objects: list[str] = []
        commands: list[list[str]] = []
        for source in SOURCES:
            compiled = str(library.with_name(f"{source.stem}.o"))
            objects.append(compiled)
            commands.append([*compiler, *flags, "-c", "-o", compiled, str(source)])
        with ThreadPoolExecutor() as pool:
            # A list, so that the error of a compiler is raised.
            list(pool.map(_run, commands))
        _run([*compiler, *flags, "-o", str(library), *objects, str(_openmp()), "-lm"])
        library.replace(target)


def _run(command: list[str]) -> str:
    """Returns what a command of the compiler prints. Raises NoKernels with its first error."""
    try:
        completed = subprocess.run(
            command,
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=DEADLINE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} could not be run ({error})") from error
    except subprocess.CalledProcessError as error:
        error_lines = [line for line in error.stderr.splitlines() if "error" in line]
        reason = error_lines[0] if error_lines else error.stderr.strip()[:200]
        if not reason:
            reason = f"exit status {error.returncode}, no message"
        raise NoKernels(f"{command[0]} failed: {reason}") from error
    return completed.stdout


# Calling

Argument = Tensor | float | int | None


class Arguments(ctypes.Structure):
    """A struct of kernels.h, filled by the names of its fields; the others are 0 or NULL.

    The field `half` is 1 if a tensor is bfloat16.
    """

    def __init__(self, **values: Argument) -> None:
        half = False
        fields: dict[str, float | int | None] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                half = half or value.dtype == torch.bfloat16
                fields[name] = value.data_ptr()
            else:
                fields[name] = value
        # A struct that lacks the field gets a plain attribute of Python.
        super().__init__(**fields, half=half)


def struct(*, counts: str, pointers: str, floats: str = "", half: str = "half") -> type[Arguments]:
    """Returns the class of a struct of kernels.h, from the names of its fields.

    All structs have the same order: int64 numbers, pointers, floats, `half`. A struct without
    `half` is declared with half="".
    """
    fields: list[tuple[str, type]] = []
    fields += [(name, ctypes.c_int64) for name in counts.split()]
    fields += [(name, ctypes.c_void_p) for name in pointers.split()]
    fields += [(name, ctypes.c_float) for name in floats.split()]
    fields += [(name, ctypes.c_int) for name in half.split()]
    return type("Struct", (Arguments,), {"_fields_": fields})


def call(name: str, *arguments: Argument | Arguments) -> int:
    """Calls a function of the library.

    Tensors are passed as their addresses, structs by reference, int as int64, float as float, None
    as NULL.
    """
    library, _ = _library()
    function = getattr(library, name)
    return function(*map(_as_c, arguments))


def _as_c(value: Argument | Arguments) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, Arguments):
        return ctypes.byref(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    # A null pointer has the bits of 0.
    return ctypes.c_int64(value or 0)
