"""The recipes: one table, whose rows hold the functions of core themselves. From a recipe's name it is one jump to its
row and one to the formula; `Recipe.loss` in objective.py calls them. `lagrpo recipes NAME` prints their source.

A function's keyword-only arguments are its knobs. A row replaces defaults with `partial` and says which numbers its
source leaves open. Section [loss] replaces any knob of the row by its name: a number, or another function's name.

>>> resolve("dapo", {"epsilon_high": 0.3}).settings["epsilon_high"]
0.3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from lagrpo.core.advantages import (
    centered,
    leave_one_out,
    log_mean_exp,
    normalized,
    normalized_unbiased,
    red_drop,
)
from lagrpo.core.corrections import masked, truncated
from lagrpo.core.kl import k1, k2, k3, k3_bias_corrected, k3_clamped, k3_linear
from lagrpo.core.losses import (
    alpha,
    asymre,
    capped_ratio,
    clipped,
    clipped_exact,
    clipped_proportional,
    exp_advantage,
    importance,
    one_side,
    opmd,
    opmd_kimi,
    opmd_pairwise,
    pi_k,
    pi_ref,
    reinforce,
    ring,
    tapered_ratio,
    two_side,
    unclipped,
)
from lagrpo.core.objective import NUMBERS, Recipe, build, find_knobs
from lagrpo.core.ratios import length_normalized, sequence, token
from lagrpo.core.reductions import constant_length, sequence_mean, sequence_sum, token_mean

SHAO = "Shao et al., DeepSeekMath, arXiv 2402.03300"
MROUEH = "Mroueh et al., Revisiting GRPO, arXiv 2505.22257"
YAO = "Yao et al., Group-relative REINFORCE is secretly off-policy, arXiv 2509.24203"
TIS = (
    "Yao, Liu et al., Your efficient RL framework secretly brings you off-policy RL training, 2025"
)
MIS = "Liu, Li et al., When speed kills stability: demystifying RL collapse from the training-inference mismatch, 2025"

SYMBOLS = """\
pi: policy; pi_k: pi at the start of the batch; alpha: the policy that sampled
rho = pi/alpha of a token, s of a completion y; logp = log pi; sg: no gradient
A: advantage; normalized (r - mu)/sigma, centered r - mu, with a group's rewards
f_eps(rho, c, A) = min(rho A, clip(rho, c - epsilon_low, c + epsilon_high) A)
M: 1 if the ratio is in a range, else 0; s0 > 0: the rewards of a group differ
k3: estimate of KL(pi, pi_ref), pi_ref being the KL reference"""

OF_GSPO: dict[str, Any] = {"ratio": length_normalized, "epsilon_low": 3e-4, "epsilon_high": 4e-4}


def _rec(
    mask: Callable, weight: Callable | None, ranges: str = "(.2, .2)", **numbers: float
) -> Recipe:
    """A member of REC with the ratio of tokens; without weight it leaves out importance sampling (NoIS)."""
    name = "".join(part.capitalize() for part in mask.__name__.split("_"))
    factor, kind = ("sg(rho) ", "IS") if weight else ("", "NoIS")
    return Recipe(
        f"M {factor}A logp, M = {mask.__name__.replace('_', ' ')} {ranges}, A centered",
        f"{YAO}: REC-{name}-{kind}",
        advantage=centered, surrogate=partial(reinforce, mask=partial(mask, **numbers), weight=weight))  # fmt: skip


ROWS: dict[str, Recipe] = {
    "grpo": Recipe(
        "f_eps(rho, 1, A) - beta k3, A normalized; mean over completions of their token means",
        f"{SHAO}, Eq. 3 and 4: beta .04, epsilon not stated. With v = 1, i = 1 it is on-policy: rho = 1",
        reduction=sequence_mean, beta=0.04),
    "grpo_masked": Recipe(
        "1[s0 > 0] (f_eps(rho, 1, A) - beta k3), A normalized: equal rewards leave surrogate, KL and normalizer",
        f"{MROUEH}, Eq. 8, literally with masked_count = true: its normalizer counts masked groups. beta .1 on GSM8K, "
        ".001 on DeepScaleR; epsilon and reduction not stated",
        reduction=sequence_mean, beta=0.1, mask_zero_variance=True),
    "off_policy_grpo": Recipe(
        "f_eps(rho, 1, A) - beta k3, A normalized by the statistics of alpha's group",
        f"{MROUEH}, Eq. 7 with pi_k/alpha taken as 1 (end of section 3.2), unmasked as in its run v = 10, i = 1",
        reduction=sequence_mean, beta=0.1),
    "off_policy_grpo_exact": Recipe(
        "f_eps(rho, pi_k/alpha, A) - beta k3, A normalized: the clip range is centered on pi_k",
        f"{MROUEH}, the clip of Eq. 6 and 7 on the ratio of each token; theirs is on the completion's (ratio = "
        "'sequence' is the literal one)",
        surrogate=clipped_exact, reduction=sequence_mean, beta=0.1),
    "unclipped": Recipe(
        "s A, A normalized by the group itself; mean over completions: estimates L_alpha, less in small groups",
        f"{MROUEH}, Eq. 3. Unbiased for J(pi) - J(alpha) = sigma L_alpha with advantage = 'leave_one_out'",
        surrogate=partial(unclipped, ratio=sequence), reduction=sequence_mean),
    "stale_reinforce": Recipe(
        "A logp, A normalized: samples of alpha treated as if pi had sampled them",
        "what a trainer that takes rho = 1 computes when i = 1 and its samples are stale",
        surrogate=reinforce, reduction=sequence_mean),
    "clipped_proportional": Recipe(
        "min(rho A, clip(rho, c (1 - epsilon_low), c (1 + epsilon_high)) A), c = pi_k/alpha, A normalized",
        "after Meng et al., Off-policy PPO, AAAI 2023",
        surrogate=clipped_proportional, reduction=sequence_mean),
    "geppo": Recipe(
        "min(rho A, clip(rho, c - epsilon_low, c + epsilon_high) A), c = pi_k/alpha, A normalized: f_eps, as rho >= 0",
        "Queeney et al., Generalized PPO, arXiv 2111.00072",
        surrogate=clipped_exact, reduction=sequence_mean),
    "grpo_recomputed": Recipe(
        "f_eps(pi/pi_k, 1, A), A normalized: samples of alpha treated as if pi_k had sampled them",
        "what a trainer computes that recomputes the log-probs of its old policy and ignores the sampler's",
        surrogate=partial(clipped, denominator=pi_k), reduction=sequence_mean),
    "grpo_tis": Recipe(
        "min(pi_k/alpha, C) f_eps(pi/pi_k, 1, A) of each token, C = 2, A normalized",
        f"{TIS}: C not stated, 2 is the default of verl and slime",
        surrogate=partial(clipped, denominator=pi_k), correction=partial(truncated, correction_cap=2.0),
        reduction=sequence_mean),
    "grpo_tis_sequence": Recipe(
        "min(pi_k(y)/alpha(y), C) f_eps(pi/pi_k, 1, A), C = 2, A normalized: one weight for each completion",
        f"{MIS}: C = 2 as for the tokens",
        surrogate=partial(clipped, denominator=pi_k), reduction=sequence_mean,
        correction=partial(truncated, correction_level=sequence, correction_cap=2.0)),
    "grpo_mis_sequence": Recipe(
        "w 1[w <= C] f_eps(pi/pi_k, 1, A), w = pi_k(y)/alpha(y), C = 2, A normalized: completions beyond C are dropped",
        f"{MIS}: C = 2 here, 3 is the default of TRL",
        surrogate=partial(clipped, denominator=pi_k), reduction=sequence_mean,
        correction=partial(masked, correction_level=sequence, correction_cap=2.0)),
    "grpo_icepop": Recipe(
        "w 1[.5 <= w <= 5] f_eps(pi/pi_k, 1, A), w = pi_k/alpha of a token, A normalized: tokens outside are dropped",
        "IcePop, in Ling Team, Ring-1T, arXiv 2510.18855: its range is a choice, verl and OpenRLHF take (.5, 5)",
        surrogate=partial(clipped, denominator=pi_k), reduction=sequence_mean,
        correction=partial(masked, correction_floor=0.5, correction_cap=5.0)),
    "grpo_trl": Recipe(
        "f_eps(rho, 1, A), A = (r - mu)/(s1 + 1e-4), s1 the deviation over G - 1; mean over the tokens of the batch",
        "TRL 1.16, GRPOTrainer's defaults: loss_type 'dapo', scale_rewards 'group', beta 0. Its loss_type 'grpo' is "
        "reduction sequence_mean; its KL term kl k3_bias_corrected",
        advantage=normalized_unbiased),
    "grpo_two_sided": Recipe(
        "max(f_eps(rho, 1, A), 4 A) where A < 0, f_eps elsewhere, - beta k3, A normalized: a ratio above 4 is cut too",
        "INTELLECT-2, arXiv 2505.07291, section 4.1: delta 4, epsilon .2, beta .001; dual clip, Ye et al., arXiv "
        "1912.09729. Reduction here: GRPO's",
        surrogate=partial(clipped, dual_clip=4.0), reduction=sequence_mean, beta=0.001),
    "dr_grpo": Recipe(
        "f_eps(rho, 1, A), A centered; sum over tokens / (completions * tokens allowed)",
        "Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783 (no KL)",
        advantage=centered, reduction=constant_length),
    "dapo": Recipe(
        "1[s0 > 0] min(rho A, clip(rho, .8, 1.28) A), A normalized; mean over the tokens of the batch",
        "Yu et al., DAPO, arXiv 2503.14476 (no KL); its penalty for length: overlong_buffer (it took 4096 of 20480)",
        surrogate=partial(clipped, epsilon_low=0.2, epsilon_high=0.28), mask_zero_variance=True),
    "rloo": Recipe(
        "A log pi(y), A = r - mean of the others; mean over completions",
        "Ahmadian et al., Back to basics, arXiv 2402.14740 (its KL is part of the reward: here none)",
        advantage=leave_one_out, surrogate=reinforce, reduction=sequence_sum),
    "gspo": Recipe(
        "f_eps(s^(1/length), 1, A), A normalized; mean over completions",
        "Zheng et al., GSPO, arXiv 2507.18071: epsilon 3e-4, 4e-4",
        surrogate=partial(clipped, **OF_GSPO), reduction=sequence_mean),
    "cispo": Recipe(
        "sg(min(rho, 1 + epsilon_high)) A logp, A normalized; mean over the tokens of the batch",
        "MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5: no lower cap; the upper one is not stated",
        surrogate=partial(reinforce, weight=partial(capped_ratio, epsilon_high=4.0))),
    "topr": Recipe(
        "A logp where A > 0, sg(min(s, 1)) A logp elsewhere, A centered; mean over completions",
        "Le Roux et al., Tapered off-policy REINFORCE, arXiv 2503.14286 (rewards +-1 there)",
        advantage=centered, surrogate=partial(reinforce, weight=partial(tapered_ratio, ratio=sequence)),
        reduction=sequence_sum),
    "reinforce": Recipe(
        "A logp, A centered; mean over the tokens of the batch", YAO, advantage=centered, surrogate=reinforce),
    "rec_grpo": Recipe(
        "M sg(rho) A logp, M = one side (.2, .2), A normalized: the gradient of f_eps(rho, 1, A)",
        f"{YAO}: GRPO as a member of the family",
        surrogate=partial(reinforce, mask=one_side, weight=importance)),
    "rec_one_side_is": _rec(one_side, importance),
    "rec_one_side_is_wide": _rec(one_side, importance, "(.6, 2)", epsilon_low=0.6, epsilon_high=2.0),
    "rec_one_side_nois": _rec(one_side, None),
    "rec_one_side_nois_wide": _rec(one_side, None, "(.6, 2)", epsilon_low=0.6, epsilon_high=2.0),
    "rec_two_side_is": _rec(two_side, importance),
    "rec_two_side_nois": _rec(two_side, None),
    "rec_ring_is": _rec(ring, importance, "(.2, .2; .6, 2)"),
    "rec_ring_nois": _rec(ring, None, "(.2, .2; .6, 2)"),
    "rec_gspo_is": Recipe(
        "M sg(s^(1/length)) A logp, M = one side (3e-4, 4e-4), A centered: the gradient of gspo, A centered",
        f"{YAO}, with the ratio of GSPO (arXiv 2507.18071)",
        advantage=centered, reduction=sequence_mean,
        surrogate=partial(reinforce, mask=partial(one_side, **OF_GSPO),
                          weight=partial(importance, ratio=length_normalized))),
    "rec_gspo_nois": Recipe(
        "M A logp, M = one side of s^(1/length) (3e-4, 4e-4), A centered",
        f"{YAO}, with the ratio of GSPO (arXiv 2507.18071)",
        advantage=centered, surrogate=partial(reinforce, mask=partial(one_side, **OF_GSPO)), reduction=sequence_mean),
    "asymre": Recipe(
        "(A + .1) logp, A centered: the baseline is mu - .1",
        f"Arnal et al., AsymRE, arXiv 2506.20520; {YAO}",
        advantage=centered, surrogate=partial(reinforce, regularizer=asymre)),
    "opmd": Recipe(
        "A logp - .1 (logp - logp_alpha)^2, A centered; mean over the tokens of the batch",
        f"{YAO}: OPMD in its practical form",
        advantage=centered, surrogate=partial(reinforce, regularizer=opmd)),
    "opmd_kimi": Recipe(
        "- (r - tau log Z - tau log pi(y)/pi_ref(y))^2, tau log Z = tau log mean e^(r/tau), tau = .1",
        f"Kimi k1.5, arXiv 2501.12599; {YAO}",
        advantage=log_mean_exp, surrogate=partial(opmd_kimi, anchor=pi_ref), reduction=sequence_sum),
    "opmd_pairwise": Recipe(
        "- sum_{i<j} (a_i - a_j)^2 / G^2, a = r - tau log pi(y)/pi_k(y), tau = .1",
        YAO,
        advantage=centered, surrogate=partial(opmd_pairwise, anchor=pi_k), reduction=sequence_sum),
    "red_drop": Recipe(
        "A logp, A centered; random completions below the mean are dropped until at most half are below it",
        f"{YAO}: RED-Drop",
        advantage=red_drop, surrogate=reinforce),
    "red_weight": Recipe(
        "exp(A) A logp, A centered", f"{YAO}: RED-Weight",
        advantage=centered, surrogate=partial(reinforce, weight=exp_advantage)),
}  # fmt: skip

RECIPES = {name: build(replace(row, name=name), {}) for name, row in ROWS.items()}

LEVELS = token, sequence, length_normalized
CHOICES: dict[str, dict[str, Callable | None]] = {
    knob: {getattr(function, "__name__", "none"): function for function in functions}
    for knob, functions in {
        "advantage": (
            normalized,
            normalized_unbiased,
            centered,
            leave_one_out,
            red_drop,
            log_mean_exp,
        ),
        "surrogate": (
            clipped,
            clipped_exact,
            clipped_proportional,
            unclipped,
            reinforce,
            opmd_kimi,
            opmd_pairwise,
        ),
        "ratio": LEVELS,
        "denominator": (alpha, pi_k),
        "mask": (None, one_side, two_side, ring),
        "weight": (None, importance, capped_ratio, tapered_ratio, exp_advantage),
        "regularizer": (None, asymre, opmd),
        "anchor": (alpha, pi_k, pi_ref),
        "correction": (None, truncated, masked),
        "correction_level": LEVELS,
        "kl": (k1, k2, k3, k3_clamped, k3_linear, k3_bias_corrected),
        "reduction": (token_mean, sequence_mean, sequence_sum, constant_length),
    }.items()
}
"""What a setting may name, for each knob that is a function."""

MINIMUM = {
    "beta": 0, "epsilon_low": 0, "epsilon_high": 0, "dual_clip": 1, "outer_low": 0, "outer_high": 0, "eps_std": 0,
    "std_offset": 0, "kl_bound": 0, "strength": 0, "weight_temperature": 1e-9, "overlong_buffer": 0,
    "correction_floor": 0, "correction_cap": 1,
}  # fmt: skip


def resolve(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe `name` with some knobs replaced: numbers, or functions by their names in CHOICES.

    Raises ValueError for an unknown name (with the nearest one), a number out of its domain, an override that nothing
    in the recipe reads, and functions that contradict each other."""
    row = _look_up("recipe", name, RECIPES)
    given = {knob: _read_value(knob, value) for knob, value in (overrides or {}).items()}
    recipe = build(row, given)
    knobs = find_knobs(recipe)
    if unread := [knob for knob in given if knob not in knobs]:
        known = ", ".join(f"{knob} = {value}" for knob, value in recipe.settings.items())
        raise ValueError(f"{unread[0]} has no effect on recipe {name!r}; knobs that do: {known}")
    for knob, minimum in MINIMUM.items():
        if knob in knobs and not knobs[knob] >= minimum:
            raise ValueError(f"{knob} must be at least {minimum:g}, but is {knobs[knob]}")
    for problem in _contradictions(knobs):
        raise ValueError(problem)
    return recipe


