"""A trainer whose NCCL call never returns: python stuck_nccl.py CALL DIRECTORY, or `stuck` within a test."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from test_vllm_client import generous, stub
from tiny import tiny_policy

from lagrpo.rollout.vllm import wire
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.generation import Generation
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.rollout.vllm.server import Deadlines, Server
from lagrpo.rollout.vllm.weights import Directories, WeightSync
from lagrpo.rollout.vllm.wire import NcclWire

CALLS = ("init_rank", "all_reduce", "broadcast", "synchronize")
DEADLINES = Deadlines(start=1, request=1, sync=1, control=5)


def never(*_: Any, **__: Any) -> None:
    threading.Event().wait()


def fake_streams(patch: Any) -> None:
    """Puts streams that do nothing in the place of torch.cuda's, by `patch(owner, name, value)`."""

    class Stream:
        def wait_stream(self, other: Any) -> None: ...
        def synchronize(self) -> None: ...

    patch(torch.cuda, "Stream", Stream)
    patch(torch.cuda, "stream", lambda _: nullcontext())
    patch(torch.cuda, "current_stream", Stream)
    patch(torch.cuda, "synchronize", lambda: None)


def sync_weights(call: str, root: Path, paths: list[str], refusing: bool = False, patch: Any = setattr) -> VllmSampler:
    """One weight sync by NCCL to a server that does what it is asked (or refuses to meet), where `call` never returns.
    `paths` gets what the server was asked for."""
    fake_streams(patch)
    patch(wire, "greeting", lambda: torch.zeros(1))
    for name in ("unique_id", "init_rank", "all_reduce", "broadcast"):
        patch(wire.nccl, name, lambda *_, **__: b"i" * 128)
    patch(torch.cuda.Stream if call == "synchronize" else wire.nccl, call, never)

    def answer(method: str, path: str, body: Any) -> Any:
        paths.append(path)
        if refusing and path == "/init_weight_transfer_engine":
            return 400, {"error": "no such backend"}
        return (200, {"world_size": 1}) if path == "/get_world_size" else generous(method, path, body)

    policy = tiny_policy()
    with stub(answer) as url:
        generation = Generation(0, 4, policy.tau, sorted(policy.chat.eos_ids), 8, policy.chat.decode)
        fleet = Fleet([Server(url, None, DEADLINES)])
        weights = WeightSync(fleet, NcclWire(), Directories(str(root)), torch.float32)
        sampler = VllmSampler(fleet, generation, weights)
        try:
            sampler.sync_weights(policy.weights, 3)
        finally:
            sampler.close()
    return sampler


if __name__ == "__main__":
    sync_weights(sys.argv[1], Path(sys.argv[2]), [])
