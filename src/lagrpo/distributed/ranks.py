"""Several processes of one run, started by torchrun.

Every rank runs the same loop. It samples and scores its share of the prompts; then all ranks hold
the same batch, the same metrics and the same state. Each computes the gradient of its share of the
rows, and rank 0 writes the files. With vLLM, rank 0 talks to the servers and scores. A rank that
raises ends, and torchrun stops the others. If a rank is stopped, `Watch` says for whom the others
wait.
"""

# Some methods of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import io
import logging
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from lagrpo.distributed.torchrun import local_size, world_size
from lagrpo.interrupts import EndedAtOnce, Interrupted
from lagrpo.machine import set_own_variable
from lagrpo.threads import call_in_thread

JOIN_TIMEOUT = 600.0  # seconds in which all ranks must have started
PATIENCE = 5.0  # seconds after which a rank says for whom it waits
POLL = 0.1  # seconds between two looks
BEAT = 5.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without a sign of life after which the others name a rank
ANY_OTHER_HOST = "198.51.100.1"  # an address of documentation (RFC 5737): no host has it
SIOCGIFADDR = 0x8915  # Linux: get the address of an interface
GONE = "gone"  # the last sign of a rank that has left the run
logger = logging.getLogger("lagrpo")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others: rank `rank` of `size`.

    `group` carries tensors (NCCL on GPUs), `objects` Python objects, and `background` objects of a
    thread. `mesh` is the ranks as FSDP2 shards layers over them, None for whole layers.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    objects: Any = None
    mesh: DeviceMesh | None = None
    background: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def in_background(self) -> Ranks:
        """Returns the ranks for a thread, which gathers objects while the run does so, too."""
        return replace(self, objects=self.background)

    def share(self, items: Sequence[T]) -> list[T]:
        """Returns every size-th item, beginning with the item number `rank`."""
        return list(items[self.rank :: self.size])

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order, on every rank. Collective."""
        if self.size == 1:
            return [value]
        own_bytes = to_bytes(value)
        lengths_R = [torch.empty(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths_R, torch.tensor([len(own_bytes)]), group=self.objects)
        lengths = [int(length) for length in lengths_R]
        values: list[Any] = []
        for rank, received in enumerate(self._exchange(own_bytes, lengths)):
            values.append(value if rank == self.rank else pickle.loads(received.numpy().data))
        return values

    def _exchange(self, own_bytes: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        """Yields the bytes of each rank, uint8. Collective."""
        longest = max(lengths)
        if longest * self.size <= 2 * sum(lengths):
            padded = own_bytes.new_zeros(longest)
            padded[: len(own_bytes)] = own_bytes
            parts = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(parts, padded, group=self.objects)
            yield from parts
            return
        # One rank has most of it, such as a batch: padded, every rank would get it R times.
        for rank, length in enumerate(lengths):
            part = own_bytes if rank == self.rank else own_bytes.new_empty(length)
            dist.broadcast(part, rank, group=self.objects)
            yield part

    def join(self, items: Sequence[T]) -> list[T]:
        """Returns the items of all ranks, rank after rank, on every rank. Collective."""
        items_by_rank = self.gather(list(items))
        return [item for items_of_rank in items_by_rank for item in items_of_rank]

    def on_rank0(self, call: Callable[[], T]) -> T:
        """Makes the call on rank 0, and returns or raises the same on every rank. Collective."""
        if self.size == 1:
            return call()
        outcome: list[Any] = [None, None]  # result, error
        if self.is_first:
            try:
                outcome[0] = call()
            except (Exception, Interrupted) as error:  # noqa: BLE001 - all ranks raise it
                outcome[1] = error
        dist.broadcast_object_list(outcome, 0, group=self.objects)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def on_every_rank(self, call: Callable[[], T]) -> list[T]:
        """Makes the call on every rank, and returns all results, in the order of the ranks.

        If the call fails on some, raises the first error on every rank. Collective.
        """
        outcome: tuple[Any, Exception | None]
        try:
            outcome = (call(), None)
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            outcome = (None, error)
        results: list[Any] = []
        for result, error in self.gather(outcome):
            if error is not None:
                raise error
            results.append(result)
        return results

    def gather_whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of the weights in the memory of rank 0's host, and nothing on the others.

        Collective if the weights are sharded: then every rank has to read each of them.
        """
        return {
            name: tensor.to("cpu", copy=True) for name, tensor in weights.items() if self.is_first
        }

    @contextmanager
    def sync_interrupts(self) -> Generator[None]:
        """Raises Interrupted on all ranks after the body if a signal has interrupted one of them.

        Collective.
        """
        signum = None
        try:
            yield
        except EndedAtOnce:  # this rank does not wait for the others
            raise
        except Interrupted as error:
            signum = error.signal
        for signum_of_rank in self.gather(signum):
            if signum_of_rank is not None:
                raise Interrupted(signum_of_rank)


