"""SkyRL: its registered policy losses, reductions, advantage estimators and KL penalties."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import peers
from cases import MAX_LENGTH, Case
from pairing import NO_BETA, WIDE, Knob, Pairing, advantage, kl, loss
from torch import Tensor

SKYRL = "`skyrl.backends.skyrl_train.utils.ppo_utils`"


def policy_loss(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    name: str,
    reduction: str,
    *,
    old: str = "alpha",
    settings: Mapping[str, Knob] | None = None,
) -> Tensor:
    """A policy loss, summed as SkyRL sums it: it scales the advantages for the reduction.

    `settings` are values of its configuration by their paths. All others have their defaults.
    """
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(loss_reduction=reduction)
    for path, value in (settings or {}).items():
        section, _, key = path.rpartition(".")
        setattr(getattr(config, section) if section else config, key, value)
    scaled_advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        case.spread(advantages), case.mask, reduction, case.C, MAX_LENGTH
    )
    return getattr(ppo_utils, name)(
        case.padded(logp),
        case.padded(getattr(case, old)),
        scaled_advantages,
        config,
        case.mask,
        case.padded(case.alpha),
    )[0]


def kl_term(case: Case, logp: Tensor, name: str) -> Tensor:
    """SkyRL's estimate of KL(pi || pi_ref), a mean over tokens."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_approx_kl

    estimate = compute_approx_kl(case.padded(logp), case.padded(case.ref), case.mask, name)
    # At padding both log-probs are 0, and so is the estimate.
    return estimate.sum() / case.mask.sum()


def estimated(case: Case, name: str) -> Tensor:
    """An advantage estimator of SkyRL [C]."""
    from skyrl.backends.skyrl_train.utils import ppo_utils

    advantages, _ = getattr(ppo_utils, name)(
        token_level_rewards=peers.token_level_rewards(case),
        response_mask=case.mask,
        index=peers.group_names(case),
    )
    return advantages[:, 0]


def skyrl(
    recipe: str,
    name: str,
    reduction: str = "token_mean",
    *,
    options: str = "",
    **loss_arguments: Any,
) -> Pairing:
    """A policy loss beside a recipe. `options`: text of the options for the table."""
    function = f"{SKYRL} `{name}`, {reduction}{options}"
    theirs = partial(policy_loss, name=name, reduction=reduction)
    return loss("SkyRL", function, recipe, theirs, **loss_arguments)


def estimator(recipe: str, name: str, **advantage_arguments: Any) -> Pairing:
    return advantage(
        "SkyRL",
        f"{SKYRL} `{name}`",
        recipe,
        lambda case: estimated(case, name),
        **advantage_arguments,
    )


def loss_settings(old: str = "alpha", **values: Knob) -> dict[str, object]:
    """Arguments of `policy_loss`. __ stands for the dot in a path."""
    settings = {path.replace("__", "."): value for path, value in values.items()}
    return {"old": old, "settings": settings}


SKYRL_PAIRINGS = [
    skyrl("grpo", "ppo_policy_loss", "sequence_mean", **NO_BETA),
    skyrl("dr_grpo", "ppo_policy_loss", "seq_mean_token_sum_norm"),
    skyrl(
        "grpo",
        "ppo_policy_loss",
        "sequence_mean",
        options=", dual_clip",
        peer_settings=loss_settings(policy_loss_type="dual_clip"),
        dual_clip=3.0,
        **NO_BETA,
        note="its default clip_ratio_c",
    ),
    skyrl(
        "gspo",
        "gspo_policy_loss",
        "sequence_mean",
        peer_settings=loss_settings(eps_clip_low=0.1, eps_clip_high=0.15),
        **WIDE,
    ),
    skyrl("cispo", "compute_policy_loss_cispo", note="its defaults"),
    skyrl(
        "grpo_tis",
        "ppo_policy_loss",
        "sequence_mean",
        options=", tis_ratio_type token",
        peer_settings=loss_settings(old="pi_k", off_policy_correction__tis_ratio_type="token"),
    ),
    skyrl(
        "grpo_tis_sequence",
        "ppo_policy_loss",
        "sequence_mean",
        options=", tis_ratio_type sequence",
        peer_settings=loss_settings(old="pi_k", off_policy_correction__tis_ratio_type="sequence"),
        # SkyRL's default cap of the ratio of a completion.
        **{"correction.cap": 5.0},
    ),
    skyrl(
        "grpo_icepop",
        "ppo_policy_loss",
        "sequence_mean",
        options=", tis_ratio_type token, token_mask_is_threshold (.5, 5)",
        peer_settings=loss_settings(
            old="pi_k",
            off_policy_correction__tis_ratio_type="token",
            off_policy_correction__token_tis_ratio_clip_high=5.0,
            off_policy_correction__token_mask_is_threshold_low=0.5,
            off_policy_correction__token_mask_is_threshold_high=5.0,
        ),
    ),
    skyrl(
        "sapo",
        "sapo_policy_loss",
        "sequence_mean",
        options=", defaults",
        same="gradient",
        differs="by value alone: theirs is f(rho) A, ours has the derivative of f as a weight",
    ),
    skyrl(
        "rollout_is",
        "rollout_is_policy_loss",
        peer_settings=loss_settings(old="pi_k"),
        note="its defaults",
    ),
    skyrl(
        "dppo_tv",
        "dppo_policy_loss",
        "seq_mean_token_sum_norm",
        options=", binary_tv, defaults",
        peer_settings=loss_settings(old="pi_k"),
        # SkyRL's default; ours is verl's .15.
        **{"mask.delta_low": 0.2, "mask.delta_high": 0.2},
        same="gradient",
        differs="by value alone: theirs is rho A, ours has rho as a weight",
    ),
    skyrl(
        "dppo_kl",
        "dppo_policy_loss",
        "seq_mean_token_sum_norm",
        options=", binary_kl",
        peer_settings=loss_settings(
            old="pi_k", dppo__dppo_type="binary_kl", dppo__delta_low=0.05, dppo__delta_high=0.05
        ),
        same="gradient",
        differs="by value alone: theirs is rho A, ours has rho as a weight",
    ),
    estimator("rloo", "compute_rloo_outcome_advantage"),
    estimator("grpo_trl", "compute_grpo_outcome_advantage", std_offset=1e-6),
    estimator("maxrl", "compute_maxrl_advantage", note="SkyRL adds 1e-6 to the mean"),
    kl(
        "SkyRL",
        f"{SKYRL} `compute_approx_kl`, 'k2'",
        "k2",
        lambda case, logp: kl_term(case, logp, "k2"),
    ),
    kl(
        "SkyRL",
        f"{SKYRL} `compute_approx_kl`, 'k3'",
        "k3_clamped",
        lambda case, logp: kl_term(case, logp, "k3"),
        bound=10.0,
    ),
]
