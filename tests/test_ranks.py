"""Several processes find each other: what torchrun's variables must say, and how a rank waits for
the others."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from lagrpo.errors import SettingsError
from lagrpo.interrupts import Interrupted, interruptible
from lagrpo.training import ranks
from lagrpo.training.checks import check_ranks, local_size, world_size

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTED = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Something on this machine that listens, and is no rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def be_rank(monkeypatch: pytest.MonkeyPatch):
    """Makes this process one of several, which waits for a moment only."""

    def set_variables(rank: int, port: int, size: int = 2) -> None:
        place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(ranks, "PATIENCE", 0.0)
        monkeypatch.setattr(ranks, "POLL", 0.02)
        monkeypatch.setattr(ranks, "JOIN_TIMEOUT", 0.3)

    return set_variables


def join() -> None:
    with ranks.joined("cpu", shard_layers=False):
        pass


# The variables


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param({"WORLD_SIZE": "2"}, "RANK is not set.*torchrun", id="without a rank"),
        pytest.param({"MASTER_ADDR": ""}, "MASTER_ADDR is not set", id="without an address"),
        pytest.param({"MASTER_PORT": ""}, "MASTER_PORT is not set", id="without a port"),
        pytest.param({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'", id="size in words"),
        pytest.param({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'", id="size 0"),
        pytest.param({"RANK": "2"}, "RANK = 2.*0 to 1", id="rank beyond the size"),
        pytest.param({"RANK": "-1"}, "RANK = '-1'", id="negative rank"),
        pytest.param({"MASTER_PORT": "99999"}, "MASTER_PORT = 99999", id="port beyond 65535"),
    ],
)
def test_variables_that_are_not_torchruns_are_rejected(monkeypatch, variables, message):
    given = variables if variables == {"WORLD_SIZE": "2"} else STARTED | variables
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        check_ranks("cpu")


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="none"),
        pytest.param({"WORLD_SIZE": ""}, id="empty size"),
        pytest.param({"RANK": "1"}, id="a rank without a size"),
    ],
)
def test_process_is_alone_without_a_size(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_ranks("cpu")
    assert (world_size(), local_size()) == (1, 1)


def test_rank_with_a_gpu_needs_its_number_on_the_host(monkeypatch):
    for name, value in STARTED.items():
        monkeypatch.setenv(name, value)
    check_ranks("cpu")
    with pytest.raises(SettingsError, match="LOCAL_RANK is not set"):
        check_ranks("cuda")


# Waiting


def test_first_rank_names_those_that_do_not_come(be_rank, free_port, caplog):
    be_rank(0, free_port, size=3)
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError, match="rank 1, rank 2"):
        join()
    assert "rank 1, rank 2" in caplog.records[-1].getMessage()


def test_other_rank_names_the_first_that_does_not_come(be_rank, free_port):
    be_rank(1, free_port)
    with pytest.raises(TimeoutError, match=f"rank 0 at 127.0.0.1:{free_port}"):
        join()


def test_other_rank_says_that_the_first_does_not_answer(be_rank, listener):
    port = listener.getsockname()[1]
    be_rank(1, port)
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        join()


def test_port_of_another_program_is_rejected(be_rank, listener):
    be_rank(0, listener.getsockname()[1])
    with pytest.raises(ConnectionError, match="MASTER_PORT"):
        join()


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_ends_the_wait(be_rank, free_port, monkeypatch, rank):
    be_rank(rank, free_port)
    monkeypatch.setattr(ranks, "JOIN_TIMEOUT", 60.0)
    signaling = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with interruptible():
        signaling.start()
        with pytest.raises(Interrupted) as stop:
            join()
    assert stop.value.signal == signal.SIGINT
