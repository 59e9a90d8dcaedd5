"""Updates that one process or several ranks make, for tests that compare them.

Functions that take a `group` run on the ranks (ranks.py), or with None as their group in the test's
own process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from test_trainer import MAX_TOKENS, assembled, judge_groups
from tiny import tiny_policy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lagrpo.core.recipes import resolve
from lagrpo.distributed.ranks import Ranks
from lagrpo.model.backend import Backend, Choice
from lagrpo.model.lora import Lora
from lagrpo.model.model import copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.training.batch import MicroBatch, micro_batches
from lagrpo.training.entropy import EntropyTerm
from lagrpo.training.master_weights import MergedState
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.types import Group, Prompt, Request

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
Metrics = list[dict[str, float]]
"""The metrics of updates."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Updated(NamedTuple):
    """A trainer after its updates."""

    metrics: Metrics
    state: Tensors
    """of one rank: its part"""
    weights: Tensors


def ranks_of(group: ProcessGroup | None, mesh: DeviceMesh | None = None) -> Ranks | None:
    if group is None:
        return None
    return Ranks(group.rank(), group.size(), group, group, mesh)


def share(group: ProcessGroup | None, rows: Sequence[T], first_takes_all: bool) -> list[T]:
    """The rows of a rank: every R-th, or all for the first rank and none for the others."""
    if group is None:
        return [*rows]
    if first_takes_all:
        return [*rows] if group.rank() == 0 else []
    return [*rows][group.rank() :: group.size()]


def make_trainer(
    group: ProcessGroup | None,
    dtype: str,
    kind: str = "llama",
    tie: bool = False,
    backend: Backend | Choice = "torch",
    lora: Lora | None = None,
    entropy_coef: float = 0.0,
    **changes: Any,
) -> Trainer:
    policy = tiny_policy(kind, DTYPES[dtype], backend=backend, lora=lora, tie_word_embeddings=tie)
    options = {"lr": 1e-3, "updates": 9, "weight_decay": 0.1, "warmup": 2, "seed": 5} | changes
    recipe = resolve("grpo", {"beta": 0.0})
    return Trainer(
        policy,
        recipe,
        Optimization(**options),
        entropy=EntropyTerm(entropy_coef),
        ranks=ranks_of(group),
    )


@functools.cache
def sampled(batch: int, max_tokens: int = MAX_TOKENS) -> list[Group]:
    """A batch of a policy that is the same everywhere and at all times. Its prompts differ in
    length, and every second completion is right."""
    prompts = [Prompt(key, (), "3", tuple(range(3, 8 + 4 * key))) for key in range(3)]
    requests = [Request(batch, 0, prompt) for prompt in prompts]
    sampler = LocalSampler(copy_policy(tiny_policy(backend="torch")), 0, max_tokens, 64)
    groups_by_key = {request.prompt.key: group for request, group in sampler.sample(requests, 4)}
    groups = [groups_by_key[key] for key in sorted(groups_by_key)]
    return judge_groups(groups, lambda group, index, completion: float(index % 2))


def rows_of(trainer: Trainer, batch: int = 1) -> list[MicroBatch]:
    # 40 tokens a row: several rows, so that every rank has one.
    return micro_batches(assembled(trainer.recipe, sampled(batch), batch), 40)


def shortest_rows(trainer: Trainer, count: int) -> list[MicroBatch]:
    """Rows of one completion of at most three tokens, for Triton's interpreter, which is slow."""
    batch = assembled(trainer.recipe, sampled(1, max_tokens=3), 1)
    rows = micro_batches(batch, 1, trainer.policy.device)
    return sorted(rows, key=lambda row: row.packed.layout.rows)[:count]


