"""Weight sync by NCCL: a broadcast from the trainer's GPU to the GPUs of all servers."""

from __future__ import annotations

import base64
import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from lagrpo.rollout.vllm.client import SamplerError, VllmClient
from lagrpo.rollout.vllm.group_queue import GroupQueue
from lagrpo.rollout.vllm.weights import WeightTransfer, WeightUpdate
from lagrpo.threads import run_together

logger = logging.getLogger("lagrpo")


class NcclTransfer(WeightTransfer):
    """Broadcasts from rank 0, the trainer, to the workers of all servers.

    The communicator is the one that PyTorch ships. A missing member makes all others wait forever,
    and neither PyTorch nor vLLM can stop them. So these calls run in threads that may stay behind,
    on separate CUDA streams: the weights can still be read and saved while a broadcast hangs. The
    other servers hang as well, so a run ends that loses one.

    If a server has another version of NCCL, members would not meet either: then weights go through
    the directory. A server without our worker extension does not say its version.
    """

    writes_first = False

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, adapted_lm: Any = None, **space: Any
    ) -> None:
        super().__init__(dtype, adapted_lm, **space)
        self._communicator: Any = None
        # How often each server had been started when the communicator was made.
        self._starts: dict[VllmClient, int] = {}
        self._versions_agree: bool | None = None  # None: not compared yet

    def send(self, groups: GroupQueue, update: WeightUpdate) -> None:
        tensors = update.tensors
        if tensors is None or not all(tensor.is_cuda for tensor in tensors.values()):
            super().send(groups, update)
            return
        if self._versions_agree is None:
            self._versions_agree = self._compare_versions(groups.servers)
        if not self._versions_agree:
            super().send(groups, update)
            return
        # Finds servers that have died since: all members would wait for one.
        groups.ask_all(VllmClient.get_label)
        # A server that was started again is a new member, and one that was set aside is none.
        starts = {server: groups.starts[server] for server in groups.servers}
        if starts != self._starts:
            self._connect(list(starts))
            self._starts = starts
        announcement = {
            "names": list(tensors),
            "dtype_names": [
                str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()
            ],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        actions = [partial(_receive, server, announcement, update.label) for server in starts]
        actions.append(partial(_broadcast, tensors, self._communicator))
        _meet(list(starts), actions)
        # A copy, because the trainer's tensors change with the next update.
        self._copy_to_host(update, tensors)

    def _compare_versions(self, servers: Sequence[VllmClient]) -> bool:
        """Returns False, and says so, if a server has another version of NCCL than the trainer."""
        ours = nccl_version()
        for server in servers:
            for version in server.get_nccl_versions():
                # vLLM writes 2.28.0 as "2.28.".
                theirs = tuple(int(part or 0) for part in version.split("."))
                if theirs != ours:
                    logger.warning(
                        "weights go through %s instead of NCCL: the trainer has NCCL %s, %s has %s",
                        self.root,
                        ".".join(map(str, ours)),
                        server,
                        version,
                    )
                    return False
        return True

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
            actions.append(partial(server.call, "POST", path, body, server.load_timeout))
            rank_offset += num_workers_of_server
        actions.append(partial(_join, world_size, identity, torch.cuda.current_device()))
        self._communicator = _meet(servers, actions)[-1]


def nccl_version() -> tuple[int, int, int]:
    """Returns the version of the NCCL that PyTorch has loaded.

    PyTorch's own number is the version that it was compiled with.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:  # NCCL is a part of PyTorch's own library
        return nccl.version()[:3]
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    # 2.27.3 is 22703.
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def _join(world_size: int, identity: bytes, device: int) -> Any:
    """Joins a new communicator as rank 0. Waits for all members. Returns it."""
    with _own_stream(device):
        communicator = nccl.init_rank(world_size, identity, 0)
        # vLLM's members begin with this sum.
        nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[communicator])
    return communicator


def _meet(servers: Sequence[VllmClient], actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of actions in which servers and trainer wait for each other.

    Raises SamplerError as soon as a server fails, and after their `load_timeout`.
    """
    seconds = max(server.load_timeout for server in servers)
    try:
        return run_together(actions, seconds)
    except (SamplerError, TimeoutError) as error:
        # All members wait for the one that is missing, so the error may name another.
        are_healthy = run_together([server.is_healthy for server in servers])
        silent = [
            str(server) for server, answers in zip(servers, are_healthy, strict=True) if not answers
        ]
        reason = str(error)
        if silent:
            reason = f"{', '.join(silent)} does not answer"
        elif isinstance(error, TimeoutError):
            names = ", ".join(map(str, servers))
            reason = f"not all of {names} took part within {seconds:g} s (vllm.load_timeout)"
        raise SamplerError(
            f"a broadcast of weights by NCCL hangs: {reason}. "
            "Start all attached servers again, then resume the run"
        ) from error


def _receive(server: VllmClient, announcement: Mapping[str, Any], label: str) -> None:
    """Lets a server take part in a broadcast. `announcement` lists the tensors in their order."""
    with server.paused():
        server.call("POST", "/start_weight_update", {})
        server.call("POST", "/update_weights", {"update_info": announcement}, server.load_timeout)
        server.call("POST", "/finish_weight_update", {"weight_version": label}, server.load_timeout)


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
