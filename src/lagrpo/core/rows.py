"""The recipes: a table, whose rows hold the functions of core themselves.

From a recipe's name it is one jump to its row and one to the formula; `Recipe` in objective.py
calls the functions. `lagrpo recipes NAME` prints their source.

A row replaces defaults of a function's knobs with `piece`, and says which numbers its source leaves
open.
"""

from __future__ import annotations

from dataclasses import replace

from lagrpo.core.advantages import (
    batch_scaled,
    batch_whitened,
    centered,
    leave_one_out,
    log_mean_exp,
    maxrl,
    normalized_positive,
    normalized_unbiased,
    red_drop,
    sign_balanced,
    zero,
)
from lagrpo.core.corrections import masked, truncated
from lagrpo.core.filters import carm, finished_only, m2po, opsm, seq_max_k3, top_entropy
from lagrpo.core.inputs import alpha, pi_k, pi_ref
from lagrpo.core.losses import (
    asymre,
    clipped,
    clipped_bapo,
    clipped_by_staleness,
    clipped_exact,
    clipped_m2po_released,
    clipped_proportional,
    gepo,
    gmpo,
    online_dpo,
    online_ipo,
    opmd,
    opmd_kimi,
    opmd_pairwise,
    reinforce,
    unclipped,
)
from lagrpo.core.masks import binary_kl, one_side, ring, tv, tv_two_side, two_side
from lagrpo.core.objective import Recipe
from lagrpo.core.pieces import PieceFunction, piece
from lagrpo.core.ratios import length_normalized, sequence, token
from lagrpo.core.reductions import constant_length, sequence_mean, sequence_sum
from lagrpo.core.token_advantages import forward_kl, reverse_kl, reverse_kl_by_drift
from lagrpo.core.weights import (
    asymmetric_cap,
    capped_ratio,
    capped_sequence,
    exp_advantage,
    importance,
    sapo,
    tapered_ratio,
    vespo,
)

SHAO = "Shao et al., DeepSeekMath, arXiv 2402.03300"
MROUEH = "Mroueh et al., Revisiting GRPO, arXiv 2505.22257"
YAO = "Yao et al., Group-relative REINFORCE is secretly off-policy, arXiv 2509.24203"
TIS = (
    "Yao, Liu et al., Your efficient RL framework secretly brings you off-policy RL training, 2025"
)
MIS = (
    "Liu, Li et al., When speed kills stability: demystifying RL collapse from the "
    "training-inference mismatch, 2025"
)
DPPO = "DPPO, arXiv 2602.04879"
ASYNC_OPD = "AsyncOPD, arXiv 2606.24143"

SYMBOLS = """\
pi: policy; pi_k: pi at the start of the batch; alpha: the policy that sampled
rho = pi/alpha of a token, s of a completion y; logp = log pi; sg: no gradient
A: advantage; normalized (r - mu)/sigma, centered r - mu, with a group's rewards
f_eps(rho, c, A) = min(rho A, clip(rho, c - epsilon_low, c + epsilon_high) A)
M: 1 if the token is kept, else 0; s0 > 0: the rewards of a group differ
k3: estimate of KL(pi, pi_ref), pi_ref being the KL reference
d = sg(log pi - log pi_ref) of a token, pi_ref being the teacher"""

GSPO_RANGE: dict[str, object] = {
    "ratio": length_normalized,
    "epsilon_low": 3e-4,
    "epsilon_high": 4e-4,
}


def _rec(
    mask: PieceFunction, weight: PieceFunction | None, ranges: str = "(.2, .2)", **numbers: float
) -> Recipe:
    """A member of REC with the ratio of tokens; without weight it is NoIS.

    NoIS: no importance sampling. `numbers` are knobs of the mask, and `ranges` shows them in the
    formula.
    """
    words = mask.__name__.split("_")
    name = "".join(word.capitalize() for word in words)
    factor = "sg(rho) " if weight else ""
    kind = "IS" if weight else "NoIS"
    return Recipe(
        f"M {factor}A logp, M = {' '.join(words)} {ranges}, A centered; mean over the tokens of "
        "the batch",
        f"{YAO}: REC-{name}-{kind}",
        advantage=piece(centered),
        surrogate=piece(reinforce, mask=piece(mask, **numbers), weight=weight),
    )


