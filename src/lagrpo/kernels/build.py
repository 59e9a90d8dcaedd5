"""Compiling kernels.c for this machine, once, with the C compiler that is here.

The library is kept in the cache directory under a name that its source, compiler, flags and the processor decide, so a
home directory that several kinds of machines share holds one for each."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
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
    if _openmp() is None:
        raise NoKernels("PyTorch's OpenMP is not GNU's, and two of them would be in each other's way")
    compiler = _compiler()
    version = _run([*compiler, "--version"]).partition("\n")[0]
    try:
        target = cache_directory() / "kernels" / f"{_fingerprint(compiler, version)}.so"
        if not target.is_file():
            say(f"compiling the kernels for this processor, once, into {target}")
            _compile(compiler, target)
        _trusted(target)
        return ctypes.CDLL(str(target)), version
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        if isinstance(error, NoKernels):
            raise
        raise NoKernels(f"the library cannot be kept or loaded ({error}); LAGRPO_CACHE names another place") from error


def _compiler() -> list[str]:
    """The command of the compiler. Raises NoKernels."""
    if own := os.environ.get("CC"):
        try:
            return shlex.split(own)
        except ValueError as error:
            raise NoKernels(f"CC = {own!r} is no command ({error})") from error
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        raise NoKernels("there is no C compiler (gcc or cc, or what CC names)")
    return [found]


def _trusted(library: Path) -> None:
    """Raise NoKernels for a library that another user may have put there."""
    for path in (library, library.parent):
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NoKernels(f"{path} belongs to another user, or others may write to it; set LAGRPO_CACHE")


def _fingerprint(compiler: list[str], version: str) -> str:
    flags = [line for line in _cpuinfo() if line.startswith(("flags", "Features", "model name"))][:2]
    what = (SOURCE.read_text(), *compiler, version, *FLAGS, str(_openmp()), platform.machine(), *flags)
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
    """Under a temporary name, renamed when complete. Raises NoKernels, OSError."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        _run([*compiler, *FLAGS, "-o", str(made), str(SOURCE), str(_openmp()), "-lm"])
        if not made.is_file():
            raise NoKernels(f"{compiler[0]} ended without an error and made no library")
        made.chmod(0o755)
        made.replace(target)


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} could not be run ({error})") from error
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[:200])
        raise NoKernels(f"{command[0]} failed: {reason or f'exit status {error.returncode}, no message'}") from error
