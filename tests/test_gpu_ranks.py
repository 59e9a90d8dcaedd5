"""The trainer over ranks: on CUDA devices by NCCL (pytest -m gpu), on a CPU by Gloo.

Updates of one rank are those of one process; a run of two ranks, which takes two GPUs, is one of
one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chaos import merged
from rank_updates import Updated, check_to_the_bit, copied, same, sampled
from ranks import together
from running import tiny_settings
from safetensors.torch import load_file
from test_fsdp2 import check_passes, short_pass
from test_trainer import assembled
from tiny import tiny_policy

from lagrpo import train
from lagrpo.core.recipes import resolve
from lagrpo.distributed.ranks import Ranks, make_mesh
from lagrpo.lifecycle.run import Result
from lagrpo.model.backend import choose_backend
from lagrpo.settings.sections import DistributedSettings
from lagrpo.training.batch import micro_batches
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer

STRATEGIES = ["zero1", "fsdp2"]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def group(device) -> Iterator[dist.ProcessGroup | None]:
    """This process as the only rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    time_limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=time_limit)
    yield dist.group.WORLD
    dist.destroy_process_group()


def updates(strategy: str | None, group: dist.ProcessGroup, device: str, **changes: Any) -> Updated:
    """Metrics, state and weights after three updates on one batch: as a rank, or without a strategy
    as a process alone. Kernels compute the layers, without panels."""
    backend = replace(choose_backend("auto", device, torch.bfloat16), products=None)
    policy = tiny_policy(dtype=torch.bfloat16, device=device, backend=backend)
    numbers = {"lr": 1e-3, "updates": 9, "weight_decay": 0.1, "seed": 5, "max_grad_norm": 0.05}
    optimization = Optimization(**numbers | changes)
    ranks = None
    if strategy is not None:
        settings = DistributedSettings.model_validate({"strategy": strategy})
        mesh = make_mesh(group, device) if settings.strategy == "fsdp2" else None
        ranks = Ranks(0, 1, group, group, mesh)
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), optimization, ranks=ranks)
    rows = micro_batches(assembled(trainer.recipe, sampled(1), 1), 40, device)
    scored, _ = trainer.accumulate(rows)
    metrics = [trainer.update()]
    for _ in range(2):
        trainer.accumulate(scored)
        metrics.append(trainer.update())
    return Updated(metrics, copied(trainer.state()), copied(trainer.policy.weights))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_of_one_rank_equal_those_of_a_process_bit_for_bit(group, device, strategy):
    """Without clipping, since FSDP2 rounds norms in another order."""
    alone = updates(None, group, device, max_grad_norm=None)
    check_to_the_bit([updates(strategy, group, device, max_grad_norm=None)], alone)


def test_log_probs_of_a_sharded_model_are_those_of_its_whole_copy(group, device):
    backend = replace(choose_backend("auto", device, torch.bfloat16), products=None)
    alone = short_pass(None, backend, checkpointing=False)
    if device == "cuda":
        assert alone.is_exact == backend.exact_products
    check_passes([short_pass(group, backend, checkpointing=False)], alone)


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_moments_on_the_host_make_the_same_updates(group, device, strategy):
    kept = updates(strategy, group, device)
    offloaded = updates(strategy, group, device, offload_moments=True)
    assert offloaded.metrics == kept.metrics
    assert {
        tensor.device.type for name, tensor in offloaded.state.items() if name.startswith("exp_avg")
    } == {"cpu"}
    assert same(
        {name: tensor.cpu() for name, tensor in offloaded.state.items()},
        {name: tensor.cpu() for name, tensor in kept.state.items()},
    )
    assert same(offloaded.weights, kept.weights)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_run_of_two_ranks_equals_run_of_one_process(model, tmp_path, device, strategy):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    more_sections = {
        "model": {"dtype": "float32"},
        "schedule": {"sync_every": 2, "num_iterations": 2, "batches": 3},
    }
    base = merged(tiny_settings(model, tmp_path), more_sections)
    alone = train(merged(base, {"run": {"name": "alone"}})).run
    sections = {"run": {"name": "ranks"}, "distributed": {"strategy": strategy}}
    results = together(2, merged(base, sections))
    assert all(isinstance(one, Result) for one in results), "\n\n".join(map(str, results))
    weights_of_ranks, weights_of_process = (
        load_file(run / "weights/final/model.safetensors") for run in (results[0].run, alone)
    )
    for name, weight in weights_of_process.items():
        assert float((weights_of_ranks[name] - weight).abs().mean()) < 1e-4, name