GRPO_ROWS: dict[str, Recipe] = {
    "grpo": Recipe(
        "f_eps(rho, 1, A) - beta k3, A normalized; mean over completions of their token means",
        f"{SHAO}, Eq. 3 and 4: beta .04, epsilon not stated. With v = 1, i = 1 it is on-policy: "
        "rho = 1",
        reduction=piece(sequence_mean),
        beta=0.04,
    ),
    "grpo_masked": Recipe(
        "1[s0 > 0] (f_eps(rho, 1, A) - beta k3), A normalized: equal rewards leave surrogate, "
        "KL and normalizer",
        f"{MROUEH}, Eq. 8, literally with masked_count = true: its normalizer counts masked "
        "groups. beta .1 on GSM8K, .001 on DeepScaleR; epsilon and reduction not stated",
        reduction=piece(sequence_mean),
        beta=0.1,
        mask_zero_variance=True,
    ),
    "off_policy_grpo": Recipe(
        "f_eps(rho, 1, A) - beta k3, A normalized by the statistics of alpha's group",
        f"{MROUEH}, Eq. 7 with pi_k/alpha taken as 1 (end of section 3.2), unmasked as in its "
        "run v = 10, i = 1",
        reduction=piece(sequence_mean),
        beta=0.1,
    ),
    "off_policy_grpo_exact": Recipe(
        "f_eps(rho, pi_k/alpha, A) - beta k3, A normalized: the clip range is centered on pi_k",
        f"{MROUEH}, the clip of Eq. 6 and 7 on the ratio of each token; theirs is on the "
        "completion's (ratio = 'sequence' is the literal one)",
        surrogate=piece(clipped_exact),
        reduction=piece(sequence_mean),
        beta=0.1,
    ),
    "unclipped": Recipe(
        "s A, A normalized by the group itself; mean over completions: estimates L_alpha, less "
        "in small groups",
        f"{MROUEH}, Eq. 3. Unbiased for J(pi) - J(alpha) = sigma L_alpha with advantage = "
        "'leave_one_out'",
        surrogate=piece(unclipped, ratio=sequence),
        reduction=piece(sequence_mean),
    ),
    "stale_reinforce": Recipe(
        "A logp, A normalized: samples of alpha treated as if pi had sampled them",
        "what a trainer that takes rho = 1 computes when i = 1 and its samples are stale",
        surrogate=piece(reinforce),
        reduction=piece(sequence_mean),
    ),
    "grpo_trl": Recipe(
        "f_eps(rho, 1, A), A = (r - mu)/(s1 + 1e-4), s1 the deviation over G - 1; mean over the "
        "tokens of the batch",
        "TRL 1.16, GRPOTrainer's defaults: loss_type 'dapo', scale_rewards 'group', beta 0. Its "
        "loss_type 'grpo' is reduction sequence_mean; its KL term kl k3_bias_corrected",
        advantage=piece(normalized_unbiased),
    ),
    "grpo_two_sided": Recipe(
        "max(f_eps(rho, 1, A), 4 A) where A < 0, f_eps elsewhere, - beta k3, A normalized: a "
        "ratio above 4 is cut too",
        "INTELLECT-2, arXiv 2505.07291, section 4.1: delta 4, epsilon .2, beta .001; dual clip, "
        "Ye et al., arXiv 1912.09729. Reduction here: GRPO's",
        surrogate=piece(clipped, dual_clip=4.0),
        reduction=piece(sequence_mean),
        beta=0.001,
    ),
    "dr_grpo": Recipe(
        "f_eps(rho, 1, A), A centered; sum over tokens / (completions * tokens allowed)",
        "Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783 (no KL)",
        advantage=piece(centered),
        reduction=piece(constant_length),
    ),
    "dapo": Recipe(
        "1[s0 > 0] min(rho A, clip(rho, .8, 1.28) A), A normalized; mean over the tokens of the "
        "batch",
        "Yu et al., DAPO, arXiv 2503.14476 (no KL); its penalty for length: overlong_buffer (it "
        "took 4096 of 20480)",
        surrogate=piece(clipped, epsilon_low=0.2, epsilon_high=0.28),
        mask_zero_variance=True,
    ),
    "rloo": Recipe(
        "A log pi(y), A = r - mean of the others; mean over completions",
        "Ahmadian et al., Back to basics, arXiv 2402.14740 (its KL is part of the reward: here "
        "none)",
        advantage=piece(leave_one_out),
        surrogate=piece(reinforce),
        reduction=piece(sequence_sum),
    ),
    "gspo": Recipe(
        "f_eps(s^(1/length), 1, A), A normalized; mean over completions",
        "Zheng et al., GSPO, arXiv 2507.18071: epsilon 3e-4, 4e-4",
        surrogate=piece(clipped, **GSPO_RANGE),
        reduction=piece(sequence_mean),
    ),
    "geppo": Recipe(
        "min(rho A, clip(rho, c - epsilon_low, c + epsilon_high) A), c = pi_k/alpha, A "
        "normalized: f_eps, as rho >= 0",
        "Queeney et al., Generalized PPO, arXiv 2111.00072",
        surrogate=piece(clipped_exact),
        reduction=piece(sequence_mean),
    ),
    "clipped_proportional": Recipe(
        "min(rho A, clip(rho, c (1 - epsilon_low), c (1 + epsilon_high)) A), c = pi_k/alpha, A "
        "normalized",
        "after Meng et al., Off-policy PPO, AAAI 2023",
        surrogate=piece(clipped_proportional),
        reduction=piece(sequence_mean),
    ),
}

