"""verl: its registered policy losses, advantage estimators and KL penalties."""

from __future__ import annotations

from functools import partial
from typing import Any, TypedDict, Unpack

import peers
from cases import GROUPS, MAX_LENGTH, Case, G
from pairing import NO_BETA, WIDE, Pairing, advantage, fresh, kl, loss, near_teacher
from torch import Tensor

VERL = "`verl.trainer.ppo.core_algos`"
C = G * GROUPS
SUPERVISED = ", use_policy_gradient False"
WITH_TASK = ", use_task_rewards, seq-mean-token-mean"
TASK_REWARDS = {"aggregation": "seq-mean-token-mean", "task_rewards": True}


def verl(
    recipe: str,
    name: str,
    aggregation: str = "token-mean",
    *,
    options: str = "",
    **loss_arguments: Any,
) -> Pairing:
    """A policy loss beside a recipe. `options`: text of the options for the table."""
    function = f"{VERL} `compute_policy_loss_{name}`, {aggregation}{options}"
    theirs = partial(peers.verl, name=name, aggregation=aggregation)
    return loss("verl", function, recipe, theirs, **loss_arguments)


def weights_of_verl(level: str, threshold: str | float) -> dict[str, object]:
    return {"old": "pi_k", "weights": lambda case: peers.verl_weights(case, level, threshold)}


def weights_of_kept(metric: str, threshold: str) -> dict[str, object]:
    """pi_k/alpha of completions, 0 for the completions that verl rejects."""

    def weights(case: Case) -> Tensor:
        # 1e9: not truncated.
        ratios = peers.verl_weights(case, "sequence", 1e9)
        return ratios * peers.verl_rejected(case, metric, threshold)

    return {"old": "pi_k", "weights": weights}


def distillation(recipe: str, mode: str, *, options: str = "", **loss_arguments: Any) -> Pairing:
    """The distillation loss with a KL estimator beside a recipe."""
    settings = {"mode": mode, **loss_arguments.pop("peer_settings", {})}
    return loss(
        "verl",
        f"`verl.trainer.distillation.losses` `distillation_ppo_loss`, {mode!r}{options}",
        recipe,
        peers.verl_distillation,
        peer_settings=settings,
        **loss_arguments,
    )


class TrustRegion(TypedDict, total=False):
    """The knobs of the filter of `trm`."""

    delta: float


def bypass(
    recipe: str, rejection: str, threshold: str, **overrides: Unpack[TrustRegion]
) -> Pairing:
    """Bypass mode: the ratio is pi/alpha, and the loss rejects completions by it."""
    correction = {"rollout_rs": rejection, "rollout_rs_threshold": threshold}
    return verl(
        recipe,
        "bypass_mode",
        "seq-mean-token-mean",
        options=f", {rejection} at most {threshold}",
        # A mean over all C completions, also over the rejected ones, as ours.
        peer_settings={"dual": 1e9, "completions": C, "rollout_correction": correction},
        **overrides,
    )


VERL_PAIRINGS = [
    verl("grpo", "vanilla", "seq-mean-token-mean", **NO_BETA, note="clip_ratio_c = 1e9"),
    verl(
        "dapo",
        "vanilla",
        peer_settings={"epsilon": (0.2, 0.28)},
        masked_count=True,
        note="clip_ratio_c = 1e9",
    ),
    verl(
        "dr_grpo",
        "vanilla",
        "seq-mean-token-sum-norm",
        peer_settings={"horizon": MAX_LENGTH},
        note="clip_ratio_c = 1e9",
    ),
    verl(
        "grpo",
        "vanilla",
        "seq-mean-token-sum",
        reduction="sequence_sum",
        **NO_BETA,
        note="clip_ratio_c = 1e9",
    ),
    verl(
        "grpo",
        "vanilla",
        "seq-mean-token-mean",
        options=", defaults",
        **NO_BETA,
        peer_settings={"dual": 3.0},
        same="neither",
        differs="verl's default clip_ratio_c = 3 cuts A < 0 beyond a ratio of 3: dual clip (arXiv "
        "1912.09729, Eq. 5). GRPO (arXiv 2402.03300, Eq. 3) has no such end: ours follows it",
    ),
    verl("gspo", "gspo", "seq-mean-token-mean", peer_settings={"epsilon": (0.1, 0.15)}, **WIDE),
    verl(
        "cispo",
        "cispo",
        peer_settings={"epsilon": (1.0, 4.0)},
        note="clip_ratio_low = 1: no lower end",
    ),
    verl(
        "cispo",
        "cispo",
        options=", clip_ratio_low = .2",
        peer_settings={"epsilon": (0.2, 4.0)},
        same="neither",
        differs="verl's default raises weights below .8; MiniMax-M1 (arXiv 2506.13585, after Eq. "
        "5) has no lower end: ours follows it",
    ),
    verl("reinforce", "gpg"),
    verl("opmd", "dro", peer_settings={"dro_beta": 0.2}, note="strength = dro_beta / 2"),
    verl("grpo_recomputed", "vanilla", "seq-mean-token-mean", peer_settings={"old": "pi_k"}),
    verl(
        "grpo_tis",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, token",
        peer_settings=weights_of_verl("token", 2.0),
    ),
    verl(
        "grpo_tis_sequence",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, sequence",
        peer_settings=weights_of_verl("sequence", 2.0),
    ),
    verl(
        "grpo_icepop",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, '0.5_5.0'",
        peer_settings=weights_of_verl("token", "0.5_5.0"),
    ),
    loss(
        "verl",
        f"{VERL} `compute_policy_loss_reinforce`, seq-mean-token-sum",
        "rloo",
        partial(peers.verl_reinforce, aggregation="seq-mean-token-sum"),
    ),
]