@contextmanager
def joined(device: str, *, shard_layers: bool, timeout: float) -> Generator[Ranks]:
    """Connects the processes that torchrun started while the body runs.

    `shard_layers` is for FSDP2. A rank waits `timeout` seconds in a collective, and then fails.
    Raises ConnectionError and TimeoutError if they do not find each other.
    """
    if world_size() == 1:
        yield Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    size = world_size()
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    time_limit = timedelta(seconds=timeout)
    store = open_store(host, port, rank, size)
    store.set_timeout(time_limit)
    store = PrefixStore("lagrpo", store)
    attempt = learn_attempt(store, f"{host}:{port}", rank, size)
    attempt_store = PrefixStore(attempt, store)
    # A connection that no collective waits in.
    watch = Watch(attempt_store.clone(), rank, size)  # pyright: ignore
    wait_for_ranks(store, attempt, f"{host}:{port}", rank, size)
    watch.start()
    if local_size() != size:
        choose_interface(host, port)

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=attempt_store, rank=rank, world_size=size, timeout=time_limit
    )
    group = dist.group.WORLD
    objects = dist.new_group(backend="gloo", timeout=time_limit)
    background = dist.new_group(backend="gloo", timeout=time_limit)
    assert group is not None
    mesh = make_mesh(group, device) if shard_layers else None
    try:
        yield Ranks(rank, size, group, objects, mesh, background)
    finally:
        watch.end()
    # Not after an error: the others would fail before it is reported.
    dist.destroy_process_group()


def open_store(host: str, port: int, rank: int, size: int) -> Store:
    """Returns the store in which ranks find each other: torchrun serves it, or rank 0.

    PyTorch's env:// would handle no signal while it waits nor say for whom, and a rank that
    torchrun restarts could read the addresses of the attempt before. Raises ConnectionError if this
    rank cannot serve or use the store, TimeoutError if nothing answers in time.
    """
    torchrun_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    this_rank_serves = rank == 0 and not torchrun_serves
    if not this_rank_serves:
        server = "torchrun" if torchrun_serves else "rank 0"
        # PyTorch would hold Python's lock while it tries to connect.
        wait_until(lambda: answers(host, port), lambda: f"{server} at {host}:{port}")
    connect = partial(
        dist.TCPStore,  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        size,
        is_master=this_rank_serves,
        timeout=timedelta(seconds=JOIN_TIMEOUT),
        wait_for_workers=False,
        multi_tenant=True,
    )
    # PyTorch handles no signal while it waits for an answer.
    store = call_in_thread(connect)
    wait_until(store.done, lambda: f"an answer of {host}:{port}")
    try:
        return store.result()
    except dist.DistError as error:
        advice = "set MASTER_PORT to a free port, and start each rank once"
        raise ConnectionError(
            f"{host}:{port} (MASTER_ADDR, MASTER_PORT) cannot be used: {advice}"
        ) from error


