"""The presets: one table. A row is a composition of pieces of core (see objective/compose.py), its formula and source.
A new method is a new row, or an existing row with overrides in a settings file:

>>> resolve("grpo", {"epsilon_high": 0.28}).composition.epsilon_high
0.28

Where a source leaves a number open the row says so. A = (r - mu)/sigma is written `normalized`, r - mu `centered`; rho
is pi/alpha of a token, s of a sequence; sg stops the gradient. Importing this module loads no torch; `resolve` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lagrpo.objective.compose import Preset, Recipe, compose
from lagrpo.objective.composition import Composition, check_known

__all__ = ["PRESETS", "Composition", "Preset", "Recipe", "resolve"]


def resolve(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The preset `name`, with some of its pieces or numbers replaced. Raises ValueError for an unknown name (with the
    nearest one), and where `compose` does."""
    return compose(name, PRESETS[check_known("recipe", name, PRESETS)], overrides or {})


SHAO = "Shao et al., DeepSeekMath, arXiv 2402.03300"
MROUEH = "Mroueh et al., Revisiting GRPO, arXiv 2505.22257"
YAO = "Yao et al., Group-relative REINFORCE is secretly off-policy, arXiv 2509.24203"
TIS = "Yao, Liu et al., Your efficient RL framework secretly brings you off-policy RL training, 2025"
MIS = "Liu, Li et al., When speed kills stability: demystifying RL collapse from the training-inference mismatch, 2025"

GRPO = Composition(reduction="sequence_mean", beta=0.04)
OFF_POLICY = replace(GRPO, beta=0.1)
RECOMPUTED = replace(GRPO, denominator="pi_k", beta=0.0)
REINFORCE = Composition(advantage="centered", surrogate="reinforce")
GSPO = Composition(ratio="length_normalized", reduction="sequence_mean", epsilon_low=3e-4, epsilon_high=4e-4)
WIDE: dict[str, Any] = {"epsilon_low": 0.6, "epsilon_high": 2.0}


def _rec(mask: str, weight: str = "one", ranges: str = "(.2, .2)", **numbers: Any) -> Preset:
    """A member of REC with the ratio of tokens: `one` leaves out importance sampling (NoIS)."""
    name = "".join(part.capitalize() for part in mask.split("_"))
    factor, kind = ("sg(rho) ", "IS") if weight == "ratio" else ("", "NoIS")
    formula = f"M {factor}A logp, M = {mask.replace('_', ' ')} {ranges}, A centered"
    return Preset(replace(REINFORCE, mask=mask, weight=weight, **numbers), formula, f"{YAO}: REC-{name}-{kind}")


