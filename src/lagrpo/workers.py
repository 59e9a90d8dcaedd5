"""How worker processes start and end.

A worker is started as a module, `python -m lagrpo.workers`, because a process with torch's threads must not be forked.
SIGINT is blocked in it, so that Ctrl-C reaches the parent alone. It ends with its parent, and when it has computed for
too long.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from pathlib import Path
from typing import Any

from lagrpo.interrupts import whole

_ROOT = Path(__file__).parents[1]  # the directory with the package
STARTING = 120.0  # seconds until a new process has read what it is to do, on a busy machine
ENDING = 10.0  # seconds until a process that was killed, or closed its pipes, is gone


class Process(SpawnProcess):
    """A process that Ctrl-C does not reach. It is started or not: a signal to the parent waits until the new process
    has read what it is to do, and the parent knows it."""

    imports_main = False
    """Whether it imports the parent's main module, as spawned processes usually do. Unless something that it needs is
    defined there, that only costs: torch and transformers in every process, and a second training run where a script
    has no main guard."""

    def start(self) -> None:
        with whole():
            super().start()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name for what starts a process
        if sys.platform == "win32":
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        # It inherits that SIGINT is blocked in this thread. Ignoring SIGINT itself would come a tenth of a second late.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return Launch(process_obj)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Launch(Popen):
    """A process started as the module lagrpo.workers. Two pipes connect it with its parent, as in multiprocessing's own
    start: it reads what it is to do from the first, whose end tells it that its parent has ended; the end of the second
    (`sentinel`) tells the parent that the process has ended."""

    def _launch(self, process_obj: Any) -> None:
        task = self._pickle_task(process_obj)
        (theirs, ours), (self.sentinel, alive) = os.pipe(), os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (ours, self.sentinel))  # type: ignore[attr-defined]
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [sys.executable, *flags, "-m", "lagrpo.workers", "--multiprocessing-fork", str(theirs)]
        try:
            # In the package's directory, so that the module is found whatever the parent did to sys.path; the process
            # changes to the parent's directory and takes over its sys.path as soon as it has read them.
            self._child = subprocess.Popen(command, cwd=_ROOT, pass_fds=[*self._fds, theirs, alive])  # type: ignore[attr-defined]
        finally:
            os.close(theirs)
            os.close(alive)
        self.pid = self._child.pid
        try:
            with killing(self._child.kill, STARTING), open(ours, "wb", closefd=False) as pipe:
                pipe.write(task)
        except BrokenPipeError as error:
            what = f"a worker process (pid {self.pid}) ended before it had read what it is to do"
            raise OSError(f"{what}; it is ended where it does not read for {STARTING:g} s") from error

    def _pickle_task(self, process: Any) -> memoryview:
        """What a new process reads: its preparation (sys.path, directory, the main module if it needs that), and
        itself."""
        preparation = spawn.get_preparation_data(process.name)
        if not process.imports_main:
            preparation = {name: value for name, value in preparation.items() if not name.startswith("init_main")}
        task = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, task)
            reduction.dump(process, task)
        finally:
            set_spawning_popen(None)
        return task.getbuffer()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; None as long as the process is there. Where multiprocessing would wait without a limit (for a
        process that closed its `sentinel`, or for the others at the end of the program), this waits ENDING seconds."""
        if self.returncode is None and flag == 0:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(ENDING)
        self.returncode = self._child.poll() if self.returncode is None else self.returncode
        return self.returncode


@contextmanager
def killing(kill: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `kill` after so many seconds, unless the block has ended: whoever waits inside for the process that is
    killed then finds its pipes closed."""
    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def die_with_parent() -> None:
    """Wait for the parent's end, then end this process, whatever it is doing. Runs in a thread of its own."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def limit_cpu_time(seconds: float) -> None:
    """Have the kernel end this process once its threads have computed for that many seconds from now.

    Usually the parent ends it at its deadline. This limit is for a parent that was killed while this process hangs in C
    code, where no thread of ours can run."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    spawn.spawn_main(pipe_handle=int(sys.argv[-1]))
