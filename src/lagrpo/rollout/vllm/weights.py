"""Weight sync: ways to load a version of the weights into all servers.

    directory   safetensors in a directory that trainer and servers see: /dev/shm, or
                $LAGRPO_TRANSFER_DIR
    nccl        broadcast from the trainer's GPU to the GPUs of the servers

A version is labeled RUN:VERSION; the servers report the label of every token that they sample. LoRA
adapters go through the directory. Versions that may be needed again stay there: for servers that
are started again, and after evaluations.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from lagrpo.machine import is_own
from lagrpo.model.lora import load_adapter_weights, save_adapter
from lagrpo.rollout.vllm.client import SamplerError, VllmClient
from lagrpo.rollout.vllm.group_queue import GroupQueue

LOCK = ".lock"
"""In a directory of weights: locked while its process lives."""
FILES = "model-*.safetensors"
BUCKET = 2**29
"""Bytes of weights that are gathered before they are written, as one file."""
# Environment variable with the parent of the directory.
DIRECTORY = "LAGRPO_TRANSFER_DIR"
SHARED_MEMORY = Path("/dev/shm")
# Space for the directory, in versions: the next one is written while the last one is still there.
VERSIONS = 2.2
logger = logging.getLogger("lagrpo")


@dataclass(eq=False, slots=True)
class WeightUpdate:
    """A version of the weights, in the servers' dtype.

    `tensors` is None once they are in the directory. `buffers` are the host's memory that has them
    until then, if they come from a GPU.
    """

    version: int
    label: str
    directory: Path
    tensors: Mapping[str, Tensor] | None
    buffers: dict[str, Tensor] | None = None


class HostBuffers:
    """Memory of the host for versions of the weights on a GPU, used again from sync to sync.

    It is pinned, which a GPU fills several times faster than other memory. By NCCL two versions are
    in memory while an evaluation has other weights. What goes through the directory needs none.
    """

    def __init__(self) -> None:
        self._free: list[dict[str, Tensor]] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a copy of the tensors, for the caller until `release`."""
        buffers: dict[str, Tensor] = {}
        if self._free:
            buffers = self._free.pop()
        for name, tensor in tensors.items():
            if name not in buffers:
                pinned = tensor.device.type == "cuda"
                buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            buffers[name].copy_(tensor.detach())
        return buffers

    def release(self, buffers: dict[str, Tensor]) -> None:
        self._free.append(buffers)


