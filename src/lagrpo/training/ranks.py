"""Several processes of one run, started by torchrun.

Every rank runs the same loop. It samples and scores its share of the prompts; then all ranks hold the same batch, the
same metrics and the same state. Each computes the gradient of its share of the rows, and rank 0 writes the files. With
vLLM, rank 0 talks to the servers and scores. A rank that raises ends, and torchrun stops the others.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from lagrpo.interrupts import EndedAtOnce, Interrupted
from lagrpo.rollout.base import Item, Request, SamplingParams
from lagrpo.training.checks import local_size, world_size
from lagrpo.types import Group

TIMEOUT = timedelta(hours=1)
"""Of collectives: longer than a rank may be busy alone, as rank 0 is while servers start or sample a batch."""
JOIN_TIMEOUT = 600.0  # seconds in which all ranks must have started
PATIENCE = 5.0  # seconds after which a rank says for whom it waits
POLL = 0.1  # seconds between two looks
_joined = Counter[str]()  # how often this process has joined others, by the address of their store
logger = logging.getLogger("lagrpo")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others: rank `rank` of `size`. `group` carries tensors (NCCL on GPUs), `objects` Python
    objects; `mesh` is the ranks as FSDP2 shards layers over them, None for whole layers."""

    rank: int = 0
    size: int = 1
    group: Any = None
    objects: Any = None
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every size-th item, beginning with this rank's."""
        return list(items[self.rank :: self.size])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank. Collective."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.objects)
        return found

    def join(self, items: Sequence[T]) -> list[T]:
        """The items of all ranks, rank after rank, on every rank. Collective."""
        return [item for own in self.gather(list(items)) for item in own]

    def on_rank0(self, call: Callable[[], T]) -> T:
        """What the call returns, or raises, on rank 0, on every rank. Collective."""
        if self.size == 1:
            return call()
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = call()
            except (Exception, Interrupted) as error:  # noqa: BLE001 - all ranks raise it
                box[1] = error
        dist.broadcast_object_list(box, 0, group=self.objects)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather_whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the memory of rank 0's host, nothing on the others. Collective if they are sharded."""
        return {
            name: tensor.to("cpu", copy=True) for name, tensor in weights.items() if self.is_first
        }

    @contextmanager
    def sync_interrupts(self) -> Iterator[None]:
        """Raise Interrupted on all ranks after the body if a signal has interrupted it on one of them. Collective."""
        stop = None
        try:
            yield
        except EndedAtOnce:
            raise
        except Interrupted as error:
            stop = error.signal
        for signum in self.gather(stop):
            if signum is not None:
                raise Interrupted(signum)


@contextmanager
def joined(device: str, shard_layers: bool) -> Iterator[Ranks]:
    """Inside, the processes that torchrun started are connected; `shard_layers` for FSDP2."""
    if world_size() == 1:
        yield Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, size = int(os.environ["RANK"]), world_size()
    # torchrun keeps one store across restarts, with addresses of processes that have ended; hosts count differently
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if local_size() == size else "0"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A second run of one process must not find the addresses of the first.
    address = f"{host}:{port}"
    place = f"attempt {attempt}, run {_joined[address]}"
    _joined[address] += 1
    store = PrefixStore(place, open_store(host, port, rank, size))
    wait_for_ranks(store, address, rank, size)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    group, objects = dist.group.WORLD, dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert group is not None
    yield Ranks(rank, size, group, objects, make_mesh(group, device) if shard_layers else None)
    dist.destroy_process_group()  # not after an error: the others would fail before it is reported


