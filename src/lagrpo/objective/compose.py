"""From names to functions: how the pieces of core become the objective of a run.

A composition is names and numbers, as a settings file can say them. `compose` looks the names up, binds to each piece
what it reads, refuses what contradicts itself, and finds out which log-probs the result needs.

Importing this module loads neither torch nor core; `compose` does.
"""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ALIASES = {  # other names of pieces, which settings and recipes accept -> the name in the tables of core.pieces
    "whitened": "normalized",
    "whitened_unbiased": "normalized_unbiased",
    "centred": "centered",
    "length_normalised": "length_normalized",
}


@dataclass(frozen=True, slots=True)
class Composition:
    """The names of the pieces and the numbers they read."""

    advantage: str = "normalized"
    """normalized | normalized_unbiased (deviation over G - 1, as TRL has it) | centered | leave_one_out | red_drop |
    log_mean_exp"""
    surrogate: str = "clipped"
    """clipped (center 1) | clipped_exact (center pi_k/alpha) | clipped_proportional (that, by a factor) | unclipped |
    reinforce (M W A logp) | opmd_kimi | opmd_pairwise"""
    ratio: str = "token"
    """token | sequence | length_normalized: the level at which pi/alpha (or pi/pi_k) is taken"""
    denominator: str = "alpha"
    """alpha | pi_k: the policy under the ratio; with pi_k a clip measures how far pi has moved from it"""
    mask: str = "none"
    """M of reinforce, which tokens count: none | one_side | two_side | ring"""
    weight: str = "one"
    """W of reinforce: one | ratio | capped_ratio (CISPO) | tapered_ratio (TOPR) | exp_advantage (RED-Weight)"""
    regularizer: str = "none"
    """what is subtracted in reinforce: none | asymre | opmd"""
    anchor: str = "alpha"
    """the policy that OPMD stays near: alpha | pi_k | pi_ref"""
    correction: str = "none"
    """weight pi_k/alpha of the surrogate's value, where its ratio is not over alpha: none | truncated | masked"""
    correction_level: str = "token"
    """level at which the correction's pi_k/alpha is taken: token | sequence | length_normalized"""
    reduction: str = "token_mean"
    """token_mean | sequence_mean | sequence_sum | constant_length"""
    kl: str = "k3"
    """estimator of KL(pi || pi_ref) on the sampled tokens, read when beta > 0: k1 | k2 | k3 | k3_clamped | k3_linear |
    k3_bias_corrected (TRL's use_bias_correction_kl: rho k3, with the gradient of k2 weighted by rho)"""
    kl_importance: bool = False
    """weight the KL estimate by stop-gradient pi/alpha of each token, as for samples of pi"""
    beta: float = 0.0
    """weight of the KL term"""
    epsilon_low: float = 0.2
    """lower clip range"""
    epsilon_high: float = 0.2
    """upper clip range"""
    dual_clip: float = inf
    """greatest ratio at which a token with A < 0 is pushed down (TRL's delta, verl's clip_ratio_c); inf: none"""
    outer_low: float = 0.6
    """outer lower range of the ring mask"""
    outer_high: float = 2.0
    """outer upper range of the ring mask"""
    correction_floor: float = 0.0
    """least pi_k/alpha: truncated raises lower ones to it, masked drops them"""
    correction_cap: float = 2.0
    """greatest pi_k/alpha: truncated lowers higher ones to it, masked drops them"""
    eps_std: float = 1e-4
    """variance floor of the normalized advantage: sigma = sqrt(s0^2 + eps_std)"""
    std_offset: float = 1e-4
    """added to the deviation of normalized_unbiased: A = (r - mu)/(s1 + std_offset)"""
    kl_bound: float = 10.0
    """greatest value of k3_clamped, steepest slope of k3_linear"""
    strength: float = 0.1
    """strength of asymre and opmd, the temperature of log_mean_exp (the papers' tau)"""
    weight_temperature: float = 1.0
    """temperature of exp_advantage"""
    overlong_buffer: int = 0
    """tokens before the limit over which DAPO's penalty for length falls from 0 to -1; 0: no penalty"""
    mask_zero_variance: bool = False
    """leave groups whose rewards are all equal out of surrogate and KL (Eq. 8)"""
    masked_count: bool = False
    """count the completions of masked groups in the normalizer"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """An objective ready to use: the pieces as functions, what they read bound. `composition` says what it was made of.

    advantage(rewards_G, uniform_G) -> advantage_G    reduction(lengths_C, kept_C, counted_C, max_length) -> weight_C
    value, cut, kl: Terms -> [T], see core.loss       needs: names of the log-probs (and group_C) that they read"""

    name: str
    source: str
    formula: str
    composition: Composition
    advantage: Callable[..., Tensor]
    value: Callable[..., Tensor]
    cut: Callable[..., Tensor]
    kl: Callable[..., Tensor]
    reduction: Callable[..., Tensor]
    needs: frozenset[str]
    silent: bool
    """whether a completion with advantage 0 contributes nothing to the gradient, so that it need not be computed"""

    @property
    def beta(self) -> float:
        return self.composition.beta

    @property
    def mask_zero_variance(self) -> bool:
        return self.composition.mask_zero_variance

    @property
    def masked_count(self) -> bool:
        return self.composition.masked_count

    @property
    def needs_logp_alpha(self) -> bool:
        """Whether data must come with the log-probs of the policy that sampled it."""
        return "logp_alpha" in self.needs

    @property
    def needs_pi_k(self) -> bool:
        return "logp_k" in self.needs

    @property
    def needs_pi_ref(self) -> bool:
        return "logp_ref" in self.needs

    @property
    def needs_whole_groups(self) -> bool:
        """Whether a micro-batch must hold all completions of a group."""
        return "group_C" in self.needs

    def shaped(self, rewards_G: Tensor, lengths_G: Tensor, max_length: int) -> Tensor:
        """The rewards that the advantage is made of: with DAPO's penalty for length where the composition has one."""
        from lagrpo.core.advantages import overlong_penalty

        buffer = self.composition.overlong_buffer
        return rewards_G + overlong_penalty(lengths_G, max_length, buffer) if buffer else rewards_G

    def weights(self, lengths_C: Tensor, zero_variance_C: Tensor, max_length: int) -> Tensor:
        """The weight of each completion of the whole batch in the objective; 0 for those of masked groups."""
        kept_C = ~zero_variance_C if self.mask_zero_variance else zero_variance_C | True
        return self.reduction(lengths_C, kept_C, kept_C | self.masked_count, max_length)

    def loss(
        self,
        logp_T: Tensor,
        logp_alpha_T: Tensor | None,
        logp_k_T: Tensor | None,
        logp_ref_T: Tensor | None,
        advantage_C: Tensor,
        completion_T: Tensor,
        weight_C: Tensor,
        group_C: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and its additive diagnostics: `core.loss.objective_sum` with these pieces."""
        from lagrpo.core.loss import Terms, objective_sum

        terms = Terms(logp_T, logp_alpha_T, logp_k_T, logp_ref_T, completion_T, advantage_C, group_C)
        return objective_sum(terms, weight_C, value=self.value, cut=self.cut, kl=self.kl, beta=self.beta)


def compose(name: str, source: str, formula: str, base: Composition, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe of `base` with some names or numbers replaced.

    Raises ValueError for an unknown name (with the nearest one), a number out of its domain, and a composition that
    contradicts itself, among them an override that nothing in the composition would read."""
    from lagrpo.core import corrections, divergences, ratios
    from lagrpo.core.loss import no_kl

    for key in overrides:
        check_known("setting", key, [field.name for field in fields(Composition)])
    made = replace(base, **{key: _table_name(key, value) for key, value in overrides.items()})
    pieces = _Pieces(made)
    surrogate, clip = (pieces.bound(function, "surrogate") for function in pieces.named("surrogate"))
    advantage, correction, reduction = (pieces.read(table) for table in ("advantage", "correction", "reduction"))
    kl = pieces.read("kl") if made.beta > 0 else no_kl
    _refuse_bad_numbers(made)
    _refuse_contradictions(made, overrides, pieces.readers)

    def value(terms: Any) -> Tensor:
        return corrections.corrected(surrogate(terms), correction(terms))

    def cut(terms: Any) -> Tensor:
        return clip(terms) | (correction(terms) == 0)

    def weighted_kl(terms: Any) -> Tensor:
        return divergences.importance_weighted(kl(terms), ratios.token_ratio(terms.logp, terms.alpha))

    used_kl = weighted_kl if made.kl_importance else kl
    needs = _needs(lambda terms: (value(terms), cut(terms), used_kl(terms)))
    silent = _silent(lambda terms: surrogate(terms) - made.beta * used_kl(terms))
    return Recipe(name, source, formula, made, advantage, value, cut, used_kl, reduction, needs, silent)


class _Pieces:
    """The pieces that a composition names, each bound to what it reads. `readers` says of every name and number that
    was read the tables of the pieces that read it; "" is the recipe itself."""

    def __init__(self, made: Composition) -> None:
        from lagrpo.core.pieces import TABLES

        self.made, self.tables = made, TABLES
        self.readers: defaultdict[str, set[str]] = defaultdict(set)

    def named(self, table: str, reader: str = "") -> Any:
        """What the composition names in a table, not yet bound: a function, or the two of a surrogate."""
        self.readers[table].add(reader)
        return self.tables[table][check_known(table, getattr(self.made, table), self.tables[table])]

    def bound(self, function: Callable[..., Any], table: str) -> Callable[..., Any]:
        """A function of a table with its keyword-only parameters: the settings of those names."""
        parameters = inspect.signature(function).parameters.values()
        return partial(function, **{p.name: self.read(p.name, table) for p in parameters if p.kind is p.KEYWORD_ONLY})

    def read(self, knob: str, reader: str = "") -> Any:
        """What `reader` gets for a setting: a number, or the bound piece of the table of that name."""
        if knob in self.tables:
            return self.bound(self.named(knob, reader), knob)
        self.readers[knob].add(reader)
        return getattr(self.made, knob)


def _table_name(table: str, name: Any) -> Any:
    """The name of a piece in its table, from an alias."""
    from lagrpo.core.pieces import TABLES

    return ALIASES.get(name, name) if name not in TABLES.get(table, ()) else name


def check_known(kind: str, name: str, names: Iterable[str]) -> str:
    """`name`, if it is one of `names`. Raises ValueError with the nearest one otherwise."""
    names = list(names)
    if name in names:
        return name
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown {kind} {name!r}; the nearest is {nearest!r} (all: {', '.join(names)})")


def _needs(objective: Callable[[Any], Any]) -> frozenset[str]:
    """What an objective reads of the things that may be absent: found by leaving out one after the other."""
    import torch

    from lagrpo.core.loss import MissingError, Terms

    token, index = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    given: dict[str, Any] = {"logp_alpha": token, "logp_k": token, "logp_ref": token, "groups": index}
    needs = set()
    for absent in given:
        try:
            objective(Terms(logp=token, completion=index, advantages=token, **given | {absent: None}))
        except MissingError as missing:
            needs.add(missing.name)
    return frozenset(needs)


def _silent(objective: Callable[[Any], Tensor]) -> bool:
    """Whether the gradient is 0 where all advantages are: found by differentiating at policies that all differ."""
    import torch

    from lagrpo.core.loss import Terms

    logp = torch.tensor([-0.7, -1.3], requires_grad=True)
    others = {name: torch.tensor([-1.1, -0.4]) + shift for name, shift in _DISTINCT}
    pair = {"completion": torch.tensor([0, 1]), "groups": torch.zeros(2, dtype=torch.long)}
    terms = Terms(logp=logp, advantages=torch.zeros(2), **pair, **others)
    gradient = torch.autograd.grad(objective(terms).sum(), logp, allow_unused=True)[0]
    return gradient is None or not bool(gradient.any())


_DISTINCT = (("logp_alpha", 0.0), ("logp_k", 0.1), ("logp_ref", 0.3))


def _refuse_bad_numbers(made: Composition) -> None:
    for knob in (
        "beta",
        "epsilon_low",
        "epsilon_high",
        "eps_std",
        "std_offset",
        "kl_bound",
        "strength",
        "overlong_buffer",
    ):
        if not getattr(made, knob) >= 0:
            raise ValueError(f"{knob} must be at least 0, but is {getattr(made, knob)}")
    if not made.weight_temperature > 0:
        raise ValueError(f"weight_temperature must be greater than 0, but is {made.weight_temperature}")
    if not made.dual_clip >= 1 + made.epsilon_high:
        raise ValueError(
            "dual_clip is a ratio beyond the clip range: at least 1 + epsilon_high = "
            f"{1 + made.epsilon_high:g}, but is {made.dual_clip}"
        )
    if made.mask == "ring" and (made.outer_low < made.epsilon_low or made.outer_high < made.epsilon_high):
        raise ValueError("the outer range of the ring must lie outside its inner one: outer_* at least epsilon_*")
    if not 0 <= made.correction_floor <= 1 <= made.correction_cap:
        raise ValueError(
            "correction_floor must lie in [0, 1] and correction_cap be at least 1, as pi_k/alpha is 1 where nothing is "
            f"to be corrected, but they are {made.correction_floor} and {made.correction_cap}"
        )


def _refuse_contradictions(made: Composition, overrides: Mapping[str, Any], readers: Mapping[str, set[str]]) -> None:
    always_read = {"beta", "kl_importance", "overlong_buffer", "mask_zero_variance", "masked_count"}
    for knob in overrides:
        if knob == "kl" and made.beta == 0:
            raise ValueError("kl names the estimator of the KL term, but beta is 0: there is no KL term")
        if knob not in readers.keys() | always_read:
            raise ValueError(
                f"{knob} was set, but nothing reads it: surrogate {made.surrogate!r} with mask {made.mask!r}, weight "
                f"{made.weight!r}, regularizer {made.regularizer!r}, correction {made.correction!r}, and advantage "
                f"{made.advantage!r}"
            )
    if made.surrogate in ("clipped_exact", "clipped_proportional") and made.denominator == "pi_k":
        raise ValueError(
            f"surrogate {made.surrogate!r} centers its range on pi_k/alpha; over denominator 'pi_k' that center is 1, "
            "which is surrogate 'clipped'"
        )
    weighs = readers.get("ratio", set()) - {
        "mask",
        "kl",
    }  # a mask keeps or drops; a correction leaves the KL term alone
    if made.correction != "none" and made.denominator == "alpha" and weighs:
        raise ValueError(
            f"correction {made.correction!r} weighs by pi_k/alpha, which pi/alpha in the {' and '.join(sorted(weighs))}"
            " already holds: it would count twice; set denominator = 'pi_k', or correction = 'none'"
        )
    if made.correction != "none" and made.surrogate == "opmd_pairwise":
        raise ValueError(
            "a correction weighs completions one by one, but 'opmd_pairwise' compares those of a group; it needs none: "
            "its argument holds whoever sampled the group"
        )
    if made.kl_importance and made.kl == "k3_bias_corrected":
        raise ValueError(
            "k3_bias_corrected is weighted by the ratio already, and kl_importance would count it twice: use one"
        )
    if made.kl_importance and made.beta == 0:
        raise ValueError("kl_importance weighs the KL term, but beta is 0: there is no KL term")
    if made.masked_count and not made.mask_zero_variance:
        raise ValueError(
            "masked_count says how masked groups are counted, but mask_zero_variance is off: none is masked"
        )
    if made.beta > 0 and made.kl == "k1":
        raise ValueError(
            "k1 = logp - logp_ref is no penalty: its gradient is grad logp, which is 0 in expectation and pushes away "
            "from the samples when they are stale; use k2 (gradient of KL(pi || pi_ref)) or k3"
        )
