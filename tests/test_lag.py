"""Staleness of whole completions, from numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lagrpo.core.kl import prefers_bounded, tv_terms
from lagrpo.core.recipes import resolve
from lagrpo.training.batch import assemble, left_out, micro_batches
from lagrpo.training.metrics import estimate_improvement, sequence_metrics
from lagrpo.training.step import record_completions
from lagrpo.types import Completion, Group, Outcome, Prompt

HALVES = {
    0: math.log(1.5) / 2,
    1: -math.log(2) / 2,
}  # of two tokens each: sequence ratios 1.5 and .5


def batch_of(rewards_NG, lengths=2, budget=100, recipe: Any = None):
    """Groups of completions of two tokens under α with log-prob -1 each, all in the objective
    unless a recipe says."""
    groups = [
        Group(
            Prompt(n, ({"role": "user", "content": "?"},), "", (5, 6)),
            tuple(
                Completion(
                    torch.arange(3, 3 + lengths),
                    -torch.ones(lengths),
                    torch.zeros(lengths),
                    True,
                    "",
                    scored,
                )
                for scored in map(Outcome.scored, rewards)
            ),
        )
        for n, rewards in enumerate(rewards_NG)
    ]
    batch = assemble(groups, recipe or resolve("dr_grpo"), lengths, seed=0, b=1)
    return batch, micro_batches(batch, budget)


def give(batch, rows, log_ratio_by_member):
    """The records of completions, such that each token of completion c has ln ρ =
    log_ratio_by_member[c]."""
    per_token = [
        torch.tensor([log_ratio_by_member[c] for c in m.members])[m.completion_T] for m in rows
    ]
    given = [
        m.with_logprobs(m.rollout_logp_T + ratio_T)
        for m, ratio_T in zip(rows, per_token, strict=True)
    ]
    return record_completions(batch, given)


def improvement(batch, records, reward_range=(0.0, 1.0)):
    return estimate_improvement(batch, records.log_ratio_C, reward_range)


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(100, id="one micro-batch"),
        pytest.param(4, id="a completion per micro-batch"),
    ],
)
def test_sequence_metrics_by_hand(budget):
    batch, rows = batch_of([[1.0, 0.0]], budget=budget)
    metrics = sequence_metrics(batch, rows := give(batch, rows, HALVES))
    per_token = [
        2 * (math.sqrt(1.5) - 1 - math.log(1.5) / 2),
        2 * (math.sqrt(0.5) - 1 + math.log(2) / 2),
    ]
    assert metrics["rollout/seq_kl"] == pytest.approx(sum(per_token) / 2, abs=1e-6)
    assert metrics["rollout/seq_tv"] == pytest.approx((0.5 + 0.5) / 2 / 2, abs=1e-6)
    assert metrics["rollout/seq_ess"] == pytest.approx(4 / 2.5, abs=1e-6)
    # J(pi_k) - J(alpha): r = (1, 0), mean of the others (0, 1), so (1.5 * 1 - 0.5 * 1) / 2 = .5
    assert improvement(batch, rows) == pytest.approx(0.5, abs=1e-6)


def test_staleness_metrics_are_zero_without_staleness():
    batch, rows = batch_of([[1.0, 0.0], [1.0, 0.0]] * 8)
    metrics = sequence_metrics(batch, give(batch, rows, dict.fromkeys(range(32), 0.0)))
    assert metrics == {
        "rollout/seq_kl": 0,
        "rollout/seq_tv": 0,
        "rollout/seq_ess": 32,
        "improvement": 0,
    }


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("grpo", {"beta": 0.0}, id="grpo leaves out flat groups"),
        pytest.param("red_drop", {}, id="red_drop leaves out completions"),
    ],
)
def test_metrics_have_the_true_values_though_the_loss_leaves_completions_out(name, overrides):
    """A coin that is right with .2 under α and .3 under π_k, in 1,500 groups of 4: J(π_k) - J(α) =
    .1, TV = .1, and KL(α‖π_k) = .2 ln(.2/.3) + .8 ln(.8/.7) = .0257. Over what the loss computes
    alone none of them comes out."""
    rewards_NG = (torch.rand(1_500, 4, generator=torch.Generator().manual_seed(1)) < 0.2).double()
    recipe = resolve(name, overrides)
    batch, _ = batch_of(rewards_NG.tolist(), lengths=1, recipe=recipe)
    log_ratio = {
        c: math.log(1.5) if r else math.log(7 / 8) for c, r in enumerate(rewards_NG.flatten())
    }
    rows = micro_batches(batch, 10_000, skip_zero_advantage=recipe.skips_zero_advantage)
    silent_rows = left_out(batch, 10_000, skip_zero_advantage=recipe.skips_zero_advantage)
    metrics = sequence_metrics(batch, give(batch, [*rows, *silent_rows], log_ratio))
    truth = {"improvement": 0.1, "rollout/seq_tv": 0.1, "rollout/seq_kl": 0.02568}
    assert {metric: metrics[metric] for metric in truth} == pytest.approx(truth, abs=0.006)
    assert sequence_metrics(batch, give(batch, rows, log_ratio))["rollout/seq_kl"] is None


def test_rewards_outside_their_range_have_no_improvement_and_a_stated_range_scales_them():
    batch, rows = batch_of([[10.0, 0.0]])
    rows = give(batch, rows, HALVES)
    assert improvement(batch, rows) is None
    assert improvement(batch, rows, (0.0, 10.0)) == pytest.approx(0.5, abs=1e-6)


def test_groups_of_equal_rewards_count_in_the_improvement_and_in_the_divergences():
    """One mixed group with .5 (as above) and one flat group: the mean gain is .25, and TV that of
    all four."""
    batch, _ = batch_of([[1.0, 0.0], [1.0, 1.0]])
    rows = [f(batch, 100, skip_zero_advantage=True) for f in (micro_batches, left_out)]
    both = give(batch, [*rows[0], *rows[1]], HALVES | {2: 0.1, 3: 0})
    assert improvement(batch, both) == pytest.approx(0.25, abs=1e-6)
    expected = (0.5 + 0.5 + math.expm1(0.2)) / 2 / 4
    assert sequence_metrics(batch, both)["rollout/seq_tv"] == pytest.approx(expected, abs=1e-6)


def test_completions_whose_alpha_is_unknown_have_no_metrics():
    batch, rows = batch_of([[1.0, 0.0]])
    assert set(
        sequence_metrics(batch, give(batch, rows, dict.fromkeys(range(2), math.nan))).values()
    ) == {None}


def test_estimate_of_tv_is_chosen_by_the_effective_sample_size():
    """log π_k - log α normal with standard deviation s under α. |ρ - 1|/2 has less spread at small
    staleness, max(0, 1 - ρ) where few completions are left in effect, by a factor of 10."""
    spreads = {}
    for s in (0.2, 2.5):
        z = torch.randn(100, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        log_ratios = s * z - s * s / 2
        spreads[s] = [
            float(tv_terms(log_ratios, bounded=bounded).mean(dim=1).std())
            for bounded in (False, True)
        ]
        assert {prefers_bounded(log_ratio) for log_ratio in log_ratios} == {s == 2.5}
    assert spreads[0.2][0] < 0.7 * spreads[0.2][1]
    assert spreads[2.5][1] < 0.1 * spreads[2.5][0]


@pytest.mark.parametrize(
    ("groups", "ratio", "is_known"),
    [
        pytest.param(10, 1.1, False, id="too few completions"),
        pytest.param(60, 1.1, True, id="enough completions"),
        pytest.param(60, 111.0, False, id="larger than possible"),
    ],
)
def test_improvement_is_null_if_the_sample_is_too_small_or_the_estimate_impossible(
    groups, ratio, is_known
):
    """Every right completion has the sequence ratio `ratio`: 20 or 120 completions; with 111 an
    improvement of 55."""
    batch, rows = batch_of([[1.0, 0.0]] * groups)
    rows = give(batch, rows, {c: math.log(ratio) / 2 * (c % 2 == 0) for c in range(2 * groups)})
    assert improvement(batch, rows) == pytest.approx((ratio - 1) / 2, rel=1e-3)
    assert (sequence_metrics(batch, rows)["improvement"] is not None) == is_known
