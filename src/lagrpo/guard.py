"""The guard of a worker process: its parent, which lets nothing of it outlive the program.

A worker begins as one process that forks while it has a single thread: the child becomes the worker, the parent stays
as its guard. The guard ends everything below it when the worker ends, when that takes more memory than it may, and when
the program lets go of its pipe or dies, by SIGKILL too. On Linux orphans below the guard become its children, so it
also finds what forks twice, starts a session of its own or closes its files. Elsewhere it ends the worker's process
group, and nothing watches memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from lagrpo.redaction import redact

LINUX = sys.platform == "linux"
LONGEST_OUTPUT = 2**20  # bytes that a worker may print in its life, to stdout and to stderr each
LONGEST_LINE, HELD = 2**16, 2**12  # bytes
_PERIOD = 0.05  # seconds between two looks at the worker
_SURVEY = 0.5  # seconds between two looks at everything below the guard, for which it reads all of /proc
_CLEANING = 2.0  # seconds for Python's resource trackers, which remove what their process left behind
_LEFT_OUT = b"\nlagrpo: the rest of what this worker process prints is left out\n"
_PDEATHSIG, _SUBREAPER = 1, 36  # options of prctl(2)


def split(program: int, report: int, memory: int) -> None:
    """Fork into guard and worker; returns in the worker alone.

    `program` is the end of a pipe that the program holds open for as long as the worker may live. The guard writes to
    `report`: eight bytes with the worker's process id, and at the end the worker's exit code and a phrase that says how
    it ended. `memory` is a limit in bytes for the worker and everything below it; 0: none."""
    parent, guard = os.getppid(), os.getpid()
    prints = [os.pipe(), os.pipe()]
    _prctl(_SUBREAPER, 1)
    if (worker := os.fork()) == 0:
        os.close(report)
        _begin_worker(guard, prints)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for _, theirs in prints:
        os.close(theirs)
    streams = [Stream(ours, target) for target, (ours, _) in enumerate(prints, 1)]
    _stand_guard(worker, parent, program, report, memory, streams)


def describe(code: int) -> str:
    """How a process with this exit code ended, as a phrase."""
    if code < 0:
        names = {known.value: known.name for known in signal.Signals}
        return f"was ended by {names.get(-code, f'signal {-code}')}"
    return f"ended itself with exit code {code}"


def _begin_worker(guard: int, prints: list[tuple[int, int]]) -> None:
    """A session of its own, output through the guard, and the first to go when the machine runs out of memory."""
    os.setsid()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    for target, (ours, theirs) in enumerate(prints, 1):
        os.close(ours)
        os.dup2(theirs, target)
        os.close(theirs)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if LINUX:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def _stand_guard(worker: int, parent: int, program: int, report: int, memory: int, streams: list[Stream]) -> NoReturn:
    code, end = 1, "lost its guard"
    try:
        os.write(report, worker.to_bytes(8, "little"))
        code, end = _watch(worker, parent, program, memory, streams)
    finally:
        _end_all(worker)
        while sum(stream.forward() for stream in streams):
            pass
        for stream in streams:
            stream.finish()
        with contextlib.suppress(OSError):
            os.write(report, f"{code} {end}".encode())
        os._exit(0)


def _watch(worker: int, parent: int, program: int, memory: int, streams: list[Stream]) -> tuple[int, str]:
    """The exit code of the worker and how it ended, once it has ended or has to end."""
    poller, survey = select.poll(), 0.0
    poller.register(program, 0)
    for stream in streams:
        poller.register(stream.source, select.POLLIN)
    while True:
        waiting = {file for file, _ in poller.poll(1000 * _PERIOD)}
        if program in waiting or os.getppid() != parent:
            return -signal.SIGKILL, "was ended with the program"
        if worker in (ended := _reap()[0]):
            code = os.waitstatus_to_exitcode(ended[worker])
            return code, describe(code)
        due = time.monotonic() >= survey
        if memory and _take_more([worker, *(_below(worker) if due else ())], memory):
            return -signal.SIGKILL, f"took more than {memory / 2**30:.4g} GiB of memory"
        survey = time.monotonic() + _SURVEY if due else survey
        if waiting and not sum(stream.forward() for stream in streams):
            time.sleep(_PERIOD / 5)  # nobody takes what it prints
        for stream in [stream for stream in streams if stream.ended]:
            poller.unregister(stream.source)  # else poll never waits again
            streams.remove(stream)


class Stream:
    """One of a worker's two outputs: forwarded in whole lines, without secrets, up to a limit; then thrown away."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self._target, self._left = source, target, LONGEST_OUTPUT
        self._line = self._ready = b""  # read and not yet whole; to be written
        self.ended = False  # everyone who could print has closed it, and all was written
        os.set_blocking(source, False)

    def forward(self) -> bool:
        """Move one piece. False where there is none, and where nobody takes it: then it waits, and so does who printed
        it."""
        with contextlib.suppress(BlockingIOError):
            if self._left <= 0:
                self.ended = not os.read(self.source, 2**16)
                return not self.ended
            if select.select([], [self._target], [], 0)[1]:
                if self._ready:
                    return self._write()
                piece = os.read(self.source, select.PIPE_BUF)
                self._take(piece)
                self.ended = not self._write() and not piece
                return not self.ended
        return False

    def finish(self) -> None:
        """Write what is left, where somebody takes it."""
        self._ready, self._line = self._ready + _redacted(self._line), b""
        while self._left > 0 and self._ready and select.select([], [self._target], [], 0)[1]:
            self._write()

    def _take(self, piece: bytes) -> None:
        """Redact the lines that are whole. Of an endless one the last HELD bytes wait, where a secret may begin."""
        self._left -= len(piece)
        lines, newline, self._line = (self._line + piece).rpartition(b"\n")
        self._ready = _redacted(lines) + newline
        if len(self._line) > LONGEST_LINE or not piece:
            line = _redacted(self._line)
            held = HELD if piece else 0
            self._ready, self._line = self._ready + line[: len(line) - held], line[len(line) - held :]
        if self._left <= 0:
            self._ready = _LEFT_OUT

    def _write(self) -> bool:
        """Write as much as the target takes without blocking; False where there is nothing."""
        piece, self._ready = self._ready[: select.PIPE_BUF], self._ready[select.PIPE_BUF :]
        if not piece:
            return False
        try:
            os.write(self._target, piece)
        except OSError:  # the program's output is closed
            self._left = 0
        return True


