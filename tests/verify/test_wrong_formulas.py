"""`lagrpo verify` on a run whose trainer computed something else than it says.

The wrong formula stays in place while the run is verified. A check that called the trainer's own
function would agree with it and find nothing.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from changed_runs import train_run
from torch import Tensor

from lagrpo.core.advantages import group_mean
from lagrpo.verify import verify_run


def unbiased_sigma(rewards_C: Tensor, group_C: Tensor, eps_std: float) -> Tensor:
    """The deviation over G - 1 instead of over G; groups have four completions."""
    distance_C = rewards_C - group_mean(rewards_C, group_C)
    return (group_mean(distance_C.square(), group_C) * 4 / 3 + eps_std).sqrt()


def half_of_sum(ratio: Tensor) -> Tensor:
    """In place of an effective sample size."""
    return ratio.sum() / 2


def doubled(log_ratio: Tensor) -> Tensor:
    """In place of a limit of log-ratios, which leaves ratios as small as these alone."""
    return 2 * log_ratio


def quarter(log_ratio: Tensor, bounded: bool) -> Tensor:
    """In place of the terms of a total variation, about half as large."""
    return log_ratio.abs() / 4


# Each function is replaced where it is defined and where a module has imported it by name.
@pytest.mark.parametrize(
    ("functions", "wrong", "columns"),
    [
        pytest.param(
            ["lagrpo.core.advantages.sigma", "lagrpo.training.metrics.sigma"],
            unbiased_sigma,
            {"advantage", "group_std"},
            id="deviation",
        ),
        pytest.param(
            ["lagrpo.core.kl.ess", "lagrpo.training.metrics.ess"],
            half_of_sum,
            {"rollout/ess", "rollout/seq_ess"},
            id="sample size",
        ),
        pytest.param(
            ["lagrpo.core.ratios.limit", "lagrpo.training.metrics.limit"],
            doubled,
            {"rollout/kl", "rollout/ratio_mean", "rollout/ess"},
            id="ratio",
        ),
        pytest.param(
            ["lagrpo.core.kl.tv_terms", "lagrpo.training.metrics.tv_terms"],
            quarter,
            {"rollout/seq_tv"},
            id="total variation",
        ),
    ],
)
def test_wrong_formula_in_training_is_found_in_every_column_that_uses_it(
    model, tmp_path, monkeypatch, functions, wrong, columns
):
    for function in functions:
        monkeypatch.setattr(function, wrong)
    run = train_run(model, tmp_path)
    different = {
        difference.name for difference in verify_run(run, 1, trust_run_code=True).differences
    }
    assert columns <= different


def test_updates_with_the_wrong_sign_are_found(model, tmp_path, monkeypatch):
    """At a small learning rate the change of log-probs is the one of first order."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", partial(adamw, maximize=True))
    sections = {"optimizer": {"learning_rate": 1e-4}, "rollout": {"num_generations": 32}}
    sections["rollout"] |= {"max_completion_length": 6, "max_prompt_length": 64}
    run = train_run(model, tmp_path, **sections)
    differences = verify_run(run, None, trust_run_code=True).differences
    assert {difference.check for difference in differences} == {"update directions"}