ENGINE_ROWS: dict[str, Recipe] = {
    "grpo_recomputed": Recipe(
        "f_eps(pi/pi_k, 1, A), A normalized: samples of alpha treated as if pi_k had sampled them",
        "what a trainer computes that recomputes the log-probs of its old policy and ignores "
        "the sampler's",
        surrogate=piece(clipped, denominator=pi_k),
        reduction=piece(sequence_mean),
    ),
    "grpo_tis": Recipe(
        "min(pi_k/alpha, C) f_eps(pi/pi_k, 1, A) of each token, C = 2, A normalized",
        f"{TIS}: C not stated, 2 is the default of verl and slime",
        surrogate=piece(clipped, denominator=pi_k),
        correction=piece(truncated, cap=2.0),
        reduction=piece(sequence_mean),
    ),
    "grpo_tis_sequence": Recipe(
        "min(pi_k(y)/alpha(y), C) f_eps(pi/pi_k, 1, A), C = 2, A normalized: one weight for "
        "each completion",
        f"{MIS}: C = 2 as for the tokens",
        surrogate=piece(clipped, denominator=pi_k),
        reduction=piece(sequence_mean),
        correction=piece(truncated, level=sequence, cap=2.0),
    ),
    "grpo_mis_sequence": Recipe(
        "w 1[w <= C] f_eps(pi/pi_k, 1, A), w = pi_k(y)/alpha(y), C = 2, A normalized: "
        "completions beyond C are dropped",
        f"{MIS}: C = 2 here, 3 is the default of TRL",
        surrogate=piece(clipped, denominator=pi_k),
        reduction=piece(sequence_mean),
        correction=piece(masked, level=sequence, cap=2.0),
    ),
    "grpo_icepop": Recipe(
        "w 1[.5 <= w <= 5] f_eps(pi/pi_k, 1, A), w = pi_k/alpha of a token, A normalized: "
        "tokens outside are dropped",
        "IcePop, in Ling Team, Ring-1T, arXiv 2510.18855: its range is a choice, verl and "
        "OpenRLHF take (.5, 5)",
        surrogate=piece(clipped, denominator=pi_k),
        reduction=piece(sequence_mean),
        correction=piece(masked, floor=0.5, cap=5.0),
    ),
}

WEIGHT_ROWS: dict[str, Recipe] = {
    "cispo": Recipe(
        "sg(min(rho, 1 + epsilon_high)) A logp, A normalized; mean over the tokens of the batch",
        "MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5: no lower cap; the upper one is not stated",
        surrogate=piece(reinforce, weight=piece(capped_ratio, epsilon_high=4.0)),
    ),
    "topr": Recipe(
        "A logp where A > 0, sg(min(s, 1)) A logp elsewhere, A centered; mean over completions of "
        "the sums over their tokens",
        "Le Roux et al., Tapered off-policy REINFORCE, arXiv 2503.14286 (rewards +-1 there)",
        advantage=piece(centered),
        surrogate=piece(reinforce, weight=piece(tapered_ratio, ratio=sequence)),
        reduction=piece(sequence_sum),
    ),
}

