"""The guard of a worker process, watching one that closes what it prints to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lagrpo.guard import Stream
from lagrpo.workers import Process


def test_a_stream_ends_when_all_that_was_printed_is_written_and_nobody_can_print_more():
    (source, printed), (shown, target) = os.pipe(), os.pipe()
    stream = Stream(source, target)
    os.write(printed, b"a line\nand half of one")
    while stream.forward():
        pass
    assert not stream.ended
    os.close(printed)
    while stream.forward():
        pass
    assert stream.ended
    assert os.read(shown, 100) == b"a line\nand half of one"
    for file in (source, shown, target):
        os.close(file)


def close_and_wait() -> None:
    for file in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    time.sleep(60)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="counts a guard's turns in /proc")
def test_the_guard_of_a_worker_that_closed_its_outputs_waits():
    process = Process(target=close_and_wait, daemon=True)
    process.start()

    def turns() -> int:
        guard = process._popen._guard.pid  # type: ignore[attr-defined]
        status = Path(f"/proc/{guard}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    try:
        time.sleep(2.0)  # it has begun, and closed them
        before, since = turns(), time.monotonic()
        time.sleep(2.0)
        assert turns() - before < 40 * (time.monotonic() - since)  # 20 a second are due, and as many again
    finally:
        process.kill()
        process.join()
