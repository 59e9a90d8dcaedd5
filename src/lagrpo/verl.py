"""Recipes as policy losses and advantages of verl. Importing it registers them as lagrpo:NAME.

    VERL_USE_EXTERNAL_MODULES=lagrpo.verl python -m verl.trainer.main_ppo … \\
        actor_rollout_ref.actor.policy_loss.loss_mode=lagrpo:prime_rl \\
        algorithm.adv_estimator=lagrpo:prime_rl \\
        algorithm.rollout_correction.bypass_mode=True

verl imports the modules of that variable in each of its processes. It passes the log-probs of one
earlier policy as old_log_prob: in bypass mode of the policy that sampled, else of the policy at the
start of the batch. Its loss_agg_mode takes the place of the recipe's reduction.
"""

# verl is in no environment of ours.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.objective import Recipe
from lagrpo.core.padded import flatten, pad
from lagrpo.core.pieces import PieceFunction
from lagrpo.core.recipes import resolve
from lagrpo.core.rows import RECIPES

try:
    import verl
    from verl.trainer.ppo import core_algos
except ModuleNotFoundError as error:
    raise ImportError(
        f"lagrpo.verl needs verl, and {error.name} is not installed: pip install 'verl>=0.9'"
    ) from error

ARGUMENTS = [
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
]
"""The arguments that verl 0.9 passes to a policy loss."""

NOT_PASSED = {
    "ref_logp": "the log-probs of the reference policy",
    "group": "the groups of the completions",
    "staleness": "the staleness of the tokens",
    "entropy": "the entropies of the tokens",
    "finished": "which completions ended by themselves",
}
"""The inputs of objectives that verl does not pass to a policy loss."""


def register(
    recipe: str | Recipe | PieceFunction,
    overrides: Mapping[str, object] | None = None,
    name: str | None = None,
) -> None:
    """Makes lagrpo:NAME a loss_mode and an adv_estimator of verl, in this process.

    Takes recipe and overrides of `lagrpo.core.recipes.resolve`; the name is the recipe's by
    default. Call it in a module of yours that VERL_USE_EXTERNAL_MODULES names. Raises ValueError
    for a recipe that needs what verl does not pass.
    """
    supported = find_supported(recipe, overrides)
    _add(name or supported.name, lambda: supported)


def find_supported(
    recipe: str | Recipe | PieceFunction, overrides: Mapping[str, object] | None = None
) -> Recipe:
    """The recipe. Raises ValueError if verl does not pass all that it needs."""
    resolved = resolve(recipe, overrides)
    missing = missing_inputs(resolved)
    if not missing:
        return resolved
    cure = "take lagrpo.trl or lagrpo train"
    if resolved.needs_teacher:
        # lagrpo.trl has no teacher, either.
        cure = "take lagrpo train"
    elif resolved.beta > 0 and not missing_inputs(resolved.with_knob("beta", 0.0)):
        cure = (
            f'call lagrpo.verl.register("{resolved.name}", {{"beta": 0}}) and set verl\'s '
            f"actor.use_kl_loss=True, actor.kl_loss_coef={resolved.beta:g}"
        )
    elif resolved.correction is not None:
        cure = "take grpo_recomputed with verl's algorithm.rollout_correction.rollout_is"
    raise ValueError(
        f"recipe {resolved.name!r} needs {' and '.join(missing)}, which verl does not pass to a "
        f"policy loss: {cure}"
    )


def missing_inputs(recipe: Recipe) -> list[str]:
    """The things that a recipe needs and verl does not pass to a policy loss, in words."""
    missing = [text for name, text in NOT_PASSED.items() if name in recipe.required_inputs]
    if recipe.needs_step_statistics:
        missing.append("statistics of the whole step")
    if recipe.needs_rollout_logp and recipe.needs_old_logp:
        missing.append("the log-probs of both α and π_k")
    if recipe.overlong_buffer:
        missing.append("the longest length of a completion")
    return missing


