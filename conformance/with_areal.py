"""AReaL: its losses with a proximal policy, and its masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cases import GROUPS, Case, G
from pairing import Pairing, loss, ours
from torch import Tensor

AREAL = "`areal.trainer.ppo.actor` `grpo_loss_fn`"
# The policy that learns, in updates: the staleness of a case is at most 4.
VERSION = 4


def actor_loss(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    *,
    old: str = "alpha",
    proximal: str | None = None,
    correction: dict[str, str | float] | None = None,
    rewards_weight: float | None = None,
    **options: object,
) -> Tensor:
    """The actor's loss on flat tokens.

    `proximal` is the policy to clip around; if None, AReaL approximates it from the versions of the
    tokens. `correction` has the settings of the weight proximal/old. `rewards_weight` is that of
    the rewards beside a teacher, whose weight is 1.
    """
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.trainer.ppo import actor

    data = {
        "logprobs": getattr(case, old),
        "advantages": advantages[case.completion],
        "loss_mask": torch.ones_like(case.completion),
        "prox_logp": getattr(case, proximal) if proximal else None,
        # The version that sampled each token.
        "versions": VERSION - case.staleness,
    }
    if rewards_weight is not None:
        data["teacher_logp"] = case.ref
        data["rl_loss_weight"] = rewards_weight
        data["distill_loss_weight"] = 1.0
    return actor.grpo_loss_fn(
        logp,
        case.entropy,
        data,
        eps_clip=0.2,
        eps_clip_higher=None,
        c_clip=None,
        rejection_sampling=RejectionSamplingConfig(**correction) if correction else None,
        current_version=VERSION,
        prox_logp_method="recompute" if proximal else "loglinear",
        **options,
    )


def preference(case: Case, logp: Tensor, kind: str, strength: float) -> Tensor:
    """AReaL's preference loss of each group's best and worst completion.

    Groups without a difference count as 0.
    """
    from areal.utils.functional import dpo_preference_loss

    # log pi/pi_ref of each completion: the sum over its tokens.
    log_ratio_C = torch.zeros_like(case.rewards).index_add(0, case.completion, logp - case.ref)
    log_ratio = log_ratio_C.view(GROUPS, G)
    rewards = case.rewards.view(GROUPS, G)
    best = rewards.argmax(1, keepdim=True)  # [GROUPS, 1]
    worst = rewards.argmin(1, keepdim=True)  # [GROUPS, 1]
    margin = (log_ratio.gather(1, best) - log_ratio.gather(1, worst)).squeeze(1)  # [GROUPS]
    differs = rewards.max(1).values > rewards.min(1).values  # [GROUPS]
    # A mean over all groups, so one without a pair lowers it, as in ours.
    return (dpo_preference_loss(margin, beta=strength, loss_type=kind) * differs).mean()


def areal(recipe: str, options: str, **loss_arguments: Any) -> Pairing:
    return loss("AReaL", f"{AREAL}{options}", recipe, actor_loss, **loss_arguments)


def preferred(recipe: str, kind: str, *, note: str = "") -> Pairing:
    return Pairing(
        "AReaL",
        f"`areal.utils.functional` `dpo_preference_loss`, {kind!r}",
        f"`{recipe}`",
        # .1 is the strength of `online_dpo` and `online_ipo`.
        lambda case, logp: preference(case, logp, kind, strength=0.1),
        partial(ours, name=recipe),
        note=note,
    )


# A weight proximal/old without a bound, and one that is 0 above 5.
UNBOUNDED: dict[str, str | float] = {
    "level": "token",
    "action": "clamp",
    "metric": "ratio",
    "upper": 1e9,
}
NOT_ABOVE_5: dict[str, str | float] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "upper": 5.0,
}

AREAL_PAIRINGS = [
    areal(
        "decoupled_ppo",
        ", prox = pi_k, weight pi_k/alpha",
        peer_settings={"proximal": "pi_k", "correction": UNBOUNDED},
    ),
    areal(
        "decoupled_ppo",
        ", prox = pi_k, rejection_sampling None",
        peer_settings={"proximal": "pi_k"},
        same="neither",
        differs="AReaL's default leaves out the factor pi_k/alpha of decoupled PPO (arXiv "
        "2505.24298): ours follows it",
    ),
    areal(
        "grpo_recomputed",
        ", prox = pi_k, rejection_sampling None",
        peer_settings={"proximal": "pi_k"},
        reduction="token_mean",
    ),
    areal(
        "grpo_icepop",
        ", prox = pi_k, weight pi_k/alpha, masked above 5",
        peer_settings={"proximal": "pi_k", "correction": NOT_ABOVE_5},
        # AReaL's mask has no lower bound.
        **{"correction.floor": 0.0},
        reduction="token_mean",
    ),
    areal(
        "a3po",
        ", prox_logp_method loglinear, weight prox/alpha",
        peer_settings={"correction": UNBOUNDED},
        same="gradient",
        differs="by value alone, where a token is clipped: its weight contains pi",
    ),
    areal(
        "a3po",
        ", prox_logp_method loglinear",
        peer_settings={},
        same="neither",
        differs="AReaL's default leaves out the factor prox/alpha: ours has it",
    ),
    areal(
        "m2po",
        ", prox = pi, m2_threshold .04",
        peer_settings={"proximal": "logp", "m2_threshold": 0.04, "correction": UNBOUNDED},
        reduction="token_mean",
        same="neither",
        differs="AReaL takes the moment over all tokens, whatever the sign of A, and what it drops "
        "leaves the normalizer; M2PO (arXiv 2510.01161, Algorithm 1) takes outward tokens alone: "
        "ours follows it",
    ),
    areal(
        "sapo",
        ", use_sapo_loss, defaults",
        peer_settings={"use_sapo_loss": True, "proximal": "alpha"},
        reduction="token_mean",
        same="gradient",
        differs="by value alone: theirs is f(rho) A, ours has the derivative of f as a weight",
    ),
    areal(
        "opd_recomputed",
        ", teacher_logp, rl_loss_weight 0",
        peer_settings={"proximal": "alpha", "rewards_weight": 0.0},
    ),
    areal(
        "grpo_opd",
        ", teacher_logp, rl_loss_weight 1",
        peer_settings={"proximal": "alpha", "rewards_weight": 1.0},
        reduction="token_mean",
        same="neither",
        differs="AReaL adds log pi - log pi_T to the loss: its gradient is the same for every "
        "teacher, and 0 on average over samples of pi. Ours takes it as a reward",
    ),
    preferred("online_dpo", "sigmoid"),
    preferred(
        "online_ipo",
        "ipo",
        note="on log-ratios of whole completions, as Eq. 17; AReaL's trainer divides them by the "
        "length, as TRL",
    ),
]
