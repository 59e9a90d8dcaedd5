"""How weights get to the servers: a shared directory, NCCL, CUDA IPC.

    directory   safetensors in a directory that trainer and servers see: /dev/shm on one host, a file system on several
    nccl        broadcast from the trainer's GPU to the GPUs of the servers
    ipc         handles to the trainer's GPU memory, for a server on the same GPU

All of them send the same: the parameters of a checkpoint, tied ones once, in the dtype that the server computes in.
Whatever the wire, a version can be written as a directory until the next one has taken its place: a server that died
gets it again, and a server that refused a new version goes back to the old one.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.cuda import nccl

from lagrpo.rollout.vllm.server import SamplerError, Server

LOOK = 0.1  # seconds between two looks whether a server has failed
Answer = Future[SamplerError | None]  # what went wrong at a server, once it has answered
T = TypeVar("T")


class StuckError(SamplerError):
    """A transfer that neither ended nor can be told to stop. Nothing can be sent any more, and the servers may wait for
    the rest of it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A version of the weights on its way to the servers."""

    label: str  # as the servers will report it
    weights: Mapping[str, Tensor]  # in the dtype of the servers, on the trainer's device
    write: Callable[[], str]  # writes it into the shared directory and returns the path
    adapter: bool = False  # of frozen weights that the servers have

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights.values())

    @property
    def device(self) -> torch.device | None:
        """The CUDA device that holds the weights; None if they are not on one."""
        device = next(iter(self.weights.values())).device
        return device if device.type == "cuda" else None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.weights.items()}


class DirectoryWire:
    """All servers read the directory at the same time."""

    by_directory = True  # the weights go through the shared directory anyway

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[SamplerError | None]:
        """Get a parcel into paused servers. Returns what went wrong at each."""
        path = parcel.write()
        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(lambda server: catch(lambda: server.reload(path)), servers))


class TransferWire:
    """vLLM's own weight transfer (start, update, finish). The servers wait inside `update` while `transfer` moves the
    tensors."""

    by_directory = False

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[SamplerError | None]:
        with torch.cuda.device(parcel.device) if parcel.device else nullcontext():
            self.connect(servers, parcel.device)
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in parcel.weights.values()]
            shapes = [list(tensor.shape) for tensor in parcel.weights.values()]
            info = {"names": list(parcel.weights), "dtype_names": dtypes, "shapes": shapes, **self.describe(parcel)}
            with ThreadPoolExecutor(len(servers)) as pool:
                answers = [pool.submit(catch, lambda s=server: _update(s, info, parcel.label)) for server in servers]
                self.transfer(parcel, servers[0].deadlines.sync, answers)
                failures = [answer.result() for answer in answers]
        if any(failures):
            self.disconnect()
        return failures

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        """Set up the transfer, unless that has been done."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Forget a connection that is no longer whole."""

    def describe(self, parcel: Parcel) -> dict[str, Any]:
        """What the servers are told besides names, dtypes and shapes."""
        return {}

    def transfer(self, parcel: Parcel, deadline: float, answers: Sequence[Answer]) -> None:
        """Move the tensors, if that is the trainer's part, within `deadline` seconds and unless a server fails."""


class IpcWire(TransferWire):
    """Handles to tensors in the memory of the GPU that trainer and server share. The server unpickles them, and must be
    started with the permission to (VLLM_ALLOW_INSECURE_SERIALIZATION); nothing is ever unpickled here."""

    def __init__(self) -> None:
        self._connected: set[str] = set()

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        for server in servers:
            if server.url not in self._connected:
                _invite(server, packed=False)
                self._connected.add(server.url)

    def disconnect(self) -> None:
        self._connected.clear()

    def describe(self, parcel: Parcel) -> dict[str, Any]:
        gpu = self.gpu()
        handles = [{gpu: self.handle(tensor)} for tensor in parcel.weights.values()]
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}

    @staticmethod
    def gpu() -> str:
        """The name that all processes know our GPU by, once it has finished its work."""
        torch.cuda.synchronize()
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    @staticmethod
    def handle(tensor: Tensor) -> tuple[Any, ...]:
        """What another process needs to see the tensor. The parcel keeps the tensor alive until the server has it."""
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor)[1]


