"""The entropy in the loss: its gradient, its normalizer, and the controller that holds a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from rank_updates import five_updates, sampled
from test_fsdp2 import make_layered
from test_trainer import assembled
from tiny import tiny_policy
from torch import Tensor

from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.model.lora import Lora
from lagrpo.model.model import Policy
from lagrpo.training.batch import MicroBatch, micro_batches
from lagrpo.training.entropy import STEP, EntropyTerm, check_entropy_target
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.verify.formulas import entropy_coefs

COEF = 0.3


# The gradient


def make_trainer(term: EntropyTerm, recipe: str = "grpo_trl", lora: Lora | None = None) -> Trainer:
    policy = tiny_policy(dtype=torch.float64, backend="torch", lora=lora)
    options = Optimization(lr=1e-3, updates=9, max_grad_norm=None)
    return Trainer(policy, resolve(recipe, {"beta": 0.0}), options, entropy=term)


def rows_of(trainer: Trainer, tokens: int) -> list[MicroBatch]:
    """A batch with groups of three prompts."""
    return micro_batches(assembled(trainer.recipe, sampled(1)), tokens)


def log_softmax(policy: Policy, row: MicroBatch) -> Tensor:
    """Log-probs of the whole vocabulary at each token, [T, V], by other code than the trainer's."""
    model = policy.model
    layout = model.backend.over(row.packed.layout)
    hidden = model.hidden(row.packed.input_ids, row.packed.layout.position_ids, layout)
    logits = model.head(hidden)[row.packed.layout.logit_rows]
    return (logits / policy.tau).log_softmax(-1)


def loss_with_entropy(trainer: Trainer, row: MicroBatch) -> Tensor:
    """The recipe's loss - COEF Σ_t weight_t H_t of a row."""
    logp_TV = log_softmax(trainer.policy, row)
    logp_T = logp_TV.gather(1, row.packed.token_ids[:, None]).squeeze(1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    x = row.loss_inputs(logp_T, trainer.policy.version)
    loss = trainer.recipe.loss(x, row.weight_C)
    return loss - COEF * (row.weight_C[row.completion_T] * entropy_T).sum()


def gradient_of(trainer: Trainer) -> Tensor:
    parameters = trainer.policy.model.parameters()
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


@pytest.mark.parametrize(
    ("recipe", "lora"),
    [
        pytest.param("grpo_trl", None, id="token_mean"),
        pytest.param("grpo", None, id="sequence_mean"),
        pytest.param("dr_grpo", None, id="constant_length"),
        pytest.param("grpo_trl", Lora(4, 8.0), id="adapters"),
    ],
)
def test_gradient_is_that_of_the_loss_less_the_weighted_entropies(recipe, lora):
    trainer = make_trainer(EntropyTerm(COEF), recipe, lora)
    rows = rows_of(trainer, 40)
    expected_loss = sum(loss_with_entropy(trainer, row) for row in rows)
    assert isinstance(expected_loss, Tensor)
    expected_loss.backward()
    expected = gradient_of(trainer).clone()
    trainer.policy.model.zero_grad()
    _, sums = trainer.accumulate(rows)
    assert sums["loss"] == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    assert expected.norm() > 1e-3
    # The trainer's log-probs are float32.
    torch.testing.assert_close(gradient_of(trainer), expected, rtol=1e-4, atol=1e-6)


def test_second_update_on_a_batch_has_the_entropy_of_its_own_policy():
    trainer = make_trainer(EntropyTerm(COEF))
    rows, _ = trainer.step(rows_of(trainer, 40))
    loss = sum(loss_with_entropy(trainer, row) for row in rows)
    assert isinstance(loss, Tensor)
    _, sums = trainer.accumulate(rows)
    assert sums["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_gradient_does_not_depend_on_micro_batches(tokens):
    gradients = []
    for size in (40, tokens):
        trainer = make_trainer(EntropyTerm(COEF))
        trainer.accumulate(rows_of(trainer, size))
        gradients.append(gradient_of(trainer))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "make", [pytest.param(None, id="zero1"), pytest.param(make_layered, id="fsdp2")]
)
def test_updates_do_not_depend_on_ranks(ranks, make):
    """In float64, where rounding is far below the steps."""
    options: Mapping[str, Any] = {"dtype": "float64", "entropy_coef": COEF}
    makers = () if make is None else (make,)
    alone = five_updates(None, options, False)
    without = five_updates(None, {"dtype": "float64"}, False)
    assert alone.metrics[0]["grad_norm"] != pytest.approx(without.metrics[0]["grad_norm"], rel=1e-2)
    for updated in ranks.run(five_updates, options, False, *makers, size=2):
        for name, weight in alone.weights.items():
            torch.testing.assert_close(updated.weights[name], weight, rtol=1e-9, atol=1e-9)


def test_completions_without_an_advantage_have_an_entropy():
    term, no_term = EntropyTerm(COEF), EntropyTerm()
    assert not make_trainer(term, "dr_grpo").skips_zero_advantage
    assert not make_trainer(EntropyTerm(target=1.0), "dr_grpo").skips_zero_advantage
    assert make_trainer(no_term, "dr_grpo").skips_zero_advantage


def test_rows_keep_the_entropy_without_what_computed_it():
    trainer = make_trainer(EntropyTerm(COEF))
    rows, _ = trainer.accumulate(rows_of(trainer, 40))
    assert not any(row.entropy_T is None or row.entropy_T.requires_grad for row in rows)


# The controller


@pytest.mark.parametrize(
    ("start", "entropies", "coefs"),
    [
        pytest.param(0.0, [0.3, 0.5, 0.4], [0.005, 0.01, 0.015], id="rises up to the target"),
        pytest.param(0.02, [0.6, 0.7, 0.4], [0.0, 0.0, 0.015], id="above: left out, and falls"),
        pytest.param(0.005, [0.6, 0.6, 0.4], [0.0, 0.0, 0.005], id="not below 0"),
        pytest.param(1.0, [0.4, 0.4, 0.4], [1.1, 1.21, 1.331], id="rises by a tenth"),
        pytest.param(1.0, [0.6, 0.6, 0.5], [0.0, 0.0, 0.891], id="falls by a tenth"),
        pytest.param(9.5, [0.4, 0.4], [10.0, 10.0], id="not above the largest"),
    ],
)
def test_coefficient_follows_the_entropy(start, entropies, coefs):
    term = EntropyTerm(start, target=0.5)
    assert term.coef == start
    found = []
    for entropy in entropies:
        term.observe(entropy)
        found.append(term.coef)
    assert found == pytest.approx(coefs)


def test_coefficient_without_a_target_stays():
    term = EntropyTerm(0.02)
    term.observe(0.1)
    assert term.coef == 0.02


@pytest.mark.parametrize("start", [0.0, 0.02, 9.5])
def test_coefficients_are_those_that_verify_computes(start):
    entropies = [0.6, 0.4, 0.5, None, 0.3, 0.51, 0.7, 0.2, *[0.1] * 90, 0.9, 0.9, 0.1]
    term = EntropyTerm(start, target=0.5)
    coefs = []
    for entropy in entropies:
        coefs.append(term.coef)
        if entropy is not None:
            term.observe(entropy)
    assert entropy_coefs(start, 0.5, entropies) == pytest.approx(coefs, rel=1e-12)


def test_trainer_observes_once_per_batch():
    trainer = make_trainer(EntropyTerm(target=4.6))
    rows, first = trainer.step(rows_of(trainer, 40))
    _, second = trainer.step(rows)
    assert first["entropy_coef"] == 0
    assert second["entropy_coef"] == STEP
    assert trainer.entropy.coef == STEP


def test_batch_without_an_update_is_not_observed():
    trainer = make_trainer(EntropyTerm(target=4.6))
    _, metrics = trainer.step([], in_objective=False)
    assert metrics == {"entropy_coef": 0.0}
    assert trainer.entropy.coef == 0


# Its state


def test_controller_goes_on_from_a_trainer_s_state():
    trainer = make_trainer(EntropyTerm(0.1, target=0.5))
    trainer.entropy.observe(0.6)
    state = {name: tensor.clone() for name, tensor in trainer.state().items()}
    resumed = make_trainer(EntropyTerm(0.1, target=0.5))
    resumed.load_state(state, version=3)
    assert resumed.entropy == trainer.entropy
    assert resumed.entropy.coef == 0


def test_state_without_the_controller_begins_at_its_start():
    state = make_trainer(EntropyTerm()).state()
    assert "entropy_term" not in state
    resumed = make_trainer(EntropyTerm(0.1, target=0.5))
    resumed.load_state(state, version=3)
    assert resumed.entropy == EntropyTerm(0.1, target=0.5)


# Targets


@pytest.mark.parametrize(
    ("target", "is_possible"),
    [(None, True), (0.5, True), (math.log(16) - 1e-6, True), (math.log(16), False), (9.0, False)],
)
def test_target_that_no_distribution_reaches_is_rejected(target, is_possible):
    if is_possible:
        check_entropy_target(target, vocabulary=16)
        return
    with pytest.raises(SettingsError, match=r"loss\.entropy_target"):
        check_entropy_target(target, vocabulary=16)
