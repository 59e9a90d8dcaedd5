"""Several processes find each other: what torchrun's variables must say, and how a rank waits for
the others."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from ranks import run_on_ranks, together
from running import tiny_settings
from torch import Tensor
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    new_group,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from lagrpo.distributed import ranks, shared
from lagrpo.distributed.ranks import Ranks
from lagrpo.distributed.torchrun import check_ranks, local_size, world_size
from lagrpo.errors import SettingsError
from lagrpo.interrupts import Interrupted, interruptible
from lagrpo.lifecycle import checkpoint, run
from lagrpo.lifecycle.callbacks import Callback
from lagrpo.resume.checkpoint_files import CheckpointError
from lagrpo.threads import call_in_thread
from lagrpo.types import Result

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
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_PORT": port,
            "MASTER_ADDR": "127.0.0.1",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(ranks, "PATIENCE", 0.0)
        monkeypatch.setattr(ranks, "POLL", 0.02)
        monkeypatch.setattr(ranks, "JOIN_TIMEOUT", 0.3)

    return set_variables


def join() -> None:
    with ranks.joined("cpu", shard_layers=False, timeout=60.0):
        pass


# The network interface


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        pytest.param({"head": "10.0.0.7"}, "eth1", id="another host"),
        pytest.param({"head": "127.0.0.1", "other": "10.0.0.7"}, "eth1", id="this host's own name"),
        pytest.param({"head": "127.0.0.1", "other": "192.168.1.5"}, "eth0", id="default route"),
        pytest.param({"head": "10.9.9.9"}, None, id="address without an interface"),
        pytest.param({}, None, id="no route"),
    ],
)
def test_interface_is_the_one_that_routes_to_the_first_rank(monkeypatch, addresses, expected):
    interfaces = {"lo": "127.0.0.1", "down0": None, "eth0": "192.168.1.5", "eth1": "10.0.0.7"}
    monkeypatch.setattr(ranks, "address_of", interfaces.get)
    monkeypatch.setattr(ranks.socket, "if_nameindex", lambda: list(enumerate(interfaces)))
    routes = {"head": addresses.get("head"), ranks.ANY_OTHER_HOST: addresses.get("other")}
    monkeypatch.setattr(ranks, "local_address_to", lambda host, port: routes[host])
    assert ranks.interface_to("head", 29500) == expected


def test_interface_of_the_user_stays(monkeypatch):
    monkeypatch.setattr(ranks, "interface_to", lambda host, port: "eth1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    # Set and then deleted, so that monkeypatch removes what the call sets.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    ranks.choose_interface("head", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of Linux")
def test_loopback_address_belongs_to_lo():
    assert ranks.address_of("lo") == "127.0.0.1"
    assert ranks.address_of("nosuch0") is None
    assert ranks.local_address_to("127.0.0.1", 9) == "127.0.0.1"


def on_a_host_of_its_own(rank: int) -> tuple[Callback, ...]:
    """Lets a rank believe that the others are on other hosts."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return ()


def test_ranks_of_several_hosts_meet_over_the_chosen_interface(model, tmp_path):
    run_settings = tiny_settings(model, tmp_path, schedule={"batches": 1}, eval={"at_start": False})
    results = together(2, run_settings, on_a_host_of_its_own)
    assert [result.version for result in results] == [1, 1]


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
    environment = variables if variables == {"WORLD_SIZE": "2"} else STARTED | variables
    for name, value in environment.items():
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


@pytest.mark.parametrize("first_to_come", [0, 1])
def test_restarted_ranks_do_not_see_keys_of_the_attempt_before(monkeypatch, first_to_come):
    monkeypatch.setattr(ranks, "POLL", 0.001)
    store = HashStore()

    def meet_as(rank: int) -> Store:
        attempt = ranks.learn_attempt(store, "this process", rank, 2)
        ranks.wait_for_ranks(store, attempt, "this process", rank, 2)
        return PrefixStore(attempt, store)

    def meet(order: tuple[int, int]) -> dict[int, Store]:
        with ThreadPoolExecutor(2) as pool:
            calls = {rank: pool.submit(meet_as, rank) for rank in order}
            return {rank: call.result() for rank, call in calls.items()}

    before = meet((0, 1))
    before[1].set("address", "of a process that has ended")
    now = meet((first_to_come, 1 - first_to_come))
    assert not now[0].check(["address"])
    now[0].set("address", "new")
    assert now[1].get("address") == b"new"