def _look_up(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    near = "".join(f"; did you mean {each!r}?" for each in get_close_matches(name, table, n=1))
    raise ValueError(f"unknown {kind} {name!r}{near} (all: {', '.join(table)})")


def _read_value(knob: str, value: Any) -> Any:
    """The number of a knob, or its function, which settings name."""
    _look_up("setting", knob, dict.fromkeys([*NUMBERS, *CHOICES, *MINIMUM]))
    names = CHOICES.get(knob)
    if names and isinstance(value, str):
        return _look_up(knob, value, names)
    if isinstance(value, int | float | list if names else str | list):
        raise ValueError(
            f"{knob} = {value!r}: write {f'one of {list(names)}' if names else 'a number'}"
        )
    return value


def _contradictions(knobs: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with these knobs of a recipe."""
    get, surrogate = knobs.get, knobs["surrogate"]
    over_alpha = get("denominator") is alpha and (
        surrogate is not reinforce or _reads_ratio(get("weight"))
    )
    if get("dual_clip", 1e9) < 1 + get("epsilon_high", 0.0):
        yield f"dual_clip must be at least 1 + epsilon_high, but is {knobs['dual_clip']}"
    if get("correction_floor", 0.0) > 1:
        yield f"correction_floor must lie in [0, 1], but is {knobs['correction_floor']}"
    if get("mask") is ring and any(
        knobs[f"outer_{end}"] < knobs[f"epsilon_{end}"] for end in ("low", "high")
    ):
        yield "mask 'ring' needs its outer range outside the inner one: outer_* must be at least epsilon_*"
    if surrogate in (clipped_exact, clipped_proportional) and get("denominator") is pi_k:
        yield f"{surrogate.__name__} clips around pi_k/alpha, which is 1 with denominator = 'pi_k': use 'clipped'"
    if get("correction") and over_alpha:
        yield "correction weights by pi_k/alpha, which the ratio already contains: set denominator = 'pi_k', or drop it"
    if get("correction") and surrogate is opmd_pairwise:
        yield "correction weights single completions, but opmd_pairwise compares the completions of a group: drop it"
    if knobs["kl_importance"] and get("kl") is k3_bias_corrected:
        yield "kl_importance would weight k3_bias_corrected by the ratio a second time: use one of them"
    if knobs["kl_importance"] and knobs["beta"] == 0:
        yield "kl_importance weights the KL term, but beta is 0, so there is no KL term"
    if knobs["masked_count"] and not knobs["mask_zero_variance"]:
        yield "masked_count counts masked groups, but mask_zero_variance is off, so no group is masked"
    if get("kl") is k1:
        yield "k1 is not a penalty: its expected gradient is 0 on fresh samples, and wrong on stale ones; use k2 or k3"


def _reads_ratio(function: Callable | None) -> bool:
    return function is not None and "ratio" in (function.__kwdefaults__ or {})
