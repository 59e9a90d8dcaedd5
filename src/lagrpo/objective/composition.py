"""The names and numbers that make an objective: the one list behind recipes, settings, --help and TOML files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from lagrpo.errors import find_nearest


def knob(default: Any, text: str, **bounds: float) -> Any:
    """A field with its help and its bounds (ge, gt, le)."""
    return field(default=default, metadata={"help": text, "bounds": bounds})


@dataclass(frozen=True, slots=True)
class Composition:
    """The pieces of an objective by name, and the numbers that they read. core/pieces.py has the tables of names."""

    advantage: str = knob(
        "normalized", "normalized, normalized_unbiased (TRL's), centered, leave_one_out, red_drop or log_mean_exp."
    )
    surrogate: str = knob(
        "clipped",
        "clipped (around 1), clipped_exact (around pi_k/alpha), clipped_proportional (around it, by a factor), "
        "unclipped, reinforce (M W A logp), opmd_kimi or opmd_pairwise.",
    )
    ratio: str = knob("token", "Level at which pi/alpha (or pi/pi_k) is taken: token, sequence or length_normalized.")
    denominator: str = knob("alpha", "The policy under that ratio: alpha, or pi_k (scored by the learner).")
    mask: str = knob("none", "M of reinforce, which tokens count: none, one_side, two_side or ring.")
    weight: str = knob(
        "one", "W of reinforce: one, ratio, capped_ratio (CISPO), tapered_ratio (TOPR) or exp_advantage (RED-Weight)."
    )
    regularizer: str = knob("none", "What reinforce subtracts: none, asymre or opmd.")
    anchor: str = knob("alpha", "The policy that OPMD stays near: alpha, pi_k or pi_ref.")
    correction: str = knob(
        "none",
        "For a ratio over pi_k: weigh the surrogate by pi_k/alpha, truncated (TIS) or masked (MIS, IcePop), or none.",
    )
    correction_level: str = knob("token", "Level of the correction's pi_k/alpha: token, sequence or length_normalized.")
    reduction: str = knob(
        "token_mean", "From tokens to the loss: token_mean, sequence_mean, sequence_sum or constant_length."
    )
    kl: str = knob(
        "k3",
        "Estimator of KL(pi || pi_ref), where beta > 0: k1, k2, k3, k3_clamped, k3_linear, k3_bias_corrected (TRL's).",
    )
    kl_importance: bool = knob(False, "Weight the KL estimate by pi/alpha of each token, as for samples of pi.")
    beta: float = knob(0.0, "Weight of KL(pi || pi_ref); 0 keeps no reference.", ge=0)
    epsilon_low: float = knob(0.2, "Lower clip range.", ge=0)
    epsilon_high: float = knob(0.2, "Upper clip range.", ge=0)
    dual_clip: float = knob(inf, "Greatest ratio at which a token with A < 0 is pushed down (TRL's delta).", ge=1)
    outer_low: float = knob(0.6, "Outer lower range of the mask ring.", ge=0)
    outer_high: float = knob(2.0, "Outer upper range of the mask ring.", ge=0)
    correction_floor: float = knob(
        0.0, "Least pi_k/alpha of a correction: truncated raises lower ones to it, masked drops them.", ge=0, le=1
    )
    correction_cap: float = knob(
        2.0, "Greatest pi_k/alpha of a correction: truncated lowers higher ones to it, masked drops them.", ge=1
    )
    eps_std: float = knob(1e-4, "Variance floor under the root of sigma, in the normalized advantage.", ge=0)
    std_offset: float = knob(1e-4, "Added to the deviation in the advantage normalized_unbiased.", ge=0)
    kl_bound: float = knob(10.0, "Greatest value of k3_clamped, steepest slope of k3_linear.", ge=0)
    strength: float = knob(0.1, "Strength of asymre and opmd; temperature of log_mean_exp (the papers' tau).", ge=0)
    weight_temperature: float = knob(1.0, "Temperature of exp_advantage.", gt=0)
    overlong_buffer: int = knob(
        0, "Tokens before the limit over which DAPO's penalty for length falls from 0 to -1; 0: no penalty.", ge=0
    )
    mask_zero_variance: bool = knob(False, "Leave groups whose rewards are all equal out of the objective (Eq. 8).")
    masked_count: bool = knob(False, "Count the completions of masked groups in the normalizer.")


def check_known(kind: str, name: str, names: Iterable[str]) -> str:
    """`name`, if it is one of `names`. Raises ValueError with the nearest one otherwise."""
    names = list(names)
    if name in names:
        return name
    raise ValueError(f"unknown {kind} {name!r}; the nearest is {find_nearest(name, names)!r} (all: {', '.join(names)})")


def check_composition(made: Composition, overrides: Mapping[str, Any], readers: Mapping[str, set[str]]) -> None:
    """Raises ValueError for a number out of its domain (NaN lies in none), an override that nothing in the composition
    reads, and pieces that contradict each other. `readers` says of each name and number which tables' pieces read it.
    """
    _check_numbers(made)
    _check_overrides(made, overrides, readers)
    # a mask keeps or drops, and a correction leaves the KL term alone: only what weighs could count pi/alpha twice
    weighing = readers.get("ratio", set()) - {"mask", "kl"}
    for message in _contradictions(made, " and ".join(sorted(weighing))):
        raise ValueError(message)


def _check_numbers(made: Composition) -> None:
    if not made.dual_clip >= 1 + made.epsilon_high:
        raise ValueError(
            "dual_clip is a ratio beyond the clip range: at least 1 + epsilon_high = "
            f"{1 + made.epsilon_high:g}, but is {made.dual_clip}"
        )
    if not 0 <= made.correction_floor <= 1 <= made.correction_cap:
        raise ValueError(
            "correction_floor must lie in [0, 1] and correction_cap be at least 1, as pi_k/alpha is 1 where nothing is "
            f"to be corrected, but they are {made.correction_floor} and {made.correction_cap}"
        )
    if made.mask == "ring" and (made.outer_low < made.epsilon_low or made.outer_high < made.epsilon_high):
        raise ValueError("the outer range of the ring must lie outside its inner one: outer_* at least epsilon_*")
    for each in fields(made):
        value, bounds = getattr(made, each.name), each.metadata["bounds"]
        if "ge" in bounds and not value >= bounds["ge"]:
            raise ValueError(f"{each.name} must be at least {bounds['ge']}, but is {value}")
        if "gt" in bounds and not value > bounds["gt"]:
            raise ValueError(f"{each.name} must be greater than {bounds['gt']}, but is {value}")


def _check_overrides(made: Composition, overrides: Mapping[str, Any], readers: Mapping[str, set[str]]) -> None:
    always_read = {"beta", "kl_importance", "overlong_buffer", "mask_zero_variance", "masked_count"}
    for name in overrides:
        if name == "kl" and made.beta == 0:
            raise ValueError("kl names the estimator of the KL term, but beta is 0: there is no KL term")
        if name not in readers.keys() | always_read:
            raise ValueError(
                f"{name} was set, but nothing reads it: surrogate {made.surrogate!r} with mask {made.mask!r}, weight "
                f"{made.weight!r}, regularizer {made.regularizer!r}, correction {made.correction!r}, and advantage "
                f"{made.advantage!r}"
            )


def _contradictions(made: Composition, weighing: str) -> Iterator[str]:
    if made.surrogate in ("clipped_exact", "clipped_proportional") and made.denominator == "pi_k":
        yield (
            f"surrogate {made.surrogate!r} centers its range on pi_k/alpha; over denominator 'pi_k' that center is 1, "
            "which is surrogate 'clipped'"
        )
    if made.correction != "none" and made.denominator == "alpha" and weighing:
        yield (
            f"correction {made.correction!r} weighs by pi_k/alpha, which pi/alpha in the {weighing} already holds: it "
            "would count twice; set denominator = 'pi_k', or correction = 'none'"
        )
    if made.correction != "none" and made.surrogate == "opmd_pairwise":
        yield (
            "a correction weighs completions one by one, but 'opmd_pairwise' compares them within a group; it needs "
            "none: its argument holds whoever sampled the group"
        )
    if made.kl_importance and made.kl == "k3_bias_corrected":
        yield "k3_bias_corrected is weighted by the ratio already, and kl_importance would count it twice: use one"
    if made.kl_importance and made.beta == 0:
        yield "kl_importance weighs the KL term, but beta is 0: there is no KL term"
    if made.masked_count and not made.mask_zero_variance:
        yield "masked_count says how masked groups are counted, but mask_zero_variance is off: none is masked"
    if made.kl == "k1" and made.beta > 0:
        yield (
            "k1 = logp - logp_ref is no penalty: its gradient is grad logp, which is 0 in expectation and pushes away "
            "from the samples when they are stale; use k2 (gradient of KL(pi || pi_ref)) or k3"
        )
