"""Losses and gradients of the rows of commit f16e863 are still what they were: golden.json, which a
script computed with that commit's code. Commit f2320a8f removed the script."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.advantages import AdvantageInputs, zero_variance
from lagrpo.core.inputs import LossInputs
from lagrpo.core.recipes import resolve

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))
LENGTHS_C = tensor(GOLDEN["lengths"])
GROUP_C = tensor(GOLDEN["groups"])


def column(name: str) -> Tensor:
    return tensor(GOLDEN[name], dtype=torch.float64)


@pytest.mark.parametrize("rewards", ["with_a_flat_group", "without"])
@pytest.mark.parametrize(
    "case",
    GOLDEN["cases"],
    ids=lambda case: " ".join(
        [case["recipe"], *(f"{k}={v}" for k, v in case["overrides"].items())]
    ),
)
def test_loss_and_gradient_of_a_row_are_as_before_knobs_had_paths(case, rewards):
    recipe = resolve(case["recipe"], case["overrides"])
    rewards_C = tensor(GOLDEN["rewards"][rewards], dtype=torch.float64)
    scored = AdvantageInputs(rewards_C, GROUP_C, LENGTHS_C, column("uniform"))
    x = LossInputs(
        logp=column("logp").requires_grad_(),
        rollout_logp=column("rollout_logp"),
        old_logp=column("old_logp"),
        ref_logp=column("ref_logp"),
        completion=torch.arange(len(LENGTHS_C)).repeat_interleave(LENGTHS_C),
        advantages=recipe.advantages(scored, GOLDEN["max_length"]),
        group=GROUP_C,
    )
    is_flat_C = zero_variance(rewards_C, GROUP_C)
    weight_C = recipe.weights(LENGTHS_C, is_flat_C, GOLDEN["max_length"]).double()
    derivative = recipe.differentiate(x, weight_C)
    expected = case[rewards]
    loss = tensor(expected["loss"], dtype=torch.float64)
    assert_close(derivative.loss, loss, rtol=1e-12, atol=1e-15)
    gradient_T = tensor(expected["gradient"], dtype=torch.float64)
    assert_close(derivative.gradient_T, gradient_T, rtol=1e-12, atol=1e-15)


def test_golden_numbers_have_every_kind_of_token():
    """dr_grpo clips some tokens and not others; the second group has a signal in one of two
    batches."""
    first = next(case for case in GOLDEN["cases"] if case["recipe"] == "dr_grpo")
    gradient_T = tensor(first["without"]["gradient"])
    assert 0 < int((gradient_T == 0).sum()) < len(gradient_T)
    assert bool((tensor(first["with_a_flat_group"]["gradient"])[10:] == 0).all())
