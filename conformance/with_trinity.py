"""Trinity-RFT, in which the authors of REC and RED wrote down their methods."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import peers
import torch
from cases import Case
from pairing import NO_BETA, WIDE, Knob, Pairing, advantage, advantages, kl, loss
from torch import Tensor


def dropped_by_trinity(case: Case) -> Tensor:
    """RED-Drop of Trinity-RFT [C], with the same draws in every call."""
    torch.manual_seed(0)
    return peers.trinity_advantage(case, "rec_advantage", "RECGroupedAdvantage", drop="balance")


def dropped_alike(case: Case) -> Tensor:
    """Our RED-Drop [C], with random numbers that drop the same completions as Trinity-RFT.

    Those that Trinity-RFT dropped have an advantage of 0.
    """
    # Ours drops the smallest numbers of a group's completions below the mean; .1 and .9 only tell
    # them apart.
    uniform = torch.where(dropped_by_trinity(case) == 0, 0.1, 0.9).double()
    return advantages(case, "red_drop", uniform=uniform)


TRINITY = "`trinity.algorithm.policy_loss_fn`"


def trinity(
    recipe: str,
    module: str,
    name: str,
    *,
    options: str = "",
    kind: Mapping[str, Knob] | None = None,
    **loss_arguments: Any,
) -> Pairing:
    """A policy loss beside a recipe. `options`: text for the table; `kind`: the loss's settings."""
    return loss(
        "Trinity-RFT",
        f"{TRINITY} `{name}`{options}",
        recipe,
        partial(peers.trinity, module=module, name=name),
        peer_settings=kind,
        **loss_arguments,
    )


def rec(
    recipe: str,
    clip: str = "none",
    weight: str = "none",
    *,
    options: str = "",
    kind: Mapping[str, Knob] | None = None,
) -> Pairing:
    """The REC loss beside a recipe. `kind`: further settings of the loss."""
    rec_settings: dict[str, Knob] = {
        "clip_mode": clip,
        "weight": weight,
        # The outer range, which only the mode ring reads.
        "epsilon_low_prime": 0.6,
        "epsilon_high_prime": 2.0,
    }
    return trinity(
        recipe,
        "rec_policy_loss",
        "RECPolicyLossFn",
        options=f", clip_mode {clip!r}, weight {weight!r}{options}",
        kind={**rec_settings, **(kind or {})},
    )


