"""An objective: functions of core, and what follows from them. core/recipes.py has the table of the published ones.

A function's keyword-only arguments are its knobs: numbers, or other functions. A recipe has them all bound by
`partial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.advantages import normalized, overlong_penalty, red_drop
from lagrpo.core.kl import k3
from lagrpo.core.losses import LossInputs, alpha, clipped, diagnostics, find_clipped
from lagrpo.core.ratios import token
from lagrpo.core.reductions import token_mean


@dataclass(frozen=True, slots=True)
class Recipe:
    """An objective: a row of the table.

    advantage   rewards [G] -> [G]                     reduction   lengths, counted [C], max_length -> weights [C]
    surrogate, kl   LossInputs -> [T]                  correction  LossInputs -> the weight of each value [T]
    """

    formula: str
    source: str
    advantage: Callable = normalized
    surrogate: Callable = clipped
    correction: Callable | None = None
    kl: Callable = k3
    reduction: Callable = token_mean
    beta: float = 0.0
    kl_importance: bool = False
    overlong_buffer: int = 0
    mask_zero_variance: bool = False
    masked_count: bool = False
    name: str = ""

    def advantages(
        self, rewards_G: Tensor, lengths_G: Tensor, max_length: int, uniform_G: Tensor
    ) -> Tensor:
        """The advantages of a group. `lengths_G` counts sampled tokens, at most `max_length`; `uniform_G` has a random
        number in [0, 1) for each completion."""
        if self.overlong_buffer:
            rewards_G = rewards_G + overlong_penalty(lengths_G, max_length, self.overlong_buffer)
        return (
            red_drop(rewards_G, uniform_G)
            if self.advantage is red_drop
            else self.advantage(rewards_G)
        )

    def weights(self, lengths_C: Tensor, zero_variance_C: Tensor, max_length: int) -> Tensor:
        """The weight of each completion of the whole batch in the objective; 0 in masked groups."""
        kept_C = ~zero_variance_C if self.mask_zero_variance else torch.ones_like(zero_variance_C)
        return kept_C * self.reduction(lengths_C, kept_C | self.masked_count, max_length)

    def value(self, x: LossInputs) -> Tensor:
        """The surrogate of each token, corrected."""
        value_T = self.surrogate(x)
        return self.correction(x) * value_T if self.correction else value_T

    def penalty(self, x: LossInputs) -> Tensor:
        """The estimate of KL(pi || pi_ref) at each token, 0 without a KL term."""
        if self.beta == 0:
            return torch.zeros_like(x.logp)
        weight_T = token(x.logp - alpha(x), x.completion).detach() if self.kl_importance else 1.0
        return weight_T * self.kl(x)

    def loss(self, x: LossInputs, weight_C: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """-sum_t weight (value - beta kl): a micro-batch's share of minus Eq. 7 of arXiv 2505.22257, of Eq. 8 if the
        weights mask groups. Backward on one micro-batch after the other gives the gradient of the batch. Second, the
        sums of `diagnostics`."""
        weight_T, value_T, kl_T = weight_C[x.completion], self.value(x), self.penalty(x)
        loss = -(weight_T * (value_T - self.beta * kl_T)).sum()
        clips = "zero_advantage" not in _reads(_functions(self.surrogate))
        clipped_T = (
            find_clipped(x, self.value)
            if clips
            else torch.zeros_like(x.completion, dtype=torch.bool)
        )
        return loss, diagnostics(x, weight_T * value_T, kl_T, clipped_T)

    @property
    def functions(self) -> list[Callable]:
        """The functions that compute it, each once."""
        pieces = (
            self.advantage,
            self.surrogate,
            self.correction,
            self.kl if self.beta > 0 else None,
            self.reduction,
        )
        return list(dict.fromkeys(f for piece in pieces for f in _functions(piece)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that make it, by name, functions by theirs."""
        return {knob: getattr(value, "__name__", value) for knob, value in find_knobs(self).items()}

    @property
    def reads(self) -> frozenset[str]:
        """What it reads of LossInputs, see `losses.reads`."""
        return _reads([*self.functions, *([alpha] if self.kl_importance else [])])

    @property
    def needs_logp_alpha(self) -> bool:
        """Whether data must come with the log-probs of the policy that sampled it."""
        return "rollout_logp" in self.reads

    @property
    def needs_pi_ref(self) -> bool:
        return "ref_logp" in self.reads

    @property
    def needs_whole_groups(self) -> bool:
        """Whether a micro-batch must hold all completions of a group."""
        return "group" in self.reads

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a completion with advantage 0 has no gradient, so that it need not be computed."""
        return "zero_advantage" not in self.reads

    @property
    def eps_std(self) -> float:
        """The variance floor of sigma, also for metrics of recipes that do not divide by it."""
        return self.settings.get("eps_std", 1e-4)


PIECES = "advantage", "surrogate", "correction", "kl", "reduction"
NUMBERS = "beta", "kl_importance", "overlong_buffer", "mask_zero_variance", "masked_count"


def _functions(piece: Callable | None) -> Iterator[Callable]:
    """The function of a piece and those among its knobs."""
    if isinstance(piece, partial):
        yield piece.func
        for value in piece.keywords.values():
            yield from _functions(value) if callable(value) else ()
    elif piece is not None:
        yield piece


def _reads(functions: Iterable[Callable]) -> frozenset[str]:
    return frozenset().union(*(getattr(f, "reads", ()) for f in functions))


def find_knobs(recipe: Recipe) -> dict[str, Any]:
    """The knobs that a recipe reads, with their values: functions and numbers."""
    found = {name: getattr(recipe, name) for name in NUMBERS}
    for name in PIECES:
        if name != "kl" or recipe.beta > 0:
            found |= _knobs_of(name, getattr(recipe, name))
    return found


def _knobs_of(name: str, piece: Any) -> dict[str, Any]:
    if not isinstance(piece, partial):
        return {name: piece}
    found: dict[str, Any] = {name: piece.func}
    for knob, value in piece.keywords.items():
        found |= _knobs_of(knob, value)
    return found


def _bind(function: Any, knobs: Mapping[str, Any]) -> Any:
    """A function with all of its knobs given, those that are functions bound likewise."""
    defaults = getattr(function, "__kwdefaults__", None) or {}
    given = {knob: _bind(knobs.get(knob, default), knobs) for knob, default in defaults.items()}
    return partial(function, **given) if given else function


def build(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe with these knobs replaced."""
    knobs = {name: getattr(recipe, name) for name in NUMBERS}
    for name in PIECES:
        knobs |= _knobs_of(name, getattr(recipe, name))
    knobs |= overrides
    return replace(
        recipe, **{p: _bind(knobs[p], knobs) for p in PIECES}, **{n: knobs[n] for n in NUMBERS}
    )