VERL_PAIRINGS += [
    advantage(
        "verl",
        f"{VERL} `compute_grpo_outcome_advantage`, not scaled",
        "dr_grpo",
        lambda case: peers.verl_advantage(case, "grpo", norm_adv_by_std_in_grpo=False),
    ),
    advantage(
        "verl",
        f"{VERL} `compute_grpo_outcome_advantage`",
        "grpo",
        lambda case: peers.verl_advantage(case, "grpo"),
        same="neither",
        differs="verl divides by the deviation over G - 1, plus 1e-6; Eq. 2 of arXiv 2505.22257 by "
        "sqrt(s0² + eps) with s0 over G: ours follows it",
    ),
    advantage(
        "verl",
        f"{VERL} `compute_rloo_outcome_advantage`",
        "rloo",
        lambda case: peers.verl_advantage(case, "rloo"),
    ),
    advantage(
        "verl",
        f"{VERL} `compute_rloo_vectorized_outcome_advantage`",
        "rloo",
        lambda case: peers.verl_advantage(case, "rloo_vectorized"),
    ),
    kl(
        "verl",
        f"{VERL} `kl_penalty`, 'k1'",
        "k1",
        lambda case, logp: peers.verl_kl(case, logp, "k1"),
    ),
    kl(
        "verl",
        f"{VERL} `kl_penalty`, 'k2'",
        "k2",
        lambda case, logp: peers.verl_kl(case, logp, "k2"),
    ),
    kl(
        "verl",
        f"{VERL} `kl_penalty`, 'k3+'",
        "k2",
        lambda case, logp: peers.verl_kl(case, logp, "k3+"),
        same="gradient",
        differs="by value alone: theirs is k3 with the gradient of k2",
    ),
    kl(
        "verl",
        f"{VERL} `kl_penalty`, 'k3'",
        "k3",
        lambda case, logp: peers.verl_kl(case, logp, "k3"),
        same="neither",
        differs="verl cuts k3 off at 10, and its gradient there is 0; Eq. 4 of arXiv 2402.03300 "
        "has no bound: ours follows it",
    ),
    kl(
        "verl",
        f"{VERL} `kl_penalty`, 'k3'",
        "k3_clamped",
        lambda case, logp: peers.verl_kl(case, logp, "k3"),
        bound=10.0,
    ),
    verl(
        "grpo",
        "vanilla",
        "seq-mean-token-mean",
        options=", defaults",
        peer_settings={"dual": 3.0},
        dual_clip=3.0,
        **NO_BETA,
    ),
    advantage(
        "verl",
        f"{VERL} `compute_grpo_outcome_advantage`",
        "grpo_trl",
        lambda case: peers.verl_advantage(case, "grpo"),
        std_offset=1e-6,
    ),
    verl(
        "dppo_tv",
        "dppo_tv",
        "seq-mean-token-sum-norm",
        peer_settings={"epsilon": (0.15, 0.15), "horizon": MAX_LENGTH},
        note="clip_ratio_c = 1e9, old = alpha",
    ),
    verl(
        "dppo_kl",
        "dppo_kl",
        "seq-mean-token-sum-norm",
        peer_settings={"epsilon": (0.05, 0.05), "horizon": MAX_LENGTH},
        note="clip_ratio_c = 1e9, old = alpha",
    ),
    verl(
        "dppo_tv",
        "dppo_tv",
        "seq-mean-token-sum-norm",
        options=", defaults",
        peer_settings={"epsilon": (0.15, 0.15), "horizon": MAX_LENGTH, "dual": 3.0},
        same="neither",
        differs="verl's default clip_ratio_c = 3 cuts the weight at 3; its own script for DPPO "
        "sets 10000, SkyRL and prime-rl have no bound: ours has none",
    ),
    verl(
        "dppo_tv",
        "dppo_tv",
        "seq-mean-token-sum-norm",
        options=", old = pi_k",
        peer_settings={"epsilon": (0.15, 0.15), "horizon": MAX_LENGTH, "old": "pi_k"},
        same="neither",
        differs="verl compares with pi_k unless in bypass mode; DPPO (arXiv 2602.04879, section "
        "5.2) with the policy that sampled: ours follows it",
    ),
    verl(
        "dppo_tv",
        "dppo_tv",
        "seq-mean-token-sum-norm",
        options=", old = pi_k",
        peer_settings={"epsilon": (0.15, 0.15), "horizon": MAX_LENGTH, "old": "pi_k"},
        **{"mask.denominator": "pi_k", "weight.denominator": "pi_k"},
    ),
    verl(
        "sapo",
        "sapo",
        "seq-mean-token-mean",
        options=", defaults",
        same="gradient",
        differs="by value alone: theirs is f(rho) A, ours has the derivative of f as a weight",
    ),
    bypass("trm", "seq_max_k3", "0.05"),
    bypass("trm", "seq_max_k3", "0.5", delta=0.5),
    loss(
        "verl",
        f"{VERL} `compute_policy_loss_reinforce`, seq-mean-token-mean x rollout_corr_helper, "
        "sequence",
        "seq_tis",
        partial(peers.verl_reinforce, aggregation="seq-mean-token-mean"),
        peer_settings={"cap": 8.0},
    ),
    verl(
        "grpo_mis_sequence",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, seq_sum_k1 '0.5_1e9'",
        peer_settings=weights_of_kept("seq_sum_k1", "0.5_1e9"),
        note="the bounds of verl's k1 are those of alpha/pi_k",
    ),
    verl(
        "grpo_mis_sequence",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, seq_sum_k1 '1e-9_2'",
        peer_settings=weights_of_kept("seq_sum_k1", "1e-9_2"),
        same="neither",
        differs="verl documents lower_upper as bounds of the ratio, but compares them with "
        "alpha/pi_k: this keeps completions with pi_k/alpha >= 1/2. Masked importance sampling "
        "drops those above 2: ours follows it",
    ),
    advantage(
        "verl",
        f"{VERL} `compute_reinforce_plus_plus_baseline_outcome_advantage`",
        "reinforce_pp_baseline",
        lambda case: peers.verl_advantage(case, "reinforce_plus_plus_baseline"),
    ),
    fresh(
        distillation(
            "opd",
            "k1",
            same="gradient",
            differs="by value alone: theirs is rho d, ours d logp",
        )
    ),
    distillation("opd_recomputed", "k1", surrogate="clipped", note="old = alpha, under its clip"),
    near_teacher(
        fresh(
            distillation(
                "opd_forward",
                "k3",
                options=SUPERVISED,
                peer_settings={"as_reward": False},
                same="gradient",
                differs="by value alone: theirs is k3, which ends at 10 nats, ours has its "
                "derivative as an advantage",
            )
        )
    ),
    near_teacher(
        distillation(
            "opd_forward",
            "k3",
            options=SUPERVISED,
            peer_settings={"as_reward": False},
            same="neither",
            differs="verl does not weight k3 by pi/alpha: its gradient is that of the forward KL "
            "on fresh samples alone. Ours has the weight",
        )
    ),
    fresh(
        distillation(
            "grpo_opd",
            "k1",
            options=WITH_TASK,
            peer_settings=TASK_REWARDS,
        )
    ),
    distillation(
        "grpo_opd",
        "k1",
        options=WITH_TASK,
        peer_settings=TASK_REWARDS,
        same="neither",
        differs="verl clips the reward's loss and the teacher's each by its own sign; ours, as "
        "slime's, clips their sum",
    ),
]
