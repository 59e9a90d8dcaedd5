"""What Linux says, from made-up files and from a real thread that waits."""

from __future__ import annotations

import os
import threading
import time
import zlib
from pathlib import Path

import pytest

from lagrpo.threads.readings import Reading, compare, read, read_free, read_waiting

TICK = os.sysconf("SC_CLK_TCK")


def proc(root: Path, stat: str = "", **threads: str) -> Path:
    for number, schedstat in threads.items():
        directory = root / "self" / "task" / number.removeprefix("t")
        directory.mkdir(parents=True)
        if schedstat:
            (directory / "schedstat").write_text(schedstat)
    (root / "stat").write_text(stat)
    return root


def test_threads_wait_in_nanoseconds(tmp_path):
    found = read_waiting(proc(tmp_path, t7="5000000000 2500000000 30\n", t8="1 1000000 2\n", t9=""))
    assert found == {7: 2.5, 8: 0.001}  # 9 ended between the two looks


def test_a_kernel_that_does_not_count_is_no_reading(tmp_path):
    assert read_waiting(proc(tmp_path / "a", t7="5000000000 0 0\n")) == {}
    assert read_waiting(proc(tmp_path / "b", t7="")) == {}
    assert read_waiting(tmp_path / "missing") == {}


#             user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  9 9 9 9 9 9 9 9 0 0
cpu0 100 20 10 300 4 1 1 5 0 0
cpu1 100 0 10 50 0 1 1 0 0 0
cpu2 0 0 0 10000 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.mark.parametrize(
    ("cpus", "polite", "ticks"),
    [({0}, False, 20 + 300 + 4 + 5), ({0}, True, 300 + 4 + 5), ({0, 1}, False, 329 + 50), ({1}, True, 50)],
)
def test_free_time_of_the_cpus_at_hand(tmp_path, cpus, polite, ticks):
    assert read_free(proc(tmp_path, STAT), cpus, polite) == pytest.approx(ticks / TICK)


def test_cpus_that_are_not_listed_are_unknown(tmp_path):
    assert read_free(proc(tmp_path, STAT), {0, 3}, False) is None
    assert read_free(tmp_path / "missing", {0}, False) is None


def test_a_window_counts_threads_that_began_and_not_those_that_ended():
    before = Reading(10.0, 3.0, {1: 1.0, 2: 5.0}, 100.0)
    window = compare(before, Reading(10.5, 3.75, {1: 1.25, 3: 0.125}, 100.25))
    assert (window.seconds, window.used, window.waited, window.free) == (0.5, 0.75, 0.375, 0.25)
    assert compare(before, Reading(11.0, 3.0, {}, None)).free is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="this system does not count")
def test_two_threads_on_one_cpu_wait_for_each_other():
    mine = os.sched_getaffinity(0)
    noise = os.urandom(1 << 23)
    try:
        os.sched_setaffinity(0, {min(mine)})
        before = read()
        # zlib lets go of the interpreter's lock: both compute at the same time, each longer than its turn lasts
        threads = [threading.Thread(target=zlib.compress, args=(noise, 9)) for _ in range(2)]
        for thread in threads:
            thread.start()
        windows = []
        while any(thread.is_alive() for thread in threads):
            after = read()
            assert before is not None
            assert after is not None
            windows.append(compare(before, after))
            time.sleep(0.005)
    finally:
        os.sched_setaffinity(0, mine)
    assert max(window.waited for window in windows) > 0
    assert windows[-1].used > 0