PRESETS: dict[str, Preset] = {
    "grpo": Preset(GRPO,
        "f_eps(rho, 1, A) - beta k3, A normalized; mean over completions of their token means",
        f"{SHAO}, Eq. 3 and 4: beta .04, epsilon not stated. With v = 1, i = 1 it is on-policy: rho = 1"),
    "grpo_masked": Preset(replace(OFF_POLICY, mask_zero_variance=True),
        "1[s0 > 0] (f_eps(rho, 1, A) - beta k3), A normalized: equal rewards leave surrogate, KL and normalizer",
        f"{MROUEH}, Eq. 8, literally with masked_count = true: its normalizer counts masked groups. beta .1 on GSM8K, "
        ".001 on DeepScaleR; epsilon and reduction not stated"),
    "off_policy_grpo": Preset(OFF_POLICY,
        "f_eps(rho, 1, A) - beta k3, A normalized by the statistics of alpha's group",
        f"{MROUEH}, Eq. 7 with pi_k/alpha taken as 1 (end of section 3.2), unmasked as in its run v = 10, i = 1"),
    "off_policy_grpo_exact": Preset(replace(OFF_POLICY, surrogate="clipped_exact"),
        "f_eps(rho, pi_k/alpha, A) - beta k3, A normalized: the clip range is centered on pi_k",
        f"{MROUEH}, the clip of Eq. 6 and 7 on the ratio of each token; theirs is on the completion's (ratio = "
        "'sequence' is the literal one)"),
    "unclipped": Preset(Composition(surrogate="unclipped", ratio="sequence", reduction="sequence_mean"),
        "s A, A normalized by the group itself; mean over completions: estimates L_alpha, less in small groups",
        f"{MROUEH}, Eq. 3. Unbiased for J(pi) - J(alpha) = sigma L_alpha with advantage = 'leave_one_out'"),
    "stale_reinforce": Preset(replace(GRPO, surrogate="reinforce", beta=0.0),
        "A logp, A normalized: samples of alpha treated as if pi had sampled them",
        "what a trainer that takes rho = 1 computes when i = 1 and its samples are stale"),
    "clipped_proportional": Preset(replace(GRPO, surrogate="clipped_proportional", beta=0.0),
        "min(rho A, clip(rho, c (1 - epsilon_low), c (1 + epsilon_high)) A), c = pi_k/alpha, A normalized",
        "after Meng et al., Off-policy PPO, AAAI 2023"),
    "geppo": Preset(replace(GRPO, surrogate="clipped_exact", beta=0.0),
        "min(rho A, clip(rho, c - epsilon_low, c + epsilon_high) A), c = pi_k/alpha, A normalized: f_eps, as rho >= 0",
        "Queeney et al., Generalized PPO, arXiv 2111.00072"),
    "grpo_recomputed": Preset(RECOMPUTED,
        "f_eps(pi/pi_k, 1, A), A normalized: samples of alpha treated as if pi_k had sampled them",
        "what a trainer computes that recomputes the log-probs of its old policy and ignores the sampler's"),
    "grpo_tis": Preset(replace(RECOMPUTED, correction="truncated"),
        "min(pi_k/alpha, C) f_eps(pi/pi_k, 1, A) of each token, C = 2, A normalized",
        f"{TIS}: C not stated, 2 is the default of verl and slime"),
    "grpo_tis_sequence": Preset(replace(RECOMPUTED, correction="truncated", correction_level="sequence"),
        "min(pi_k(y)/alpha(y), C) f_eps(pi/pi_k, 1, A), C = 2, A normalized: one weight for each completion",
        f"{MIS}: C = 2 as for the tokens"),
    "grpo_mis_sequence": Preset(replace(RECOMPUTED, correction="masked", correction_level="sequence"),
        "w 1[w <= C] f_eps(pi/pi_k, 1, A), w = pi_k(y)/alpha(y), C = 2, A normalized: completions beyond C are dropped",
        f"{MIS}: C = 2 here, 3 is the default of TRL"),
    "grpo_icepop": Preset(replace(RECOMPUTED, correction="masked", correction_floor=0.5, correction_cap=5.0),
        "w 1[.5 <= w <= 5] f_eps(pi/pi_k, 1, A), w = pi_k/alpha of a token, A normalized: tokens outside are dropped",
        "IcePop, in Ling Team, Ring-1T, arXiv 2510.18855: its range is a choice, verl and OpenRLHF take (.5, 5)"),
    "grpo_trl": Preset(Composition(advantage="normalized_unbiased"),
        "f_eps(rho, 1, A), A = (r - mu)/(s1 + 1e-4), s1 the deviation over G - 1; mean over the tokens of the batch",
        "TRL 1.16, GRPOTrainer's defaults: loss_type 'dapo', scale_rewards 'group', beta 0. Its loss_type 'grpo' is "
        "reduction sequence_mean; its KL term kl k3_bias_corrected"),
    "grpo_two_sided": Preset(replace(GRPO, dual_clip=4.0, beta=0.001),
        "max(f_eps(rho, 1, A), 4 A) where A < 0, f_eps elsewhere, - beta k3, A normalized: a ratio above 4 is cut too",
        "INTELLECT-2, arXiv 2505.07291, section 4.1: delta 4, epsilon .2, beta .001; dual clip, Ye et al., arXiv "
        "1912.09729. Reduction here: GRPO's"),
    "dr_grpo": Preset(Composition(advantage="centered", reduction="constant_length"),
        "f_eps(rho, 1, A), A centered; sum over tokens / (completions * tokens allowed)",
        "Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783 (no KL)"),
    "dapo": Preset(Composition(epsilon_high=0.28, mask_zero_variance=True),
        "1[s0 > 0] min(rho A, clip(rho, .8, 1.28) A), A normalized; mean over the tokens of the batch",
        "Yu et al., DAPO, arXiv 2503.14476 (no KL); its penalty for length: overlong_buffer (it took 4096 of 20480)"),
    "rloo": Preset(Composition(advantage="leave_one_out", surrogate="reinforce", reduction="sequence_sum"),
        "A log pi(y), A = r - mean of the others; mean over completions",
        "Ahmadian et al., Back to basics, arXiv 2402.14740 (its KL is part of the reward: here none)"),
    "gspo": Preset(GSPO,
        "f_eps(s^(1/length), 1, A), A normalized; mean over completions",
        "Zheng et al., GSPO, arXiv 2507.18071: epsilon 3e-4, 4e-4"),
    "cispo": Preset(Composition(surrogate="reinforce", weight="capped_ratio", epsilon_high=4.0),
        "sg(min(rho, 1 + epsilon_high)) A logp, A normalized; mean over the tokens of the batch",
        "MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5: no lower cap; the upper one is not stated"),
    "topr": Preset(replace(REINFORCE, ratio="sequence", weight="tapered_ratio", reduction="sequence_sum"),
        "A logp where A > 0, sg(min(s, 1)) A logp elsewhere, A centered; mean over completions",
        "Le Roux et al., Tapered off-policy REINFORCE, arXiv 2503.14286 (rewards +-1 there)"),
    "reinforce": Preset(REINFORCE, "A logp, A centered; mean over the tokens of the batch", YAO),
    "rec_grpo": Preset(replace(REINFORCE, mask="one_side", advantage="normalized", weight="ratio"),
        "M sg(rho) A logp, M = one side (.2, .2), A normalized: the gradient of f_eps(rho, 1, A)",
        f"{YAO}: GRPO as a member of the family"),
    "rec_one_side_is": _rec("one_side", "ratio"),
    "rec_one_side_is_wide": _rec("one_side", "ratio", "(.6, 2)", **WIDE),
    "rec_one_side_nois": _rec("one_side"),
    "rec_one_side_nois_wide": _rec("one_side", ranges="(.6, 2)", **WIDE),
    "rec_two_side_is": _rec("two_side", "ratio"),
    "rec_two_side_nois": _rec("two_side"),
    "rec_ring_is": _rec("ring", "ratio", "(.2, .2; .6, 2)"),
    "rec_ring_nois": _rec("ring", ranges="(.2, .2; .6, 2)"),
    "rec_gspo_is": Preset(replace(GSPO, surrogate="reinforce", mask="one_side", weight="ratio", advantage="centered"),
        "M sg(s^(1/length)) A logp, M = one side (3e-4, 4e-4), A centered: the gradient of gspo, A centered",
        f"{YAO}, with the ratio of GSPO (arXiv 2507.18071)"),
    "rec_gspo_nois": Preset(replace(GSPO, surrogate="reinforce", mask="one_side", advantage="centered"),
        "M A logp, M = one side of s^(1/length) (3e-4, 4e-4), A centered",
        f"{YAO}, with the ratio of GSPO (arXiv 2507.18071)"),
    "asymre": Preset(replace(REINFORCE, regularizer="asymre"),
        "(A + .1) logp, A centered: the baseline is mu - .1",
        f"Arnal et al., AsymRE, arXiv 2506.20520; {YAO}"),
    "opmd": Preset(replace(REINFORCE, regularizer="opmd"),
        "A logp - .1 (logp - logp_alpha)^2, A centered; mean over the tokens of the batch",
        f"{YAO}: OPMD in its practical form"),
    "opmd_kimi": Preset(
        Composition(advantage="log_mean_exp", surrogate="opmd_kimi", anchor="pi_ref", reduction="sequence_sum"),
        "- (r - tau log Z - tau log pi(y)/pi_ref(y))^2, tau log Z = tau log mean e^(r/tau), tau = .1",
        f"Kimi k1.5, arXiv 2501.12599; {YAO}",
    ),
    "opmd_pairwise": Preset(
        Composition(advantage="centered", surrogate="opmd_pairwise", anchor="pi_k", reduction="sequence_sum"),
        "- sum_{i<j} (a_i - a_j)^2 / G^2, a = r - tau log pi(y)/pi_k(y), tau = .1",
        f"{YAO}",
    ),
    "red_drop": Preset(replace(REINFORCE, advantage="red_drop"),
        "A logp, A centered after dropping as many completions below the mean, at random, as are too many",
        f"{YAO}: RED-Drop"),
    "red_weight": Preset(replace(REINFORCE, weight="exp_advantage"), "exp(A) A logp, A centered", f"{YAO}: RED-Weight"),
}  # fmt: skip
