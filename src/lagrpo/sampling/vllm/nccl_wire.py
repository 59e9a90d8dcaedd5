"""Weights by NCCL: broadcast from rank 0, the trainer, to all workers of all servers.

A member that is missing makes all the others wait forever, and PyTorch offers no way to stop them. So every call that
waits does so in its own thread, with a deadline, and on its own CUDA stream: the policy can still be read, and written
to disk, while a broadcast hangs.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.cuda import nccl

from lagrpo.sampling.vllm.server import Server
from lagrpo.sampling.vllm.wire import Answer, Parcel, StuckError, TransferWire, catch

LOOK = 0.1  # seconds between two looks whether a server has failed
T = TypeVar("T")


class NcclWire(TransferWire):
    """Uses the communicator that PyTorch ships. Members find each other by an id that goes to the servers with the
    first call, so no port is needed."""

    def __init__(self) -> None:
        self._communicator: Any = None
        self._members: list[str] = []

    def connect(self, servers: Sequence[Server], device: torch.device | None) -> None:
        urls = [server.url for server in servers]
        if self._communicator is not None and self._members == urls:
            return
        workers = [count_workers(server) for server in servers]
        world, identity = 1 + sum(workers), nccl.unique_id()
        offsets = [1 + sum(workers[:n]) for n in range(len(servers))]
        with ThreadPoolExecutor(len(servers)) as pool:
            joins = (partial(_invite, *member, world, identity) for member in zip(servers, offsets, strict=True))
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


def _invite(server: Server, offset: int, world: int, identity: bytes) -> None:
    """Let the workers of a server join the communicator, with ranks from `offset` on."""
    info = {"rank_offset": offset, "world_size": world, "packed": False}
    info["nccl_unique_id_b64"] = base64.b64encode(identity).decode()
    server.call("POST", "/init_weight_transfer_engine", {"init_info": info}, server.deadlines.sync)


def _join(world: int, identity: bytes, device: torch.device | None) -> Any:
    with own_stream(device):
        communicator = nccl.init_rank(world, identity, 0)
        nccl.all_reduce([greeting()], comms=[communicator])
    return communicator


def greeting() -> Tensor:
    """What is summed first: vLLM's members begin with the sum of one number."""
    return torch.zeros(1, device="cuda")


def count_workers(server: Server) -> int:
    """Worker processes of a server, over all its parallelism: members of the broadcast."""
    return int(server.call("GET", "/get_world_size")["world_size"])


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
    end in time, or cannot end any more because a server that should take part has failed (one of `answers`).

    Raises:
        StuckError: see above. What the action itself raises.
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
        if failure := next((answer.result() for answer in answers if answer.done() and answer.result()), None):
            raise StuckError(f"{what} cannot end: {failure}") from failure
        if time.monotonic() > end:
            raise StuckError(f"{what} did not end within {seconds:g} s: a member that should take part does not")
    return done.result()
