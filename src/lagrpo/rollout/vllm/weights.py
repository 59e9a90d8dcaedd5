"""Weight sync: ways to load a version of the weights into all servers.

    directory   safetensors in a directory that trainer and servers see: /dev/shm, or
                $LAGRPO_TRANSFER_DIR
    nccl        broadcast from the trainer's GPU to the GPUs of the servers

A version is labeled RUN:VERSION; the servers report the label of every token that they sample. LoRA
adapters go through the directory. Versions that may be needed again stay there: for servers that
are started again, and after evaluations.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Environment variable with the parent of the directory.
DIRECTORY = "LAGRPO_TRANSFER_DIR"


@dataclass(eq=False, slots=True)
class WeightUpdate:
    """A version of the weights, in the servers' dtype.

    `tensors` is None once they are in the directory.
    """

    version: int
    label: str
    directory: Path
    tensors: Mapping[str, Tensor] | None


class WeightTransfer:
    """Weight sync through a directory, in `dtype`.

    If `adapted_lm` is a model with adapters, only they are sent. For adapters nothing pauses:
    completions in flight continue with the adapter that they began with.

    - `current`: the version that all servers should have
    - `run`: a random name, which tells our version 3 from another run's
    - `pauses`: True if the servers pause while they load weights
    - `writes_first`: True if a version is in the directory before the servers pause
    """

    writes_first = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16, adapted_lm: Any = None) -> None:
        self.dtype = dtype
        self.adapted_lm = adapted_lm
        self.pauses = adapted_lm is None
        self.current: WeightUpdate | None = None
        self.run = secrets.token_hex(4)
        self.root = _make_directory()
        self._updates: dict[str, WeightUpdate] = {}  # by label
        self._requests_in_flight: Counter[str] = Counter()  # by label
        # For `_updates` and `_requests_in_flight`.
        self._lock = threading.Lock()
        # For the files.
        self._writing = threading.Lock()

    def pack(self, weights: Mapping[str, Tensor], version: int) -> WeightUpdate:
        """Returns a version in the servers' dtype, ready to be sent."""
        label = f"{self.run}:{version}"
        if label in self._updates:
            return self._updates[label]
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            tensors[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        update = WeightUpdate(version, label, self.root / f"v{version:06d}", tensors)
        self._updates[label] = update
        if self.writes_first:
            self.write(update)
        return update

    def write(self, update: WeightUpdate) -> str:
        """Writes a version to its directory if that was not done. Returns the directory."""
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
        """Returns the weights of a version, as they were sent."""
        directory = Path(self.write(update))
        if self.adapted_lm is not None:
            return load_adapter_weights(directory)
        return load_file(directory / FILE)

    def send(self, groups: GroupQueue, update: WeightUpdate) -> None:
        """Loads a version into all servers.

        Raises SamplerError for a server that cannot load it; that server stays paused.
        """
        groups.ask_all(partial(self.load, update=update))

    def load(self, server: VllmClient, update: WeightUpdate) -> None:
        """Loads a version into a server, from the directory."""
        if self.adapted_lm is not None:
            server.load_adapter(update.label, self.write(update))
            return
        with server.paused():
            server.reload(self.write(update), update.label)

    def load_current(self, server: VllmClient) -> None:
        """Loads the current version into a server that was started again."""
        if self.current is not None:
            self.load(server, self.current)

    def version_of(self, label: str) -> int:
        """Returns the version that a label stands for; -1 for weights that are not of this run."""
        run, _, number = label.partition(":")
        if run == self.run and number.isdigit():
            return int(number)
        return -1

    @contextmanager
    def using(self) -> Iterator[str]:
        """Keeps the current version until the block ends. Yields its label."""
        with self._lock:
            assert self.current is not None, "weights are synced before anything is sampled"
            label = self.current.label
            self._requests_in_flight[label] += 1
        try:
            yield label
        finally:
            with self._lock:
                self._requests_in_flight[label] -= 1

    def drop_others(self, servers: Sequence[VllmClient], update: WeightUpdate | None) -> None:
        """Removes all versions but `update` and those that requests in flight use."""
        with self._lock:
            old_updates = [
                old_update
                for old_update in self._updates.values()
                if old_update is not update and not self._requests_in_flight[old_update.label]
            ]
        for old_update in old_updates:
            del self._updates[old_update.label]
            if self.adapted_lm is not None:
                for server in servers:
                    # A server that does not answer has nothing to unload.
                    with suppress(SamplerError):
                        server.unload_adapter(old_update.label)
            shutil.rmtree(old_update.directory, ignore_errors=True)

    def close(self, servers: Sequence[VllmClient]) -> None:
        self.drop_others(servers, None)
        shutil.rmtree(self.root, ignore_errors=True)


class NcclTransfer(WeightTransfer):
    """Broadcasts from rank 0, the trainer, to the workers of all servers.

    The communicator is the one that PyTorch ships. A missing member makes all others wait forever,
    and PyTorch cannot stop them. So these calls run in threads that may stay behind, on separate
    CUDA streams: the weights can still be read and saved while a broadcast hangs.
    """

    writes_first = False

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)
        self._communicator: Any = None
        # How often each server had been started when the communicator was made.
        self._starts: dict[VllmClient, int] = {}

    def send(self, groups: GroupQueue, update: WeightUpdate) -> None:
        tensors = update.tensors
        if tensors is None or not all(tensor.is_cuda for tensor in tensors.values()):
            super().send(groups, update)
            return
        # A server that was started again is a new member.
        if groups.starts != self._starts:
            self._connect(groups.servers)
            self._starts = dict(groups.starts)
        announcement = {
            "names": list(tensors),
            "dtype_names": [
                str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()
            ],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        actions = [
            partial(_receive, server, announcement, update.label) for server in groups.servers
        ]
        actions.append(partial(_broadcast, tensors, self._communicator))
        run_together(actions, LOAD_TIMEOUT)
        # A copy, because the trainer's tensors change with the next update.
        update.tensors = {name: tensor.cpu() for name, tensor in tensors.items()}

    def _connect(self, servers: Sequence[VllmClient]) -> None:
        """Makes a communicator of the trainer and all workers. Its id goes to servers over HTTP."""
        num_workers = [
            int(server.call("GET", "/get_world_size")["world_size"]) for server in servers
        ]
        identity = nccl.unique_id()
        world_size = 1 + sum(num_workers)
        actions: list[Callable[[], Any]] = []
        # Rank 0 is the trainer; the workers of the first server come next, then the second's.
        rank_offset = 1
        for server, num_workers_of_server in zip(servers, num_workers, strict=True):
            init_info = {
                "world_size": world_size,
                "packed": False,
                "nccl_unique_id_b64": base64.b64encode(identity).decode(),
                "rank_offset": rank_offset,
            }
            body = {"init_info": init_info}
            path = "/init_weight_transfer_engine"
            actions.append(partial(server.call, "POST", path, body, LOAD_TIMEOUT))
            rank_offset += num_workers_of_server
        actions.append(partial(_join, world_size, identity, torch.cuda.current_device()))
        results = run_together(actions, LOAD_TIMEOUT)
        self._communicator = results[-1]


TRANSFERS = {"directory": WeightTransfer, "nccl": NcclTransfer}


def _join(world_size: int, identity: bytes, device: int) -> Any:
    """Joins a new communicator as rank 0. Waits for all members. Returns it."""
    with _own_stream(device):
        communicator = nccl.init_rank(world_size, identity, 0)
        # vLLM's members begin with this sum.
        nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[communicator])
    return communicator


