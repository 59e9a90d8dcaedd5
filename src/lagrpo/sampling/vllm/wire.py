"""How weights get to the servers: a shared directory, NCCL, CUDA IPC.

    directory   safetensors in a directory that trainer and servers see: /dev/shm on one host, a file system on several
    nccl        broadcast from the trainer's GPU to the GPUs of the servers
    ipc         handles to the trainer's GPU memory, for a server on the same GPU

What is sent is the same everywhere: the parameters of a checkpoint, tied ones once, in the dtype that the server
computes in. Whatever the wire, a version stays available as a directory until the next one has taken its place, so that
a server that died can get it again, and one that refused a new version can go back to the old one.
"""

from __future__ import annotations

import base64
import os
import pickle
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.cuda import nccl

from lagrpo.sampling.vllm.server import SamplerError, Server

FILE = "model.safetensors"
LOOK = 0.1  # seconds between two looks whether a server has failed
T = TypeVar("T")
Weights = Mapping[str, Tensor]
Answer = Future[BaseException | None]  # what went wrong at a server, once it has answered


class StuckError(SamplerError):
    """A transfer that neither ended nor can be told to stop: nothing can be sent any more, and the servers may wait
    for the rest of it."""


class CorruptError(SamplerError):
    """A file of weights does not hold what was written into it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A version of the weights on its way: `label` as the servers will report it, `weights` in the dtype of the
    servers and on the trainer's device, `write` puts it into the shared directory and gives that directory's path."""

    label: str
    weights: Weights
    write: Callable[[], str]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights.values())

    @property
    def device(self) -> torch.device | None:
        """Where the weights are on the trainer's side: a CUDA device, or None."""
        device = next(iter(self.weights.values())).device
        return device if device.type == "cuda" else None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.weights.items()}


class Wire(Protocol):
    """Gets a parcel into the servers, which are paused and have no other weights while it does."""

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[BaseException | None]:
        """What went wrong at each server."""
        ...


class Directories:
    """The versions that may still be needed, each as a directory of safetensors below `root`, which is removed at the
    end (a root of our own making; what an earlier process left there when it was killed is removed at the start)."""

    def __init__(self, root: str | None) -> None:
        base = Path(root).expanduser() if root else _shared_memory()
        if root is None:  # below a root of the user's, other hosts may be at work
            _remove_abandoned(base)
        self.root = base / f"lagrpo-{os.getpid()}-{secrets.token_hex(4)}"
        self.root.mkdir(parents=True, mode=0o755)

    def put(self, weights: Weights, version: int) -> Path:
        """Writes a version, reads it back, and only then gives it its name.

        Raises:
            CorruptError: the file does not hold the weights. OSError: it could not be written.
        """
        from safetensors.torch import save_file

        path = self.root / f"v{version:06d}"
        if path.is_dir():
            return path
        scratch = path.with_suffix(".tmp")
        scratch.mkdir(exist_ok=True)
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(own, scratch / FILE, metadata={"format": "pt"})
        check(scratch / FILE, own)
        scratch.rename(path)
        return path

    def drop_before(self, version: int) -> None:
        """Remove the versions older than this one."""
        for path in self.root.iterdir():
            if path.name < f"v{version:06d}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def check(path: Path, weights: Weights) -> None:
    """Raises CorruptError unless the file holds exactly these weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(weights):
                raise CorruptError(f"{path} was not written as it should be: it has other parameters")
            for name, tensor in weights.items():
                if not torch.equal(_bits(file.get_tensor(name)), _bits(tensor)):
                    raise CorruptError(f"{path} was not written as it should be: {name} differs from what was written")
    except SafetensorError as error:
        raise CorruptError(f"{path} was not written as it should be: {error}") from error


class DirectoryWire:
    """Every server reads the directory, all at the same time."""

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[BaseException | None]:
        path = parcel.write()
        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(lambda server: _failure(lambda: server.reload(path)), servers))


class TransferWire:
    """The weight transfer that vLLM has itself (start, update, finish). `transfer` moves the tensors while the servers
    wait for them inside `update`; `describe` says what the update tells them besides names, dtypes and shapes."""

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[BaseException | None]:
        with torch.cuda.device(parcel.device) if parcel.device else nullcontext():
            return self._send(servers, parcel)

    def _send(self, servers: Sequence[Server], parcel: Parcel) -> list[BaseException | None]:
        self.connect(servers, parcel.device)
        info: dict[str, Any] = {
            "names": list(parcel.weights),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in parcel.weights.values()],
            "shapes": [list(tensor.shape) for tensor in parcel.weights.values()],
            **self.describe(parcel),
        }

        def update(server: Server) -> None:
            for path, body in (
                ("/start_weight_update", {}),
                ("/update_weights", {"update_info": info}),
                ("/finish_weight_update", {"weight_version": parcel.label}),
            ):
                server.call("POST", path, body, server.deadlines.sync, again=False)

        with ThreadPoolExecutor(len(servers)) as pool:
            waiting = [pool.submit(_failure, lambda server=server: update(server)) for server in servers]
            self.transfer(parcel, servers[0].deadlines.sync, waiting)
            failures = [one.result() for one in waiting]
        if any(failures):
            self.disconnect()
        return failures

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        raise NotImplementedError

    def disconnect(self) -> None:
        """Forget a connection that is no longer whole."""

    def describe(self, parcel: Parcel) -> dict[str, Any]:
        return {}

    def transfer(self, parcel: Parcel, deadline: float, waiting: Sequence[Answer]) -> None:
        """Move the tensors, where that is the trainer's part, within so many seconds and unless a server fails."""


