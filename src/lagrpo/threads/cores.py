"""How many CPUs this process may use, by its affinity and by the quota of its container.

`nproc` and PyTorch count the CPUs of the affinity mask. A container with a quota of 2 CPUs on a machine of 64 sees 64
there. With 64 threads it uses up its share of every tenth of a second in a few milliseconds, and then stands still."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(threads: int, quota: float | None, cores: int) -> int:
    """How many of the threads can compute at a time, with that quota (in CPUs) and so many cores.

    >>> [limit_threads(*case) for case in ((8, None, 8), (8, 2.5, 8), (8, 0.5, 8), (2, 2.5, 8), (8, None, 4))]
    [8, 3, 1, 2, 4]
    """
    return max(1, min(threads, cores, cores if quota is None else math.ceil(quota)))


def read_quota(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """The CPUs' worth of time that the control group of this process and the groups above it allow; None without a
    limit or without control groups. `groups` is where groups are mounted, `membership` lists this process's."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for directory in _find_groups(groups, line) for limit in _read_limits(directory)]
    return min(limits, default=None)


def _find_groups(groups: Path, line: str) -> Iterator[Path]:
    """The control group of a line "number:controllers:path" and all groups above it, wherever they are mounted. In a
    container the path may not exist there: then the mounted group is the container's own."""
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


def _read_limits(directory: Path) -> Iterator[float]:
    """The limit of one group: cpu.max (version 2, "QUOTA PERIOD"), or cpu.cfs_quota_us / cpu.cfs_period_us
    (version 1)."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        numbers = [number for name in names for number in _read_numbers(directory / name)]
        if len(numbers) == 2 and min(numbers) > 0:
            yield numbers[0] / numbers[1]


def _read_numbers(path: Path) -> list[float]:
    """The numbers in a file. A word such as "max" is none, and a missing file has none."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [float(word) for word in words if word.lstrip("-").isdigit()]