IS = "importance_sampling"
# The wide range of Yao et al. (arXiv 2509.24203), and the range of GSPO.
WIDE_REC = {"epsilon_low": 0.6, "epsilon_high": 2.0}
GSPO = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
TRINITY_PAIRINGS = [
    rec("reinforce"),
    rec("rec_grpo", "one-side", IS),
    rec("rec_one_side_is", "one-side", IS),
    rec("rec_one_side_is_wide", "one-side", IS, options=", (.6, 2)", kind=WIDE_REC),
    rec("rec_one_side_nois", "one-side"),
    rec("rec_one_side_nois_wide", "one-side", options=", (.6, 2)", kind=WIDE_REC),
    rec("rec_two_side_is", "two-side", IS),
    rec("rec_two_side_nois", "two-side"),
    rec("rec_ring_is", "ring", IS),
    rec("rec_ring_nois", "ring"),
    rec("rec_gspo_is", "gspo-one-side", "gspo_importance_sampling", kind=GSPO),
    rec("rec_gspo_nois", "gspo-one-side", kind=GSPO),
    rec("red_weight", weight="advantage", kind={"temp": 1.0}),
    rec(
        "asymre",
        options=", regularizer 'forward-kl'",
        kind={"regularizer": "forward-kl", "regularizer_coef": 0.1},
    ),
    rec("opmd", options=", regularizer 'k2'", kind={"regularizer": "k2", "regularizer_coef": 0.1}),
    rec("red_drop"),
    trinity(
        "topr",
        "topr_policy_loss",
        "TOPRPolicyLossFn",
        options=", seq-mean-token-sum",
        kind={"loss_agg_mode": "seq-mean-token-sum"},
        ratio="token",
    ),
    trinity(
        "topr",
        "topr_policy_loss",
        "TOPRPolicyLossFn",
        options=", seq-mean-token-sum",
        kind={"loss_agg_mode": "seq-mean-token-sum"},
        same="neither",
        differs="Trinity tapers the ratio of each token; TOPR (arXiv 2503.14286) that of the "
        "completion, pi(y)/mu(y): ours follows it",
    ),
    trinity(
        "cispo",
        "cispo_policy_loss",
        "CISPOPolicyLossFn",
        kind={"clip_range_low": 1.0, "clip_range_high": 4.0},
    ),
    trinity(
        "gspo",
        "gspo_policy_loss",
        "GSPOLossFn",
        kind={"clip_range_low": 0.1, "clip_range_high": 0.15},
        **WIDE,
    ),
    trinity(
        "grpo",
        "ppo_policy_loss",
        "PPOPolicyLossFn",
        options=", seq-mean-token-mean",
        **NO_BETA,
        kind={"clip_range": 0.2, "clip_ratio_c": 1e9, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    trinity(
        "unclipped",
        "importance_sampling_policy_loss",
        "ImportanceSamplingLossFn",
        ratio="token",
        reduction="token_mean",
    ),
    trinity(
        "reinforce",
        "opmd_policy_loss",
        "OPMDPolicyLossFn",
        options=", tau = 0",
        kind={"tau": 0.0},
        note="its loss is ours / (1 + tau); the regularizer is in the factor",
    ),
    advantage(
        "Trinity-RFT",
        "`trinity.algorithm.advantage_fn` `RECGroupedAdvantage`",
        "reinforce",
        lambda case: peers.trinity_advantage(case, "rec_advantage", "RECGroupedAdvantage"),
    ),
    Pairing(
        "Trinity-RFT",
        "`trinity.algorithm.advantage_fn` `RECGroupedAdvantage`, drop 'balance'",
        "advantage of `red_drop`",
        lambda case, logp: dropped_by_trinity(case),
        lambda case, logp: dropped_alike(case),
        note="ours drops the completions that theirs drew at random",
    ),
    advantage(
        "Trinity-RFT",
        "`trinity.algorithm.advantage_fn` `OPMDGroupAdvantage`, logavgexp",
        "opmd_kimi",
        lambda case: peers.trinity_advantage(
            case, "opmd_advantage", "OPMDGroupAdvantage", opmd_baseline="logavgexp", tau=0.1
        ),
    ),
    kl(
        "Trinity-RFT",
        "`trinity.algorithm.kl_fn` `K1Fn`",
        "k1",
        lambda case, logp: peers.trinity_kl(case, logp, "K1Fn"),
    ),
    kl(
        "Trinity-RFT",
        "`trinity.algorithm.kl_fn` `K2Fn`",
        "k2",
        lambda case, logp: peers.trinity_kl(case, logp, "K2Fn"),
    ),
    kl(
        "Trinity-RFT",
        "`trinity.algorithm.kl_fn` `K3Fn`",
        "k3",
        lambda case, logp: peers.trinity_kl(case, logp, "K3Fn"),
    ),
    kl(
        "Trinity-RFT",
        "`trinity.algorithm.kl_fn` `CorrectedK3Fn`",
        "rho k2",
        lambda case, logp: peers.trinity_kl(case, logp, "CorrectedK3Fn", corrected=True),
        same="neither",
        differs="value rho k3, gradient that of rho k2, as with TRL; Trinity also ends rho at 2, "
        "where the gradient becomes that of 2 k3. TRL's, after DeepSeek-V3.2 (arXiv 2512.02556), "
        "has no such end",
    ),
    trinity(
        "grpo",
        "ppo_policy_loss",
        "PPOPolicyLossFn",
        options=", seq-mean-token-mean, clip_ratio_c = 3",
        kind={"clip_range": 0.2, "clip_ratio_c": 3.0, "loss_agg_mode": "seq-mean-token-mean"},
        dual_clip=3.0,
        **NO_BETA,
    ),
    advantage(
        "Trinity-RFT",
        "`trinity.algorithm.advantage_fn` `GRPOGroupedAdvantage`",
        "grpo_trl",
        lambda case: peers.trinity_advantage(case, "grpo_advantage", "GRPOGroupedAdvantage"),
        std_offset=1e-6,
    ),
    trinity(
        "sapo",
        "sapo_policy_loss",
        "SAPOPolicyLossFn",
        options=", seq-mean-token-mean",
        kind={"loss_agg_mode": "seq-mean-token-mean"},
        same="neither",
        differs="Trinity weights log pi by the gate f(rho) itself, which is 2 at rho = 1 and only "
        "rises; the gradient of SAPO (arXiv 2511.20347) has its derivative, 1 at rho = 1: ours "
        "follows it, as do TRL, verl, SkyRL and AReaL",
    ),
    loss(
        "Trinity-RFT",
        f"{TRINITY} `ImportanceSamplingLossFn` x `OnPolicyDistillAdvantage`",
        "opd_stale",
        peers.trinity_distillation,
    ),
]