class NcclWire(TransferWire):
    """Broadcast from rank 0, the trainer, to all workers of all servers, by the communicator that PyTorch ships. The
    meeting point is an id that goes to the servers with the first call, so no port is needed.

    A member that is missing makes all the others wait for ever, and PyTorch offers no way to stop them. So whatever
    waits does so in a thread of its own, with a deadline, and on a stream of its own: the policy can still be read, and
    written to disk, while a broadcast hangs."""

    def __init__(self) -> None:
        self._communicator: Any = None
        self._met: list[str] = []

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        if self._communicator is not None and self._met == [server.url for server in servers]:
            return
        workers = [workers_of(server) for server in servers]
        world, identity = 1 + sum(workers), nccl.unique_id()
        offsets = [1 + sum(workers[:n]) for n in range(len(servers))]

        def meet(server: Server, offset: int) -> None:
            info = {"rank_offset": offset, "world_size": world, "packed": False}
            info["nccl_unique_id_b64"] = base64.b64encode(identity).decode()
            body = {"init_info": info}
            server.call("POST", "/init_weight_transfer_engine", body, server.deadlines.sync)

        def join() -> Any:
            with beside(device):
                communicator = nccl.init_rank(world, identity, 0)
                nccl.all_reduce([greeting()], comms=[communicator])
            return communicator

        with ThreadPoolExecutor(len(servers)) as pool:
            pairs = zip(servers, offsets, strict=True)
            waiting = [pool.submit(_failure, partial(meet, server, offset)) for server, offset in pairs]
            deadline = servers[0].deadlines.sync
            self._communicator = within(deadline, "the meeting by NCCL", join, waiting)
            failures = [one.result() for one in waiting]
        if failure := next(filter(None, failures), None):
            self.disconnect()
            raise failure
        self._met = [server.url for server in servers]

    def disconnect(self) -> None:
        self._communicator, self._met = None, []

    def transfer(self, parcel: Parcel, deadline: float, waiting: Sequence[Answer]) -> None:
        def broadcast() -> None:
            with beside(parcel.device):
                for tensor in parcel.weights.values():
                    nccl.broadcast([tensor.contiguous()], 0, comms=[self._communicator])

        try:
            within(deadline, "the update by NCCL", broadcast, waiting)
        except StuckError:
            self.disconnect()
            raise


class IpcWire(TransferWire):
    """Handles to the tensors in the memory of the GPU that trainer and server share. The server unpickles them, and is
    started with the permission to (VLLM_ALLOW_INSECURE_SERIALIZATION); nothing is ever unpickled here."""

    def __init__(self) -> None:
        self._met: set[str] = set()

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        for server in servers:
            if server.url not in self._met:
                body = {"init_info": {"packed": False}}
                server.call("POST", "/init_weight_transfer_engine", body, server.deadlines.sync)
                self._met.add(server.url)

    def disconnect(self) -> None:
        self._met.clear()

    def describe(self, parcel: Parcel) -> dict[str, Any]:
        gpu = self.gpu()
        handles = [{gpu: self.handle(tensor)} for tensor in parcel.weights.values()]
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}

    @staticmethod
    def gpu() -> str:
        """The name that all processes know our GPU by, once it has done what it was asked."""
        torch.cuda.synchronize()
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    @staticmethod
    def handle(tensor: Tensor) -> tuple[Any, ...]:
        """What another process needs to see the tensor; the parcel keeps it alive until the server has it."""
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor)[1]


@contextmanager
def beside(device: torch.device | None) -> Iterator[None]:
    """Inside, a stream of its own, behind the work of the current one; what was done on it is done at the end."""
    with torch.cuda.device(device) if device else nullcontext():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def within(seconds: float, what: str, action: Callable[[], T], waiting: Sequence[Answer]) -> T:
    """The result of an action that nobody can stop. It runs in a thread that is left behind where it has not ended in
    time, or where it cannot end any more because a server that should take part has failed (one of `waiting`).

    Raises:
        StuckError: see there. What the action itself raises.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001  (it belongs to the one who waits)
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    end = time.monotonic() + seconds
    while not wait([done], LOOK).done:
        if failure := next((one.result() for one in waiting if one.done() and one.result()), None):
            raise StuckError(f"{what} cannot end: {failure}") from failure
        if time.monotonic() > end:
            raise StuckError(f"{what} did not end within {seconds:g} s: somebody who should take part does not")
    return done.result()


def greeting() -> Tensor:
    """Every member's communicator begins with a sum of one number."""
    return torch.zeros(1, device="cuda")


WIRES: dict[str, Callable[[], Wire]] = {"directory": DirectoryWire, "nccl": NcclWire, "ipc": IpcWire}


def workers_of(server: Server) -> int:
    """Worker processes of a server, over all its parallelism: members of the broadcast."""
    return int(server.call("GET", "/get_world_size")["world_size"])


def _failure(action: Callable[[], None]) -> BaseException | None:
    try:
        action()
    except SamplerError as error:
        return error
    return None


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: equal bits are equal weights, and NaN is equal to itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _remove_abandoned(base: Path) -> None:
    """Directories of processes of this machine that are no longer there."""
    for path in base.glob("lagrpo-*-*") if base.is_dir() else ():
        number = path.name.split("-")[1]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
