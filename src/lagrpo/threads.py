"""CPU threads: how many compute, and how they wait for each other.

A run fixes the number when it starts. oneDNN's backward products give other bits with another number of threads.
`import lagrpo` loads this file before PyTorch: OpenMP reads how threads wait once, when PyTorch loads it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which users set the number of threads
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # variables by which users set how threads wait
SPINS = "1000"  # tens of microseconds; GNU's OpenMP takes 300,000, which is milliseconds

_ours: dict[str, str] = {}  # what this file put into the environment


def choose_threads(asked: int | None, recorded: int | None = None, ranks: int = 1) -> int:
    """The number of threads: `asked`, what the user's environment says, `recorded` by the run that resumes, or the
    cores that `ranks` processes of this host share. torchrun's OMP_NUM_THREADS=1 is not the user's choice."""
    import torch

    named = {os.environ.get(name) for name in NUMBER} - {None, "", "1" if ranks > 1 else None}
    if asked or named:
        return asked or torch.get_num_threads()
    physical = torch.get_num_threads() if ranks == 1 else sys.maxsize  # of a rank it is torchrun's 1
    return recorded or max(1, min(physical, usable_cores()) // ranks)


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Inside, PyTorch and our kernels compute with `number` threads, and tokenizers start none unless the user says
    so. They share one OpenMP."""
    import torch

    before, quiet = torch.get_num_threads(), "TOKENIZERS_PARALLELISM"
    torch.set_num_threads(number)
    if quiet not in os.environ:
        os.environ[quiet] = _ours[quiet] = "false"
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if _ours.pop(quiet, None):
            os.environ.pop(quiet, None)


def shorten_spin(environment: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> None:
    """Let threads that wait sleep soon, unless the user chose how they wait or PyTorch is loaded. A thread that spins
    takes the core from the one it waits for when another program is busy."""
    if sys.platform.startswith("linux") and "torch" not in loaded and not any(name in environment for name in WAITING):
        environment["GOMP_SPINCOUNT"] = _ours["GOMP_SPINCOUNT"] = SPINS


def drop_own(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what this file put there: for programs with another OpenMP."""
    return {name: value for name, value in environment.items() if _ours.get(name) != value}


def usable_cores() -> int:
    """CPUs that this process can use at a time, by its affinity and the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, math.ceil(read_quota() or cpus)))


def read_quota(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The CPUs that the control group of this process and the groups above it allow; None without a limit. `groups`
    is where groups are mounted, `membership` lists this process's as lines "number:controllers:path"."""
    limits = []
    for line in _read(membership).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        group = PurePosixPath("/", path)
        group = PurePosixPath("/") if ".." in group.parts else group  # outside of what a container sees
        if not controllers or "cpu" in controllers.split(","):
            mounts = (controllers, "cpu") if controllers else ("", "unified")
            above = [each.relative_to("/") for each in (group, *group.parents)]
            limits += [_read_limit(groups / mount / each) for mount in mounts for each in above]
    return min((limit for limit in limits if limit), default=None)


def _read_limit(group: Path) -> float | None:
    """cpu.max (version 2: "QUOTA PERIOD"), or cpu.cfs_quota_us and cpu.cfs_period_us (version 1)."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = " ".join(_read(group / name) for name in names).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
