"""TRL: `GRPOTrainer._compute_loss` under its options."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import peers
import torch
from cases import Case
from pairing import NO_BETA, WIDE, Pairing, advantage, expected, fresh, loss
from torch import Tensor

IW_OPD = "`trl.experimental.iw_opd` `IWOPDTrainer._compute_iw_opd_loss`"
TRL = "`trl.trainer.grpo_trainer` `GRPOTrainer._compute_loss`"


def trl(recipe: str, loss_type: str, *, options: str = "", **loss_arguments: Any) -> Pairing:
    """A loss beside a recipe. `options`: text of the options for the table."""
    function = f"{TRL}, {loss_type!r}{options}"
    theirs = partial(peers.trl, loss_type=loss_type)
    return loss("TRL", function, recipe, theirs, **loss_arguments)


def scaled(recipe: str, scale_rewards: str) -> Pairing:
    """Advantages under a value of `scale_rewards` beside those of a recipe."""
    function = TRL.replace("_compute_loss", "_generate_and_score_completions")
    return advantage(
        "TRL",
        f"{function}, scale_rewards {scale_rewards!r}",
        recipe,
        lambda case: peers.trl_scored(case, scale_rewards=scale_rewards)["advantages"],
    )


def divergence(recipe: str, beta: float, **verdict: Any) -> Pairing:
    """The divergence of whole distributions beside the mean of a recipe over samples of alpha."""
    return Pairing(
        peer="TRL",
        function=f"`trl.trainer.distillation_trainer` `DistillationTrainer`, beta {beta:g}, "
        "two tokens",
        ours_is=f"`{recipe}`, its mean over samples of α",
        theirs=partial(peers.trl_divergence, beta=beta),
        ours=partial(expected, name=recipe),
        **verdict,
    )


def finished_in_trl(case: Case) -> Tensor:
    """TRL's mask of tokens under `mask_truncated_completions`."""
    return peers.trl_scored(case, mask_truncated_completions=True)["completion_mask"].double()


def weights_of_trl(case: Case, cap: float = inf) -> Tensor:
    """pi_k/alpha as TRL computes it with vLLM [C, LONGEST]: padding has exp(0) = 1."""
    return torch.exp(case.padded(case.pi_k - case.alpha)).clamp(max=cap)


TRL_PAIRINGS = [
    trl("grpo", "grpo", **NO_BETA),
    trl("grpo", "grpo", options=", beta .04", peer_settings={"beta": 0.04}),
    trl("grpo", "bnpo", reduction="token_mean", **NO_BETA),
    trl("dr_grpo", "dr_grpo"),
    trl(
        "dapo",
        "dapo",
        peer_settings={"epsilon": (0.2, 0.28)},
        masked_count=True,
        note="TRL counts the tokens of groups with equal rewards",
    ),
    trl(
        "cispo",
        "cispo",
        peer_settings={"epsilon": (0.2, 5.0)},
        note="TRL caps at epsilon_high, MiniMax-M1 (Eq. 5) at 1 + it",
    ),
    trl(
        "gspo",
        "grpo",
        options=", sequence level",
        peer_settings={"level": "sequence", "epsilon": (0.1, 0.15)},
        **WIDE,
    ),
    trl(
        "gspo",
        "luspo",
        options=", sequence level",
        peer_settings={"level": "sequence", "epsilon": (0.1, 0.15)},
        reduction="sequence_sum",
        **WIDE,
    ),
    trl("grpo_recomputed", "grpo", options=", old = pi_k", peer_settings={"old": "pi_k"}),
    trl(
        "grpo_tis",
        "grpo",
        options=", importance_sampling_ratio",
        peer_settings={
            "old": "pi_k",
            "weights": lambda case: case.padded((case.pi_k - case.alpha).exp().clamp(max=2.0)),
        },
    ),
    trl(
        "grpo",
        "grpo",
        options=", use_bias_correction_kl",
        peer_settings={"beta": 0.04, "corrected_kl": True},
        kl="k2",
        kl_importance=True,
        same="gradient",
        differs="by value alone: theirs is that of rho k3, ours of rho k2; the gradient of "
        "KL(pi ‖ pi_ref) in both",
    ),
    trl(
        "grpo", "grpo", options=", delta 3", peer_settings={"delta": 3.0}, dual_clip=3.0, **NO_BETA
    ),
    trl(
        "grpo",
        "grpo",
        options=", use_bias_correction_kl",
        peer_settings={"beta": 0.04, "corrected_kl": True},
        kl="k3_bias_corrected",
    ),
    trl(
        "grpo_two_sided",
        "grpo",
        options=", delta 4, beta .001",
        peer_settings={"delta": 4.0, "beta": 0.001},
    ),
    trl(
        "sapo",
        "sapo",
        options=", defaults",
        same="gradient",
        differs="by value alone: theirs is f(rho) A with f = (4/t) sigmoid(t (rho - 1)), ours has "
        "the derivative of f as a weight",
    ),
    trl("vespo", "vespo", options=", defaults"),
    trl(
        "vespo",
        "vespo",
        options=", importance_sampling_ratio not truncated",
        peer_settings={"old": "pi_k", "weights": weights_of_trl},
        note="pi/pi_k times pi_k/alpha is pi/alpha",
    ),
    trl(
        "vespo",
        "vespo",
        options=", importance_sampling_ratio at most 2",
        peer_settings={"old": "pi_k", "weights": partial(weights_of_trl, cap=2.0)},
        same="neither",
        differs="with vLLM, TRL multiplies pi/pi_k of the completion by truncated pi_k/alpha of "
        "its tokens; VESPO (arXiv 2602.10693) takes pi/alpha of the completion: ours follows it",
    ),
    trl(
        "opsm", "grpo", options=", off_policy_mask_threshold .5", peer_settings={"opsm_delta": 0.5}
    ),
    trl(
        "opsm",
        "grpo",
        options=", off_policy_mask_threshold .1",
        peer_settings={"opsm_delta": 0.1},
        delta=0.1,
    ),
    trl(
        "grpo_top_entropy",
        "dapo",
        options=", top_entropy_quantile .2",
        peer_settings={"top_entropy": 0.2},
        note="one micro-batch: TRL takes the quantile of each micro-batch, ours that of the step",
    ),
    trl(
        "grpo_finished",
        "grpo",
        options=", mask_truncated_completions",
        peer_settings={"mask": finished_in_trl},
    ),
    trl(
        "grpo_finished",
        "dapo",
        options=", mask_truncated_completions",
        peer_settings={"mask": finished_in_trl},
        reduction="token_mean",
        same="neither",
        differs="TRL's mean over tokens leaves out truncated completions, its mean over "
        "completions counts them; what a filter of ours drops stays in every normalizer. The "
        "losses differ by that factor alone",
    ),
    loss("TRL", IW_OPD, "iw_opd", peers.trl_iw_opd, peer_settings={"gamma": 0.5}),
    fresh(
        loss(
            "TRL",
            f"{IW_OPD}, gamma 0",
            "opd",
            peers.trl_iw_opd,
            peer_settings={"gamma": 0.0, "recorded": False},
        )
    ),
    divergence("opd_recomputed", 1.0),
    divergence(
        "opd_forward",
        0.0,
        same="gradient",
        differs="by value alone: theirs is the forward KL, ours has its gradient",
    ),
    scaled("grpo_trl", "group"),
    scaled("dr_grpo", "none"),
    scaled("grpo_batch_scaled", "batch"),
]
