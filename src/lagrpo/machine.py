"""This machine: its cores, the threads that compute and how they wait for each other, and where caches lie.

A run fixes the number of threads when it starts: oneDNN's backward products give other bits with another number.
`import lagrpo` loads this file before PyTorch, because OpenMP reads how threads wait when PyTorch loads it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NUMBER = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)  # variables by which users set the number of threads
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # variables by which users set how threads wait
SPINS = "1000"  # tens of microseconds; GNU's OpenMP takes 300,000, which is milliseconds
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_.*"
)
"""Variables by which torchrun tells a process its place among the others."""


def cache_directory() -> Path:
    """Of files made once per machine (converted models, kernels): $LAGRPO_CACHE, else $XDG_CACHE_HOME/lagrpo, else
    ~/.cache/lagrpo."""
    if own := os.environ.get("LAGRPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lagrpo"


def choose_threads(recorded: int | None = None, ranks: int = 1) -> int:
    """The number of threads: what the user's environment says, `recorded` by the run that resumes, or the cores that
    `ranks` processes of this host share. torchrun's OMP_NUM_THREADS=1 is not the user's choice."""
    import torch

    named = {os.environ.get(name) for name in NUMBER} - {None, "", "1" if ranks > 1 else None}
    if named:
        return torch.get_num_threads()
    physical = (
        torch.get_num_threads() if ranks == 1 else sys.maxsize
    )  # of a rank it is torchrun's 1
    return recorded or max(1, min(physical, usable_cores()) // ranks)


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Inside, PyTorch and our kernels, which share one OpenMP, compute with `number` threads. Tokenizers start none
    unless the user says so."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shorten_spin() -> None:
    """Let threads that wait sleep soon, unless the user chose how they wait or PyTorch is loaded. A thread that spins
    takes the core from the one it waits for when another program is busy."""
    if (
        sys.platform.startswith("linux")
        and "torch" not in sys.modules
        and not any(n in os.environ for n in WAITING)
    ):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def drop_own(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what `shorten_spin` put there: for programs with another OpenMP."""
    return {
        name: value
        for name, value in environment.items()
        if (name, value) != ("GOMP_SPINCOUNT", SPINS)
    }


def drop_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what torchrun put there: for programs that are not ranks. One that starts a process group
    of its own would look for the store of torchrun's."""
    return {name: value for name, value in environment.items() if not TORCHRUN.fullmatch(name)}


def usable_cores() -> int:
    """CPUs that this process can use at a time, by its affinity and the quota of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, math.ceil(read_quota() or cpus)))


def read_quota(groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPUs that the container's control group allows, of version 2 or 1; None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        files = [groups / name for name in names]
        words = " ".join(
            file.read_text(encoding="utf-8") for file in files if file.is_file()
        ).split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            return int(words[0]) / int(words[1])
    return None