REC_ROWS: dict[str, Recipe] = {
    "reinforce": Recipe(
        "A logp, A centered; mean over the tokens of the batch",
        YAO,
        advantage=piece(centered),
        surrogate=piece(reinforce),
    ),
    "rec_grpo": Recipe(
        "M sg(rho) A logp, M = one side (.2, .2), A normalized: the gradient of f_eps(rho, 1, A)",
        f"{YAO}: GRPO as a member of the family",
        surrogate=piece(reinforce, mask=one_side, weight=importance),
    ),
    "rec_one_side_is": _rec(one_side, importance),
    "rec_one_side_is_wide": _rec(
        one_side, importance, "(.6, 2)", epsilon_low=0.6, epsilon_high=2.0
    ),
    "rec_one_side_nois": _rec(one_side, None),
    "rec_one_side_nois_wide": _rec(one_side, None, "(.6, 2)", epsilon_low=0.6, epsilon_high=2.0),
    "rec_two_side_is": _rec(two_side, importance),
    "rec_two_side_nois": _rec(two_side, None),
    "rec_ring_is": _rec(ring, importance, "(.2, .2; .6, 2)"),
    "rec_ring_nois": _rec(ring, None, "(.2, .2; .6, 2)"),
    "rec_gspo_is": Recipe(
        "M sg(s^(1/length)) A logp, M = one side (3e-4, 4e-4), A centered: the gradient of "
        "gspo, A centered",
        f"{YAO}, with the ratio of GSPO (arXiv 2507.18071)",
        advantage=piece(centered),
        reduction=piece(sequence_mean),
        surrogate=piece(
            reinforce,
            mask=piece(one_side, **GSPO_RANGE),
            weight=piece(importance, ratio=length_normalized),
        ),
    ),
    "rec_gspo_nois": Recipe(
        "M A logp, M = one side of s^(1/length) (3e-4, 4e-4), A centered; mean over completions "
        "of their token means",
        f"{YAO}, with the ratio of GSPO (arXiv 2507.18071)",
        advantage=piece(centered),
        surrogate=piece(reinforce, mask=piece(one_side, **GSPO_RANGE)),
        reduction=piece(sequence_mean),
    ),
    "asymre": Recipe(
        "(A + .1) logp, A centered: the baseline is mu - .1; mean over the tokens of the batch",
        f"Arnal et al., AsymRE, arXiv 2506.20520; {YAO}",
        advantage=piece(centered),
        surrogate=piece(reinforce, regularizer=asymre),
    ),
    "opmd": Recipe(
        "A logp - .1 (logp - rollout_logp)^2, A centered; mean over the tokens of the batch",
        f"{YAO}: OPMD in its practical form. DRO of verl and Tinker is the same with strength = "
        "beta / 2, verl's with the anchor pi_k",
        advantage=piece(centered),
        surrogate=piece(reinforce, regularizer=opmd),
    ),
    "red_drop": Recipe(
        "A logp, A centered; random completions below the mean are dropped until at most half "
        "are below it; mean over the tokens of the batch",
        f"{YAO}: RED-Drop",
        advantage=piece(red_drop),
        surrogate=piece(reinforce),
    ),
    "red_weight": Recipe(
        "exp(A) A logp, A centered; mean over the tokens of the batch",
        f"{YAO}: RED-Weight",
        advantage=piece(centered),
        surrogate=piece(reinforce, weight=exp_advantage),
    ),
}