def choose_interface(host: str, port: int) -> None:
    """Lets Gloo and NCCL use the network interface that routes to MASTER_ADDR.

    By itself Gloo takes the address of this host's name, which is often 127.0.1.1: other hosts
    cannot connect to that. Variables that the user has set stay.
    """
    interface = interface_to(host, port)
    if interface is None:
        return
    set_own_variable("GLOO_SOCKET_IFNAME", interface)
    # Without "=", NCCL takes all interfaces whose names begin so.
    set_own_variable("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_to(host: str, port: int) -> str | None:
    """Returns the interface that reaches a host; None if there is none with an IPv4 address.

    On the host itself, whose name may be a loopback address, it is the default interface.
    """
    local_address = local_address_to(host, port)
    if local_address is not None and local_address.startswith("127."):
        local_address = local_address_to(ANY_OTHER_HOST, port)
    if local_address is None:
        return None
    for _, name in socket.if_nameindex():
        if local_address == address_of(name):
            return name
    return None


def local_address_to(host: str, port: int) -> str | None:
    """Returns the IPv4 address of this machine that packets to a host come from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: this only looks up the route.
            probe.connect((host, port))
        except OSError:
            return None
        return probe.getsockname()[0]


def address_of(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface; None if it has none, or not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    # struct ifreq of <net/if.h>: a name of 16 bytes, then an address whose bytes 4 to 7 are IPv4's.
    query = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, query)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def answers(host: str, port: int) -> bool:
    """True if something listens at the address."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def learn_attempt(store: Store, address: str, rank: int, size: int) -> str:
    """Returns the name of this attempt to run, the same on all ranks.

    torchrun may keep one store across restarts, with the keys of processes that have ended, and
    hosts count restarts differently. So rank 0 draws a name, and `wait_for_ranks` tells it to every
    process that asks. Each process asks under a random name: it cannot read an older answer.

    Raises TimeoutError if rank 0 does not come in time, and ConnectionError if the store is gone.
    """
    own_name = secrets.token_hex(8)
    if rank == 0:
        return own_name
    key = f"attempt of {own_name}"
    with naming_server(address):
        store.set(f"name of rank {rank}", own_name)
        wait_until(lambda: store.check([key]), lambda: f"rank 0 (WORLD_SIZE = {size}) at {address}")
        return store.get(key).decode()


def wait_for_ranks(store: Store, attempt: str, address: str, rank: int, size: int) -> None:
    """Waits until all ranks of this attempt have come to this point.

    Raises TimeoutError if some do not come in time, and ConnectionError if the store is gone.
    """
    attempt_store = PrefixStore(attempt, store)
    keys = [f"rank {number}" for number in range(size)]

    def find_missing() -> list[int]:
        if attempt_store.check(keys):
            return []
        return [number for number, key in enumerate(keys) if not attempt_store.check([key])]

    def all_are_here() -> bool:
        missing = find_missing()
        if rank == 0:
            for number in missing:
                name_key = f"name of rank {number}"
                if store.check([name_key]):
                    store.set(f"attempt of {store.get(name_key).decode()}", attempt)
        return not missing

    def describe() -> str:
        missing = [keys[number] for number in find_missing()]
        shown = ", ".join(missing[:8])
        more = " and others" if len(missing) > 8 else ""
        return f"{shown}{more} (WORLD_SIZE = {size}) at {address}"

    with naming_server(address):
        attempt_store.set(keys[rank], "here")
        wait_until(all_are_here, describe)


@contextmanager
def naming_server(address: str) -> Generator[None]:
    """Raises ConnectionError if the process that serves the store has ended."""
    try:
        yield
    except dist.DistError as error:
        raise ConnectionError(f"the process that serves {address} has ended") from error


def wait_until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Waits until the condition holds. After a few seconds it says what it waits for.

    `describe` names what is missing. Signals are handled. Raises TimeoutError after JOIN_TIMEOUT.
    """
    started = time.monotonic()
    last_text = ""
    while not condition():
        waited = time.monotonic() - started
        if waited > PATIENCE:
            text = describe()
            if text != last_text:
                last_text = text
                logger.warning("waiting for %s", text)
        if waited > JOIN_TIMEOUT:
            advice = (
                "start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, "
                "or use torchrun"
            )
            raise TimeoutError(f"{describe()} did not come within {JOIN_TIMEOUT:g} s: {advice}")
        time.sleep(POLL)


class Watch:
    """Signs of life that ranks exchange through the store, in a thread of each rank.

    A rank that is stopped, or whose host does not answer, gives none: a warning of another rank
    names it, whatever the run waits in. A busy rank gives signs.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._num_signs = 0
        self._last_signs = [""] * size
        self._changed_at = [time.monotonic()] * size
        self._looked_at = time.monotonic()
        self._silent: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lagrpo watch", daemon=True)
        store.set(f"place {rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._give_sign(str(self._num_signs))

    def start(self) -> None:
        """Starts to watch, once all ranks have a Watch."""
        self._thread.start()

    def end(self) -> None:
        """Ends the watch. The others do not wait for this rank any more."""
        self._ended.set()
        self._thread.join(BEAT)

    def _run(self) -> None:
        # The store ends with the process that serves it.
        with suppress(dist.DistError):
            places = self._get_of_all("place")
            while not self._ended.wait(BEAT):
                exchange = call_in_thread(self.exchange_signs)
                try:
                    signs = exchange.result(SILENCE)
                except TimeoutError:
                    server = "torchrun or rank 0"
                    logger.warning("waiting for %s, through which the ranks meet", server)
                    signs = exchange.result()
                for rank, is_silent in self.compare(signs, time.monotonic()).items():
                    text = "waiting for rank %d (%s), which gives no sign of life"
                    if not is_silent:
                        text = "rank %d (%s) goes on"
                    logger.warning(text, rank, places[rank])
            self._give_sign(GONE)

    def exchange_signs(self) -> list[str]:
        """Gives a sign of life. Returns the last sign of each rank."""
        self._num_signs += 1
        self._give_sign(str(self._num_signs))
        return self._get_of_all("sign")

    def compare(self, signs: Sequence[str], now: float) -> dict[int, bool]:
        """Compares the signs of all ranks with the last ones, at the time `now` in seconds.

        Returns the ranks that this rank has to report: True for a rank that has become silent,
        False for one that is silent no more. Only the first rank that is not silent reports.
        """
        if now - self._looked_at > SILENCE:  # this process was stopped itself
            self._changed_at = [now] * self._size
        self._looked_at = now
        changes: dict[int, bool] = {}
        for rank, sign in enumerate(signs):
            if sign != self._last_signs[rank]:
                self._last_signs[rank] = sign
                self._changed_at[rank] = now
            is_silent = sign != GONE and now - self._changed_at[rank] > SILENCE
            if is_silent != (rank in self._silent):
                changes[rank] = is_silent
        self._silent ^= set(changes)
        reporters = [
            rank for rank, sign in enumerate(signs) if sign != GONE and rank not in self._silent
        ]
        return changes if self._rank == reporters[0] else {}

    def _give_sign(self, sign: str) -> None:
        self._store.set(f"sign {self._rank}", sign)

    def _get_of_all(self, name: str) -> list[str]:
        keys = [f"{name} {rank}" for rank in range(self._size)]
        return [value.decode() for value in self._store.multi_get(keys)]


def make_mesh(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """Returns the ranks as FSDP2 shards layers over them: together they hold one copy."""
    return DeviceMesh.from_group(group, device, mesh_dim_names=("shards",))


class CompactPickler(pickle.Pickler):
    """A pickler that writes the numbers of a tensor alone.

    PyTorch writes all numbers that a tensor is a view of, and a kilobyte beside them.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.requires_grad or obj.device.type != "cpu":
            return NotImplemented
        numbers = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
        return to_tensor, (numbers, obj.dtype, tuple(obj.shape))


def to_tensor(numbers: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor whose numbers are these bytes."""
    return torch.from_numpy(numbers).view(dtype).view(shape)


def to_bytes(value: object) -> Tensor:
    """Returns a value as bytes that `pickle` reads: uint8 [n]."""
    buffer = io.BytesIO()
    CompactPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def add_up(sums_by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of all ranks, added in the order of the ranks."""
    total: defaultdict[str, float] = defaultdict(float)
    for sums in sums_by_rank:
        for name, value in sums.items():
            total[name] += value
    return dict(total)
