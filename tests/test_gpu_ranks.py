"""The trainer over ranks on CUDA devices, by NCCL: pytest -m gpu. One GPU shows that one rank is
one process; two GPUs show that two ranks are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chaos import merged
from rank_updates import copied, same, sampled
from ranks import together
from running import tiny_settings
from safetensors.torch import load_file
from test_trainer import assembled
from tiny import save_tiny, tiny_policy
from torch import Tensor

from lagrpo import train
from lagrpo.core.recipes import resolve
from lagrpo.distributed.ranks import Ranks, make_mesh
from lagrpo.lifecycle.run import Result
from lagrpo.training.batch import micro_batches
from lagrpo.training.master_weights import MergedState
from lagrpo.training.trainer import Optimization, Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup | None]:
    """This process as the only rank, by NCCL."""
    torch.cuda.set_device(0)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def updates(
    kind: str, group: dist.ProcessGroup, **changes: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics, state and weights after three updates on one batch: as a process alone, or as a
    rank."""
    policy = tiny_policy(dtype=torch.bfloat16, device="cuda")
    optimization = Optimization(
        lr=1e-3, updates=9, weight_decay=0.1, seed=5, max_grad_norm=0.05, **changes
    )
    mesh = make_mesh(group, "cuda") if kind == "layers" else None
    ranks = None if kind == "alone" else Ranks(0, 1, group, group, mesh)
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), optimization, ranks=ranks)
    rows = micro_batches(assembled(trainer.recipe, sampled(1), 1), 40, "cuda")
    scored, _ = trainer.accumulate(rows)
    metrics = [trainer.update()]
    for _ in range(2):
        trainer.accumulate(scored)
        metrics.append(trainer.update())
    return metrics, copied(trainer.state()), copied(trainer.policy.weights)


@pytest.mark.parametrize("kind", ["optimizer", "layers"])
def test_updates_of_one_rank_equal_those_of_a_process_bit_for_bit(group, kind):
    metrics, state, weights = updates("alone", group)
    results = updates(kind, group)
    assert results[0] == metrics
    assert same(MergedState([results[1]]), state)
    assert same(results[2], weights)


@pytest.mark.parametrize("kind", ["alone", "optimizer", "layers"])
def test_moments_on_the_host_make_the_same_updates(group, kind):
    metrics, state, weights = updates(kind, group)
    results = updates(kind, group, offload_moments=True)
    assert results[0] == metrics
    assert {
        tensor.device.type for name, tensor in results[1].items() if name.startswith("exp_avg")
    } == {"cpu"}
    assert same(
        {name: tensor.cpu() for name, tensor in results[1].items()},
        {n: t.cpu() for n, t in state.items()},
    )
    assert same(results[2], weights)


@pytest.mark.parametrize("shard", ["optimizer", "layers"])
def test_run_of_two_ranks_equals_run_of_one_process(tmp_path, shard):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = save_tiny(tmp_path / "model")
    more_sections = {
        "model": {"dtype": "float32"},
        "schedule": {"sync_every": 2, "num_iterations": 2, "batches": 3},
    }
    base = merged(tiny_settings(model, tmp_path), more_sections)
    alone = train(merged(base, {"run": {"name": "alone"}})).run
    sections = {"run": {"name": "ranks"}, "distributed": {"strategy": shard}}
    results = together(2, merged(base, sections))
    assert all(isinstance(one, Result) for one in results), "\n\n".join(map(str, results))
    weights_of_ranks, weights_of_process = (
        load_file(run / "weights/final/model.safetensors") for run in (results[0].run, alone)
    )
    for name, weight in weights_of_process.items():
        assert float((weights_of_ranks[name] - weight).abs().mean()) < 1e-4, name
