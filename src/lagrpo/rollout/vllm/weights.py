"""Weight sync: a version of the weights into all servers.

    directory   safetensors in a directory that trainer and servers see: /dev/shm, or $LAGRPO_TRANSFER_DIR
    nccl        broadcast from the trainer's GPU to the GPUs of the servers

A version is labeled RUN:VERSION; the servers report the label of every token that they sample. LoRA adapters go through
the directory. Versions that may be needed again stay there: for servers that are started again, and after evaluations.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.cuda import nccl

from lagrpo.model.lora import load_adapter_weights, save_adapter
from lagrpo.rollout.vllm.client import (
    LOAD_TIMEOUT,
    GroupQueue,
    SamplerError,
    VllmClient,
    run_together,
)

FILE = "model.safetensors"
DIRECTORY = "LAGRPO_TRANSFER_DIR"  # environment variable with the parent of the directory


@dataclass(eq=False, slots=True)
class WeightUpdate:
    """A version of the weights, in the servers' dtype."""

    version: int
    label: str
    directory: Path
    tensors: Mapping[str, Tensor] | None  # None once they are in the directory


class WeightTransfer:
    """Weights to servers through a directory, in `dtype`; adapters if `adapted_lm` is a model with adapters. For those
    nothing pauses: completions in flight continue with the adapter that they began with."""

    writes_first = True  # a version is in the directory before the servers pause

    def __init__(self, dtype: torch.dtype = torch.bfloat16, adapted_lm: Any = None) -> None:
        self.dtype, self.adapted_lm, self.pauses = dtype, adapted_lm, adapted_lm is None
        self.current: WeightUpdate | None = None  # what all servers should have
        self.run = secrets.token_hex(4)  # tells our version 3 from another run's
        self.root = _make_directory()
        self._updates: dict[str, WeightUpdate] = {}
        self._used: Counter[str] = Counter()  # requests in flight by label
        self._lock = threading.Lock()  # of these
        self._writing = threading.Lock()

    def pack(self, weights: Mapping[str, Tensor], version: int) -> WeightUpdate:
        """A version in the servers' dtype, ready to be sent."""
        label = f"{self.run}:{version}"
        if label not in self._updates:
            tensors = {
                name: t.to(self.dtype) if t.is_floating_point() else t
                for name, t in weights.items()
            }
            self._updates[label] = WeightUpdate(
                version, label, self.root / f"v{version:06d}", tensors
            )
            if self.writes_first:
                self.write(self._updates[label])
        return self._updates[label]

    def write(self, update: WeightUpdate) -> str:
        """The directory of a version, written if it was not."""
        with self._writing:
            if update.tensors is not None:
                update.directory.mkdir(exist_ok=True)
                tensors = {
                    name: tensor.detach().cpu().contiguous()
                    for name, tensor in update.tensors.items()
                }
                if self.adapted_lm is not None:
                    save_adapter(self.adapted_lm, tensors, update.directory)
                else:
                    save_file(tensors, update.directory / FILE, {"format": "pt"})
                update.tensors = None
        return str(update.directory)

    def read(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """The weights of a version, as they were sent."""
        directory = Path(self.write(update))
        return (
            load_file(directory / FILE)
            if self.adapted_lm is None
            else load_adapter_weights(directory)
        )

    def send(self, groups: GroupQueue, update: WeightUpdate) -> None:
        """Load a version into all servers. Raises SamplerError for a server that cannot load it, and stays paused."""
        groups.ask_all(partial(self.load, update=update))

    def load(self, server: VllmClient, update: WeightUpdate) -> None:
        """Load a version into a server, from the directory."""
        if self.adapted_lm is not None:
            return server.load_adapter(update.label, self.write(update))
        with server.paused():
            server.reload(self.write(update), update.label)

    def load_current(self, server: VllmClient) -> None:
        """Load the current version into a server that was started again."""
        if self.current is not None:
            self.load(server, self.current)

    def version_of(self, label: str) -> int:
        """The version that a label stands for; -1 for weights that are not of this run."""
        run, _, number = label.partition(":")
        return int(number) if run == self.run and number.isdigit() else -1

    @contextmanager
    def using(self) -> Iterator[str]:
        """The label of the current version, which stays until the block ends."""
        with self._lock:
            assert self.current is not None, "weights are synced before anything is sampled"
            label = self.current.label
            self._used[label] += 1
        try:
            yield label
        finally:
            with self._lock:
                self._used[label] -= 1

    def drop_others(self, servers: Sequence[VllmClient], update: WeightUpdate | None) -> None:
        """Remove all versions but one, and those that requests in flight use."""
        with self._lock:
            dropped = [
                u for u in self._updates.values() if u is not update and not self._used[u.label]
            ]
        for old in dropped:
            del self._updates[old.label]
            for server in servers if not self.pauses else ():
                with suppress(SamplerError):  # a server that does not answer has nothing to unload
                    server.unload_adapter(old.label)
            shutil.rmtree(old.directory, ignore_errors=True)

    def close(self, servers: Sequence[VllmClient]) -> None:
        self.drop_others(servers, None)
        shutil.rmtree(self.root, ignore_errors=True)


class NcclTransfer(WeightTransfer):
    """Broadcast from rank 0, the trainer, to the workers of all servers, by the communicator that PyTorch ships.

    A missing member makes all others wait forever, and PyTorch cannot stop them. So these calls run in threads that may
    stay behind, on CUDA streams of their own: the weights can still be read and saved while a broadcast hangs."""

    writes_first = False

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)
        self._communicator: Any = None
        self._starts: dict[VllmClient, int] = {}

    def send(self, groups: GroupQueue, update: WeightUpdate) -> None:
        if update.tensors is None or not all(tensor.is_cuda for tensor in update.tensors.values()):
            return super().send(groups, update)
        if groups.starts != self._starts:  # a server that was started again is a new member
            self._connect(groups.servers)
            self._starts = dict(groups.starts)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in update.tensors.values()]
        shapes = [list(tensor.shape) for tensor in update.tensors.values()]
        info = {"names": list(update.tensors), "dtype_names": dtypes, "shapes": shapes}
        receive = [partial(_receive, server, info, update.label) for server in groups.servers]
        run_together(
            [*receive, partial(_broadcast, update.tensors, self._communicator)], LOAD_TIMEOUT
        )
        update.tensors = {
            name: tensor.cpu() for name, tensor in update.tensors.items()
        }  # the trainer's move on

    def _connect(self, servers: Sequence[VllmClient]) -> None:
        """Members find each other by an id that the servers get over HTTP."""
        workers = [int(server.call("GET", "/get_world_size")["world_size"]) for server in servers]
        identity, world = nccl.unique_id(), 1 + sum(workers)
        shared = {
            "world_size": world,
            "packed": False,
            "nccl_unique_id_b64": base64.b64encode(identity).decode(),
        }
        joining: list[Any] = []
        for n, server in enumerate(servers):
            info = {"init_info": shared | {"rank_offset": 1 + sum(workers[:n])}}
            joining.append(
                partial(server.call, "POST", "/init_weight_transfer_engine", info, LOAD_TIMEOUT)
            )
        device = torch.cuda.current_device()
        *_, self._communicator = run_together(
            [*joining, partial(_join, world, identity, device)], LOAD_TIMEOUT
        )


