"""Real vLLM servers with a tiny model, for the tests marked vllm. $LAGRPO_VLLM_PYTHON names the Python
that has vllm."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from tiny import save_tiny

from lagrpo.backends.adapters import adapted
from lagrpo.model.loading import load_policy
from lagrpo.model.model import Policy
from lagrpo.rollout.vllm.adapters import AdapterSync
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.generation import Generation
from lagrpo.rollout.vllm.process import Launch, StartedServer
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.rollout.vllm.server import Deadlines, Server
from lagrpo.rollout.vllm.weights import Directories, WeightSync
from lagrpo.rollout.vllm.wire import DirectoryWire

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of each server; the tests run two at a time
PYTHON = os.environ.get("LAGRPO_VLLM_PYTHON", ".venv-vllm/bin/python")
SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
DEADLINES = Deadlines(start=240, request=120, sync=60, control=30)


def tiny_directory(root: Path, **changes: Any) -> Path:
    """A model that vLLM's attention on CPUs takes."""
    return save_tiny(root / "model", **SIZES | changes)


def start(
    model: Path, log: Path, dtype: str = "float32", lora: tuple[int, int] = (0, 0), options: tuple[str, ...] = ()
) -> StartedServer:
    """A server of the model, ready."""
    launch = Launch(PYTHON, str(model), dtype, longest=256, max_num_seqs=64, lora=lora, options=options)
    server = StartedServer(launch, DEADLINES, log)
    server.wait(DEADLINES.start)
    return server


def policy_of(model: Path, tau: float = 1.0, dtype: torch.dtype = torch.float32) -> Policy:
    return load_policy(str(model), dtype, tau=tau)


def sampler_over(servers: Sequence[Server], policy: Policy, root: Path) -> VllmSampler:
    """A sampler of seed 0 and up to 12 tokens over the servers, in the policy's dtype, its directory below `root`."""
    generation = Generation(0, 12, policy.tau, sorted(policy.chat.eos_ids), 32, policy.chat.decode)
    fleet = Fleet(servers)
    weights = WeightSync(fleet, DirectoryWire(), Directories(str(root)), policy.dtype)
    if adapted(policy.model.lm):
        weights = AdapterSync(fleet, policy.model.lm, str(root), policy.dtype)
    return VllmSampler(fleet, generation, weights)


def perturb(policy: Policy, scale: float = 0.02) -> None:
    """What an update does: other weights, the next version."""
    generator = torch.Generator().manual_seed(policy.version)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale * float(parameter.std()))
    policy.weights.version += 1


def kill(server: StartedServer) -> None:
    """kill -9 of the process that serves HTTP; what it started is left to the guard."""
    assert server.guard is not None
    os.kill(psutil.Process(server.guard.pid).children()[0].pid, signal.SIGKILL)