def _redacted(line: bytes) -> bytes:
    return redact(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _end_all(worker: int) -> None:
    """Kill everything below this process until nothing is left. Resource trackers end by themselves, once what they
    track for has ended; they get the time for that."""
    patience = time.monotonic() + _CLEANING
    while True:
        if not LINUX:
            with contextlib.suppress(OSError):
                os.killpg(worker, signal.SIGKILL)
        for process in _below(os.getpid()):
            if time.monotonic() > patience or b"multiprocessing.resource_tracker" not in _read(process, "cmdline"):
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        if not _reap()[1]:
            return
        time.sleep(0.005)


def _reap() -> tuple[dict[int, int], bool]:
    """The children that have ended, with their statuses, and whether others are left."""
    ended: dict[int, int] = {}
    try:
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return ended, True
            ended[process] = status
    except ChildProcessError:
        return ended, False


def _below(ancestor: int) -> list[int]:
    """The processes below this one, on Linux."""
    children: dict[int, list[int]] = {}
    for process in map(int, filter(str.isdecimal, os.listdir("/proc") if LINUX else ())):
        if stat := _read(process, "stat"):
            children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(process)
    found = list(children.get(ancestor, ()))
    for process in found:
        found += children.get(process, ())
    return found


def _take_more(processes: list[int], memory: int) -> bool:
    """Whether these processes have more than so many bytes in memory; what they share counts once. On Linux."""
    resident = sum(int(statm.split()[1]) for process in processes if (statm := _read(process, "statm")))
    if resident * os.sysconf("SC_PAGE_SIZE") <= memory:
        return False
    rollups = (_read(process, "smaps_rollup").partition(b"\nPss:")[2].split() for process in processes)
    return sum(1024 * int(rollup[0]) for rollup in rollups if rollup) > memory


def _read(process: int, file: str) -> bytes:
    """A file of /proc; nothing for a process that has ended."""
    try:
        return Path(f"/proc/{process}/{file}").read_bytes()
    except OSError:
        return b""


def end_with_parent(number: int) -> None:
    """Have the system send this process a signal when its parent ends, however that ends. Linux only."""
    _prctl(_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
