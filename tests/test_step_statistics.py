"""Numbers of a whole optimizer step: statistics that a loss reads, the learning rate by ESS, and
the cosine of gradients. None depends on micro-batches, on ranks, or on what the loss leaves out.

Functions without `test_` run on the ranks (ranks.py), or with None as their group in this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rank_updates import Metrics, Tensors, copied, ranks_of, same, sampled, share
from running import Section, tiny_settings
from test_trainer import assembled, judge_groups
from tiny import tiny_policy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.testing import assert_close

from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Derivative, Recipe
from lagrpo.core.recipes import resolve
from lagrpo.lifecycle.run import train
from lagrpo.model.model import Policy
from lagrpo.runs import load_metrics
from lagrpo.training.batch import MicroBatch, micro_batches
from lagrpo.training.kl_rate import RateByKl
from lagrpo.training.optimizer import KL_RATE, Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, JsonObject

ONE_ROW = 10_000
"""Tokens of a packed row: more than a batch has."""

# Thresholds lie where some tokens of `sampled` are dropped or clipped and others are not:
# test_statistics_drop_or_clip_some_tokens_and_not_others.
WITH_STATISTICS = [
    pytest.param("m2po", {"tau": 0.02}, id="m2po"),
    pytest.param(
        "m2po_released", {"tau": 0.02, "least_low": 0.05, "least_high": 0.05}, id="m2po_released"
    ),
    pytest.param("grpo_top_entropy", {"share": 0.3}, id="top_entropy"),
    pytest.param(
        "dr_grpo",
        {"filters": ["m2po", "top_entropy"], "tau": 0.02, "share": 0.6},
        id="two statistics",
    ),
    pytest.param("grpo_trl", {"filters": ["clip_cov"], "share": 0.2}, id="clip_cov"),
    pytest.param("grpo", {"advantage": "batch_whitened", "beta": 0.0}, id="batch_whitened"),
]


def stale(groups: Sequence[Group], spread: float = 0.3) -> list[Group]:
    """The groups with normal noise of this deviation on log α, as if another policy had sampled
    them."""
    generator = torch.Generator().manual_seed(5)

    def add_noise(completion: Completion) -> Completion:
        noise = spread * torch.randn(len(completion.rollout_logp), generator=generator)
        return replace(completion, rollout_logp=completion.rollout_logp + noise)

    return [
        replace(group, completions=tuple(map(add_noise, group.completions))) for group in groups
    ]


def with_flat_groups(groups: list[Group]) -> list[Group]:
    """The first has equal rewards, so advantages of 0."""
    return judge_groups(groups, lambda g, j, c: 1.0 if g == 0 else float(j % 2))


def make_trainer(
    group: ProcessGroup | None, recipe: str, overrides: Section, **changes: Any
) -> Trainer:
    """With PyTorch's operations in float64, where rounding is far below what is compared."""
    policy = tiny_policy(dtype=torch.float64, backend="torch")
    options: dict[str, Any] = {"lr": 1e-3, "updates": 9, "max_grad_norm": None} | changes
    return Trainer(
        policy, resolve(recipe, overrides), Optimization(**options), ranks=ranks_of(group)
    )


def rows_of(trainer: Trainer, tokens: int) -> list[MicroBatch]:
    batch = assembled(trainer.recipe, stale(with_flat_groups(sampled(1))))
    return micro_batches(
        batch,
        tokens,
        whole_groups=trainer.recipe.needs_whole_groups,
        skip_zero_advantage=trainer.skips_zero_advantage,
    )


class Updated(NamedTuple):
    """Some updates on a batch."""

    metrics: Metrics
    """and sums, of each update"""
    weights: Tensors
    """after the last"""


def make_updates(
    group: ProcessGroup | None,
    recipe: str,
    overrides: Section,
    changes: Section,
    tokens: int = 40,
    first_takes_all: bool = False,
    count: int = 2,
) -> Updated:
    trainer = make_trainer(group, recipe, overrides, **changes)
    rows: Sequence[MicroBatch] = share(group, rows_of(trainer, tokens), first_takes_all)
    metrics = []
    for _ in range(count):
        rows, step_metrics = trainer.step(rows)
        metrics.append(step_metrics)
    return Updated(metrics, copied(trainer.policy.weights))


