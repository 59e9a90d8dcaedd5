"""MasterWeights over ranks: R processes make the updates of one.

Functions without `test_` run on the ranks (ranks.py), or with None as their group in this process,
by MasterWeights.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_master_weights import module
from test_trainer import MAX_TOKENS, assembled, judge_groups
from tiny import tiny_policy
from torch import Tensor

from lagrpo.core.recipes import resolve
from lagrpo.model.lora import Lora
from lagrpo.model.model import copy_policy
from lagrpo.rollout.base import Request
from lagrpo.rollout.local import LocalSampler
from lagrpo.training.batch import MicroBatch, micro_batches
from lagrpo.training.master_weights import MasterWeights, MergedState, ZeroMasterWeights
from lagrpo.training.ranks import Ranks
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group, Prompt

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def ranks_of(group: Any, mesh: Any = None) -> Ranks | None:
    return None if group is None else Ranks(group.rank(), group.size(), group, group, mesh)


def share(group: Any, rows: Sequence[Any], first_takes_all: bool) -> list[Any]:
    """The rows of a rank: every R-th, or all for the first rank and none for the others."""
    if group is None:
        return [*rows]
    if first_takes_all:
        return [*rows] if group.rank() == 0 else []
    return [*rows][group.rank() :: group.size()]


def make(
    group: Any,
    dtype: str,
    kind: str = "llama",
    tie: bool = False,
    lora: Lora | None = None,
    **changes: Any,
) -> Trainer:
    policy = tiny_policy(kind, DTYPES[dtype], backend="torch", lora=lora, tie_word_embeddings=tie)
    optimization = Optimization(
        **({"lr": 1e-3, "updates": 9, "weight_decay": 0.1, "warmup": 2, "seed": 5} | changes)
    )
    return Trainer(policy, resolve("grpo", {"beta": 0.0}), optimization, ranks=ranks_of(group))


@functools.cache
def sampled(batch: int) -> list[Group]:
    """A batch of a policy that is the same everywhere and at all times."""
    prompts = [Prompt(key, (), "3", tuple(range(3, 8 + 4 * key))) for key in range(3)]
    sampler = LocalSampler(copy_policy(tiny_policy(backend="torch")), 0, MAX_TOKENS, 64)
    groups_by_key = {
        r.prompt.key: group
        for r, group in sampler.sample([Request(batch, 0, p) for p in prompts], 4)
    }
    return judge_groups(
        [groups_by_key[key] for key in sorted(groups_by_key)], lambda g, j, c: float(j % 2)
    )


def rows_of(trainer: Trainer, batch: int = 1) -> list[MicroBatch]:
    return micro_batches(assembled(trainer.recipe, sampled(batch), batch), 40)


def learn(
    group: Any, trainer: Trainer, batches: Sequence[tuple[int, int]], first_takes_all: bool = True
) -> list[dict]:
    """(batch, i): the metrics of i updates on each of the batches."""
    metrics = []
    for batch, i in batches:
        rows, _ = trainer.accumulate(share(group, rows_of(trainer, batch), first_takes_all))
        metrics.append(trainer.update())
        for _ in range(i - 1):
            trainer.accumulate(rows)
            metrics.append(trainer.update())
    return metrics


def copied(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(one: Any, other: Any) -> bool:
    """True if all tensors of two mappings have the same bits, whatever their shapes."""
    return one.keys() == other.keys() and all(
        torch.equal(one[n].reshape(-1), other[n].reshape(-1)) for n in one
    )


# Five updates, i = 3 and then 2


def five_updates(
    group: Any, options: dict[str, Any], first_takes_all: bool, make: Callable[..., Trainer] = make
) -> tuple[list[dict], dict, dict]:
    trainer = make(group, **options)
    metrics = learn(group, trainer, [(1, 3), (2, 2)], first_takes_all)
    return metrics, copied(trainer.state()), copied(trainer.policy.weights)


@pytest.mark.parametrize(
    ("R", "first_takes_all"),
    [
        pytest.param(2, True, id="2 ranks, the first takes all rows"),
        pytest.param(3, False, id="3 ranks share the rows"),
    ],
)
def test_the_updates_of_several_ranks_are_those_of_one_process_to_rounding(
    ranks, R, first_takes_all
):
    """In float64, where rounding is far below the steps. Clipped: the limit is a third of the
    norms."""
    options = {"dtype": "float64", "max_grad_norm": 0.05}
    metrics, state, weights = five_updates(None, options, first_takes_all)
    assert min(m["grad_norm"] for m in metrics) > 0.1
    results = ranks.run(five_updates, options, first_takes_all, size=R)
    check_to_rounding(results, metrics, state, weights)
    assert all(rank_metrics == results[0][0] for rank_metrics, *_ in results)


def check_to_rounding(
    results: Sequence[Any], metrics: Sequence[dict], state: Any, weights: Any
) -> None:
    """Checks that ranks and one process agree to float64's rounding, and ranks have the same
    weights."""
    merged = MergedState([rank[1] for rank in results])
    assert merged.keys() == state.keys()
    for name, expected in state.items():
        torch.testing.assert_close(merged[name].view_as(expected), expected, rtol=1e-9, atol=1e-9)
    for rank_metrics, _, rank_weights in results:
        assert [m["lr"] for m in rank_metrics] == [m["lr"] for m in metrics]
        assert [m["grad_norm"] for m in rank_metrics] == pytest.approx(
            [m["grad_norm"] for m in metrics], rel=1e-9
        )
        assert same(rank_weights, results[0][2])
        for name, expected in weights.items():
            torch.testing.assert_close(rank_weights[name], expected, rtol=1e-9, atol=1e-9)


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
    """One rank has all rows, the others none: nothing is added but zeros. Without clipping, since
    norms are rounded in another order. Moments may stay on the host."""
    options = {"max_grad_norm": None, **options}
    metrics, state, weights = five_updates(None, options, True)
    arguments = options | changes, True
    results = (
        [five_updates(None, *arguments)]
        if R is None
        else ranks.run(five_updates, *arguments, size=R)
    )
    check_to_the_bit(results, metrics, state, weights)


def check_to_the_bit(
    results: Sequence[Any], metrics: Sequence[dict], state: Any, weights: Any
) -> None:
    """Checks that the ranks and one process have the same bits."""
    assert same(MergedState([rank[1] for rank in results]), state)
    for rank_metrics, _, rank_weights in results:
        assert same(rank_weights, weights)
        assert [m["grad_norm"] for m in rank_metrics] == pytest.approx(
            [m["grad_norm"] for m in metrics], rel=1e-6
        )


def mixed_updates(group: Any) -> list[dict[str, Tensor]]:
    """One model with weights of two dtypes, no optimizer: masters go down by their gradients."""
    model = module(
        torch.linspace(1, 2, 50).bfloat16(), torch.linspace(-1, 1, 40), torch.ones(6, 7).bfloat16()
    )
    if group is None:
        masters = MasterWeights(model, "dithered", 1)
    else:
        masters = ZeroMasterWeights(model, "dithered", 1, group)
    states = [copied(dict(model.named_parameters()))]
    for scale in (0.001, 0.0):
        if group is None or group.rank() == 0:
            squares = [(p.float() * p.float() * scale).sum() for p in model.parameters()]
            torch.stack(squares).sum().backward()
        masters.reduce_grads()
        with torch.no_grad():
            for master in masters.parameters:
                assert master.grad is not None
                master -= master.grad
        masters.zero_grads()
        masters.write_back()
        states.append(copied(dict(model.named_parameters())))
    return states


def test_weights_of_two_dtypes_have_masters_too(ranks):
    start, moved, still = mixed_updates(None)
    assert not same(moved, start)
    assert same(still, moved)
    for states in ranks.run(mixed_updates, size=2):
        assert all(map(same, states, (start, moved, still)))


# What computes by the weights


def log_probs_after_updates(group: Any) -> list[tuple[bool, bool, bool]]:
    """Three booleans for each of two updates with the kernels, which read weights from panels.

    The log-probs differ from those before the update; equal those of a fresh policy with the same
    weights; equal those of a copy that reads the same panels.
    """
    policy = tiny_policy(dtype=torch.bfloat16, backend="c")
    trainer = Trainer(
        policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-2), ranks=ranks_of(group)
    )
    assert policy.model.exact
    copy, rows, comparisons = copy_policy(policy), rows_of(trainer), []
    for _ in range(2):
        before = trainer.compute_logprobs(rows)
        trainer.accumulate(share(group, rows, False))
        trainer.update()
        fresh = tiny_policy(dtype=torch.bfloat16, backend="c")
        fresh.weights.load(policy.weights, policy.version)
        copy.load(policy.weights, policy.version)
        with torch.no_grad():
            expected, copied_T = ([p.logp(row.packed) for row in rows] for p in (fresh, copy))
        after = trainer.compute_logprobs(rows)
        equal = [all(map(torch.equal, after, other)) for other in (before, expected, copied_T)]
        comparisons.append((not equal[0], equal[1], equal[2]))
    return comparisons


def test_kernels_use_the_new_weights_after_an_update(ranks, with_kernels):
    assert ranks.run(log_probs_after_updates, size=2) == [[(True, True, True)] * 2] * 2


# Gradients that are not finite


def refused(group: Any, on: int, make: Callable[..., Trainer] = make) -> tuple[str, bool, bool]:
    """The message; whether nothing changed, and whether the next update is the one of a trainer
    that was never refused. On one rank a weight is so large that the gradient overflows inside the
    model."""
    trainer, untouched = make(group, "bfloat16"), make(group, "bfloat16")
    rows = share(group, rows_of(trainer), False)
    before, weights, weight_C = (
        copied(trainer.state()),
        copied(trainer.policy.weights),
        rows[0].weight_C.clone(),
    )
    if group.rank() == on:
        rows[0].weight_C[0] = 1e37
    trainer.accumulate(rows)
    with pytest.raises(FloatingPointError) as raised:
        trainer.update()
    unchanged = same(trainer.state(), before) and same(copied(trainer.policy.weights), weights)
    rows[0].weight_C.copy_(weight_C)
    for one in (trainer, untouched):
        one.accumulate(rows)
        one.update()
    return (
        str(raised.value),
        unchanged,
        same(trainer.state(), untouched.state()) and trainer.policy.version == 1,
    )


def test_gradient_not_finite_on_one_rank_is_rejected_on_all_ranks(ranks):
    messages, unchanged, as_if_never = zip(*ranks.run(refused, 1, size=2), strict=True)
    start = r"the gradient of update 1 is not finite \(norm (inf|nan)\); still version 0"
    assert all(re.match(start, message) for message in messages)
    assert all(unchanged)
    assert all(as_if_never)


# States


def state_after(
    group: Any, states: list[dict[str, Tensor]] | None, dtype: str, batch: int
) -> tuple:
    """From `states`, or from the start: one update on a batch. The state that was loaded, and the
    one after it."""
    trainer = make(group, dtype, max_grad_norm=None)
    if states is not None:
        trainer.load_state(MergedState([copied(state) for state in states]), 1)
    loaded, version = copied(trainer.state()), trainer.policy.version
    weights = copied(trainer.policy.weights)
    learn(group, trainer, [(batch, 1)])
    return version, loaded, weights, copied(trainer.state()), copied(trainer.policy.weights)


def test_optimizer_state_loads_with_any_number_of_ranks(ranks):
    """To the bit, and so is the update after it. None is one process without ranks."""

    def run(R: int | None, *arguments: Any) -> list[tuple]:
        return (
            [state_after(None, *arguments)]
            if R is None
            else ranks.run(state_after, *arguments, size=R)
        )

    first = state_after(None, None, "bfloat16", 1)
    expected = state_after(None, [first[3]], "bfloat16", 2)
    for R in (None, 2, 3):
        saved = [rank[3] for rank in run(R, None, "bfloat16", 1)]
        assert same(MergedState(saved), first[3])
        for other in (None, 2, 3):
            results = run(other, saved, "bfloat16", 2)
            assert same(MergedState([rank[1] for rank in results]), first[3])
            assert same(MergedState([rank[3] for rank in results]), expected[3])
            for version, _, weights, _, after in results:
                assert version == 1
                assert same(weights, first[4])
                assert same(after, expected[4])


def test_optimizer_state_of_another_model_is_rejected_before_anything_changes():
    trainer = make(None, "bfloat16")
    before, name = copied(trainer.state()), "master/lm_head.weight"
    with pytest.raises(ValueError, match=r"master/lm_head.weight has 3264 numbers in .*, not 3296"):
        trainer.load_state({n: t + 1 for n, t in before.items()} | {name: before[name][:-1]}, 1)
    assert same(trainer.state(), before)
    assert trainer.policy.version == 0
