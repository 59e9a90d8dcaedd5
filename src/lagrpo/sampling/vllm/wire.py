"""How weights get to the servers: a shared directory, NCCL (nccl_wire.py), CUDA IPC.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lagrpo.sampling.vllm.server import SamplerError, Server

Answer = Future[SamplerError | None]  # what went wrong at a server, once it has answered


class StuckError(SamplerError):
    """A transfer that neither ended nor can be told to stop. Nothing can be sent any more, and the servers may wait for
    the rest of it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A version of the weights on its way to the servers."""

    label: str
    """As the servers will report it."""
    weights: Mapping[str, Tensor]
    """In the dtype of the servers, on the trainer's device."""
    write: Callable[[], str]
    """Writes it into the shared directory and returns the path."""

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
        """By name of the parameter."""
        return {name: tensor.shape for name, tensor in self.weights.items()}


class Wire(Protocol):
    """Gets a parcel into paused servers."""

    by_directory: bool
    """Whether the weights go through the shared directory anyway."""

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[SamplerError | None]:
        """What went wrong at each server."""
        ...


class DirectoryWire:
    """All servers read the directory at the same time."""

    by_directory = True

    def send(self, servers: Sequence[Server], parcel: Parcel) -> list[SamplerError | None]:
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
            info = self._info(parcel)
            with ThreadPoolExecutor(len(servers)) as pool:
                answers = [pool.submit(catch, lambda s=server: _update(s, info, parcel.label)) for server in servers]
                self.transfer(parcel, servers[0].deadlines.sync, answers)
                failures = [answer.result() for answer in answers]
        if any(failures):
            self.disconnect()
        return failures

    def _info(self, parcel: Parcel) -> dict[str, Any]:
        """What the servers are told about the tensors."""
        return {
            "names": list(parcel.weights),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in parcel.weights.values()],
            "shapes": [list(tensor.shape) for tensor in parcel.weights.values()],
            **self.describe(parcel),
        }

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
                body = {"init_info": {"packed": False}}
                server.call("POST", "/init_weight_transfer_engine", body, server.deadlines.sync)
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
