"""What Linux says about the threads of this process, and about the CPUs under them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Reading:
    """At one moment, everything in seconds. `clock`: a monotonic clock. `used`: CPU time of this process. `waited`: for
    each of its threads, how long it was ready to run and had no core. `free`: CPU time, summed over the CPUs at hand,
    that nobody used, or that programs of lower priority did; None where that is unknown."""

    clock: float
    used: float
    waited: Mapping[int, float]
    free: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two readings: the same in sums, over `seconds` of time."""

    seconds: float
    used: float
    waited: float
    free: float | None


def between(before: Reading, after: Reading) -> Window:
    """Threads that have ended since are not counted, those that began are."""
    waited = sum(seconds - before.waited.get(thread, 0.0) for thread, seconds in after.waited.items())
    known = before.free is not None and after.free is not None
    return Window(
        seconds=after.clock - before.clock,
        used=after.used - before.used,
        waited=waited,
        free=after.free - before.free if known else None,  # type: ignore[operator]
    )


def read() -> Reading | None:
    """Now; None where the system does not say how long threads wait."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    waited = waiting_times(PROC)
    if not waited:
        return None
    polite = os.getpriority(os.PRIO_PROCESS, 0) > 0  # then what has a lower priority than others may be our equal
    return Reading(time.monotonic(), time.process_time(), waited, free_time(PROC, os.sched_getaffinity(0), polite))


def waiting_times(proc: Path) -> dict[int, float]:
    """By thread of this process, from self/task/THREAD/schedstat: time on a CPU and time waiting for one, both in
    nanoseconds, and how often it got one. Nothing where Linux does not keep count."""
    waited, turns = {}, 0
    try:
        threads = [int(path.name) for path in (proc / "self" / "task").iterdir()]
    except OSError:
        return {}
    for thread in threads:
        try:
            _, waiting, count = map(int, (proc / "self" / "task" / str(thread) / "schedstat").read_text().split())
        except (OSError, ValueError):  # it ended just now, or there is no such file
            continue
        waited[thread] = waiting / 1e9
        turns += count
    return waited if turns else {}


def free_time(proc: Path, cpus: Set[int], polite: bool) -> float | None:
    """Of these CPUs, from the lines "cpuN user nice system idle iowait irq softirq steal …" of stat, in ticks: idle and
    iowait; nice, the time of programs of lower priority, unless this one is `polite` itself; steal, which a hypervisor
    took: as far as this system is concerned nobody used it. None where a CPU has no line."""
    tick = os.sysconf("SC_CLK_TCK")
    free: dict[int, float] = {}
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    for name, *words in (line.split() for line in lines if line.startswith("cpu")):
        if name != "cpu" and len(words) >= 8:
            _, nice, _, idle, iowait, _, _, steal = map(int, words[:8])
            free[int(name[3:])] = (idle + iowait + steal + (0 if polite else nice)) / tick
    return sum(free[cpu] for cpu in cpus) if cpus <= free.keys() else None
