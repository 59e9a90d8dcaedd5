"""How many CPUs this process may use: affinity, and the quota of its container.

`nproc` and PyTorch count the CPUs of the affinity mask. A container that may use 2 CPUs' worth of time on a machine of
64 sees 64 there; with so many threads it has used its share of every tenth of a second in a few milliseconds and stands
still for the rest."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def at_hand() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most(threads: int, quota: float | None, cores: int) -> int:
    """How many of so many threads can compute at a time.

    >>> most(8, None, 8), most(8, 2.5, 8), most(8, 0.5, 8), most(2, 2.5, 8), most(8, None, 4)
    (8, 3, 1, 2, 4)
    """
    return max(1, min(threads, cores, cores if quota is None else math.ceil(quota)))


def quota(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time that the control group of this process, or one above it, allows; None for no limit, or where
    there are no control groups. `groups` is where they are mounted, `membership` says which are this process's."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for directory in _directories(groups, line) for limit in _limits(directory)]
    return min(limits, default=None)


def _directories(groups: Path, line: str) -> Iterator[Path]:
    """The control group of a line "number:controllers:path" and all above it, wherever they may be mounted. In a
    container the path can be one that is not there: then what is mounted is the container's own group."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    inner = PurePosixPath("/", path)
    if ".." in inner.parts:  # a group outside of what this process sees
        inner = PurePosixPath("/")
    if controllers and "cpu" not in controllers.split(","):
        return
    for mount in (controllers, "cpu") if controllers else ("", "unified"):
        for group in (inner, *inner.parents):
            yield groups / mount / group.relative_to("/")


def _limits(directory: Path) -> Iterator[float]:
    """Of one group: cpu.max (version 2: "QUOTA PERIOD"), or cpu.cfs_quota_us and cpu.cfs_period_us (version 1)."""
    both = _numbers(directory / "cpu.max")
    one = _numbers(directory / "cpu.cfs_quota_us") + _numbers(directory / "cpu.cfs_period_us")
    for numbers in (both, one):
        if len(numbers) == 2 and min(numbers) > 0:
            yield numbers[0] / numbers[1]


def _numbers(path: Path) -> list[float]:
    """The numbers in a file; none where it is missing, and for a word such as "max"."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [float(word) for word in words if word.lstrip("-").isdigit()]
