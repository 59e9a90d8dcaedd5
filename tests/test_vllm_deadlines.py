"""What a user is told when a vLLM server keeps a run waiting: for what, how long, which version and prompt. Against
stubs; no vLLM is needed."""

from __future__ import annotations

import select
import socket
import sys
import threading
from contextlib import contextmanager
from subprocess import PIPE, Popen

import pytest
from test_sampling import requests_for
from test_vllm_client import SHORT, generous, sampler_at, stub
from tiny import tiny_policy

from lagrpo.rollout.vllm import process
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.generation import Dispatcher
from lagrpo.rollout.vllm.process import check_python
from lagrpo.rollout.vllm.server import SamplerError, Server, UnreachableError


def silent(path_of_none):
    return lambda method, path, body: None if path == path_of_none else generous(method, path, body)


@pytest.fixture
def policy():
    return tiny_policy()


def test_a_group_that_does_not_come_is_named_with_its_prompt_and_version(policy, tmp_path):
    with stub(silent("/inference/v1/generate")) as url:
        sampler = sampler_at(url, policy, tmp_path, failures=0)
        sampler.sync_weights(policy.weights, 0)
        named = r"generate did not answer within 0\.5 s \(2 completions of prompt 0, batch 1 by version 0\)\."
        with pytest.raises(SamplerError, match=named):
            list(sampler.sample(requests_for(policy, 1), 2))
        sampler.close()


def test_a_load_that_does_not_end_is_named_with_its_version(policy, tmp_path, monkeypatch):
    """The server that does not load is not healthy either, as one that hangs."""
    sick = threading.Event()

    def hanging(method, path, body):
        if path == "/collective_rpc":
            sick.set()
        return (
            None if path == "/collective_rpc" or (path == "/health" and sick.is_set()) else generous(method, path, body)
        )

    with stub(hanging) as url:
        sampler = sampler_at(url, policy, tmp_path, failures=0)
        for server in sampler.servers:
            monkeypatch.setattr(server, "deadlines", SHORT.__class__(start=0.3, request=0.3, sync=0.3, control=0.3))
        with pytest.raises(SamplerError, match=r"did not answer within 0\.3 s \(version 0 was being loaded\)\. That"):
            sampler.sync_weights(policy.weights, 0)
        sampler.close()


@contextmanager
def dripping():
    """A server that sends a byte of its answer every 20 ms, and would go on for a minute."""
    gone = threading.Event()

    def serve(listening):
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n")
            while not gone.wait(0.02):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            gone.set()
            thread.join(10)


def test_a_server_that_answers_a_byte_at_a_time_trips_the_deadline():
    with dripping() as url, pytest.raises(UnreachableError, match=r"/weight_info did not answer within 0\.5 s"):
        Server(url, None, SHORT).version()


class Gone(Server):
    """A server that ended, and cannot be brought back for a reason that is none of its own."""

    def revive(self):
        raise OSError(28, "No space left on device")


def never(server, request, G):
    raise UnreachableError(f"{server} ended")


def test_a_thread_that_cannot_bring_a_server_back_tells_whoever_waits(policy):
    fleet = Fleet([Gone("http://127.0.0.1:1", None, SHORT)])
    coming = Dispatcher(fleet, never).submit(requests_for(policy, 1), 2, each=1)
    with pytest.raises(
        SamplerError, match=r"127\.0\.0\.1:1 ended\) and could not be brought back: OSError: .*No space"
    ):
        list(coming)
    fleet.close()


def test_groups_that_nobody_generates_are_not_waited_for_for_ever(policy, monkeypatch):
    fleet = Fleet([Server("http://127.0.0.1:1", None, SHORT)], failures=2)
    assert fleet.patience == 0.5 + 3 * (0.5 + 5.0 + 0.5)
    monkeypatch.setattr(Fleet, "patience", 0.1)
    monkeypatch.setattr(Dispatcher, "_start_threads", lambda dispatcher, each: None)
    coming = Dispatcher(fleet, never).submit(requests_for(policy, 3), 2, each=1)
    overdue = r"no group came from http://127\.0\.0\.1:1 within 0\.1 s, .*2 completions of prompt 0, batch 1 and 2 more"
    with pytest.raises(SamplerError, match=overdue):
        list(coming)


def test_a_server_ends_with_its_guard_however_that_ends():
    serving = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    guard = Popen([sys.executable, "-c", process.GUARD, sys.executable, "-c", serving], stdin=PIPE, stdout=PIPE)
    assert guard.stdout is not None
    assert int(guard.stdout.readline()) != guard.pid
    guard.kill()
    guard.wait(5)
    assert select.select([guard.stdout], [], [], 10)[0]
    assert guard.stdout.read() == b"", "the server, which has the other end of this pipe, is still there"


def test_a_port_that_stays_taken_is_told_before_a_server_is_started_again(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(process.StartedServer, "_start", lambda server: started.append(server))
    monkeypatch.setattr(process, "STOPPING", 0.3)
    launch = process.Launch("python", "model", "float32", 10, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = process.StartedServer(launch, SHORT, tmp_path / "log", other.getsockname()[1])
        with pytest.raises(UnreachableError, match="another process listens on port"):
            server.revive()
    assert len(started) == 1


def test_a_python_that_does_not_say_whether_it_has_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "CHECKING", 0.2)
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(ValueError, match=r"python did not say within 0\.2 s whether it has vllm"):
        check_python(str(slow))