# What ranks exchange


def value_of(kind: str, rank: int) -> object:
    """A value of a rank: 30 tensors are views of one."""
    numbers = torch.arange(3000.0) + rank
    return {
        "rank 0 has all": list(numbers.split(100)) if rank == 0 else [],
        "equal shares": list(numbers.split(100)),
        "dtypes": [numbers.bfloat16()[::2], numbers[7], numbers[:0], numbers > 9, {"a": [None]}],
    }[kind]


def gather(group: ProcessGroup, kind: str) -> tuple[list[str], int]:
    """The gathered values as text, and the bytes that this rank received, its own included."""
    num_bytes = 0
    all_gather, broadcast = torch.distributed.all_gather, torch.distributed.broadcast

    def count_gathered(tensors: list[Tensor], *arguments: Any, **options: Any) -> None:
        nonlocal num_bytes
        num_bytes += sum(tensor.nbytes for tensor in tensors)
        all_gather(tensors, *arguments, **options)

    def count_broadcast(tensor: Tensor, *arguments: Any, **options: Any) -> None:
        nonlocal num_bytes
        num_bytes += tensor.nbytes
        broadcast(tensor, *arguments, **options)

    with (
        patch.object(torch.distributed, "all_gather", count_gathered),
        patch.object(torch.distributed, "broadcast", count_broadcast),
    ):
        ranks_of_group = Ranks(group.rank(), group.size(), group, group)
        values = ranks_of_group.gather(value_of(kind, group.rank()))
    return [repr(value) for value in values], num_bytes


@pytest.mark.parametrize(
    ("kind", "most_bytes"),
    [
        pytest.param("rank 0 has all", 20_000, id="rank 0 has all"),
        pytest.param("equal shares", 60_000, id="equal shares"),
        pytest.param("dtypes", 30_000, id="dtypes"),
    ],
)
def test_gather_gives_every_rank_all_values_and_sends_each_number_once(kind, most_bytes):
    expected = [repr(value_of(kind, rank)) for rank in range(3)]
    for values, num_bytes in run_on_ranks(gather, kind):
        assert values == expected
        assert num_bytes < most_bytes


# Files


def look_for_file(group: ProcessGroup, directories: list[Path]) -> str:
    """The error of a rank whose run directory is this one of the directories; "" without one."""
    with patch.object(shared, "VISIBLE_WITHIN", 0.0):
        try:
            shared.check_shared(Ranks(group.rank(), 2, group, group), directories[group.rank()])
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("names", "error"),
    [
        pytest.param(("a", "a"), "^$", id="shared"),
        pytest.param(("a", "b"), "rank 1 on .* does not see .*/a of rank 0", id="two disks"),
    ],
)
def test_ranks_must_see_the_same_directory(tmp_path, names, error):
    (tmp_path / "b").mkdir()
    directories = [tmp_path / name for name in names]
    for error_of_rank in run_on_ranks(look_for_file, directories, size=2):
        assert re.search(error, error_of_rank)
    assert list(tmp_path.glob("*/.*")) == []


def write_part(group: ProcessGroup, directories: list[Path], full_rank: int | None = None) -> str:
    """Writes a checkpoint with one part per rank. Returns the error of this rank; "" without.

    The disk of `full_rank` is full.
    """
    path = directories[group.rank()] / "step-000001"
    ranks_of_group = Ranks(group.rank(), 2, group, group)
    save = checkpoint._save_tensors
    if group.rank() == full_rank:
        save = Mock(side_effect=OSError(errno.ENOSPC, "No space"))
    with (
        patch.object(shared, "VISIBLE_WITHIN", 0.0),
        patch.object(checkpoint, "_save_tensors", save),
    ):
        try:
            checkpoint._write(path, ranks_of_group, {"x": torch.ones(3)}, lambda *_: None)
        except CheckpointError as error:
            return str(error)
    return ""