def check_same(updated: Updated, expected: Updated) -> None:
    # float64 sums in another order: 1e-9 is a million times their rounding.
    for line, expected_line in zip(updated.metrics, expected.metrics, strict=True):
        assert line == pytest.approx(expected_line, rel=1e-9, abs=1e-12)
    for name, weight in expected.weights.items():
        assert_close(updated.weights[name], weight, rtol=1e-9, atol=1e-9)


# Statistics that a loss reads


class Accumulated(NamedTuple):
    """An update before its step."""

    rows: int
    sums: dict[str, float]
    gradient: Tensor
    """of all weights, flat"""


def gradient_of(trainer: Trainer) -> Tensor:
    gradients = [p.grad for p in trainer.policy.model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def accumulate(recipe: str, overrides: Section, tokens: int) -> Accumulated:
    trainer = make_trainer(None, recipe, overrides)
    rows = rows_of(trainer, tokens)
    _, sums = trainer.accumulate(rows)
    return Accumulated(len(rows), sums, gradient_of(trainer))


@pytest.mark.parametrize(("name", "overrides"), WITH_STATISTICS)
def test_gradient_with_statistics_does_not_depend_on_micro_batches(name, overrides):
    in_one_row = accumulate(name, overrides, ONE_ROW)
    assert in_one_row.rows == 1
    assert in_one_row.gradient.norm() > 1e-3
    # A row has at least one completion, or one group, however few tokens it may have.
    for tokens, least_rows in ((60, 3), (1, 7)):
        split = accumulate(name, overrides, tokens)
        assert split.rows >= least_rows
        # The statistics are read from log-probs that rows keep in float32.
        assert split.sums == pytest.approx(in_one_row.sums, rel=1e-5, abs=1e-6)
        assert_close(split.gradient, in_one_row.gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "overrides"), WITH_STATISTICS)
def test_update_with_statistics_does_not_depend_on_ranks(ranks, name, overrides):
    alone = make_updates(None, name, overrides, {})
    for first_takes_all in (False, True):
        results = ranks.run(make_updates, name, overrides, {}, 40, first_takes_all, size=2)
        for rank_result in results:
            check_same(rank_result, alone)


@pytest.mark.parametrize(("name", "overrides"), WITH_STATISTICS[:-1])
def test_statistics_drop_or_clip_some_tokens_and_not_others(name, overrides):
    """Else the tests above would compare nothing."""
    (first,) = make_updates(None, name, overrides, {}, count=1).metrics
    cut = first["filtered_tokens"] + first["clipped_positive"] + first["clipped_negative"]
    # Both ends: nothing cut compares nothing, and all cut has no gradient.
    assert 0 < cut < 0.9 * first["tokens"]