def open_store(host: str, port: int, rank: int, size: int) -> Store:
    """The store in which ranks find each other: torchrun serves it, without torchrun rank 0. Raises ConnectionError if
    this rank cannot serve or use it, TimeoutError if nothing answers in time."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_torchrun
    if not serves:
        server = "torchrun" if by_torchrun else "rank 0"
        wait_until(lambda: answers(host, port), lambda: f"{server} at {host}:{port}")
    open_it = partial(
        dist.TCPStore,  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        size,
        is_master=serves,
        timeout=timedelta(seconds=JOIN_TIMEOUT),
        wait_for_workers=False,
        multi_tenant=True,
    )
    # PyTorch handles no signal while it waits for an answer.
    store = call_in_thread(open_it)
    wait_until(store.done, lambda: f"an answer of {host}:{port}")
    try:
        store.result().set_timeout(TIMEOUT)
        return store.result()
    except dist.DistError as error:
        cure = "set MASTER_PORT to a free port, and start each rank once"
        raise ConnectionError(
            f"{host}:{port} (MASTER_ADDR, MASTER_PORT) cannot be used: {cure}"
        ) from error


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """What the call returns or raises, in a thread that ends with the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by the one who reads the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def answers(host: str, port: int) -> bool:
    """True if something listens at the address."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_for_ranks(store: Store, address: str, rank: int, size: int) -> None:
    """Return when all ranks have come to this point. Raises TimeoutError if some do not come in time."""
    keys = [f"rank {number}" for number in range(size)]
    store.set(keys[rank], "here")

    def describe() -> str:
        missing = [key for key in keys if not store.check([key])]
        shown = ", ".join(missing[:8])
        more = " and others" if len(missing) > 8 else ""
        return f"{shown}{more} (WORLD_SIZE = {size}) at {address}"

    try:
        wait_until(lambda: store.check(keys), describe)
    except dist.DistError as error:
        raise ConnectionError(f"the process that serves {address} has ended") from error


def wait_until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Return when the condition holds; after a few seconds say for whom it waits. Signals are handled. Raises
    TimeoutError after JOIN_TIMEOUT."""
    started, said = time.monotonic(), ""
    while not condition():
        waited = time.monotonic() - started
        if waited > PATIENCE and describe() != said:
            said = describe()
            logger.warning("waiting for %s", said)
        if waited > JOIN_TIMEOUT:
            cure = "start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or use torchrun"
            raise TimeoutError(f"{describe()} did not come within {JOIN_TIMEOUT:g} s: {cure}")
        time.sleep(POLL)


def make_mesh(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """The ranks as FSDP2 shards layers over them: all have one copy between them."""
    return DeviceMesh.from_group(group, device, mesh_dim_names=("shards",))


def add_up(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of all ranks, added in their order."""
    total: defaultdict[str, float] = defaultdict(float)
    for sums in of_ranks:
        for name, value in sums.items():
            total[name] += value
    return dict(total)


class FirstRankSampler:
    """The vLLM engine of rank 0, `own`, as all ranks call it: collectively. Rank 0 alone has requests."""

    def __init__(self, ranks: Ranks, own: Any) -> None:
        self.ranks, self.own = ranks, own
        said = ranks.on_rank0(
            lambda: (own.syncs_in_flight, tuple(map(str, own.servers)), own.weights.dtype)
        )
        self.syncs_in_flight, self.servers, self.dtype = said

    @property
    def version(self) -> int:
        return self.ranks.on_rank0(lambda: self.own.version)

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        whole = self._whole(weights)
        return self.ranks.on_rank0(lambda: self.own.sync_weights(whole, version))

    @contextmanager
    def temporary_weights(
        self, weights: Mapping[str, Tensor], version: int, back: bool
    ) -> Iterator[None]:
        whole = self._whole(weights)
        with ExitStack() as stack:
            self.ranks.on_rank0(
                lambda: stack.enter_context(self.own.temporary_weights(whole, version, back))
            )
            yield

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        """On rank 0; the others get the version alone."""
        version, weights = self.own.current_weights() if self.ranks.is_first else (-1, {})
        return self.ranks.on_rank0(lambda: version), weights

    def sample(
        self, requests: Sequence[Request], G: int, *given: SamplingParams
    ) -> Iterator[tuple[Request, Group]]:
        return self.own.sample(requests, G, *given) if self.ranks.is_first else iter(())

    def generate_on_server(
        self, number: int, requests: Sequence[Request], G: int, max_tokens: int
    ) -> list[Group]:
        return self.ranks.on_rank0(
            lambda: self.own.generate_on_server(number, requests, G, max_tokens)
        )

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        return self.ranks.on_rank0(lambda: self.own.scores(items))

    def pop_metrics(self) -> Mapping[str, float]:
        return self.own.pop_metrics() if self.ranks.is_first else {}

    def close(self) -> None:
        if self.ranks.is_first:
            self.own.close()

    def _whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.ranks.gather_whole(weights) if self.ranks.mesh is not None else weights