def test_checkpoint_is_written_if_all_its_parts_are_there(tmp_path):
    (tmp_path / "b").mkdir()
    assert run_on_ranks(write_part, [tmp_path / "a"] * 2, size=2) == ["", ""]
    assert len(list(tmp_path.glob("a/step-000001/*"))) == 2
    for error in run_on_ranks(write_part, [tmp_path / "c", tmp_path / "b"], size=2):
        assert "1 of 2 parts" in error
    for error in run_on_ranks(write_part, [tmp_path / "c"] * 2, 1, size=2):
        assert "step-000001 could not be written" in error
        assert "No space" in error
    assert [*tmp_path.glob("[bc]/*"), *tmp_path.glob("[bc]/.*")] == []


def gather_in_two_threads(group: ProcessGroup) -> tuple[list[int], list[int]]:
    """What a thread has gathered while the main thread gathers, and what the main thread has."""
    background = new_group(backend="gloo")
    ranks_of_group = Ranks(group.rank(), 2, group, group, background=background)
    of_thread = call_in_thread(
        lambda: [sum(ranks_of_group.in_background().gather(number)) for number in range(200)]
    )
    of_main = [sum(ranks_of_group.gather(-number)) for number in range(200)]
    return of_thread.result(), of_main


def test_thread_gathers_while_the_run_gathers():
    expected = [2 * number for number in range(200)]
    for of_thread, of_main in run_on_ranks(gather_in_two_threads, size=2):
        assert of_thread == expected
        assert of_main == [-number for number in expected]


def test_collective_that_timed_out_names_the_setting(monkeypatch):
    monkeypatch.setattr(run, "SECONDS_FOR_TORCHRUN", 0.0)

    def wait() -> Result:
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    with pytest.raises(RuntimeError) as error:
        run.run_recorded(wait)
    assert "distributed.timeout" in error.value.__notes__[0]


# Signs of life


class FakeStore:
    """A store of this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


@pytest.mark.parametrize(
    ("rank", "looks", "expected"),
    [
        pytest.param(0, [(0, "11"), (30, "22")], {}, id="slow ranks"),
        pytest.param(0, [(0, "11"), (15, "21"), (30, "31")], {1: True}, id="rank 1 stops"),
        pytest.param(1, [(0, "11"), (15, "12"), (30, "13")], {0: True}, id="rank 0 stops"),
        pytest.param(1, [(0, "111"), (15, "121"), (30, "131")], {0: True, 2: True}, id="two stop"),
        pytest.param(1, [(0, "111"), (15, "221"), (30, "331")], {}, id="rank 0 reports"),
        pytest.param(0, [(0, "11"), (15, "21"), (30, "31"), (35, "42")], {1: False}, id="goes on"),
        pytest.param(0, [(0, "11"), (300, "21")], {}, id="this rank was stopped"),
    ],
)
def test_watch_reports_ranks_that_become_silent(monkeypatch, rank, looks, expected):
    monkeypatch.setattr(ranks.time, "monotonic", lambda: 0.0)
    size = len(looks[0][1])
    watch = ranks.Watch(cast(Store, FakeStore()), rank, size)
    changes = {}
    for now, signs in looks:
        changes = watch.compare(list(signs), now)
    assert changes == expected


def test_watch_does_not_report_a_rank_that_has_left(monkeypatch):
    monkeypatch.setattr(ranks.time, "monotonic", lambda: 0.0)
    watch = ranks.Watch(cast(Store, FakeStore()), 0, 2)
    looks = [(0, "1"), (15, "2"), (30, "3")]
    assert [watch.compare([sign, ranks.GONE], now) for now, sign in looks] == [{}, {}, {}]


def test_watch_names_the_rank_that_gives_no_sign(be_rank, free_port, monkeypatch):
    be_rank(0, free_port)
    store = ranks.open_store("127.0.0.1", free_port, rank=0, size=2)
    monkeypatch.setattr(ranks, "BEAT", 0.01)
    monkeypatch.setattr(ranks, "SILENCE", 0.05)
    lines: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(ranks.logger, "warning", lambda text, *words: lines.put(text % words))
    ranks.Watch(store, 1, 2)  # never started
    watch = ranks.Watch(store, 0, 2)
    watch.start()
    assert f"rank 1 (process {os.getpid()}" in lines.get(timeout=30)
    watch.end()
    assert store.multi_get(["sign 0"]) == [ranks.GONE.encode()]
