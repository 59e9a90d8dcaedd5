"""The C kernels as a library: compiled once per machine with the C compiler that is here, loaded once per process.

The cache directory has one for each kind of machine. C sees tensors as addresses: the caller keeps them alive,
contiguous if kernels.h says so, and on the CPU.

LAGRPO_CPU_ISA names the instructions that may be used, to see what another processor would compute: native (all, the
default), avx512_bf16 (all but AMX), avx512 (no bfloat16 products), avx2, or baseline."""

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
from torch import Tensor

from lagrpo.machine import cache_directory

logger = logging.getLogger("lagrpo")

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.c")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-std=gnu11", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi", "-O3")
VECTOR = 16  # numbers in one vector of the kernels
DEADLINE = 300  # seconds for the compiler
ISA = "LAGRPO_CPU_ISA"


class Level(NamedTuple):
    """The compiler's flags, what /proc/cpuinfo must list, and whether the level has bfloat16 products."""

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
    "emulated_tiles": Level(("-march=native", "-DEMULATED_TILES")),
}
"""emulated_tiles: AMX's instructions in plain C, for tests; far too slow for anything else."""


class NoKernels(RuntimeError):  # noqa: N818
    """The kernels are not available on this machine; the message is the reason."""


def isa_level() -> str:
    """The level that LAGRPO_CPU_ISA names. Raises NoKernels for an unknown name, or a level above this processor."""
    name = (os.environ.get(ISA) or "native").lower()
    if name not in LEVELS:
        raise NoKernels(f"{ISA} = {name!r} is not an instruction set: use {', '.join(LEVELS)}")
    if missing := LEVELS[name].needs - cpu_flags():
        raise NoKernels(f"{ISA} = {name!r}: this processor lacks {', '.join(sorted(missing))}")
    return name


def cpu_flags() -> frozenset[str]:
    """The processor's features by their names in /proc/cpuinfo (x86: flags, ARM: Features); none elsewhere."""
    lines = (line.partition(":") for line in _cpuinfo())
    return frozenset(
        next(
            (value.split() for name, _, value in lines if name.strip() in ("flags", "Features")), ()
        )
    )


def why_not() -> str | None:
    """Load the kernels at the first call. None if they are loaded, else the reason."""
    library, said = _library()
    return said if library is None else None


def describe() -> str:
    return f"C kernels ({_library()[1]})"


@cache
def _library() -> tuple[Any, str]:
    """The library and its compiler, or None and why there is none."""
    try:
        return load_library()
    except NoKernels as error:
        return None, str(error)


def load_library() -> tuple[ctypes.CDLL, str]:
    """The library, compiled unless the cache has it, and the name of its compiler. Raises NoKernels."""
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        raise NoKernels("they need Linux and a PyTorch built with OpenMP")
    if _openmp() is None:
        raise NoKernels("PyTorch's OpenMP is not GNU's, and two OpenMP libraries would conflict")
    # flags without what this processor lacks anyway, so that two levels with the same instructions share a library
    own = (
        flag
        for flag in LEVELS[isa_level()].flags
        if flag not in NO_AMX or "amx_tile" in cpu_flags()
    )
    flags, compiler = (*FLAGS, *own), _compiler()
    version = _run([*compiler, "--version"]).partition("\n")[0]
    try:
        target = cache_directory() / "kernels" / f"{_fingerprint(compiler, version, flags)}.so"
        if not target.is_file():
            logger.info("compiling the C kernels for this processor, once: %s", target)
            _compile(compiler, flags, target)
        library = ctypes.CDLL(str(target))
        library.pack_bytes.restype = ctypes.c_int64
        return library, version
    except NoKernels:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        raise NoKernels(
            f"cannot save or load the library ({error}); set LAGRPO_CACHE to another directory"
        ) from error


def _compiler() -> list[str]:
    if users := os.environ.get("CC"):
        return shlex.split(users)
    if found := shutil.which("gcc") or shutil.which("cc"):
        return [found]
    raise NoKernels("no C compiler found (gcc, cc or $CC)")


def _fingerprint(compiler: list[str], version: str, flags: tuple[str, ...]) -> str:
    sources = (path.read_text(encoding="utf-8") for path in (*SOURCES, *HEADERS))
    processor = [
        line for line in _cpuinfo() if line.startswith(("flags", "Features", "model name"))
    ][:2]
    decisive = (
        *sources,
        *compiler,
        version,
        *flags,
        str(_openmp()),
        platform.machine(),
        *processor,
    )
    return hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:20]


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _openmp() -> Path | None:
    """PyTorch's own OpenMP library."""
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Compile all files at once, under temporary names; rename the library when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        objects = [str(made.with_name(f"{source.stem}.o")) for source in SOURCES]
        commands = [
            [*compiler, *flags, "-c", "-o", *pair]
            for pair in zip(objects, map(str, SOURCES), strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        _run([*compiler, *flags, "-o", str(made), *objects, str(_openmp()), "-lm"])
        made.replace(target)


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(
            command,
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=DEADLINE,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} could not be run ({error})") from error
    except subprocess.CalledProcessError as error:
        reason = next(
            (line for line in error.stderr.splitlines() if "error" in line),
            error.stderr.strip()[:200],
        )
        raise NoKernels(
            f"{command[0]} failed: {reason or f'exit status {error.returncode}, no message'}"
        ) from error


class Arguments(ctypes.Structure):
    """A struct of kernels.h, filled by the names of its fields, others 0 or NULL. `half`: a tensor is bfloat16."""

    def __init__(self, **values: Tensor | float | int | None) -> None:
        half = any(isinstance(v, Tensor) and v.dtype == torch.bfloat16 for v in values.values())
        given = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in values.items()}
        super().__init__(**given, half=half)


def struct(counts: str, pointers: str, floats: str = "", half: str = "half") -> type[Arguments]:
    """A struct of kernels.h by the names of its fields: all structs keep this order."""
    kinds = (
        (counts, ctypes.c_int64),
        (pointers, ctypes.c_void_p),
        (floats, ctypes.c_float),
        (half, ctypes.c_int),
    )
    return type(
        "Struct",
        (Arguments,),
        {"_fields_": [(name, kind) for names, kind in kinds for name in names.split()]},
    )


def call(name: str, *arguments: Tensor | Arguments | float | int | None) -> int:
    """Call a function of the library: tensors go as their addresses, structs by reference, int as int64."""
    return getattr(_library()[0], name)(*map(_as_c, arguments))


def _as_c(value: Tensor | Arguments | float | int | None) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, Arguments):
        return ctypes.byref(value)
    return (
        ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value or 0)
    )  # None: a null pointer
