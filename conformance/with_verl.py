"""verl: its registered policy losses, advantage estimators and KL penalties."""

from __future__ import annotations

from typing import Any

import peers
from cases import MAX_LENGTH
from pairing import NO_BETA, WIDE, Pairing, advantage, kl, loss

VERL = "`verl.trainer.ppo.core_algos`"


def verl(
    recipe: str, name: str, aggregation: str = "token-mean", *, options: str = "", **more: Any
) -> Pairing:
    function = f"{VERL} `compute_policy_loss_{name}`, {aggregation}{options}"
    return loss("verl", function, recipe, peers.verl, given=(name, aggregation), **more)


def weights_of_verl(level: str, threshold: str | float) -> dict[str, Any]:
    return {"old": "pi_k", "weights": lambda case: peers.verl_weights(case, level, threshold)}


OF_VERL = [
    verl("grpo", "vanilla", "seq-mean-token-mean", **NO_BETA, note="clip_ratio_c = 1e9"),
    verl(
        "dapo",
        "vanilla",
        their={"epsilon": (0.2, 0.28)},
        masked_count=True,
        note="clip_ratio_c = 1e9",
    ),
    verl(
        "dr_grpo",
        "vanilla",
        "seq-mean-token-sum-norm",
        their={"horizon": MAX_LENGTH},
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
        their={"dual": 3.0},
        same="neither",
        differs="verl's default clip_ratio_c = 3 cuts A < 0 beyond a ratio of 3: dual clip (arXiv 1912.09729, Eq. 5). "
        "GRPO (arXiv 2402.03300, Eq. 3) has no such end: ours follows it",
    ),
    verl("gspo", "gspo", "seq-mean-token-mean", their={"epsilon": (0.1, 0.15)}, **WIDE),
    verl("cispo", "cispo", their={"epsilon": (1.0, 4.0)}, note="clip_ratio_low = 1: no lower end"),
    verl(
        "cispo",
        "cispo",
        options=", clip_ratio_low = .2",
        their={"epsilon": (0.2, 4.0)},
        same="neither",
        differs="verl's default raises weights below .8; MiniMax-M1 (arXiv 2506.13585, after Eq. 5) has no lower end: "
        "ours follows it",
    ),
    verl("reinforce", "gpg"),
    verl("opmd", "dro", their={"dro_beta": 0.2}, note="strength = dro_beta / 2"),
    verl("grpo_recomputed", "vanilla", "seq-mean-token-mean", their={"old": "pi_k"}),
    verl(
        "grpo_tis",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, token",
        their=weights_of_verl("token", 2.0),
    ),
    verl(
        "grpo_tis_sequence",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, sequence",
        their=weights_of_verl("sequence", 2.0),
    ),
    verl(
        "grpo_icepop",
        "vanilla",
        "seq-mean-token-mean",
        options=" x rollout_corr_helper, '0.5_5.0'",
        their=weights_of_verl("token", "0.5_5.0"),
    ),
    loss(
        "verl",
        f"{VERL} `compute_policy_loss_reinforce`, seq-mean-token-sum",
        "rloo",
        peers.verl_reinforce,
        given=("seq-mean-token-sum",),
    ),
]

OF_VERL += [
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
        differs="verl cuts k3 off at 10, and its gradient there is 0; Eq. 4 of arXiv 2402.03300 has no bound: ours "
        "follows it",
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
        their={"dual": 3.0},
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
]