def policy_loss(
    find_recipe: Callable[[], Recipe],
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A policy loss of verl: the loss, and metrics. Tensors are [C, L], L the padded length."""
    recipe = find_recipe()
    mask = response_mask.bool()
    first_C = mask.int().argmax(dim=1, keepdim=True)
    advantage_C = advantages.gather(1, first_C)
    if bool(((advantages != advantage_C) & mask).any()):
        raise ValueError(
            f"recipe {recipe.name!r} has one advantage per completion, not one per token: "
            f"set algorithm.adv_estimator=lagrpo:{recipe.name}"
        )
    samples_from_alpha = recipe.needs_rollout_logp
    if samples_from_alpha and rollout_is_weights is not None:
        _reject_mode(recipe, "α", bypass=True)
    x = flatten(
        log_prob,
        mask,
        advantage_C.squeeze(1),
        rollout_logp=old_log_prob if samples_from_alpha else None,
        old_logp=None if samples_from_alpha else old_log_prob,
    )
    value = pad(recipe.value(x), mask)
    if rollout_is_weights is not None:
        value = value * rollout_is_weights
    normalizers = {} if config is None else config.global_batch_info
    loss = core_algos.agg_loss(
        loss_mat=-value, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **normalizers
    )
    log_ratio_T = (log_prob - old_log_prob).detach()[mask]
    metrics = {"actor/ppo_kl": -log_ratio_T.sum().item() / max(1, len(log_ratio_T))}
    metrics |= {name: value.float().mean().item() for name, value in x.logged.items()}
    return loss, metrics


def group_advantages(
    find_recipe: Callable[[], Recipe],
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    config: Any = None,
    **_others: Any,
) -> tuple[Tensor, Tensor]:
    """An advantage estimator of verl: advantages and returns, both [C, L].

    It also checks that verl passes the log-probs that the recipe's loss reads.
    """
    recipe = find_recipe()
    correction = (config or {}).get("rollout_correction", None) or {}
    is_bypassed = bool(correction.get("bypass_mode", False))
    if recipe.needs_rollout_logp and not is_bypassed:
        _reject_mode(recipe, "α", bypass=True)
    if recipe.needs_old_logp and is_bypassed:
        _reject_mode(recipe, "π_k", bypass=False)
    rewards_C = token_level_rewards.sum(dim=1)
    _, group = np.unique(index, return_inverse=True)
    x = AdvantageInputs(
        rewards=rewards_C,
        group=torch.as_tensor(group, device=rewards_C.device),
        lengths=response_mask.sum(dim=1),
        uniform=torch.rand_like(rewards_C),
    )
    # No recipe here penalizes length, so the limit is not read.
    advantages = recipe.advantages(x, 0).unsqueeze(1) * response_mask
    return advantages, advantages


def _reject_mode(recipe: Recipe, policy: str, *, bypass: bool) -> NoReturn:
    raise ValueError(
        f"recipe {recipe.name!r} reads the log-probs of {policy}: set "
        f"algorithm.rollout_correction.bypass_mode={bypass}"
    )


def _add(name: str, find_recipe: Callable[[], Recipe]) -> None:
    """Registers a recipe, which is looked up when verl first calls it."""
    mode = f"lagrpo:{name}"
    core_algos.register_policy_loss(mode)(partial(policy_loss, find_recipe))
    # Written directly: verl's function refuses to replace an estimator.
    core_algos.ADV_ESTIMATOR_REGISTRY[mode] = partial(group_advantages, find_recipe)


def _check_version() -> None:
    """Raises ImportError for a verl whose policy losses get other arguments.

    Before 0.9 bypass mode replaced loss_mode by verl's own loss.
    """
    known = list(inspect.signature(core_algos.get_policy_loss_fn("vanilla")).parameters)
    major, minor, *_ = verl.__version__.split(".")
    if known != ARGUMENTS or (int(major), int(minor)) < (0, 9):
        raise ImportError(
            "lagrpo.verl works with the policy losses of verl 0.9, and this is "
            f"{verl.__version__}: pip install 'verl==0.9.*'"
        )


_check_version()
for _name in RECIPES:
    # A process that uses none of them should not pay for all.
    _add(_name, cache(partial(find_supported, _name)))
