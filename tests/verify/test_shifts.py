"""Sums over tokens: the changes of log-probs that no single token shows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lagrpo.settings.loss import LossSettings
from lagrpo.verify.record import Report
from lagrpo.verify.shifts import check_shifts
from lagrpo.verify.tokens import RowReading, read_tokens

T = 4000
VOCABULARY = 50
HIDDEN = 0.02
"""share by which a hidden state is off: a logit of bfloat16 by .03"""


def distribution(seed: int = 0) -> Tensor:
    """Logits [T, V] with the deviation 1.5."""
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(T, VOCABULARY, dtype=torch.float64, generator=generator)


def with_noise(logits_TV: Tensor, deviation: float) -> Tensor:
    """Logits with the independent rounding errors of a run."""
    generator = torch.Generator().manual_seed(1)
    noise_TV = torch.randn(logits_TV.shape, dtype=torch.float64, generator=generator)
    return logits_TV + deviation * noise_TV


def top_p(logits_TV: Tensor, share: float) -> Tensor:
    """Logits of the most probable tokens that have this share of the probability."""
    p_TV, order_TV = logits_TV.softmax(-1).sort(-1, descending=True)
    is_beyond_TV = p_TV.cumsum(-1) - p_TV >= share
    is_left_out_TV = torch.zeros_like(is_beyond_TV).scatter(1, order_TV, is_beyond_TV)
    return logits_TV.masked_fill(is_left_out_TV, -math.inf)


def names_of_shifts(sampled_from_TV: Tensor, recorded_TV: Tensor) -> set[str]:
    """What differs if tokens come from one distribution and the log-probs from another.

    The replay has the logits of `distribution`.
    """
    generator = torch.Generator().manual_seed(2)
    uniform_T = torch.rand(T, dtype=torch.float64, generator=generator)
    cdf_TV = sampled_from_TV.softmax(-1).cumsum(-1)
    token_T = torch.searchsorted(cdf_TV, uniform_T.unsqueeze(1), right=True).squeeze(1)
    token_T = token_T.clamp(max=VOCABULARY - 1)
    logp_T = recorded_TV.log_softmax(-1).gather(1, token_T.unsqueeze(1)).squeeze(1)
    row = {
        "where": "row 0",
        "step": 1,
        "token_ids": token_T.tolist(),
        "loss_mask": [True] * T,
        "policy_versions": [0] * T,
        "policy_version": 0,
        "rollout_logprobs": logp_T.tolist(),
        "old_logprobs": None,
        "advantage": 1.0,
    }
    read = read_tokens(distribution(), token_T, uniform_T, hidden=HIDDEN, dtype="bfloat16")
    run: Any = SimpleNamespace(
        report=Report("run"),
        settings=SimpleNamespace(rollout=SimpleNamespace(engine="local"), loss=LossSettings()),
        version_after=lambda step: None,
    )
    check_shifts(run, [RowReading(row, 0, read)])
    return {difference.name.split(",")[0] for difference in run.report.differences}


@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.03])
def test_honest_run_has_no_shift(deviation):
    """Up to the whole noise that the dtype explains."""
    noisy_TV = with_noise(distribution(), deviation)
    assert names_of_shifts(noisy_TV, noisy_TV) == set()


SLOPE = "slope of errors on log-probs"
MEAN = "mean error"
SQUARE = "mean squared error"
SAMPLES = "mean log-prob of sampled tokens less the replay's"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        pytest.param(lambda x: x / 0.9, {SLOPE, SAMPLES}, id="temperature .9"),
        pytest.param(lambda x: x / 1.1, {SLOPE, SAMPLES}, id="temperature 1.1"),
        pytest.param(lambda x: x / 0.97, {SLOPE}, id="temperature .97"),
        pytest.param(lambda x: top_p(x, 0.9), {MEAN, SAMPLES}, id="top-p .9"),
        pytest.param(lambda x: 5 * (x / 5).tanh(), {SLOPE, SAMPLES}, id="softcap of logits"),
        pytest.param(lambda x: x + 0.2 * distribution(3), {SQUARE}, id="stale version"),
        pytest.param(lambda x: with_noise(x, 0.15), {SQUARE}, id="larger noise"),
    ],
)
def test_changed_distribution_shows_in_a_sum_over_tokens(change, names):
    changed_TV = with_noise(change(distribution()), 0.01)
    assert names <= names_of_shifts(changed_TV, changed_TV)


@pytest.mark.parametrize(
    "change",
    [lambda x: x / 0.9, lambda x: x / 1.1, lambda x: top_p(x, 0.9)],
    ids=["temperature .9", "temperature 1.1", "top-p .9"],
)
def test_tokens_of_another_distribution_show_though_their_log_probs_are_right(change):
    noisy_TV = with_noise(distribution(), 0.01)
    assert names_of_shifts(change(noisy_TV), noisy_TV) == {SAMPLES}


@pytest.mark.parametrize(
    ("change", "name"),
    [(lambda x: x / 0.9, SLOPE), (lambda x: top_p(x, 0.9), MEAN)],
    ids=["temperature .9", "top-p .9"],
)
def test_log_probs_of_another_distribution_show_though_the_tokens_are_right(change, name):
    noisy_TV = with_noise(distribution(), 0.01)
    # A token outside of the top-p has no log-prob there.
    recorded_TV = change(noisy_TV).clamp(min=-30)
    assert name in names_of_shifts(noisy_TV, recorded_TV)


# Directions of updates


def found_directions(
    changes: list[float], advantages: list[float], entropy_coef: float = 0.0
) -> list[str]:
    """The differences, if updates change the log-probs of completions by these sums."""
    uniform_T = torch.full((1,), 0.5, dtype=torch.float64)
    readings = []
    for index, (change, advantage) in enumerate(zip(changes, advantages, strict=True)):
        row = {
            "where": f"row {index}",
            "step": 1,
            "token_ids": [0],
            "loss_mask": [True],
            "policy_versions": [0],
            "policy_version": 0,
            "rollout_logprobs": [None],
            "old_logprobs": None,
            "advantage": advantage,
        }
        for version, logit in ((0, 0.0), (1, change)):
            logits_TV = torch.tensor([[logit, 0.0]], dtype=torch.float64)
            token_T = torch.zeros(1, dtype=torch.int64)
            read = read_tokens(logits_TV, token_T, uniform_T, hidden=HIDDEN, dtype="float32")
            readings.append(RowReading(row, version, read))
    run: Any = SimpleNamespace(
        report=Report("run"),
        settings=SimpleNamespace(
            rollout=SimpleNamespace(engine="vllm"), loss=LossSettings(entropy_coef=entropy_coef)
        ),
        version_after=lambda step: 1,
    )
    check_shifts(run, readings)
    is_compared = any(advantages) and not entropy_coef
    assert run.report.compared["update directions"] == is_compared
    assert run.report.skipped.total() == (1 if entropy_coef else 0)
    return [difference.check for difference in run.report.differences]


ADVANTAGES = [1.0, -1.0] * 12


@pytest.mark.parametrize(
    ("changes", "advantages", "found"),
    [
        pytest.param([0.1, -0.1] * 12, ADVANTAGES, [], id="along the advantages"),
        pytest.param([-0.1, 0.1] * 12, ADVANTAGES, ["update directions"], id="wrong sign"),
        pytest.param([0.1] * 24, ADVANTAGES, [], id="all rise alike"),
        pytest.param([0.1, 0.1, -0.1, -0.1] * 6, ADVANTAGES, [], id="unrelated"),
        pytest.param([-0.1, 0.1] * 12, [0.0] * 24, [], id="no advantage"),
    ],
)
def test_update_against_the_advantages_is_found(changes, advantages, found):
    assert found_directions(changes, advantages) == found


def test_update_directions_are_not_checked_if_the_loss_has_the_entropy():
    assert found_directions([-0.1, 0.1] * 12, ADVANTAGES, entropy_coef=0.01) == []