REGRESSION_ROWS: dict[str, Recipe] = {
    "opmd_kimi": Recipe(
        "- (r - tau log Z - tau log pi(y)/pi_ref(y))^2, tau log Z = tau log mean e^(r/tau), tau "
        "= .1",
        f"Kimi k1.5, arXiv 2501.12599; {YAO}",
        advantage=piece(log_mean_exp),
        surrogate=piece(opmd_kimi, anchor=pi_ref),
        reduction=piece(sequence_sum),
    ),
    "opmd_pairwise": Recipe(
        "- sum_{i<j} (a_i - a_j)^2 / G^2, a = r - tau log pi(y)/pi_k(y), tau = .1",
        YAO,
        advantage=piece(centered),
        surrogate=piece(opmd_pairwise, anchor=pi_k),
        reduction=piece(sequence_sum),
    ),
    "oapl": Recipe(
        "- (r - V - b2 log pi(y)/alpha(y))^2, V = b1 log mean e^(r/b1), b1 = 1, b2 = 1e-3",
        "OAPL, arXiv 2602.19362, which syncs every 50 updates and clips the gradient's norm at "
        "1e-3",
        advantage=piece(log_mean_exp, strength=1.0),
        surrogate=piece(opmd_kimi, strength=1e-3),
        reduction=piece(sequence_sum),
    ),
    "tba": Recipe(
        "- sum_{i<j} (a_i - a_j)^2 / G^2, a = r - tau log pi(y)/pi_ref(y), tau = .05",
        "TBA, arXiv 2503.18929: the trajectory balance of VarGrad, opmd_pairwise with another "
        "anchor. tau is a choice; refresh pi_ref with schedule.ref_sync_every",
        advantage=piece(centered),
        surrogate=piece(opmd_pairwise, anchor=pi_ref, strength=0.05),
        reduction=piece(sequence_sum),
    ),
    "online_dpo": Recipe(
        "log sigmoid(.1 h), h = log pi/pi_ref of a group's best completion - that of its worst; "
        "mean over groups",
        "DPO, arXiv 2305.18290, Eq. 7, on pairs from the group; beta .1",
        advantage=piece(centered),
        surrogate=piece(online_dpo),
        reduction=piece(sequence_sum),
    ),
    "online_ipo": Recipe(
        "- (h - 1/(2 tau))^2, h as in online_dpo, tau = .1; mean over groups",
        "IPO, arXiv 2310.12036, Eq. 17, on pairs from the group",
        advantage=piece(centered),
        surrogate=piece(online_ipo),
        reduction=piece(sequence_sum),
    ),
}

PROBABILITY_ROWS: dict[str, Recipe] = {
    "dppo_tv": Recipe(
        "M sg(rho) A logp, M: pi - alpha <= .15 where A > 0, alpha - pi <= .15 where A < 0, A "
        "normalized; sum over tokens / (completions * tokens allowed)",
        f"{DPPO}: DPPO-TV with the numbers of verl's script; SkyRL and prime-rl take .2. verl "
        "compares with pi_k unless told otherwise, the paper with alpha",
        surrogate=piece(reinforce, mask=piece(tv), weight=importance),
        reduction=piece(constant_length),
    ),
    "dppo_kl": Recipe(
        "M sg(rho) A logp, M: KL of (this token, any other) from alpha to pi <= .05 nats on the "
        "side that A pushes to, A normalized; sum over tokens / (completions * tokens allowed)",
        f"{DPPO}: DPPO-KL with the numbers of verl's script",
        surrogate=piece(reinforce, mask=piece(binary_kl), weight=importance),
        reduction=piece(constant_length),
    ),
    "prime_rl": Recipe(
        "M sg(rho) A logp - .001 (logp - rollout_logp)^2, M = DPPO-TV with .2, A centered; mean "
        "over the tokens of the batch",
        f"prime-rl's default of August 2026, after {DPPO}; the squared log-ratio, on all tokens, "
        "is credited to Kimi K2.5, arXiv 2602.02276",
        advantage=piece(centered),
        surrogate=piece(
            reinforce,
            mask=piece(tv, delta_low=0.2, delta_high=0.2),
            weight=importance,
            regularizer=piece(opmd, strength=1e-3),
        ),
    ),
    "ipo_mask": Recipe(
        "M sg(rho) A logp - .001 (logp - rollout_logp)^2, M: |pi - alpha| <= .1 whatever the sign "
        "of A, A centered; mean over the tokens of the batch",
        "prime-rl's loss `ipo`, its default in March 2026; not the preference optimization of that "
        "name (online_ipo)",
        advantage=piece(centered),
        surrogate=piece(
            reinforce,
            mask=piece(tv_two_side),
            weight=importance,
            regularizer=piece(opmd, strength=1e-3),
        ),
    ),
}

