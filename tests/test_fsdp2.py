"""Sharded layers (FSDP2): R processes make the updates of one.

Functions without `test_` run on the ranks (ranks.py), or with None as their group in this process,
whole.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from rank_updates import (
    DTYPES,
    check_to_rounding,
    check_to_the_bit,
    five_updates,
    ranks_of,
    rejected_update,
    rows_of,
)
from tiny import tiny_policy
from torch import Tensor
from torch.distributed import ProcessGroup

from lagrpo.core.recipes import resolve
from lagrpo.model.model import copy_policy
from lagrpo.training.fsdp import copy_sharded
from lagrpo.training.ranks import make_mesh
from lagrpo.training.trainer import Optimization, Trainer


def make_layered(
    group: ProcessGroup | None,
    dtype: str,
    kind: str = "llama",
    tie: bool = False,
    checkpointing: bool = False,
    beta: float = 0.0,
    **changes: Any,
) -> Trainer:
    """As `make_trainer`, in shards."""
    policy = tiny_policy(kind, DTYPES[dtype], backend="torch", tie_word_embeddings=tie)
    numbers = {"lr": 1e-3, "updates": 9, "weight_decay": 0.1, "warmup": 2, "seed": 5} | changes
    mesh = make_mesh(group, "cpu") if group is not None else None
    reference = None
    if beta:
        reference = copy_sharded(policy, mesh) if mesh is not None else copy_policy(policy)
    return Trainer(
        policy,
        resolve("grpo", {"beta": beta}),
        Optimization(**numbers),
        reference,
        activation_checkpointing=checkpointing,
        ranks=ranks_of(group, mesh),
    )


def test_updates_with_sharded_layers_are_those_of_one_process_to_rounding(ranks):
    """In float64, where rounding is far below the steps. Three ranks divide no weight evenly."""
    # Clipped, so that a norm of a rank's own part would show: the limit is below all norms.
    options = {"dtype": "float64", "max_grad_norm": 0.05}
    alone = five_updates(None, options, False)
    assert min(line["grad_norm"] for line in alone.metrics) > 0.1
    check_to_rounding(ranks.run(five_updates, options, False, make_layered, size=3), alone)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        pytest.param(
            {"dtype": "bfloat16", "masters": "plain", "tie": True}, {}, id="plain masters"
        ),
        pytest.param(
            {"dtype": "bfloat16"},
            {"checkpointing": True, "offload_moments": True},
            id="checkpointing and moments on the host",
        ),
        pytest.param(
            {"dtype": "float32", "kind": "qwen2", "weight_decay": 0.0}, {}, id="float32 qwen2"
        ),
    ],
)
def test_updates_are_bit_equal_if_the_gradients_are(ranks, options, changes):
    """One rank has all rows, the other idles beside it: nothing is added but zeros. So the masters
    are dithered alike, and what is gathered is rounded as in one process. Without clipping, since
    norms are rounded in another order."""
    options = {"max_grad_norm": None, **options}
    results = ranks.run(five_updates, options | changes, True, make_layered, size=2)
    check_to_the_bit(results, five_updates(None, options, True))


# What a rank has


class Kept(NamedTuple):
    """What a rank keeps, in numbers."""

    masters: int
    gradients: int
    weights: int
    whole_weights: list[str]
    """the names of weights that it has whole"""


def measure_kept(group: ProcessGroup) -> Kept:
    trainer = make_layered(group, "bfloat16")
    trainer.accumulate(rows_of(trainer))
    parameters = dict(trainer.policy.model.lm.named_parameters())
    local_weights = {name: p._local_tensor for name, p in parameters.items()}
    gradients = [p.grad._local_tensor for p in parameters.values() if p.grad is not None]
    whole_weights = [name for name, p in parameters.items() if local_weights[name].shape == p.shape]
    # By storage, which includes what fills a shard up. Shards are float32: four bytes a number.
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in local_weights.values()}
    trainer.masters.zero_grads()
    return Kept(
        masters=sum(master.numel() for master in trainer.masters.parameters),
        gradients=sum(gradient.numel() for gradient in gradients),
        weights=sum(tensor.untyped_storage().nbytes() // 4 for tensor in storages.values()),
        whole_weights=whole_weights,
    )


def test_rank_keeps_its_part_of_masters_gradients_and_weights(ranks):
    """The rest is gathered for as long as it computes. What does not divide is filled up to whole
    rows: at most 5 % here."""
    numbers = sum(p.numel() for p in tiny_policy(dtype=torch.bfloat16).model.lm.parameters())
    for R in (2, 3):
        results = ranks.run(measure_kept, size=R)
        assert sum(held.masters for held in results) == numbers
        assert sum(held.gradients for held in results) == numbers
        for held in results:
            assert held.masters <= numbers / R * 1.05
            assert held.weights <= numbers / R * 1.05
            assert held.whole_weights == []


class ReferenceLogprobs(NamedTuple):
    """log π_ref of the rows of a batch."""

    at_start: list[Tensor]
    after_update: list[Tensor]
    after_stage: list[Tensor]


def reference_logprobs(group: ProcessGroup) -> ReferenceLogprobs:
    """An update and the end of a stage. On the way the policy's own log-probs stay as they were:
    policy and reference compute in turn, and must not leave their weights in each other's place."""
    trainer = make_layered(group, "bfloat16", beta=0.1)
    fresh = rows_of(trainer)

    def by_reference() -> list[Tensor]:
        return trainer.compute_logprobs(fresh, by=trainer.reference)

    at_start = by_reference()
    assert all(map(torch.equal, at_start, trainer.compute_logprobs(fresh)))
    trainer.accumulate([replace(row, ref_logp_T=at_start[n]) for n, row in enumerate(fresh)])
    trainer.update()
    policy_logprobs = trainer.compute_logprobs(fresh)
    after_update = by_reference()
    assert all(map(torch.equal, policy_logprobs, trainer.compute_logprobs(fresh)))

    trainer.end_stage(reset_optimizer=False)
    assert trainer.reference is not None
    assert trainer.reference.version == 1
    after_stage = by_reference()
    assert all(map(torch.equal, after_stage, trainer.compute_logprobs(fresh)))
    return ReferenceLogprobs(at_start, after_update, after_stage)


def test_reference_stays_until_the_stage_ends_and_then_is_the_policy(ranks):
    for logprobs in ranks.run(reference_logprobs, size=2):
        assert all(map(torch.equal, logprobs.at_start, logprobs.after_update))
        assert not any(map(torch.equal, logprobs.at_start, logprobs.after_stage))


# Gradients that are not finite


def test_gradient_not_finite_on_one_rank_is_rejected_on_all_ranks(ranks):
    pattern = r"the gradient of update 1 is not finite \(norm (inf|nan)\)"
    for rejected in ranks.run(rejected_update, 1, make_layered, size=2):
        assert re.match(pattern, rejected.message)
        assert rejected.is_unchanged
        assert rejected.goes_on