@pytest.fixture
def shares_kept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of tokens that filters keep, in each call of the loss."""
    shares = []
    differentiate = Recipe.differentiate

    def record(recipe: Recipe, x: LossInputs, weight_C: Tensor) -> Derivative:
        derivative = differentiate(recipe, x, weight_C)
        shares.append(1 - float(derivative.filtered_T.double().mean()))
        return derivative

    monkeypatch.setattr(Recipe, "differentiate", record)
    return shares


def test_statistics_cover_completions_without_an_advantage(shares_kept):
    """Their entropies count in the quantile, though they have no gradient."""
    trainer = make_trainer(None, "grpo_top_entropy", {"share": 0.3})
    assert not trainer.skips_zero_advantage
    (row,) = rows_of(trainer, ONE_ROW)
    assert sorted(row.members) == list(range(len(row.batch.member_C)))
    shares_kept.clear()
    trainer.step([row])
    assert shares_kept == pytest.approx([0.3], abs=1 / len(row.completion_T))


def test_top_entropy_keeps_its_share_at_every_update_on_a_batch(shares_kept):
    """The quantile and the tokens are of the same entropies, though the policy moves."""
    # A rate so large that the second update's entropies are others than the first's.
    trainer = make_trainer(None, "grpo_top_entropy", {"share": 0.3}, lr=0.1)
    rows = rows_of(trainer, ONE_ROW)
    shares_kept.clear()
    for _ in range(3):
        rows, _ = trainer.step(rows)
    assert shares_kept == pytest.approx([0.3] * 3, abs=1 / len(rows[0].completion_T))


def test_m2po_keeps_the_second_moment_of_a_step_below_tau():
    """The moment is computed from the policy's own log-probs, for any split into rows."""
    trainer = make_trainer(None, "m2po", {"tau": 0.02})
    rows = rows_of(trainer, 40)
    squares, is_kept = [], []
    statistics = trainer._collect_statistics(rows)
    for row, logp_T in zip(rows, trainer.compute_logprobs(rows), strict=True):
        x = row.loss_inputs(logp_T, 0, statistics)
        assert x.rollout_logp is not None
        log_ratio_T = x.logp - x.rollout_logp
        is_outward = x.advantage * log_ratio_T > 0
        squares.append(log_ratio_T[is_outward].square())
        is_kept.append(trainer.recipe.kept(x)[is_outward].bool())
    squares_T = torch.cat(squares)
    is_kept_T = torch.cat(is_kept)
    assert float(squares_T.mean()) > 0.02 >= float(squares_T[is_kept_T].mean())
    # No more is dropped than needed: with the smallest dropped token it would exceed tau.
    next_square = squares_T[~is_kept_T].min()
    sum_with_next = squares_T[is_kept_T].sum() + next_square
    assert float(sum_with_next / (int(is_kept_T.sum()) + 1)) > 0.02


