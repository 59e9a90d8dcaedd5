"""Compiling kernels.c for this machine, once, with the C compiler that is here.

The library is kept in the cache directory under a name that its source, compiler, flags and the processor decide, so a
home directory that several kinds of machines share holds one for each."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lagrpo.embedded import cache_directory

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden")
DEADLINE = 300  # seconds for the compiler


class NoKernels(RuntimeError):  # noqa: N818
    """The kernels cannot be had on this machine; the message is the reason."""


def load_library(say: Callable[[str], None]) -> tuple[ctypes.CDLL, str]:
    """The library and what made it. Raises NoKernels."""
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        raise NoKernels("they need Linux and a PyTorch that runs its threads with OpenMP")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoKernels("there is no C compiler (gcc or cc, or what CC names)")
    version = _run([*compiler.split(), "--version"]).partition("\n")[0]
    target = cache_directory() / "kernels" / f"{_fingerprint(version)}.so"
    if not target.is_file():
        say(f"compiling the kernels for this processor, once, into {target}")
        _compile(compiler.split(), target)
    try:
        return ctypes.CDLL(str(target)), version
    except OSError as error:
        raise NoKernels(f"{target} cannot be loaded ({error})") from error


def _fingerprint(version: str) -> str:
    flags = [line for line in _cpuinfo() if line.startswith(("flags", "Features", "model name"))][:2]
    what = (SOURCE.read_text(), version, *FLAGS, str(_openmp()), platform.machine(), *flags)
    return hashlib.sha256("\0".join(what).encode()).hexdigest()[:20]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _openmp() -> Path | None:
    """PyTorch's own OpenMP library: with a second one in the process, the threads of each would wait in the way of the
    other's."""
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


def _compile(compiler: list[str], target: Path) -> None:
    """Under a temporary name, renamed when complete. Raises NoKernels."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            libraries = [str(library)] if (library := _openmp()) else []
            _run([*compiler, *FLAGS, "-o", str(made), str(SOURCE), *libraries, "-lm"])
            made.replace(target)
    except OSError as error:
        raise NoKernels(f"{target.parent} cannot be written ({error})") from error


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} could not be run ({error})") from error
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[:200])
        raise NoKernels(f"{command[0]} failed: {reason}") from error