class NcclWire(TransferWire):
    """Broadcast from rank 0, the trainer, to all workers of all servers, by the communicator that PyTorch ships.
    Members find each other by an id that goes to the servers with the first call, so no port is needed.

    A member that is missing makes all the others wait forever, and PyTorch offers no way to stop them. So every call
    that waits does so in its own thread, with a deadline, and on its own CUDA stream: the policy can still be read, and
    written to disk, while a broadcast hangs."""

    def __init__(self) -> None:
        self._communicator: Any = None
        self._members: list[str] = []

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        urls = [server.url for server in servers]
        if self._communicator is not None and self._members == urls:
            return
        workers = [int(server.call("GET", "/get_world_size")["world_size"]) for server in servers]
        world, identity = 1 + sum(workers), nccl.unique_id()
        shared = {"world_size": world, "packed": False, "nccl_unique_id_b64": base64.b64encode(identity).decode()}
        offsets = [1 + sum(workers[:n]) for n in range(len(servers))]  # the first rank of each server's workers
        with ThreadPoolExecutor(len(servers)) as pool:
            joins = (partial(_invite, s, rank_offset=n, **shared) for s, n in zip(servers, offsets, strict=True))
            answers = [pool.submit(catch, join) for join in joins]
            join = partial(_join, world, identity, device)
            self._communicator = run_within(servers[0].deadlines.sync, "the meeting by NCCL", join, answers)
            failures = [answer.result() for answer in answers]
        if failure := next(filter(None, failures), None):
            self.disconnect()
            raise failure
        self._members = urls

    def disconnect(self) -> None:
        self._communicator, self._members = None, []

    def transfer(self, parcel: Parcel, deadline: float, answers: Sequence[Answer]) -> None:
        def broadcast() -> None:
            with own_stream(parcel.device):
                for tensor in parcel.weights.values():
                    nccl.broadcast([tensor.contiguous()], 0, comms=[self._communicator])

        try:
            run_within(deadline, "the update by NCCL", broadcast, answers)
        except StuckError:
            self.disconnect()
            raise


Wire = DirectoryWire | IpcWire | NcclWire


def _invite(server: Server, **info: Any) -> None:
    """Let the workers of a server take part in the transfer."""
    server.call("POST", "/init_weight_transfer_engine", {"init_info": info}, server.deadlines.sync)


def _update(server: Server, info: Mapping[str, Any], label: str) -> None:
    for path, body in (
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {"weight_version": label}),
    ):
        server.call("POST", path, body, server.deadlines.sync, again=False)


def catch(action: Callable[[], None]) -> SamplerError | None:
    """The SamplerError that `action` raises; None if it raises none."""
    try:
        action()
    except SamplerError as error:
        return error
    return None


def _join(world: int, identity: bytes, device: torch.device | None) -> Any:
    with own_stream(device):
        communicator = nccl.init_rank(world, identity, 0)
        nccl.all_reduce([greeting()], comms=[communicator])
    return communicator


def greeting() -> Tensor:
    """What is summed first: vLLM's members begin with the sum of one number."""
    return torch.zeros(1, device="cuda")


@contextmanager
def own_stream(device: torch.device | None) -> Iterator[None]:
    """Inside, work goes to a new stream, after the work of the current one; at the end the new stream is waited for."""
    with torch.cuda.device(device) if device else nullcontext():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def run_within(seconds: float, what: str, action: Callable[[], T], answers: Sequence[Answer]) -> T:
    """The result of an action that nobody can stop. It runs in a thread, which is left behind if the action does not
    end in time, or cannot end any more because a server that should take part has failed (one of `answers`): then
    StuckError is raised."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001  (it belongs to the one who waits)
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    end = time.monotonic() + seconds
    while not wait([done], LOOK).done:
        if failure := next((answer.result() for answer in answers if answer.done() and answer.result()), None):
            raise StuckError(f"{what} cannot end: {failure}") from failure
        if time.monotonic() > end:
            raise StuckError(f"{what} did not end within {seconds:g} s: a member that should take part does not")
    return done.result()