def learn(
    group: ProcessGroup | None,
    trainer: Trainer,
    batches: Sequence[tuple[int, int]],
    first_takes_all: bool = True,
) -> Metrics:
    """Makes i updates on each batch, given as (batch, i)."""
    metrics = []
    for batch, updates in batches:
        rows, _ = trainer.accumulate(share(group, rows_of(trainer, batch), first_takes_all))
        metrics.append(trainer.update())
        for _ in range(updates - 1):
            trainer.accumulate(rows)
            metrics.append(trainer.update())
    return metrics


def copied(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(tensors: Tensors, others: Tensors) -> bool:
    """True if all tensors of two mappings have the same bits, whatever their shapes."""
    return tensors.keys() == others.keys() and all(
        torch.equal(tensors[name].reshape(-1), others[name].reshape(-1)) for name in tensors
    )


def five_updates(
    group: ProcessGroup | None,
    options: Mapping[str, Any],
    first_takes_all: bool,
    make: Callable[..., Trainer] = make_trainer,
) -> Updated:
    """Three updates on one batch and two on the next."""
    trainer = make(group, **options)
    metrics = learn(group, trainer, [(1, 3), (2, 2)], first_takes_all)
    return Updated(metrics, copied(trainer.state()), copied(trainer.policy.weights))


def check_to_rounding(ranks: Sequence[Updated], alone: Updated) -> None:
    """Checks that ranks and one process agree to float64's rounding, and ranks have the same
    weights."""
    merged = MergedState([rank.state for rank in ranks])
    assert merged.keys() == alone.state.keys()
    for name, expected in alone.state.items():
        torch.testing.assert_close(merged[name].view_as(expected), expected, rtol=1e-9, atol=1e-9)
    norms = [line["grad_norm"] for line in alone.metrics]
    for rank in ranks:
        assert [line["lr"] for line in rank.metrics] == [line["lr"] for line in alone.metrics]
        assert [line["grad_norm"] for line in rank.metrics] == pytest.approx(norms, rel=1e-9)
        assert same(rank.weights, ranks[0].weights)
        for name, expected in alone.weights.items():
            torch.testing.assert_close(rank.weights[name], expected, rtol=1e-9, atol=1e-9)


def check_to_the_bit(ranks: Sequence[Updated], alone: Updated) -> None:
    """Checks that the ranks and one process have the same bits."""
    assert same(MergedState([rank.state for rank in ranks]), alone.state)
    norms = [line["grad_norm"] for line in alone.metrics]
    for rank in ranks:
        assert same(rank.weights, alone.weights)
        # A norm is a sum of the ranks' parts, in an order that depends on their number.
        assert [line["grad_norm"] for line in rank.metrics] == pytest.approx(norms, rel=1e-6)


class Rejected(NamedTuple):
    """A rank after an update whose gradient was not finite."""

    message: str
    is_unchanged: bool
    """state and weights were those before the update"""
    goes_on: bool
    """the next update was the one of a trainer that had no such update"""


def rejected_update(
    group: ProcessGroup, rank: int, make: Callable[..., Trainer] = make_trainer
) -> Rejected:
    """On one rank the weight of a completion is so large that the gradient overflows inside the
    model."""
    trainer = make(group, "bfloat16")
    untouched = make(group, "bfloat16")
    rows = share(group, rows_of(trainer), first_takes_all=False)
    state = copied(trainer.state())
    weights = copied(trainer.policy.weights)
    weight_C = rows[0].weight_C.clone()

    if group.rank() == rank:
        rows[0].weight_C[0] = 1e37
    trainer.accumulate(rows)
    with pytest.raises(FloatingPointError) as raised:
        trainer.update()
    is_unchanged = same(trainer.state(), state) and same(copied(trainer.policy.weights), weights)

    rows[0].weight_C.copy_(weight_C)
    for one_trainer in (trainer, untouched):
        one_trainer.accumulate(rows)
        one_trainer.update()
    goes_on = same(trainer.state(), untouched.state()) and trainer.policy.version == 1
    return Rejected(str(raised.value), is_unchanged, goes_on)
