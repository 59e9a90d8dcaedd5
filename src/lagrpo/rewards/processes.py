"""Worker processes, as the training process starts, calls and ends them.

A worker is a new interpreter with a socket. It does not import the main script: for a script that
trains, that would take seconds and memory for PyTorch, and without an
`if __name__ == "__main__"` it would train again.

A message is a header, with the number of a call, and a pickle. The code that a worker runs may
write to the socket, never answer, and end or stop its process. So the training process waits for
nothing without a deadline, and accepts only an answer with the number of its call.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

HEADER = struct.Struct("!QQ")
"""The number of a call, and the bytes of the pickle that follows."""

POLL = 0.5
"""Seconds between two looks whether a silent worker still lives.

The end of a worker closes its socket, unless a process that it has started still has the socket.
"""

ENDS_WITHIN = 1.0
"""Seconds in which a worker that has closed its socket must end to give its exit code."""

PROGRAM = """
import json, sys
path, argv, numbers = json.loads(sys.argv[1])
sys.path[:] = path
sys.argv[:] = argv
from lagrpo.rewards.worker import serve
serve(*numbers)
"""


class LoadError(Exception):
    """The worker could not load the object that it is to call."""


class WorkerEndedError(Exception):
    """The worker process has ended, with this exit code; a negative one is a signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class UnreadableAnswerError(Exception):
    """The worker has sent something else than the answer to its call."""


class Worker:
    """A process that loads the object `pickled`, and may use `memory_bytes`.

    One thread calls it, not the main thread; any thread may end it. Raises OSError if the process
    cannot be started.
    """

    def __init__(self, pickled: bytes, memory_bytes: int) -> None:
        self._pickled = pickled
        self._memory_bytes = memory_bytes
        self._number = 0  # of the last call
        self._socket, workers_socket = socket.socketpair()
        self._socket.settimeout(0)  # nothing waits but `_wait_for`
        # The worker reads the other end of this pipe to see that the training process has ended.
        life_end, self._life = os.pipe()
        try:
            self._process = _start([workers_socket.fileno(), life_end], memory_bytes)
        except OSError:
            self._close_files()
            raise
        finally:
            workers_socket.close()
            os.close(life_end)

    def load(self) -> None:
        """Waits until the worker has loaded its object. Raises LoadError, or as `call`."""
        problem = self._exchange(self._pickled, deadline=math.inf)
        if problem is not None:
            raise LoadError(problem)

    def call(
        self, function: Callable[..., object], arguments: tuple[object, ...], deadline: float
    ) -> object:
        """Returns `function(loaded object, *arguments)`, which the worker computes.

        Raises TimeoutError after `deadline` seconds, WorkerEndedError and UnreadableAnswerError.
        After each of these, the worker cannot be used any more.
        """
        return self._exchange(pickle.dumps((function, arguments)), deadline)

    def is_usable(self) -> bool:
        """False if the worker has ended, or has sent something that does not answer a call."""
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return self._process.poll() is None
        except ConnectionError:
            pass
        return False

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process, and closes its files."""
        self.end()
        self._close_files()

    def _close_files(self) -> None:
        self._socket.close()
        os.close(self._life)

    def _exchange(self, message: bytes, deadline: float) -> object:
        """Sends a message, and returns the answer."""
        end = time.monotonic() + deadline
        self._number += 1
        try:
            self._send(HEADER.pack(self._number, len(message)) + message, end)
            number, size = HEADER.unpack(self._receive(HEADER.size, end))
            # No answer is larger than the worker's memory.
            if number != self._number or size > self._memory_bytes:
                raise UnreadableAnswerError
            answer = self._receive(size, end)
        except (ConnectionError, EOFError):
            raise WorkerEndedError(self._wait_for_exit_code()) from None
        try:
            return pickle.loads(answer)
        # This is not the main thread: a KeyboardInterrupt is no Ctrl-C.
        except BaseException as error:
            raise UnreadableAnswerError from error

    def _send(self, data: bytes, end: float) -> None:
        unsent = memoryview(data)
        while unsent:
            self._wait_for(select.POLLOUT, end)
            unsent = unsent[self._socket.send(unsent) :]

    def _receive(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait_for(select.POLLIN, end)
            part = self._socket.recv(min(size - len(data), 2**20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _wait_for(self, event: int, end: float) -> None:
        """Waits until the socket can be read or written. Raises TimeoutError, WorkerEndedError."""
        poll = select.poll()
        poll.register(self._socket, event)
        while True:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if poll.poll(1000 * min(remaining, POLL)):
                return
            exit_code = self._process.poll()
            if exit_code is not None:
                raise WorkerEndedError(exit_code)

    def _wait_for_exit_code(self) -> int:
        """Returns the exit code of a worker that has closed its socket."""
        try:
            return self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.end()
            return self._process.returncode


def _start(descriptors: list[int], memory_bytes: int) -> subprocess.Popen[bytes]:
    """Starts an interpreter that runs `serve` of worker.py with these numbers.

    It imports from where this process imports. Signals to this process's group, such as Ctrl-C, do
    not reach another session.
    """
    # An empty entry is the current directory.
    path = [entry or os.getcwd() for entry in sys.path]
    argument = json.dumps([path, sys.argv, [*descriptors, memory_bytes]])
    # -P: until it has this path, no file of the current directory shadows a module of Python.
    options = [*subprocess._args_from_interpreter_flags(), "-P"]  # pyright: ignore[reportAttributeAccessIssue]
    return subprocess.Popen(
        [sys.executable, *options, "-c", PROGRAM, argument],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )
