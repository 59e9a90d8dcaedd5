"""Recipes inside verl and TRL: what they refuse. make conformance compares with the real ones."""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lagrpo.core.recipes import resolve


def verl_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
):
    """The arguments that verl 0.9 passes to a policy loss."""


def load(name: str, monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> ModuleType:
    """Imports `lagrpo.NAME` anew, with these modules in place of the other trainer's."""
    for path, module in modules.items():
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.delitem(sys.modules, f"lagrpo.{name}", raising=False)
    return importlib.import_module(f"lagrpo.{name}")


def verl_modules(version: str = "0.9.1", vanilla: Any = verl_loss) -> dict[str, Any]:
    losses: dict[str, Any] = {"vanilla": vanilla}

    def register(name: str) -> Any:
        return lambda function: losses.setdefault(name, function)

    algos = SimpleNamespace(
        get_policy_loss_fn=losses.__getitem__,
        register_policy_loss=register,
        ADV_ESTIMATOR_REGISTRY={},
        agg_loss=lambda loss_mat, loss_mask, loss_agg_mode: (loss_mat * loss_mask).sum(),
    )
    ppo = SimpleNamespace(core_algos=algos)
    trainer = SimpleNamespace(ppo=ppo)
    verl = SimpleNamespace(__version__=version, trainer=trainer)
    return {"verl": verl, "verl.trainer": trainer, "verl.trainer.ppo": ppo}


@dataclass
class Config:
    """Settings of GRPOConfig that lagrpo.trl reads."""

    beta: float = 0.0
    loss_type: str = "dapo"
    num_iterations: int = 1
    steps_per_generation: int = 4
    gradient_accumulation_steps: int = 4
    per_device_train_batch_size: int = 8
    num_generations: int = 8
    world_size: int = 1


class Trainer:
    """The methods of TRL's GRPOTrainer that lagrpo.trl replaces."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list): ...
    def _compute_loss(self, model, inputs): ...
    def _generate_and_score_completions(self, inputs): ...


def trl_modules(version: str = "1.16.0", trainer: type = Trainer) -> dict[str, Any]:
    return {"trl": SimpleNamespace(__version__=version, GRPOTrainer=trainer, GRPOConfig=Config)}


@pytest.mark.parametrize(
    ("name", "modules", "cure"),
    [
        ("verl", {"verl": None}, "pip install 'verl"),
        ("verl", verl_modules("0.8.0"), r"0\.8\.0.*pip install"),
        ("verl", verl_modules(vanilla=lambda old, new: None), "pip install"),
        ("trl", {"trl": None}, "pip install 'trl"),
        ("trl", trl_modules("1.12.0"), r"1\.12\.0.*pip install"),
        ("trl", trl_modules(trainer=object), "pip install"),
    ],
    ids=["verl missing", "verl old", "verl other", "trl missing", "trl old", "trl other"],
)
def test_import_beside_another_trainer_that_does_not_fit_names_the_cure(
    name, modules, cure, monkeypatch
):
    with pytest.raises(ImportError, match=cure):
        load(name, monkeypatch, modules)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("prime_rll", "unknown recipe.*prime_rl"),
        ("a3po", "staleness"),
        ("m2po", "whole step"),
        ("gepo", "groups"),
        ("opmd_kimi", "reference"),
        ("opd", "reference.*: take lagrpo train"),
        ("iw_opd", "reference.*: take lagrpo train"),
        ("decoupled_ppo", "both α and π_k"),
        ("grpo_finished", "ended"),
        ("grpo_tis", "grpo_recomputed"),
        ("grpo", '"beta": 0'),
    ],
)
def test_recipe_that_verl_cannot_feed_is_refused_by_name(recipe, reason, monkeypatch):
    door = load("verl", monkeypatch, verl_modules())
    with pytest.raises(ValueError, match=rf"(?s){recipe}.*{reason}|{reason}"):
        door.register(recipe)


def test_policy_loss_in_verl_reads_the_old_log_probs_as_alpha_and_skips_padding(monkeypatch):
    """Ratios of 1 and 2, so 2 of the completion, and A = 2: -(2 · 2 + 2 · 2) = -8."""
    door = load("verl", monkeypatch, verl_modules())
    loss, metrics = door.policy_loss(
        lambda: resolve("unclipped"),
        old_log_prob=torch.zeros(1, 3),
        log_prob=torch.tensor([[1.0, 2.0, 1e9]]).log(),
        advantages=torch.tensor([[2.0, 2.0, 0.0]]),
        response_mask=torch.tensor([[1, 1, 0]]),
    )
    assert float(loss) == pytest.approx(-8.0)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.3466, abs=1e-4)


def test_policy_loss_in_verl_adds_the_recipes_own_advantages_of_tokens(monkeypatch):
    """Advantages 2 and 3 at log-probs -1 and -2: -(2 · -1 + 3 · -2) = 8."""
    door = load("verl", monkeypatch, verl_modules())
    later_counts_more = resolve("reinforce", {"token_advantage": lambda x: -1 - x.logp})
    loss, _ = door.policy_loss(
        lambda: later_counts_more,
        old_log_prob=torch.zeros(1, 2),
        log_prob=torch.tensor([[-1.0, -2.0]]),
        advantages=torch.full((1, 2), 2.0),
        response_mask=torch.ones(1, 2),
    )
    assert float(loss) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("recipe", "arguments", "reason"),
    [
        ("unclipped", {"advantages": torch.tensor([[1.0, 2.0]])}, "adv_estimator"),
        ("unclipped", {"rollout_is_weights": torch.ones(1, 2)}, "bypass_mode=True"),
    ],
    ids=["advantage per token", "weights of the other mode"],
)
def test_policy_loss_in_verl_rejects_what_does_not_fit(recipe, arguments, reason, monkeypatch):
    door = load("verl", monkeypatch, verl_modules())
    ones = torch.ones(1, 2)
    batch = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), ones)
    with pytest.raises(ValueError, match=reason):
        door.policy_loss(lambda: resolve(recipe), **(batch | arguments))


@pytest.mark.parametrize(
    ("recipe", "is_bypassed", "cure"),
    [("prime_rl", False, "bypass_mode=True"), ("grpo_recomputed", True, "bypass_mode=False")],
    ids=["alpha", "pi_k"],
)
def test_estimator_in_verl_rejects_the_mode_that_passes_another_policy(
    recipe, is_bypassed, cure, monkeypatch
):
    door = load("verl", monkeypatch, verl_modules())
    config = {"rollout_correction": {"bypass_mode": is_bypassed}}
    with pytest.raises(ValueError, match=cure):
        door.group_advantages(
            lambda: resolve(recipe), torch.ones(2, 1), torch.ones(2, 1), ["a", "a"], config
        )


def test_estimator_in_verl_compares_the_completions_of_a_prompt(monkeypatch):
    door = load("verl", monkeypatch, verl_modules())
    advantages, _ = door.group_advantages(
        lambda: resolve("reinforce"),
        token_level_rewards=torch.tensor([[0.0, 1.0], [4.0, 0.0], [0.0, 0.0], [2.0, 0.0]]),
        response_mask=torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]),
        index=["a", "b", "a", "b"],
        config={"rollout_correction": None},
    )
    assert advantages.tolist() == [[0.5, 0.5], [1.0, 0.0], [-0.5, -0.5], [-1.0, -1.0]]


@pytest.mark.parametrize(
    ("recipe", "settings", "reason"),
    [
        ("dapo", {"loss_type": "grpo"}, "loss_type"),
        ("dapo", {"beta": 0.1}, "overrides"),
        ("m2po", {}, "gradient_accumulation_steps = 1"),
        ("gepo", {}, "steps_per_generation = 1"),
        ("grpo_top_entropy", {"num_iterations": 2}, "num_iterations = 1"),
        (
            "grpo_recomputed",
            {"num_iterations": 2, "steps_per_generation": 8},
            "num_iterations = 1",
        ),
    ],
    ids=["setting of a loss", "beta", "step", "groups", "entropy", "pi_k"],
)
def test_settings_of_trl_that_a_recipe_cannot_use_are_rejected(
    recipe, settings, reason, monkeypatch
):
    door = load("trl", monkeypatch, trl_modules())
    with pytest.raises(ValueError, match=reason):
        door.check_settings(resolve(recipe), Config(**settings))
    whole_step = Config(gradient_accumulation_steps=1, steps_per_generation=1)
    door.check_settings(resolve(recipe), whole_step)


@pytest.mark.parametrize("recipe", ["opd", "grpo_opd", "iw_opd"])
def test_recipe_that_needs_a_teacher_is_refused_by_trl(recipe, monkeypatch):
    door = load("trl", monkeypatch, trl_modules())
    with pytest.raises(ValueError, match=f"{recipe}.*teacher"):
        door.check_settings(resolve(recipe), Config())
