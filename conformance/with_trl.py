"""TRL: `GRPOTrainer._compute_loss` under its options."""

from __future__ import annotations

from typing import Any

import peers
from pairing import NO_BETA, WIDE, Pairing, loss

TRL = "`trl.trainer.grpo_trainer` `GRPOTrainer._compute_loss`"


def trl(recipe: str, loss_type: str, *, options: str = "", **more: Any) -> Pairing:
    function = f"{TRL}, {loss_type!r}{options}"
    return loss("TRL", function, recipe, peers.trl, given=(loss_type,), **more)


OF_TRL = [
    trl("grpo", "grpo", **NO_BETA),
    trl("grpo", "grpo", options=", beta .04", their={"beta": 0.04}),
    trl("grpo", "bnpo", reduction="token_mean", **NO_BETA),
    trl("dr_grpo", "dr_grpo"),
    trl(
        "dapo",
        "dapo",
        their={"epsilon": (0.2, 0.28)},
        masked_count=True,
        note="TRL counts the tokens of groups with equal rewards",
    ),
    trl(
        "cispo",
        "cispo",
        their={"epsilon": (0.2, 5.0)},
        note="TRL caps at epsilon_high, MiniMax-M1 (Eq. 5) at 1 + it",
    ),
    trl(
        "gspo",
        "grpo",
        options=", sequence level",
        their={"level": "sequence", "epsilon": (0.1, 0.15)},
        **WIDE,
    ),
    trl(
        "gspo",
        "luspo",
        options=", sequence level",
        their={"level": "sequence", "epsilon": (0.1, 0.15)},
        reduction="sequence_sum",
        **WIDE,
    ),
    trl("grpo_recomputed", "grpo", options=", old = pi_k", their={"old": "pi_k"}),
    trl(
        "grpo_tis",
        "grpo",
        options=", importance_sampling_ratio",
        their={
            "old": "pi_k",
            "weights": lambda case: case.padded((case.pi_k - case.alpha).exp().clamp(max=2.0)),
        },
    ),
    trl(
        "grpo",
        "grpo",
        options=", use_bias_correction_kl",
        their={"beta": 0.04, "corrected_kl": True},
        kl="k2",
        kl_importance=True,
        same="gradient",
        note="value rho k3, gradient rho (log pi/pi_ref) grad log pi: that of rho k2",
        differs="by value alone: theirs is that of rho k3, ours of rho k2; the gradient of KL(pi ‖ pi_ref) in both",
    ),
    trl("grpo", "grpo", options=", delta 3", their={"delta": 3.0}, dual_clip=3.0, **NO_BETA),
    trl(
        "grpo",
        "grpo",
        options=", use_bias_correction_kl",
        their={"beta": 0.04, "corrected_kl": True},
        kl="k3_bias_corrected",
    ),
]
