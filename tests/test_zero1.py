"""Masters and optimizer state in parts (ZeRO-1): R ranks make the updates of one process.

Functions that take a `group` run on the ranks (ranks.py), or with None as their group in this
process, by MasterWeights.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from rank_updates import (
    Tensors,
    Updated,
    check_to_rounding,
    check_to_the_bit,
    copied,
    five_updates,
    learn,
    make_trainer,
    ranks_of,
    rejected_update,
    rows_of,
    same,
    share,
)
from test_master_weights import module
from test_trainer import run_out_of_memory
from tiny import tiny_policy
from torch import Tensor
from torch.distributed import ProcessGroup

from lagrpo.core.recipes import resolve
from lagrpo.model.model import copy_policy
from lagrpo.training import split_masters
from lagrpo.training.master_weights import FlatBuffer, MasterWeights, MergedState, ZeroMasterWeights
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer


@pytest.mark.parametrize(
    ("R", "first_takes_all"),
    [
        pytest.param(2, True, id="2 ranks, the first takes all rows"),
        pytest.param(3, False, id="3 ranks share the rows"),
    ],
)
def test_updates_of_several_ranks_are_those_of_one_process_to_rounding(ranks, R, first_takes_all):
    """In float64, where rounding is far below the steps."""
    # Clipped, so that a norm of a rank's own part would show: the limit is below all norms.
    options = {"dtype": "float64", "max_grad_norm": 0.05}
    alone = five_updates(None, options, first_takes_all)
    assert min(line["grad_norm"] for line in alone.metrics) > 0.1
    results = ranks.run(five_updates, options, first_takes_all, size=R)
    check_to_rounding(results, alone)
    for result in results:
        assert result.metrics == results[0].metrics


@pytest.mark.parametrize(
    ("R", "options", "changes"),
    [
        pytest.param(1, {"dtype": "bfloat16"}, {}, id="1 rank"),
        pytest.param(
            3,
            {"dtype": "bfloat16", "masters": "plain", "tie": True},
            {},
            id="3 ranks, plain masters",
        ),
        pytest.param(
            2,
            {"dtype": "float32", "kind": "qwen2", "weight_decay": 0.0},
            {},
            id="2 ranks, float32 qwen2",
        ),
        pytest.param(
            2,
            {"dtype": "bfloat16"},
            {"offload_moments": True},
            id="2 ranks, moments on the host",
        ),
        pytest.param(
            None,
            {"dtype": "bfloat16"},
            {"offload_moments": True},
            id="no ranks, moments on the host",
        ),
    ],
)
def test_updates_are_bit_equal_if_the_gradients_are(ranks, R, options, changes):
    """One rank has all rows, the others none: nothing is added but zeros. `changes` must not change
    a bit, so the process alone does without them."""
    # Unclipped: ranks sum a norm in another order, and its rounding would scale the gradients.
    options = {"max_grad_norm": None, **options}
    alone = five_updates(None, options, True)
    if R is None:
        results = [five_updates(None, options | changes, True)]
    else:
        results = ranks.run(five_updates, options | changes, True, size=R)
    check_to_the_bit(results, alone)


def split_updates(group: ProcessGroup | None, options: dict[str, Any]) -> Updated:
    """`five_updates` with weights that are half of their masters, as on a GPU. The trainer before
    the last update is loaded into another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_masters, "SPLIT_ON", ("cpu",))
        patch.setattr(split_masters, "NUMBERS_AT_ONCE", 2**10)
        before = make_trainer(group, **options)
        assert before.masters.blocks
        metrics = learn(group, before, [(1, 3), (2, 1)])
        trainer = make_trainer(group, **options)
        parts = trainer.ranks.gather(copied(before.state()))
        trainer.load_state(MergedState(parts), before.policy.version)
        metrics += learn(group, trainer, [(2, 1)])
    return Updated(metrics, copied(trainer.state()), copied(trainer.policy.weights))


@pytest.mark.parametrize("offload", [False, True], ids=["moments here", "moments on the host"])
@pytest.mark.parametrize("R", [None, 3], ids=["no ranks", "3 ranks"])
def test_updates_with_split_masters_are_those_with_whole_masters_to_the_bit(ranks, R, offload):
    options = {"dtype": "bfloat16", "tie": True, "max_grad_norm": None}
    alone = five_updates(None, options, True)
    options["offload_moments"] = offload
    results = ranks.run(split_updates, options, size=R) if R else [split_updates(None, options)]
    check_to_the_bit(results, alone)


def mixed_updates(group: ProcessGroup | None, runs_out: bool = False) -> list[Tensors]:
    """With `runs_out` rank 0 has no memory for its second part of the gradients at first.

    The weights before, between and after two updates of a model of two dtypes, without an
    optimizer: masters go down by their gradients. The second update has gradients of 0."""
    model = module(
        torch.linspace(1, 2, 50).bfloat16(), torch.linspace(-1, 1, 40), torch.ones(6, 7).bfloat16()
    )
    if group is None:
        masters = MasterWeights(model, "dithered", 1)
    else:
        masters = ZeroMasterWeights(model, "dithered", 1, group)
    states: list[Tensors] = [copied(dict(model.named_parameters()))]
    for scale in (0.001, 0.0):
        if group is None or group.rank() == 0:
            squares = [(p.float() * p.float() * scale).sum() for p in model.parameters()]
            torch.stack(squares).sum().backward()
        if runs_out and group is not None and group.rank() == 0:
            with pytest.MonkeyPatch.context() as patch:
                run_out_of_memory(patch, FlatBuffer, "new_part", 1)
                with pytest.raises(torch.OutOfMemoryError):
                    masters.reduce_grads()
        masters.reduce_grads()
        state: dict[str, Tensor] = {}
        for span, master, numbers in zip(
            masters.spans, masters.parameters, masters.read(), strict=True
        ):
            assert master.grad is not None
            state[f"master/{span.label}"] = numbers - master.grad
        moved = MergedState([state])
        masters.load(lambda span, moved=moved: moved.part(f"master/{span.name}", span))
        masters.zero_grads()
        masters.write_back()
        states.append(copied(dict(model.named_parameters())))
    return states