STALE_ROWS: dict[str, Recipe] = {
    "rollout_is": Recipe(
        "M sg(rho) A logp, M = two side (.2, .2), A normalized; mean over the tokens of the batch",
        "GLM-5, arXiv 2602.15763: its range is not stated, .2 is SkyRL's default",
        surrogate=piece(reinforce, mask=piece(two_side), weight=importance),
    ),
    "decoupled_ppo": Recipe(
        "c min(q A, clip(q, 1 - epsilon_low, 1 + epsilon_high) A), q = pi/pi_k, c = pi_k/alpha, "
        "A normalized; mean over the tokens of the batch",
        "decoupled PPO, AReaL, arXiv 2505.24298; the clip acts from the second update on a "
        "batch on",
        surrogate=piece(clipped_proportional),
    ),
    "a3po": Recipe(
        "min(rho A, clip(rho, (1 - epsilon_low)^d, (1 + epsilon_high)^d) A), d = max(staleness, "
        "1), A normalized; mean over the tokens of the batch",
        "A-3PO, arXiv 2512.06547, with its full weight; AReaL leaves the factor pi_k/alpha out "
        "by default",
        surrogate=piece(clipped_by_staleness),
    ),
    "m2po": Recipe(
        "M rho A, M drops outward tokens with the largest (log rho)^2 of the step until their "
        "mean is at most .04, A normalized; mean over completions of their token means",
        "M2PO, arXiv 2510.01161, Algorithm 1: tau .04. Outward: A > 0, rho > 1 or A < 0, rho < 1",
        surrogate=piece(unclipped),
        filters=(piece(m2po),),
        reduction=piece(sequence_mean),
    ),
    "m2po_released": Recipe(
        "f_eps(rho, 1, A) with a range from the step's (log rho)^2, at least (.3, .5), A "
        "normalized; mean over the tokens of the batch",
        "the released code of M2PO, arXiv 2510.01161, which adapts a clip instead of dropping "
        "tokens; it takes the statistics of a micro-batch, lagrpo of the whole step",
        surrogate=piece(clipped_m2po_released),
    ),
    "bapo": Recipe(
        "min(rho A, clip(rho, l, h) A), l from .6 to .9, then h from 1.2 to 3, until the clipped "
        "gains of the step weigh as much as its losses, A normalized; mean over the tokens of the "
        "batch",
        "BAPO, arXiv 2510.18927: the ranges of its paper, steps of .05 and dual clip 3 of its "
        "released code; it takes the statistics of a micro-batch, lagrpo of the whole step",
        surrogate=piece(clipped_bapo),
    ),
    "gmpo": Recipe(
        "exp(mean log rho) A, log rho at most .4 where A > 0, at least -.4 where A < 0, A "
        "normalized; mean over completions",
        "GMPO, arXiv 2507.20673: the range (e^-.4, e^.4)",
        surrogate=piece(gmpo),
        reduction=piece(sequence_mean),
    ),
    "gepo": Recipe(
        "f_eps(w, 1, A), w = p sum(q) / sum(q^2) with p = pi(y)^(1/length), q = "
        "alpha(y)^(1/length) and sums over the group, A normalized; mean over completions",
        "GEPO, arXiv 2508.17850, as in its code; epsilon .2 is TRL's default",
        surrogate=piece(gepo),
        reduction=piece(sequence_mean),
    ),
    "sapo": Recipe(
        "4 rho p (1 - p) A logp, p = sigmoid(t (rho - 1)), t = 1 where A > 0, else 1.05, weight "
        "without gradient, A normalized; mean over completions of their token means",
        "SAPO, arXiv 2511.20347: the gradient of its soft clip",
        surrogate=piece(reinforce, weight=piece(sapo)),
        reduction=piece(sequence_mean),
    ),
    "vespo": Recipe(
        "sg(s^k e^(l (1 - s))) A logp, (k, l) = (2, 3) where A >= 0, else (3, 2), A normalized; "
        "mean over the tokens of the batch",
        "VESPO, arXiv 2602.10693, with the numbers of its code",
        surrogate=piece(reinforce, weight=piece(vespo)),
    ),
    "seq_tis": Recipe(
        "sg(min(s, 8)) A logp, A normalized; mean over completions of their token means",
        "the base of VCPO, arXiv 2602.17616: cap 8. Its learning rate: optimizer.scale_lr_by_ess",
        surrogate=piece(reinforce, weight=piece(capped_sequence)),
        reduction=piece(sequence_mean),
    ),
    "opsm": Recipe(
        "F f_eps(rho, 1, A), F drops completions with A < 0 whose mean log alpha/pi exceeds .5 "
        "nats, A normalized; mean over completions of their token means",
        "off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, Eq. 9, on GRPO without "
        "KL. Its delta is not published: slime takes 1e-4, TRL's help names .5",
        filters=(piece(opsm),),
        reduction=piece(sequence_mean),
    ),
    "trm": Recipe(
        "F f_eps(rho, 1, A), F drops completions with a token whose rho - log rho - 1 exceeds "
        ".05 nats, A normalized; mean over completions of their token means",
        "trust-region masking, arXiv 2512.23075, by verl's estimate from sampled tokens, on "
        "GRPO without KL. No delta is published",
        filters=(piece(seq_max_k3),),
        reduction=piece(sequence_mean),
    ),
    "carm": Recipe(
        "F f_eps(rho, 1, A), F drops completions whose mean |log rho| exceeds .1823 nats, A "
        "normalized; mean over completions of their token means",
        "CARM, arXiv 2610.02039, on GRPO without KL: log(1 + epsilon), epsilon .2 is a choice",
        filters=(piece(carm),),
        reduction=piece(sequence_mean),
    ),
    "positive_only": Recipe(
        "max(A, 0) logp, A normalized; mean over completions of their token means",
        "imitation of the better completions: a baseline that every comparison of stale losses "
        "needs",
        advantage=piece(normalized_positive),
        surrogate=piece(reinforce),
        reduction=piece(sequence_mean),
    ),
    "topr_token": Recipe(
        "A logp where A > 0, sg(min(rho, 1)) A logp elsewhere, A centered; mean over completions "
        "of the sums over their tokens",
        "topr with the ratio of each token instead of the completion's",
        advantage=piece(centered),
        surrogate=piece(reinforce, weight=piece(tapered_ratio, ratio=token)),
        reduction=piece(sequence_sum),
    ),
    "asymmetric_cap": Recipe(
        "sg(min(rho, c)) A logp, c without bound where A > 0, else 1, A normalized; mean over "
        "the tokens of the batch",
        "importance sampling of right completions, tapered for wrong ones",
        surrogate=piece(reinforce, weight=piece(asymmetric_cap)),
    ),
}

