"""This machine: its cores, the threads that compute and how they wait for each other, and caches.

A run fixes the number of threads when it starts: oneDNN's backward products give other bits with
another number. `import lagrpo` loads this file before PyTorch, because OpenMP reads how threads
wait when PyTorch loads it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which users set the number of threads."""

WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which users set how threads wait."""

SPINS = "1000"
"""Turns of a waiting thread: tens of microseconds.

GNU's OpenMP takes 300,000, which is milliseconds.
"""

TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_.*"
)
"""Variables by which torchrun tells a process its place among the others."""


MEMORY_LIMITS = {
    "memory.max": "memory.current",
    "memory/memory.limit_in_bytes": "memory/memory.usage_in_bytes",
}
"""Files of a control group, version 2 and version 1: the limit of its memory, and its usage."""


VLLM_PYTHON = ".venv-vllm/bin/python"
"""The Python that has vLLM, unless $LAGRPO_VLLM_PYTHON names another one."""


_own_variables = {"GOMP_SPINCOUNT": SPINS}
"""Environment variables that lagrpo has set for this process, or for one that started it."""


def cache_directory() -> Path:
    """Returns the directory of files made once per machine: converted models, kernels.

    It is $LAGRPO_CACHE, else $XDG_CACHE_HOME/lagrpo, else ~/.cache/lagrpo.
    """
    lagrpo_cache = os.environ.get("LAGRPO_CACHE")
    if lagrpo_cache:
        return Path(lagrpo_cache).expanduser()
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return user_cache.expanduser() / "lagrpo"


def is_own(path: Path) -> bool:
    """True if a file or directory, and a link to it, are this user's or root's."""
    return {path.lstat().st_uid, path.stat().st_uid} <= {os.getuid(), 0}


def choose_threads(recorded: int | None = None, ranks: int = 1) -> int:
    """Returns the number of threads.

    In this order, it is the choice of the user's environment, the number `recorded` by the run that
    resumes, or a share of the cores, for `ranks` processes of this host.
    """
    import torch

    for name in THREAD_VARIABLES:
        value = os.environ.get(name)
        is_from_torchrun = ranks > 1 and value == "1"
        if value and not is_from_torchrun:
            return torch.get_num_threads()
    if recorded:
        return recorded
    cores = usable_cores()
    if ranks == 1:
        # By default PyTorch has a thread for each physical core; in ranks, torchrun's 1.
        cores = min(cores, torch.get_num_threads())
    return max(1, cores // ranks)


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Lets PyTorch and our kernels, which share one OpenMP, compute with `number` threads inside.

    Tokenizers start no threads unless the user says so.
    """
    import torch

    number_before = torch.get_num_threads()
    torch.set_num_threads(number)
    set_own_variable("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        torch.set_num_threads(number_before)


def shorten_spin() -> None:
    """Lets waiting threads sleep soon, unless the user chose how they wait or PyTorch is loaded.

    When another program is busy, a thread that spins takes the core from the one it waits for.
    """
    is_linux = sys.platform.startswith("linux")
    is_chosen_by_user = any(name in os.environ for name in WAIT_VARIABLES)
    if is_linux and not is_chosen_by_user and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def set_own_variable(name: str, value: str) -> None:
    """Sets an environment variable for this process alone, unless the user has set it."""
    if os.environ.setdefault(name, value) == value:
        _own_variables[name] = value


def drop_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of `set_own_variable`.

    It is for other programs, which have another OpenMP, or compute other things on a GPU.
    """
    return {name: value for name, value in environment.items() if _own_variables.get(name) != value}


def drop_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of torchrun.

    Programs that are not ranks get it. With the variables, their process group would try to join
    torchrun's store.
    """
    return {name: value for name, value in environment.items() if not TORCHRUN.fullmatch(name)}


def usable_cores() -> int:
    """Counts the CPUs that this process can use at a time: affinity and the container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    quota = read_quota() or cpus
    return max(1, min(cpus, math.ceil(quota)))


def visible_gpus() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names; None if the variable is not set.

    CUDA does not see GPUs from the first negative number on.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return list(takewhile(lambda name: name and not name.startswith("-"), names))


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory that this machine has, or that the container allows if fewer."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in MEMORY_LIMITS:
        # Without a limit, version 2 says "max", and version 1 a number beyond all memory.
        limit = _read_number(groups / name)
        if limit is not None:
            limits.append(limit)
    return min(limits)


def available_memory(
    groups: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int | None:
    """Returns the bytes that processes can still get, by the system and by the container's limit.

    Copies of files that the system keeps in memory count as available. None if the system has no
    /proc.
    """
    if not meminfo.is_file():
        return None
    available = [1024 * _read_table(meminfo)["MemAvailable"]]
    for limit_name, usage_name in MEMORY_LIMITS.items():
        limit = _read_number(groups / limit_name)
        usage = _read_number(groups / usage_name)
        if limit is None or usage is None:
            continue
        statistics = _read_table((groups / usage_name).with_name("memory.stat"))
        for name in ("inactive_file", "active_file"):
            # In version 1 the sums over all groups inside have the prefix.
            usage -= statistics.get(f"total_{name}", statistics.get(name, 0))
        available.append(limit - usage)
    return min(available)


def process_peak() -> int | None:
    """Returns the most bytes of memory that this process ever had; None if the system has no /proc.

    These are resident pages, also of mapped files.
    """
    return _read_status("VmHWM")


def process_memory() -> int | None:
    """Returns the bytes of memory that this process has, counted as in `process_peak`."""
    return _read_status("VmRSS")


def _read_status(name: str) -> int | None:
    status = Path("/proc/self/status")
    return 1024 * _read_table(status)[name] if status.is_file() else None


def _read_table(file: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number per line; the lines may have units."""
    numbers: dict[str, int] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, *values = line.replace(":", " ").split()
        if values and values[0].isdigit():
            numbers[name] = int(values[0])
    return numbers


def _read_number(file: Path) -> int | None:
    """Returns the number in a file; None without the file, and for something else in it."""
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def read_quota(groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Returns the CPUs that the container's control group allows; None without a limit.

    The quota is microseconds of CPU time in a period, also in microseconds.
    """
    version_2 = ["cpu.max"]  # both numbers
    version_1 = ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]
    for names in (version_2, version_1):
        words: list[str] = []
        for name in names:
            file = groups / name
            if file.is_file():
                words += file.read_text(encoding="utf-8").split()
        # Without a limit, the quota is "max" or -1.
        if len(words) == 2 and all(word.isdigit() for word in words):
            quota, period = words
            return int(quota) / int(period)
    return None
