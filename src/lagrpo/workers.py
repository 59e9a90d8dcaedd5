"""How worker processes start and end.

A worker is started as a module, `python -m lagrpo.workers`, because a process with torch's threads must not be forked.
SIGINT is blocked in it, so that Ctrl-C reaches the parent alone. It has a guard (guard.py), and ends with the program
and everything that it started, and when it has computed for too long.
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

from lagrpo import guard

_ROOT = Path(__file__).parents[1]  # the directory with the package
_PATIENCE = 3.0  # seconds for a guard to end everything below it
STARTING = 120.0  # seconds until a new process has read what it is to do, on a busy machine
ENDING = 10.0  # seconds until a process that was killed, or closed its pipes, is gone


class Process(SpawnProcess):
    """A process that Ctrl-C does not reach."""

    imports_main = False
    """Whether it imports the parent's main module, as spawned processes usually do. Unless something that it needs is
    defined there, that only costs: torch and transformers in every process, and a second training run where a script
    has no main guard."""
    memory = 0
    """Bytes that it may take with everything that it starts, on Linux; 0: no limit."""

    @property
    def end(self) -> str:
        """How it ended, as a phrase; "" while it has not."""
        launch: Any = self._popen  # type: ignore[attr-defined]
        return "" if self.exitcode is None else getattr(launch, "end", "") or guard.describe(self.exitcode)

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
    """A process started as the module lagrpo.workers, with its guard. Two pipes connect them with the parent, as in
    multiprocessing's own start: the process reads what it is to do from the first, whose end tells both that the parent
    has ended or let go; on the second (`sentinel`) the guard tells who the process is and how it ended."""

    end = ""

    def _launch(self, process_obj: Any) -> None:
        task, self._reading = self._pickle_task(process_obj), threading.Lock()
        (theirs, ours), (self.sentinel, report) = os.pipe(), os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel,))  # type: ignore[attr-defined]
        self._let_go = util.Finalize(self, util.close_fds, (ours,))  # type: ignore[attr-defined]
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        numbers = [str(number) for number in (process_obj.memory, report, theirs)]
        command = [sys.executable, *flags, "-m", "lagrpo.workers", "--multiprocessing-fork", *numbers]
        try:
            # In the package's directory, so that the module is found whatever the parent did to sys.path; the process
            # changes to the parent's directory and takes over its sys.path as soon as it has read them.
            files = [*self._fds, theirs, report]  # type: ignore[attr-defined]
            self._guard = subprocess.Popen(command, cwd=_ROOT, pass_fds=files, start_new_session=True)
        finally:
            os.close(theirs)
            os.close(report)
        try:
            with killing(self._guard.kill, STARTING), open(ours, "wb", closefd=False) as pipe:
                pipe.write(task)
                pipe.flush()
                self.pid = int.from_bytes(os.read(self.sentinel, 8), "little") or self._guard.pid
        except BrokenPipeError as error:
            what = f"a worker process (guard {self._guard.pid}) ended before it had read what it is to do"
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
        if flag == 0:
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(ENDING)
        code = self._guard.poll()
        with self._reading:
            if code is not None and self.returncode is None:
                said, _, self.end = os.read(self.sentinel, 1000).decode().partition(" ")
                self.returncode = int(said) if said else code
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        """End the process and all that it started, whatever the signal: none of it needs to be asked."""
        self._let_go()
        if sig == signal.SIGKILL and self.returncode is None:
            try:
                self._guard.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._guard.kill()


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
    memory, report, program = map(int, sys.argv[-3:])
    guard.split(program, report, memory)
    spawn.spawn_main(pipe_handle=program)
