"""Reward workers for tests, forked from a process that has their code: a start takes some
milliseconds, and a fifth of a second otherwise."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any

from lagrpo.rewards import processes

PROGRAM = "import quick_workers, sys; quick_workers.fork_on_request(int(sys.argv[1]))"
start_interpreter = processes._start


class Forker:
    """A process that forks workers and says how they have ended."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.lock = threading.Lock()  # several threads call a worker
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(process.wait)
        atexit.register(self.socket.close)

    def ask(self, request: list[Any], descriptors: list[int]) -> Any:
        with self.lock:
            message = json.dumps(request).encode()
            socket.send_fds(self.socket, [len(message).to_bytes(8, "big")], descriptors)
            self.socket.sendall(message)
            return json.loads(self.socket.recv(100))


@cache
def forker(process: int) -> Forker:
    return Forker()


class QuickWorker:
    """A forked worker, with the methods of Popen that lagrpo calls."""

    def __init__(self, descriptors: list[int], memory_bytes: int) -> None:
        state = [os.getcwd(), dict(os.environ), sys.path, sys.argv, memory_bytes]
        self.forker = forker(os.getpid())
        self.pid = self.forker.ask(state, [*descriptors, 1, 2])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.forker.ask([self.pid], [])
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_on_request(descriptor: int) -> None:
    """Serves a Forker until its process ends."""
    for name in ("rewards.worker", "rewards.coroutines", "tasks.environments"):
        importlib.import_module(f"lagrpo.{name}")
    requests = socket.socket(fileno=descriptor)
    exit_codes: dict[int, int] = {}
    while True:
        header, descriptors, _, _ = socket.recv_fds(requests, 8, 4)
        if not header:
            return
        message = json.loads(requests.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
        if descriptors:
            answer: int | None = os.fork()
            if answer == 0:
                requests.close()
                return become_worker(descriptors, *message)
            for each in descriptors:
                os.close(each)
        else:
            answer = exit_codes.get(message[0])
            if answer is None:
                process, status = os.waitpid(message[0], os.WNOHANG)
                if process:
                    answer = exit_codes[process] = os.waitstatus_to_exitcode(status)
        requests.sendall(json.dumps(answer).encode())


def become_worker(
    descriptors: list[int],
    directory: str,
    environment: dict[str, str],
    path: list[str],
    arguments: list[str],
    memory_bytes: int,
) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [entry or directory for entry in path]
    sys.argv[:] = arguments
    for ours, standard in zip(descriptors[2:], (1, 2), strict=True):
        os.dup2(ours, standard)
        os.close(ours)
    from lagrpo.rewards.worker import serve

    serve(descriptors[0], descriptors[1], memory_bytes)