ADVANTAGE_ROWS: dict[str, Recipe] = {
    "maxrl": Recipe(
        "f_eps(rho, 1, A), A = (r - mu)/mu, 0 where mu <= 0; mean over the tokens of the batch",
        "the advantage of MaxRL, arXiv 2602.02710, under GRPO's clip",
        advantage=piece(maxrl),
    ),
    "sign_balance": Recipe(
        "f_eps(rho, 1, A), A = 1 above the mean reward of the group, -n+/n- below; mean over "
        "completions of their token means",
        "the advantage of SignBalance, arXiv 2609.04063, under GRPO's clip",
        advantage=piece(sign_balanced),
        reduction=piece(sequence_mean),
    ),
    "grpo_batch_scaled": Recipe(
        "f_eps(rho, 1, A), A = (r - mu)/(s + 1e-4), s the deviation of all rewards of the "
        "batch; mean over the tokens of the batch",
        "TRL's scale_rewards = 'batch', after Lite PPO, arXiv 2508.08221",
        advantage=piece(batch_scaled),
    ),
    "reinforce_pp_baseline": Recipe(
        "f_eps(rho, 1, A), A: r - mu, then centered and scaled over the tokens of the batch; "
        "mean over the tokens of the batch",
        "the variant of REINFORCE++ with a baseline, arXiv 2501.03262, without its KL term",
        advantage=piece(batch_whitened),
    ),
    "grpo_finished": Recipe(
        "F f_eps(rho, 1, A), F drops completions that were cut at their limit, A normalized; "
        "mean over completions of their token means",
        "TRL's mask_truncated_completions with loss_type 'grpo'. Its mean over tokens leaves out "
        "what it drops, ours does not",
        filters=(piece(finished_only),),
        reduction=piece(sequence_mean),
    ),
    "grpo_top_entropy": Recipe(
        "F f_eps(rho, 1, A), F keeps the fifth of the step's tokens with the highest entropy, A "
        "normalized; mean over the tokens of the batch",
        "Wang et al., Beyond the 80/20 rule, arXiv 2506.01939; TRL's top_entropy_quantile = .2",
        filters=(piece(top_entropy),),
    ),
}