def _receive(server: VllmClient, announcement: Mapping[str, Any], label: str) -> None:
    """Lets a server take part in a broadcast. `announcement` lists the tensors in their order."""
    with server.paused():
        server.call("POST", "/start_weight_update", {})
        server.call("POST", "/update_weights", {"update_info": announcement}, LOAD_TIMEOUT)
        server.call("POST", "/finish_weight_update", {"weight_version": label}, LOAD_TIMEOUT)


def _broadcast(tensors: Mapping[str, Tensor], communicator: Any) -> None:
    device = next(iter(tensors.values())).device
    with _own_stream(device):
        for tensor in tensors.values():
            nccl.broadcast([tensor.contiguous()], 0, comms=[communicator])


@contextmanager
def _own_stream(device: torch.device | int) -> Iterator[None]:
    """Runs the block on a new stream, after the current stream's work, and waits for its end."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _make_directory() -> Path:
    """Makes a directory for this process, and removes what killed runs left.

    It removes only from the default parent. Another parent may be shared with machines whose
    processes are not visible here.
    """
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    base = Path(os.environ.get(DIRECTORY) or shared).expanduser()
    if str(base) == shared:
        for path in base.glob("lagrpo-*-*"):
            process_id = path.name.split("-")[1]
            if not Path(f"/proc/{process_id}").exists():
                shutil.rmtree(path, ignore_errors=True)
    root = base / f"lagrpo-{os.getpid()}-{secrets.token_hex(4)}"
    root.mkdir(parents=True)
    return root
