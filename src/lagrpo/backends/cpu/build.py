"""Compile the C sources for this machine, once, with the C compiler that is here.

The cache directory keeps the library under a name that its sources, compiler, flags and the processor decide, so a home
directory that several kinds of machines share holds one for each.

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
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lagrpo.cache import cache_directory

logger = logging.getLogger("lagrpo")

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.c")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-std=gnu11", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi")
ISA = "LAGRPO_CPU_ISA"


@dataclass(frozen=True, slots=True)
class Isa:
    """A level: the compiler's flags, what /proc/cpuinfo must list, whether bfloat16 products are in it."""

    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    bf16: bool = True


V3 = frozenset({"avx2", "fma", "bmi2", "f16c"})
V4 = V3 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
LEVELS = {
    "native": Isa(("-march=native",)),
    "avx512_bf16": Isa(("-march=native", *NO_AMX), V4 | {"avx512_bf16"}),
    "avx512": Isa(("-march=x86-64-v4",), V4, bf16=False),
    "avx2": Isa(("-march=x86-64-v3",), V3, bf16=False),
    "baseline": Isa(("-march=x86-64",), bf16=False),
    "emulated_tiles": Isa(("-march=native", "-DEMULATED_TILES")),
}
"""emulated_tiles: AMX's instructions in plain C, for tests; far too slow for anything else."""
DEADLINE = 300  # seconds for the compiler
DIGEST = hashlib.sha256().digest_size  # bytes


class NoKernels(RuntimeError):  # noqa: N818
    """The kernels cannot be had on this machine; the message is the reason."""


def isa_level() -> str:
    """The level that LAGRPO_CPU_ISA names. Raises NoKernels for a name that is none, or one above this processor."""
    name = (os.environ.get(ISA) or "native").lower()
    if name not in LEVELS:
        offered = ", ".join(level for level in LEVELS if level != "emulated_tiles")
        raise NoKernels(f"{ISA} = {name!r} is no level of instructions: use {offered}")
    if platform.machine() not in ("x86_64", "AMD64") and name != "native":
        raise NoKernels(f"{ISA} = {name!r} is for x86-64; this processor is {platform.machine()}: unset {ISA}")
    if missing := LEVELS[name].needs - cpu_flags():
        raise NoKernels(f"{ISA} = {name!r}: this processor has no {', '.join(sorted(missing))}")
    return name


def optimization(level: str) -> tuple[str, ...]:
    """The compiler's flags. Nothing is left out that this processor lacks, so two levels with the same instructions
    share a library."""
    return "-O3", *(flag for flag in LEVELS[level].flags if flag not in NO_AMX or "amx_tile" in cpu_flags())


def cpu_flags() -> frozenset[str]:
    """The processor's features by their names in /proc/cpuinfo (x86: flags, ARM: Features); none elsewhere."""
    lines = (line.partition(":") for line in _cpuinfo())
    return frozenset(next((value.split() for name, _, value in lines if name.strip() in ("flags", "Features")), ()))


def load_library() -> tuple[ctypes.CDLL, str]:
    """The library and the name of its compiler. Raises NoKernels."""
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        raise NoKernels("they need Linux and a PyTorch that runs its threads with OpenMP")
    if _openmp() is None:
        raise NoKernels("PyTorch's OpenMP is not GNU's, and two of them would be in each other's way")
    flags = (*FLAGS, *optimization(isa_level()))
    compiler = _compiler()
    version = _run([*compiler, "--version"]).partition("\n")[0]
    try:
        target = cache_directory() / "kernels" / f"{_fingerprint(compiler, version, flags)}.so"
        if not _is_whole(target):
            why = "it is damaged" if target.exists() else "once"
            logger.info("compiling the kernels for this processor (%s), into %s", why, target)
            _compile(compiler, flags, target)
        _trusted(target)
        return ctypes.CDLL(str(target)), version
    except NoKernels:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        raise NoKernels(f"the library cannot be kept or loaded ({error}); LAGRPO_CACHE names another place") from error


def _is_whole(library: Path) -> bool:
    """Whether it ends with the digest of what comes before it. A file cut short would end the process when it is loaded
    (SIGBUS), and say nothing."""
    if not library.is_file():
        return False
    content = library.read_bytes()
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _seal(library: Path) -> None:
    """Append the digest, which the loader of libraries does not look at, and have the disk keep it."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _compiler() -> list[str]:
    if own := os.environ.get("CC"):
        try:
            return shlex.split(own)
        except ValueError as error:
            raise NoKernels(f"CC = {own!r} is no command ({error})") from error
    if found := shutil.which("gcc") or shutil.which("cc"):
        return [found]
    raise NoKernels("there is no C compiler (gcc or cc, or what CC names)")


def _trusted(library: Path) -> None:
    """Raise NoKernels for a library that another user may have put there."""
    for path in (library, library.parent):
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NoKernels(f"{path} belongs to another user, or others may write to it; set LAGRPO_CACHE")


def _fingerprint(compiler: list[str], version: str, flags: tuple[str, ...]) -> str:
    sources = (path.read_text() for path in (*SOURCES, *HEADERS))
    processor = [line for line in _cpuinfo() if line.startswith(("flags", "Features", "model name"))][:2]
    what = (*sources, *compiler, version, *flags, str(_openmp()), platform.machine(), *processor)
    return hashlib.sha256("\0".join(what).encode()).hexdigest()[:20]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _openmp() -> Path | None:
    """PyTorch's own OpenMP library."""
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path) -> None:
    """Compile all files at once, under temporary names; rename the library when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        objects = [str(made.with_name(f"{source.stem}.o")) for source in SOURCES]
        commands = [[*compiler, *flags, "-c", "-o", *pair] for pair in zip(objects, map(str, SOURCES), strict=True)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        _run([*compiler, *flags, "-o", str(made), *objects, str(_openmp()), "-lm"])
        if not made.is_file():
            raise NoKernels(f"{compiler[0]} ended without an error and made no library")
        made.chmod(0o755)
        _seal(made)
        made.replace(target)


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} could not be run ({error})") from error
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[:200])
        raise NoKernels(f"{command[0]} failed: {reason or f'exit status {error.returncode}, no message'}") from error
