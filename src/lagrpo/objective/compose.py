"""From names to functions: how the pieces of core become the objective of a run.

`compose` looks the names of a composition up, binds to each piece what it reads, refuses what contradicts itself, and
finds out which log-probs the result needs. Importing this module loads neither torch nor core; `compose` does.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lagrpo.objective.composition import Composition, check_composition, check_known

if TYPE_CHECKING:
    from torch import Tensor

    from lagrpo.core.loss import Terms

ALIASES = {  # other names of pieces, which settings and recipes accept -> the name in the tables of core.pieces
    "whitened": "normalized",
    "whitened_unbiased": "normalized_unbiased",
    "centred": "centered",
    "length_normalised": "length_normalized",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """A row of the table: what it is made of, what that computes, and who says so."""

    composition: Composition
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Recipe(Preset):
    """An objective ready to use: the pieces as functions, what they read bound.

    advantage(rewards_G, uniform_G) -> advantage_G    reduction(lengths_C, kept_C, counted_C, max_length) -> weight_C
    value, cut, kl: Terms -> [T], see core.loss       needs: names of the log-probs (and group_C) that they read"""

    name: str
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
    def needs_logp_alpha(self) -> bool:
        """Whether data must come with the log-probs of the policy that sampled it."""
        return "logp_alpha" in self.needs

    @property
    def needs_pi_ref(self) -> bool:
        return "logp_ref" in self.needs

    @property
    def needs_whole_groups(self) -> bool:
        """Whether a micro-batch must hold all completions of a group."""
        return "group_C" in self.needs

    def advantages(self, rewards_G: Tensor, lengths_G: Tensor, max_length: int, uniform_G: Tensor) -> Tensor:
        """The advantages of a group, after DAPO's penalty for length where the composition has one. `lengths_G` counts
        sampled tokens, `uniform_G` holds one random number in [0, 1) for each completion."""
        from lagrpo.core.advantages import overlong_penalty

        if buffer := self.composition.overlong_buffer:
            rewards_G = rewards_G + overlong_penalty(lengths_G, max_length, buffer)
        return self.advantage(rewards_G, uniform_G)

    def weights(self, lengths_C: Tensor, zero_variance_C: Tensor, max_length: int) -> Tensor:
        """The weight of each completion of the whole batch in the objective; 0 in masked groups."""
        kept_C = ~zero_variance_C if self.mask_zero_variance else zero_variance_C | True
        return self.reduction(lengths_C, kept_C, kept_C | self.composition.masked_count, max_length)

    def loss(self, terms: Terms, weight_C: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and its additive diagnostics: `core.loss.objective_sum` with these pieces."""
        from lagrpo.core.loss import objective_sum

        return objective_sum(terms, weight_C, value=self.value, cut=self.cut, kl=self.kl, beta=self.beta)


def compose(name: str, preset: Preset, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe of a preset with some names or numbers replaced.

    Raises ValueError for an unknown name (with the nearest one), a number out of its domain, and a composition that
    contradicts itself, among them an override that nothing in the composition would read."""
    from lagrpo.core import corrections, divergences, ratios
    from lagrpo.core.loss import no_kl

    for key in overrides:
        check_known("setting", key, [field.name for field in fields(Composition)])
    made = replace(preset.composition, **{key: ALIASES.get(value, value) for key, value in overrides.items()})
    pieces = _Pieces(made)
    surrogate, clip = (pieces.bind(function, "surrogate") for function in pieces.find("surrogate"))
    advantage, correction, reduction = (pieces.read(table) for table in ("advantage", "correction", "reduction"))
    kl = pieces.read("kl") if made.beta > 0 else no_kl
    check_composition(made, overrides, pieces.readers)

    def value(terms: Terms) -> Tensor:
        return corrections.corrected(surrogate(terms), correction(terms))

    def cut(terms: Terms) -> Tensor:
        return clip(terms) | (correction(terms) == 0)

    def weighted_kl(terms: Terms) -> Tensor:
        return divergences.importance_weighted(kl(terms), ratios.token_ratio(terms.logp, terms.alpha))

    used_kl = weighted_kl if made.kl_importance else kl
    needs = _find_needs(lambda terms: (value(terms), cut(terms), used_kl(terms)))
    silent = _is_silent(lambda terms: surrogate(terms) - made.beta * used_kl(terms))
    about = made, preset.formula, preset.source, name
    return Recipe(*about, advantage, value, cut, used_kl, reduction, needs, silent)


class _Pieces:
    """The pieces that a composition names, each bound to what it reads. `readers` says of every name and number that
    was read the tables of the pieces that read it; "" is the recipe itself."""

    def __init__(self, made: Composition) -> None:
        from lagrpo.core.pieces import TABLES

        self.made, self.tables = made, TABLES
        self.readers: defaultdict[str, set[str]] = defaultdict(set)

    def find(self, table: str, reader: str = "") -> Any:
        """What the composition names in a table, not yet bound: a function, or the two of a surrogate."""
        self.readers[table].add(reader)
        return self.tables[table][check_known(table, getattr(self.made, table), self.tables[table])]

    def bind(self, function: Callable[..., Any], table: str) -> Callable[..., Any]:
        """A function of a table with its keyword-only parameters: the settings of those names."""
        parameters = inspect.signature(function).parameters.values()
        return partial(function, **{p.name: self.read(p.name, table) for p in parameters if p.kind is p.KEYWORD_ONLY})

    def read(self, knob: str, reader: str = "") -> Any:
        """What `reader` gets for a setting: a number, or the bound piece of the table of that name."""
        if knob in self.tables:
            return self.bind(self.find(knob, reader), knob)
        self.readers[knob].add(reader)
        return getattr(self.made, knob)


def _find_needs(objective: Callable[[Any], Any]) -> frozenset[str]:
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


def _is_silent(objective: Callable[[Any], Tensor]) -> bool:
    """Whether the gradient is 0 where all advantages are: found by differentiating at policies that all differ."""
    import torch

    from lagrpo.core.loss import Terms

    logp = torch.tensor([-0.7, -1.3], requires_grad=True)
    alpha, k, ref = (torch.tensor([-1.1, -0.4]) + shift for shift in (0.0, 0.1, 0.3))
    terms = Terms(logp, alpha, k, ref, torch.tensor([0, 1]), torch.zeros(2), groups=torch.zeros(2, dtype=torch.long))
    gradient = torch.autograd.grad(objective(terms).sum(), logp, allow_unused=True)[0]
    return gradient is None or not bool(gradient.any())
