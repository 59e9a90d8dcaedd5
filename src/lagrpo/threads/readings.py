"""What Linux reports about the threads of this process and the CPUs under them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment, all in seconds."""

    clock: float  # monotonic
    used: float  # CPU time of this process
    waited: Mapping[int, float]  # for each thread, how long it was ready to run and had no core
    free: float | None  # idle, with lower-priority programs' time, summed over this process's CPUs; None where unknown


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two readings, `seconds` apart; `waited` is summed over the threads."""

    seconds: float
    used: float
    waited: float
    free: float | None


def compare(before: Reading, after: Reading) -> Window:
    """The window between two readings. It counts threads that began since, and leaves out threads that ended."""
    waited = sum(seconds - before.waited.get(thread, 0.0) for thread, seconds in after.waited.items())
    free = None if before.free is None or after.free is None else after.free - before.free
    return Window(after.clock - before.clock, after.used - before.used, waited, free)


def read() -> Reading | None:
    """Read the counters; None where the system does not report how long threads wait."""
    if not hasattr(os, "sched_getaffinity") or not (waited := read_waiting(PROC)):
        return None
    polite = os.getpriority(os.PRIO_PROCESS, 0) > 0  # then programs of lower priority may be our equals
    return Reading(time.monotonic(), time.process_time(), waited, read_free(PROC, os.sched_getaffinity(0), polite))


def read_waiting(proc: Path) -> dict[int, float]:
    """Seconds that each thread of this process waited for a CPU, from self/task/THREAD/schedstat: time on a CPU, time
    waiting (both in nanoseconds), and turns. Empty where Linux does not count."""
    waited, turns = {}, 0
    for thread in (proc / "self" / "task").glob("*"):
        try:
            _, waiting, count = map(int, (thread / "schedstat").read_text().split())
        except (OSError, ValueError):  # it ended just now, or there is no such file
            continue
        waited[int(thread.name)] = waiting / 1e9
        turns += count
    return waited if turns else {}


def read_free(proc: Path, cpus: Set[int], polite: bool) -> float | None:
    """Free seconds of these CPUs, from the lines "cpuN user nice system idle iowait irq softirq steal …" of stat, in
    ticks: idle, iowait and steal (a hypervisor took it: no program here used it), and nice, the time of lower-priority
    programs, unless this one is `polite` itself. None where a CPU has no line."""
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