@pytest.mark.parametrize("runs_out", [False, True], ids=["enough memory", "too little at first"])
def test_weights_of_two_dtypes_have_masters_too(ranks, runs_out):
    start, moved, still = mixed_updates(None)
    assert not same(moved, start)
    assert same(still, moved)
    for rank_states in ranks.run(mixed_updates, runs_out, size=2):
        assert all(map(same, rank_states, (start, moved, still)))


# What computes by the weights


class Comparison(NamedTuple):
    """The log-probs after an update beside three others."""

    differs_from_before: bool
    equals_fresh_policy: bool
    """one that was built with the new weights"""
    equals_copy: bool
    """one that reads the same panels as the trainer"""


def compare_logprobs_after_updates(group: ProcessGroup) -> list[Comparison]:
    """Makes two updates with the kernels, which read weights from panels, copies that an update
    must renew."""
    policy = tiny_policy(dtype=torch.bfloat16, backend="c")
    trainer = Trainer(
        policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-2), ranks=ranks_of(group)
    )
    assert policy.model.exact
    copy = copy_policy(policy)
    rows = rows_of(trainer)
    comparisons = []
    for _ in range(2):
        before = trainer.compute_logprobs(rows)
        trainer.accumulate(share(group, rows, first_takes_all=False))
        trainer.update()
        after = trainer.compute_logprobs(rows)

        fresh = tiny_policy(dtype=torch.bfloat16, backend="c")
        fresh.weights.load(policy.weights, policy.version)
        copy.load(policy.weights, policy.version)
        with torch.no_grad():
            fresh_logps = [fresh.logp(row.packed) for row in rows]
            by_copy = [copy.logp(row.packed) for row in rows]
        comparison = Comparison(
            differs_from_before=not all(map(torch.equal, after, before)),
            equals_fresh_policy=all(map(torch.equal, after, fresh_logps)),
            equals_copy=all(map(torch.equal, after, by_copy)),
        )
        comparisons.append(comparison)
    return comparisons


def test_kernels_use_the_new_weights_after_an_update(ranks, with_kernels):
    for comparisons in ranks.run(compare_logprobs_after_updates, size=2):
        assert comparisons == [Comparison(True, True, True)] * 2


# Gradients that are not finite


def test_gradient_not_finite_on_one_rank_is_rejected_on_all_ranks(ranks):
    """The other rank's own gradient is finite. If it went on, the ranks would part."""
    pattern = r"the gradient of update 1 is not finite \(norm (inf|nan)\); still version 0"
    for rejected in ranks.run(rejected_update, 1, size=2):
        assert re.match(pattern, rejected.message)
        assert rejected.is_unchanged
        assert rejected.goes_on


# States


class Resumed(NamedTuple):
    """A trainer that has loaded a state, and made one update."""

    version: int
    loaded_state: Tensors
    loaded_weights: Tensors
    state: Tensors
    weights: Tensors


def update_from(
    group: ProcessGroup | None, states: list[Tensors] | None, dtype: str, batch: int
) -> Resumed:
    """One update on a batch, from the states of all ranks, or from the start without any."""
    trainer = make_trainer(group, dtype, max_grad_norm=None)
    if states is not None:
        trainer.load_state(MergedState([copied(state) for state in states]), 1)
    version = trainer.policy.version
    loaded_state = copied(trainer.state())
    loaded_weights = copied(trainer.policy.weights)
    learn(group, trainer, [(batch, 1)])
    state = copied(trainer.state())
    return Resumed(version, loaded_state, loaded_weights, state, copied(trainer.policy.weights))


def test_optimizer_state_loads_with_any_number_of_ranks_to_the_bit(ranks):
    """None is one process without ranks."""

    def run(R: int | None, states: list[Tensors] | None, batch: int) -> list[Resumed]:
        if R is None:
            return [update_from(None, states, "bfloat16", batch)]
        return ranks.run(update_from, states, "bfloat16", batch, size=R)

    (first,) = run(None, None, batch=1)
    (second,) = run(None, [first.state], batch=2)
    for R in (None, 2, 3):
        saved = [rank.state for rank in run(R, None, batch=1)]
        assert same(MergedState(saved), first.state)
        for other_R in (None, 2, 3):
            results = run(other_R, saved, batch=2)
            assert same(MergedState([rank.loaded_state for rank in results]), first.state)
            assert same(MergedState([rank.state for rank in results]), second.state)
            for rank in results:
                assert rank.version == 1
                assert same(rank.loaded_weights, first.weights)
                assert same(rank.weights, second.weights)


def test_optimizer_state_of_another_model_is_rejected_before_anything_changes():
    trainer = make_trainer(None, "bfloat16")
    before = copied(trainer.state())
    name = "master/lm_head.weight"
    changed: dict[str, Tensor] = {key: tensor + 1 for key, tensor in before.items()}
    changed[name] = before[name][:-1]  # one row of the vocabulary is missing
    with pytest.raises(ValueError, match="3264 numbers"):
        trainer.load_state(changed, 1)
    assert same(trainer.state(), before)
    assert trainer.policy.version == 0
