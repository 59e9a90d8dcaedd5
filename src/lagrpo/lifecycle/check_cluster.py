"""`lagrpo check-cluster`: checks of the ranks of a run, before it starts.

Under torchrun all ranks make these checks together, and rank 0 prints a line for each. They need no
model, and take seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lagrpo.distributed.ranks import Ranks
from lagrpo.distributed.shared import check_shared
from lagrpo.distributed.torchrun import check_ranks
from lagrpo.errors import one_line
from lagrpo.lifecycle.run import set_up
from lagrpo.logs import print_text
from lagrpo.model.backend import pick_device
from lagrpo.rollout.vllm.client import KEY, SamplerError, VllmClient
from lagrpo.runs.directory import check_writable
from lagrpo.runs.environment import package_version
from lagrpo.settings.schema import Settings

PACKAGES = ("lagrpo", "torch", "transformers")
MEGABYTES = {"cuda": 1000, "cpu": 64}
"""Megabytes of the all-reduce, by device."""


def check_cluster(settings: Settings) -> bool:
    """Makes all checks, and prints them on rank 0. Returns True if all pass, on every rank.

    Raises ConnectionError and TimeoutError if the ranks do not find each other.
    """
    device = pick_device().type
    check_ranks(device)
    passed = True
    with set_up(settings, device) as ranks:
        checks: dict[str, Callable[[], str]] = {
            "directory": partial(check_directory, ranks, Path(settings.run.output_dir)),
            "exchange": partial(check_exchange, ranks, device),
            "versions": partial(check_versions, ranks),
            "arithmetic": partial(check_arithmetic, ranks, device),
            "servers": partial(check_servers, ranks, settings.vllm.urls),
        }
        for name, check in checks.items():
            try:
                result = ("ok", check())
            except (ValueError, OSError) as error:
                result = ("FAILED", str(error))
            # A check may fail on some ranks only: the first of them is shown.
            results = ranks.gather(result)
            failures = [result for result in results if result[0] != "ok"]
            grade, facts = (failures or results)[0]
            passed &= not failures
            if ranks.is_first:
                print_text(f"{grade:<6}  {name:<10}  {one_line(facts)}", flush=True)
    return passed


def check_directory(ranks: Ranks, directory: Path) -> str:
    """Checks that run.output_dir is writable, and that all ranks see what rank 0 writes there."""
    if ranks.size == 1:
        check_writable(directory)
        return f"one process can write to {directory.absolute()}"
    check_shared(ranks, directory)
    return f"all {ranks.size} ranks see a new file in {directory.absolute()}"


def check_exchange(ranks: Ranks, device: str) -> str:
    """Adds up a tensor over all ranks, and measures it."""
    if ranks.size == 1:
        return "one process: nothing to exchange"
    megabytes = MEGABYTES[device]
    values = torch.full((megabytes * 10**6 // 4,), 1.0 + ranks.rank, device=device)
    dist.all_reduce(values[:1000].clone(), group=ranks.group)  # connects the ranks
    dist.barrier(group=ranks.group)
    started = time.perf_counter()
    dist.all_reduce(values, group=ranks.group)
    smallest, largest = float(values.min()), float(values.max())  # waits for a GPU
    seconds = time.perf_counter() - started
    expected = ranks.size * (ranks.size + 1) / 2
    if not smallest == largest == expected:
        raise ValueError(f"the sum of {ranks.size} ranks is {smallest:g}, not {expected:g}")
    return (
        f"all-reduce of {megabytes} MB over {ranks.size} ranks by {dist.get_backend(ranks.group)}: "
        f"{megabytes / 1000 / seconds:.2f} GB/s"
    )


def check_versions(ranks: Ranks) -> str:
    """Checks that all ranks have the same versions of Python and of the packages."""
    versions = {"python": platform.python_version()}
    versions |= {name: package_version(name) or "missing" for name in PACKAGES}
    return compare(ranks, ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_arithmetic(ranks: Ranks, device: str) -> str:
    """Checks that all ranks compute the same bits: log-probs by products of two precisions."""
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(64, 256, generator=generator)
    head_HV = torch.randn(256, 1000, generator=generator)
    digest = hashlib.blake2b(digest_size=8)
    for dtype in (torch.float32, torch.bfloat16):
        logits_TV = hidden_TH.to(device, dtype) @ head_HV.to(device, dtype)
        logp_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        digest.update(logp_TV.cpu().numpy().tobytes())
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return compare(ranks, f"log-probs {digest.hexdigest()} on {name}")


def compare(ranks: Ranks, facts: str) -> str:
    """Returns facts that are equal on all ranks. Raises ValueError if they are not. Collective."""
    all_facts = ranks.gather((facts, socket.gethostname()))
    for rank, (facts_of_rank, host) in enumerate(all_facts):
        if facts_of_rank != all_facts[0][0]:
            raise ValueError(
                f"rank {rank} on {host} has {facts_of_rank}; "
                f"rank 0 on {all_facts[0][1]} has {all_facts[0][0]}"
            )
    return facts


def check_servers(ranks: Ranks, urls: Sequence[str]) -> str:
    """Checks that every server of vllm.urls answers rank 0, with the version that is needed."""
    if not urls:
        return "vllm.urls names none"
    return ranks.on_rank0(partial(ask_servers, urls))


def ask_servers(urls: Sequence[str]) -> str:
    """Returns the URL and the version of each server. Raises ValueError for an unfit one."""
    answers: list[str] = []
    for url in urls:
        try:
            version = VllmClient(url, os.environ.get(KEY)).check_version()
        except SamplerError as error:
            raise ValueError(str(error)) from error
        answers.append(f"{url} has vLLM {version}")
    return ", ".join(answers)