DISTILLATION_ROWS: dict[str, Recipe] = {
    "opd": Recipe(
        "-d logp: no task reward, each token has its own d alone; mean over the tokens of the "
        "batch",
        "on-policy distillation as REINFORCE, verl's PG-OPD after Thinking Machines, On-policy "
        "distillation, 2025",
        advantage=piece(zero),
        token_advantage=piece(reverse_kl),
        surrogate=piece(reinforce),
    ),
    "opd_recomputed": Recipe(
        "-rho d: d with the policy that learns; mean over the tokens of the batch",
        f"{ASYNC_OPD}: its estimator with the recomputed advantage, one sample, no clip",
        advantage=piece(zero),
        token_advantage=piece(reverse_kl),
        surrogate=piece(unclipped),
    ),
    "opd_stale": Recipe(
        "-rho d, d = log alpha - log pi_ref as recorded; mean over the tokens of the batch",
        "tinker-cookbook's on-policy distillation with its loss importance_sampling; "
        f"under PPO's clip (surrogate = 'clipped') that of {ASYNC_OPD}, before it recomputes d",
        advantage=piece(zero),
        token_advantage=piece(reverse_kl, student=alpha),
        surrogate=piece(unclipped),
    ),
    "opd_forward": Recipe(
        "rho (pi_ref/pi - 1): estimates -grad KL(pi_ref, pi); mean over the tokens of the batch",
        f"the forward KL of {ASYNC_OPD}, estimated from the sampled tokens as the gradient of k3 "
        "weighted by rho; the paper samples from the teacher",
        advantage=piece(zero),
        token_advantage=piece(forward_kl),
        surrogate=piece(unclipped),
    ),
    "grpo_opd": Recipe(
        "f_eps(rho, 1, A - lambda d), A normalized, lambda = token_advantage.strength = 1; mean "
        "over completions of their token means",
        "slime's and Miles's --use-opd, which take d with pi_k: the same at the first update on a "
        "batch",
        token_advantage=piece(reverse_kl),
        reduction=piece(sequence_mean),
    ),
    "iw_opd": Recipe(
        "-(1 + .5 (1 - F)) d logp, d = log alpha - log pi_ref, F the share of the completion's "
        "|d| before the token; mean over the tokens of the batch",
        "IW-OPD, arXiv 2606.22600, Algorithm 1, as in TRL; the authors' code puts it under PPO's "
        "clip",
        advantage=piece(zero),
        token_advantage=piece(reverse_kl_by_drift),
        surrogate=piece(reinforce),
    ),
}

FAMILIES: dict[str, dict[str, Recipe]] = {
    "GRPO and its clips": GRPO_ROWS,
    "GRPO with another advantage or a filter": ADVANTAGE_ROWS,
    "importance weights without a clip": WEIGHT_ROWS,
    "methods for stale rollouts": STALE_ROWS,
    "bounds on the change of a probability": PROBABILITY_ROWS,
    "REC and RED of Yao et al.": REC_ROWS,
    "regressions and preferences": REGRESSION_ROWS,
    "corrections for another rollout engine": ENGINE_ROWS,
    "distillation from a teacher": DISTILLATION_ROWS,
}

RECIPES: dict[str, Recipe] = {
    name: replace(row, name=name, family=family)
    for family, rows in FAMILIES.items()
    for name, row in rows.items()
}