class WeightTransfer:
    """Weight sync through a directory, in `dtype`.

    If `adapted_lm` is a model with adapters, only they are sent. For adapters nothing pauses:
    completions in flight continue with the adapter that they began with. A version has `num_bytes`.
    If the shared memory is too small, as in containers, the directory is in `output_dir`.

    - `current`: the version that all servers should have
    - `run`: a random name, which tells our version 3 from another run's
    - `pauses`: True if the servers pause while they load weights
    - `writes_first`: True if a version is in the directory before the servers pause
    """

    writes_first = True

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        adapted_lm: Any = None,
        *,
        num_bytes: int = 0,
        output_dir: Path | None = None,
    ) -> None:
        self.dtype = dtype
        self.adapted_lm = adapted_lm
        self.pauses = adapted_lm is None
        self.current: WeightUpdate | None = None
        self.run = secrets.token_hex(4)
        self.root = _make_directory(num_bytes, output_dir)
        # The system gives the lock back when this process ends, however it ends.
        self._root_lock = _lock_of(self.root)
        self._root_lock.acquire()
        self._host_buffers = HostBuffers()
        self._updates: dict[str, WeightUpdate] = {}  # by label
        self._requests_in_flight: Counter[str] = Counter()  # by label
        # For `_updates` and `_requests_in_flight`.
        self._lock = threading.Lock()
        # For the files.
        self._writing = threading.Lock()

    def pack(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightUpdate:
        """Returns a version in the servers' dtype, ready to be sent, from names and tensors.

        On the way to a directory only BUCKET bytes of them are held, unless one tensor has more.
        """
        label = f"{self.run}:{version}"
        if label in self._updates:
            return self._updates[label]
        update = WeightUpdate(version, label, self.root / f"v{version:06d}", None)
        converted = ((name, self._convert(tensor)) for name, tensor in weights)
        if self.adapted_lm is None and self.writes_first:
            with self._writing:
                _save_in_buckets(converted, update.directory)
        else:
            update.tensors = dict(converted)
        self._updates[label] = update
        if self.writes_first:
            self.write(update)
        return update

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def write(self, update: WeightUpdate) -> str:
        """Writes a version to its directory if that was not done. Returns the directory."""
        with self._writing:
            if update.tensors is not None:
                if self.adapted_lm is not None:
                    update.directory.mkdir(exist_ok=True)
                    tensors = {name: _on_host(tensor) for name, tensor in update.tensors.items()}
                    save_adapter(self.adapted_lm, tensors, update.directory)
                else:
                    _save_in_buckets(update.tensors.items(), update.directory)
                self._drop_tensors(update)
        return str(update.directory)

    def _copy_to_host(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors of a version to the host, unless they are there."""
        if update.buffers is None:
            update.buffers = self._host_buffers.copy(tensors)
            update.tensors = update.buffers

    def _drop_tensors(self, update: WeightUpdate) -> None:
        update.tensors = None
        if update.buffers is not None:
            self._host_buffers.release(update.buffers)
            update.buffers = None

    def read(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """Returns the weights of a version, as they were sent."""
        directory = Path(self.write(update))
        if self.adapted_lm is not None:
            return load_adapter_weights(directory)
        weights: dict[str, Tensor] = {}
        for file in directory.glob(FILES):
            weights |= load_file(file)
        return weights

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
        """Loads the current version into a server that was started again, or answers again."""
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
            self._drop_tensors(old_update)
            shutil.rmtree(old_update.directory, ignore_errors=True)

    def close(self, servers: Sequence[VllmClient]) -> None:
        if self.adapted_lm is not None:
            # A silent server would hold up the end of a run for each version.
            servers = [server for server in servers if server.is_healthy()]
        self.drop_others(servers, None)
        shutil.rmtree(self.root, ignore_errors=True)
        self._root_lock.release()


def _save_in_buckets(weights: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Writes weights into files of a new directory, each with BUCKET bytes or one tensor."""
    # An attempt may have failed, on a full disk.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    bucket: dict[str, Tensor] = {}
    for name, tensor in weights:
        bucket_bytes = sum(one.nbytes for one in bucket.values())
        if bucket and bucket_bytes + tensor.nbytes > BUCKET:
            _save_bucket(bucket, directory)
            bucket = {}
        bucket[name] = _on_host(tensor)
    _save_bucket(bucket, directory)


def _save_bucket(bucket: Mapping[str, Tensor], directory: Path) -> None:
    """Writes the next file."""
    number = len(list(directory.glob(FILES)))
    save_file(dict(bucket), directory / FILES.replace("*", f"{number:05d}"), {"format": "pt"})


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor of the host, which shares the memory of one that is there.

    A GPU fills pinned memory several times faster than other memory, and PyTorch reuses it.
    """
    tensor = tensor.detach().contiguous()
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor)


def _lock_of(root: Path) -> FileLock:
    """Returns the lock that a process holds as long as it uses its directory of weights."""
    return FileLock(root / LOCK, thread_local=False)


def _remove_left_directories(parent: Path) -> None:
    """Removes the directories of weights that killed runs left.

    A process of another container may share this parent, but is not visible in /proc. Its lock is.
    """
    for lock_file in parent.glob(f"lagrpo-*/{LOCK}"):
        root = lock_file.parent
        try:
            # Another user may have put a link there. Locking would create or empty its file.
            if not (is_own(root) and is_own(lock_file)):
                continue
            with _lock_of(root).acquire(timeout=0):
                shutil.rmtree(root, ignore_errors=True)
        except (Timeout, OSError):
            # In use, or of another user.
            continue


def _make_directory(num_bytes: int, output_dir: Path | None) -> Path:
    """Makes a directory for this process, and removes what killed runs left.

    It removes only from the default parent. Another parent may be a network drive, whose locks
    other machines need not see. Versions of `num_bytes` that do not fit into the default parent
    go to `output_dir`.
    """
    default = Path(tempfile.gettempdir())
    if os.access(SHARED_MEMORY, os.W_OK):
        default = SHARED_MEMORY
    chosen_by_user = os.environ.get(DIRECTORY)
    base = Path(chosen_by_user).expanduser() if chosen_by_user else default
    if base == default:
        _remove_left_directories(base)
    if not chosen_by_user and output_dir is not None:
        needed = int(VERSIONS * num_bytes)
        free = shutil.disk_usage(default).free
        if free < needed:
            # A server may have another working directory.
            base = output_dir.absolute()
            logger.info(
                "weights go to the servers through %s: they need %s MB, and %s has %s MB "
                "(%s names another directory)",
                base,
                needed // 10**6,
                default,
                free // 10**6,
                DIRECTORY,
            )
    root = base / f"lagrpo-{os.getpid()}-{secrets.token_hex(4)}"
    root.mkdir(parents=True)
    return root