TRANSFERS = {"directory": WeightTransfer, "nccl": NcclTransfer}


def _join(world: int, identity: bytes, device: int) -> Any:
    with _own_stream(device):
        communicator = nccl.init_rank(world, identity, 0)
        nccl.all_reduce(
            [torch.zeros(1, device="cuda")], comms=[communicator]
        )  # vLLM's members begin with this sum
    return communicator


def _receive(server: VllmClient, info: Mapping[str, Any], label: str) -> None:
    with server.paused():
        server.call("POST", "/start_weight_update", {})
        server.call("POST", "/update_weights", {"update_info": info}, LOAD_TIMEOUT)
        server.call("POST", "/finish_weight_update", {"weight_version": label}, LOAD_TIMEOUT)


def _broadcast(tensors: Mapping[str, Tensor], communicator: Any) -> None:
    with _own_stream(next(iter(tensors.values())).device):
        for tensor in tensors.values():
            nccl.broadcast([tensor.contiguous()], 0, comms=[communicator])


@contextmanager
def _own_stream(device: torch.device | int) -> Iterator[None]:
    """Inside, work goes to a new stream, after the work of the current one; the end waits for it."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _make_directory() -> Path:
    """A directory of this process. Directories of runs that were killed are removed from /dev/shm."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    base = Path(os.environ.get(DIRECTORY) or shared).expanduser()
    if str(base) == shared:
        for path in base.glob("lagrpo-*-*"):
            if not Path(f"/proc/{path.name.split('-')[1]}").exists():
                shutil.rmtree(path, ignore_errors=True)
    root = base / f"lagrpo-{os.getpid()}-{secrets.token_hex(4)}"
    root.mkdir(parents=True)
    return root
