"""Sharded layers (FSDP2): R processes make the updates of one.

Functions without `test_` run on the ranks (ranks.py), or with None as their group in this process,
whole.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_zero1 import (
    DTYPES,
    check_to_rounding,
    check_to_the_bit,
    five_updates,
    ranks_of,
    refused,
    rows_of,
)
from tiny import tiny_policy
from torch import Tensor

from lagrpo.core.recipes import resolve
from lagrpo.model.model import copy_policy
from lagrpo.training.fsdp import copy_sharded
from lagrpo.training.ranks import make_mesh
from lagrpo.training.trainer import Optimization, Trainer


def make_layered(
    group: Any,
    dtype: str,
    kind: str = "llama",
    tie: bool = False,
    checkpointing: bool = False,
    beta: float = 0.0,
    **changes: Any,
) -> Trainer:
    """As `make` of test_zero1, in shards."""
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
    """In float64, where rounding is far below the steps. Clipped: the limit is a third of the
    norms. Three ranks divide no weight evenly."""
    options = {"dtype": "float64", "max_grad_norm": 0.05}
    metrics, state, weights = five_updates(None, options, False)
    assert min(m["grad_norm"] for m in metrics) > 0.1
    check_to_rounding(
        ranks.run(five_updates, options, False, make_layered, size=3), metrics, state, weights
    )


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
    check_to_the_bit(results, *five_updates(None, options, True))


# What a rank has


def memory(group: Any) -> tuple[int, int, int, list[str]]:
    """Numbers in the masters, in the gradients, and in the weights that a rank keeps; which of
    these are whole."""
    trainer = make_layered(group, "bfloat16")
    trainer.accumulate(rows_of(trainer))
    local_weights = {
        name: p._local_tensor for name, p in trainer.policy.model.lm.named_parameters()
    }
    gradients = [
        p.grad._local_tensor for p in trainer.policy.model.lm.parameters() if p.grad is not None
    ]
    unsharded = [
        name
        for name, p in trainer.policy.model.lm.named_parameters()
        if local_weights[name].shape == p.shape
    ]
    trainer.masters.zero_grads()
    return (
        sum(p.numel() for p in trainer.masters.parameters),
        sum(g.numel() for g in gradients),
        sum(
            {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4
                for t in local_weights.values()
            }.values()
        ),
        unsharded,
    )


def test_a_rank_keeps_its_part_of_masters_gradients_and_weights(ranks):
    """The rest is gathered for as long as it computes. What does not divide is filled up to whole
    rows."""
    numbers = sum(p.numel() for p in tiny_policy(dtype=torch.bfloat16).model.lm.parameters())
    for R in (2, 3):
        results = ranks.run(memory, size=R)
        assert sum(masters for masters, *_ in results) == numbers
        assert sum(gradients for _, gradients, *_ in results) == numbers
        for masters, _, weights, unsharded in results:
            assert masters <= numbers / R * 1.05
            assert weights <= numbers / R * 1.05
            assert unsharded == []


def reference(group: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """log π_ref at the start, after updates, and after the end of a stage, with what the policy
    gives then."""
    trainer = make_layered(group, "bfloat16", beta=0.1)
    fresh = rows_of(trainer)
    reference_logprobs = lambda: trainer.compute_logprobs(fresh, by=trainer.reference)  # noqa: E731
    before, policy_logprobs = reference_logprobs(), trainer.compute_logprobs(fresh)
    assert all(map(torch.equal, before, policy_logprobs))
    trainer.accumulate([replace(row, ref_logp_T=before[n]) for n, row in enumerate(fresh)])
    trainer.update()
    policy_logprobs = trainer.compute_logprobs(fresh)
    after = reference_logprobs()
    assert all(map(torch.equal, policy_logprobs, trainer.compute_logprobs(fresh)))
    trainer.end_stage(reset_optimizer=False)
    assert trainer.reference is not None
    assert trainer.reference.version == 1
    swapped, policy_logprobs = reference_logprobs(), trainer.compute_logprobs(fresh)
    assert all(map(torch.equal, swapped, policy_logprobs))
    return before, after, swapped


def test_the_reference_stays_until_the_stage_ends_and_then_is_the_policy(ranks):
    for before, after, swapped in ranks.run(reference, size=2):
        assert all(map(torch.equal, before, after))
        assert not any(map(torch.equal, before, swapped))


# Gradients that are not finite


def test_gradient_not_finite_on_one_rank_is_rejected_on_all_ranks(ranks):
    messages, unchanged, as_if_never = zip(
        *ranks.run(refused, 1, make_layered, size=2), strict=True
    )
    assert all(
        re.match(r"the gradient of update 1 is not finite \(norm (inf|nan)\)", message)
        for message in messages
    )
    assert all(unchanged)
    assert all(as_if_never)