def record_passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets an entry for every forward pass of a row: whether it has a gradient."""
    with_gradient = []
    logp = Policy.logp

    def record(policy: Policy, *arguments: Any) -> Tensor:
        with_gradient.append(torch.is_grad_enabled())
        return logp(policy, *arguments)

    monkeypatch.setattr(Policy, "logp", record)
    return with_gradient


@pytest.mark.parametrize("name", ["grpo", "dapo", "opsm", "a3po", "reinforce_pp_baseline"])
def test_recipe_without_statistics_makes_no_second_pass(name, monkeypatch):
    trainer = make_trainer(None, name, {"beta": 0.0})
    rows = rows_of(trainer, 40)
    with_gradient = record_passes(monkeypatch)
    trainer.step(rows)
    assert with_gradient == [True] * len(rows)


def test_statistic_of_a_step_makes_a_second_pass(monkeypatch):
    trainer = make_trainer(None, "m2po", {})
    rows = rows_of(trainer, 40)
    with_gradient = record_passes(monkeypatch)
    trainer.step(rows)
    assert with_gradient == [False] * len(rows) + [True] * len(rows)


# The learning rate by the effective sample size (VCPO, arXiv 2602.17616)


@pytest.mark.parametrize(
    ("ess_share", "full", "factor"),
    [
        (1.0, 1.0, 1.0),
        (0.727273, 1.0, 0.852803),
        (0.25, 1.0, 0.5),  # one of four completions carries all: 1 / sqrt(4)
        (0.25, 0.55, (0.25 / 0.55) ** 0.5),
        (0.6, 0.55, 1.0),
        (0.5, 0.0, 1.0),  # off
        (None, 1.0, 1.0),  # no completion has log-probs of its policy
    ],
)
def test_learning_rate_has_the_worked_factor(ess_share, full, factor):
    optimization = Optimization(lr=2.0, full_rate_ess=full)
    assert optimization.rate(5, ess_share) == pytest.approx(2.0 * factor, rel=1e-6)


def test_factor_of_the_learning_rate_multiplies_its_schedule():
    optimization = Optimization(lr=1.0, full_rate_ess=1.0, schedule="linear", updates=4)
    assert optimization.rate(2, 0.25) == pytest.approx(0.5 * 0.5)


def with_weights(
    trainer: Trainer, rows: Sequence[MicroBatch], weights: list[float]
) -> list[MicroBatch]:
    """The rows, as if completion c had the ratio weights[c] under the policy."""
    changed = []
    for row, logp_T in zip(rows, trainer.compute_logprobs(rows), strict=True):
        lengths_C = row.completion_T.bincount(minlength=len(row.members))
        ratios = [weights[c % len(weights)] for c in row.members]
        log_ratio_C = torch.tensor(ratios, dtype=torch.float64).log()
        per_token_T = (log_ratio_C / lengths_C)[row.completion_T]
        changed.append(replace(row, rollout_logp_T=logp_T.double() - per_token_T))
    return changed


@pytest.mark.parametrize(
    ("weights", "share_of_all", "factor"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0, 1.0),
        ([2.0, 1.0, 0.5, 0.5], 0.727273, 0.852803),
        ([1e9, 1.0, 1.0, 1.0], 0.25, 0.5),
        ([1e300, 1e299, 1e299, 1e299], 1.3**2 / 1.03 / 4, (1.3**2 / 1.03 / 4) ** 0.5),
    ],
    ids=["equal", "worked", "one carries all", "beyond the limit of ratios"],
)
@pytest.mark.parametrize("tokens", [10_000, 1])
def test_step_scales_its_learning_rate_by_the_ess_of_its_completions(
    weights, share_of_all, factor, tokens
):
    """Not truncated, and with completions whose advantage is 0, whatever the micro-batches."""
    trainer = make_trainer(None, "seq_tis", {}, full_rate_ess=1.0, lr=1e-3)
    assert trainer.recipe.skips_zero_advantage
    assert not trainer.skips_zero_advantage
    rows = with_weights(trainer, rows_of(trainer, tokens), weights)
    assert sorted(c for row in rows for c in row.members) == list(range(12))
    _, sums = trainer.step(rows)
    assert sums["ess_share"] == pytest.approx(share_of_all, rel=1e-6)
    assert sums["lr"] == pytest.approx(1e-3 * factor, rel=1e-6)


def test_learning_rate_by_ess_does_not_depend_on_ranks(ranks):
    changes = {"full_rate_ess": 1.0, "log_gradient_cosine": True}
    alone = make_updates(None, "seq_tis", {}, changes)
    first = alone.metrics[0]
    assert first["ess_share"] < 0.99  # else the rate would be the full one
    assert first["lr"] == pytest.approx(1e-3 * first["ess_share"] ** 0.5)
    for first_takes_all in (False, True):
        results = ranks.run(make_updates, "seq_tis", {}, changes, 40, first_takes_all, size=2)
        for rank_result in results:
            check_same(rank_result, alone)


# The cosine of consecutive gradients


def update_repeatedly(trainer: Trainer, count: int) -> tuple[list[Tensor], Metrics]:
    """The gradients of some updates, before they are clipped, and the metrics."""
    gradients = []
    metrics = []
    rows: Sequence[MicroBatch] = rows_of(trainer, 60)
    for _ in range(count):
        rows, _ = trainer.accumulate(rows)
        gradients.append(gradient_of(trainer).double())
        metrics.append(trainer.update())
    return gradients, metrics


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3], ids=["whole", "clipped"])
def test_gradient_cosine_is_that_of_consecutive_gradients(max_grad_norm):
    trainer = make_trainer(
        None, "grpo", {"beta": 0.0}, log_gradient_cosine=True, lr=0.02, max_grad_norm=max_grad_norm
    )
    gradients, metrics = update_repeatedly(trainer, 3)
    assert "gradient_cosine" not in metrics[0]
    for before, after, line in zip(gradients, gradients[1:], metrics[1:], strict=False):
        expected = float(before @ after / before.norm() / after.norm())
        assert line["gradient_cosine"] == pytest.approx(expected, rel=1e-6)
        assert abs(expected) < 0.999  # a gradient with itself would have 1


def test_gradient_cosine_is_off_unless_asked_for():
    trainer = make_trainer(None, "grpo", {"beta": 0.0})
    _, metrics = update_repeatedly(trainer, 2)
    assert all("gradient_cosine" not in line for line in metrics)
    assert not [name for name in trainer.state() if name.startswith("previous_gradient")]


def test_gradient_cosine_does_not_change_the_update():
    weights = []
    for log in (True, False):
        trainer = make_trainer(None, "grpo", {"beta": 0.0}, log_gradient_cosine=log)
        update_repeatedly(trainer, 3)
        weights.append(copied(trainer.policy.weights))
    assert same(*weights)


@pytest.mark.parametrize("offload", [False, True])
def test_gradient_cosine_goes_on_from_a_state(offload):
    changes = {"log_gradient_cosine": True, "offload_moments": offload}
    trainer = make_trainer(None, "grpo", {"beta": 0.0}, **changes)
    resumed = make_trainer(None, "grpo", {"beta": 0.0}, **changes)
    rows, _ = trainer.accumulate(rows_of(trainer, 60))
    trainer.update()
    resumed.load_state(copied(trainer.state()), 1)
    trainer.accumulate(rows)
    resumed.accumulate(rows)
    metrics = trainer.update()
    assert "gradient_cosine" in metrics
    assert resumed.update() == metrics


# The learning rate by the divergence of the sampler


@pytest.mark.parametrize(
    ("staleness", "kls", "factors"),
    [
        # The scale cannot rise above 1.
        pytest.param(0, [0.05, 0.0, 0.01], [1.0, 1.0, 1.0], id="near"),
        # At four times the target: a half at once, and a scale of e^(-log 4 / 16) per update.
        pytest.param(
            0,
            [0.2, 0.2, 0.05],
            [0.5 * 4 ** (-1 / 16), 0.5 * 4 ** (-1 / 8), 4 ** (-1 / 8)],
            id="far",
        ),
        pytest.param(100, [0.2], [0.5 * 4 ** (-1 / 200)], id="stale"),
        # log(.05 / 1000) counts as -2 for the scale.
        pytest.param(0, [1000.0], [(0.05 / 1000) ** 0.5 * math.exp(-2 / 16)], id="very far"),
    ],
)
def test_rate_by_kl_has_the_worked_factors(staleness, kls, factors):
    rate = RateByKl(target=0.05, staleness=staleness)
    assert [rate.next_factor(kl) for kl in kls] == pytest.approx(factors)


def test_scale_of_rate_by_kl_recovers_as_slowly_as_it_falls():
    rate = RateByKl(target=0.05, staleness=0)
    for kl in (0.2, 0.2, 0.0125, 0.0125):
        factor = rate.next_factor(kl)
    assert factor == pytest.approx(1.0)


def test_step_scales_its_learning_rate_by_the_kl_of_the_completions_that_it_learns_from():
    """Those with an advantage, also if an update reads the others."""
    trainer = make_trainer(None, "seq_tis", {}, full_rate_kl=1e-3, lr=1e-3)
    _, sums = trainer.step(rows_of(trainer, ONE_ROW))
    assert sums["tokens_kl_alpha"] == sums["tokens"] > 0
    kl = sums["kl_alpha"] / sums["tokens_kl_alpha"]
    expected = RateByKl(target=1e-3, staleness=0).next_factor(kl)
    assert expected < 0.9
    assert sums["lr"] == pytest.approx(1e-3 * expected, rel=1e-12)

    reads_all = make_trainer(None, "seq_tis", {}, full_rate_kl=1e-3, full_rate_ess=1e-9)
    _, sums_of_all = reads_all.step(rows_of(reads_all, ONE_ROW))
    assert sums_of_all["tokens"] > sums["tokens"]
    assert sums_of_all["lr"] == pytest.approx(sums["lr"], rel=1e-5)


def test_learning_rate_by_kl_does_not_depend_on_ranks(ranks):
    changes = {"full_rate_kl": 1e-3, "log_gradient_cosine": True}
    alone = make_updates(None, "seq_tis", {}, changes)
    assert alone.metrics[1]["lr"] < alone.metrics[0]["lr"] < 1e-3
    for first_takes_all in (False, True):
        results = ranks.run(make_updates, "seq_tis", {}, changes, 40, first_takes_all, size=2)
        for rank_result in results:
            check_same(rank_result, alone)


def test_scale_of_the_rate_is_part_of_the_trainers_state_and_old_states_load_without():
    trainer = make_trainer(None, "seq_tis", {}, full_rate_kl=1e-3)
    rows = rows_of(trainer, ONE_ROW)
    trainer.step(rows)
    state = {name: value.clone() for name, value in trainer.state().items()}
    resumed = make_trainer(None, "seq_tis", {}, full_rate_kl=1e-3)
    resumed.load_state(state, version=1)
    assert resumed.optimizer.rate_by_kl == trainer.optimizer.rate_by_kl
    assert resumed.step(rows)[1]["lr"] == trainer.step(rows)[1]["lr"]
    del state[KL_RATE]
    resumed = make_trainer(None, "seq_tis", {}, full_rate_kl=1e-3)
    resumed.load_state(state, version=1)
    assert resumed.optimizer.rate_by_kl == RateByKl(target=1e-3, staleness=0)


def settings(model: Path, root: Path, **sections: Section) -> dict[str, Section]:
    base: dict[str, Section] = {"eval": {"at_start": False}, "checkpoint": {"save_every": 2}}
    return tiny_settings(model, root, **(base | sections))


@pytest.mark.parametrize("scaled", [{"scale_lr_by_ess": 1.0}, {"scale_lr_by_kl": 1e-3}])
def test_gradient_cosine_and_rate_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    model, tmp_path, scaled
):
    changes = {
        "optimizer": {"learning_rate": 1e-2, "log_gradient_cosine": True} | scaled,
        "loss": {"recipe": "seq_tis"},
    }
    lines = {}
    for name, batches in (("long", 4), ("short", 2)):
        schedule = {"batches": batches, "prompts_per_batch": 2, "sync_every": 4}
        run = {"name": name}
        lines[name] = train(settings(model, tmp_path, run=run, schedule=schedule, **changes)).run
    train({"schedule": {"batches": 4}}, resume=lines["short"], trust_run_code=True)
    long, short = (load_metrics(lines[name]) for name in ("long", "short"))
    for metric in ("gradient_cosine", "learning_rate", "loss"):
        assert [line[metric] for line in short] == [line[metric] for line in long], metric
    assert long[0]["gradient_cosine"] is None
    assert -1 <= long[2]["gradient_cosine"] <= 1
    assert all(line["learning_rate"] <= 1e-2 for line in long)
    assert long[2]["learning_rate"] < 0.999e-2  # two updates after the weight sync


# Metrics of the tokens of the objective


def metrics_with(model: Path, root: Path, loss: Section) -> list[JsonObject]:
    run_settings = settings(
        model,
        root,
        loss=loss,
        task={"name": "sample_task:load_vowels"},
        rollout={"num_generations": 3, "max_completion_length": 6, "max_prompt_length": 64},
        schedule={"prompts_per_batch": 4, "batches": 4, "sync_every": 4, "num_iterations": 2},
        run={"output_dir": str(root), "seed": 4},  # no batch is without a signal
    )
    return load_metrics(train(run_settings).run)


@pytest.mark.parametrize(
    "loss",
    [
        {"recipe": "grpo"},
        {"recipe": "grpo", "filters": ["opsm"], "overrides": {"opsm.delta": 0.0}},
    ],
    ids=["grpo", "opsm"],
)
def test_token_metrics_cover_the_objective_whether_or_not_there_is_a_kl_term(model, tmp_path, loss):
    """A KL term of 1e-30 moves nothing, but has a gradient at completions without an advantage."""
    without = metrics_with(model, tmp_path / "0", loss | {"beta": 0.0})
    with_kl = metrics_with(model, tmp_path / "1", loss | {"beta": 1e-30})
    assert max(line["frac_reward_zero_std"] for line in without) > 0
    assert max(line["clip_ratio/low_mean"] + line["clip_ratio/high_mean"] for line in without) > 0
    names = [
        name for name in without[0] if name.startswith(("clip_ratio/", "filtered/", "rollout/"))
    ]
    for line, line_with_kl in zip(without, with_kl, strict=True):
        expected = {name: line_with_kl[name] for name in names}
        assert {name: line[name] for name in names} == pytest.approx(expected, rel=1e-5)
    assert all(line["kl"] == 0.0 for line in without)
    assert math.isfinite(with_kl[-1]["kl"])
