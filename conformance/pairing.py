"""A row of the table: a peer's function, and the function of lagrpo that it is compared with.

`theirs` and `ours` get a case and the log-probs under pi [T], which require a gradient, and return
a tensor. That tensor and its gradient are compared. Both sides get the same advantages, unless the
advantages are what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypedDict

import torch
from cases import MAX_LENGTH, Case, G
from torch import Tensor

from lagrpo.core import kl as estimators
from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.inputs import LossInputs, without_gradient
from lagrpo.core.recipes import resolve

Side = Callable[[Case, Tensor], Tensor | tuple[Tensor, Tensor]]
"""Returns a tensor that PyTorch can differentiate, or (JAX) value and gradient."""

Knob = bool | float | str
Same = Literal["both", "gradient", "value", "neither"]


class Beta(TypedDict):
    """The knob of the KL term's weight."""

    beta: float


class Epsilons(TypedDict):
    """The knobs of a clip range."""

    epsilon_low: float
    epsilon_high: float


NO_BETA: Beta = {"beta": 0.0}
# Bounds of GSPO that are so wide that completions lie on both sides of the range.
WIDE: Epsilons = {"epsilon_low": 0.1, "epsilon_high": 0.15}


@dataclass(frozen=True)
class Pairing:
    """A row of the table."""

    peer: str
    function: str
    """The peer's function, with its options."""
    ours_is: str
    """The name of our function."""
    theirs: Side
    ours: Side
    same: Same = "both"
    """The parts that are expected to agree."""
    note: str = ""
    """The options that make them agree."""
    differs: str = ""
    """Where they differ, and who follows the paper."""


def ours(case: Case, logp: Tensor, name: str, **overrides: Knob) -> Tensor:
    """The loss of a recipe with its own advantages, weights and statistics of the step."""
    recipe = resolve(name, overrides)
    # float32 in lagrpo; all else in a case is float64.
    weight_C = recipe.weights(case.lengths, case.flat, MAX_LENGTH).double()
    inputs = loss_inputs(case, logp, advantages(case, name, overrides))
    # Some recipes read statistics of the whole step. A case is the whole step.
    inputs = replace(inputs, step=recipe.collect(without_gradient(inputs)))
    return recipe.loss(inputs, weight_C)


def loss_inputs(case: Case, logp: Tensor, advantages_C: Tensor) -> LossInputs:
    """All inputs that a loss may read."""
    return LossInputs(
        logp=logp,
        rollout_logp=case.alpha,
        old_logp=case.pi_k,
        ref_logp=case.ref,
        completion=case.completion,
        advantages=advantages_C,
        group=case.group,
        staleness=case.staleness,
        entropy=case.entropy,
        finished=case.finished,
    )


def advantages(
    case: Case,
    name: str,
    overrides: Mapping[str, Knob] | None = None,
    uniform: Tensor | None = None,
) -> Tensor:
    """The advantages of a recipe [C]. `uniform` [C]: RED-Drop's random numbers."""
    recipe = resolve(name, overrides)
    if uniform is None:
        # Distinct numbers in every group; only RED-Drop reads them.
        uniform = torch.linspace(0, 0.9, G, dtype=torch.float64).repeat(case.C // G)
    inputs = AdvantageInputs(case.rewards, case.group, case.lengths, uniform)
    return recipe.advantages(inputs, MAX_LENGTH)


def loss(
    peer: str,
    function: str,
    recipe: str,
    theirs: Callable[..., Tensor],
    *,
    note: str = "",
    differs: str = "",
    same: Same = "both",
    peer_settings: Mapping[str, object] | None = None,
    **overrides: Knob,
) -> Pairing:
    """A peer's loss on the advantages of our recipe, beside that recipe with these overrides.

    `peer_settings` are keyword arguments of `theirs`; a function among them gets the case and
    returns the argument.
    """

    def their_loss(case: Case, logp: Tensor) -> Tensor:
        arguments: dict[str, object] = {}
        for name, value in (peer_settings or {}).items():
            arguments[name] = value(case) if callable(value) else value
        return theirs(case, logp, advantages(case, recipe, overrides), **arguments)

    ours_is = f"`{recipe}`"
    if overrides:
        ours_is += " with " + _name_knobs(overrides)
    return Pairing(
        peer=peer,
        function=function,
        ours_is=ours_is,
        theirs=their_loss,
        ours=partial(ours, name=recipe, **overrides),
        same=same,
        note=note,
        differs=differs,
    )


def fresh(pairing: Pairing) -> Pairing:
    """The pairing on completions that pi has sampled: alpha and pi_k are pi."""

    def sample(case: Case, logp: Tensor) -> Case:
        return replace(case, alpha=logp.detach(), pi_k=logp.detach())

    return on_cases(pairing, "on fresh samples", sample)


def near_teacher(pairing: Pairing) -> Pairing:
    """The pairing with log-ratios of pi and pi_ref that are a quarter of the case's."""

    def approach(case: Case, logp: Tensor) -> Case:
        return replace(case, ref=logp.detach() + (case.ref - case.logp) / 4)

    return on_cases(pairing, "a teacher nearby", approach)


def on_cases(pairing: Pairing, words: str, change: Callable[[Case, Tensor], Case]) -> Pairing:
    """The pairing on changed cases; `words` say how they are changed."""

    def changed(side: Side) -> Side:
        return lambda case, logp: side(change(case, logp), logp)

    return replace(
        pairing,
        function=f"{pairing.function}, {words}",
        theirs=changed(pairing.theirs),
        ours=changed(pairing.ours),
    )


def expected(case: Case, logp: Tensor, name: str) -> Tensor:
    """The mean loss of a recipe if alpha samples from two tokens.

    Each token of the case is one of the two; the other one has the rest of the probability.
    """
    recipe = resolve(name)
    T = len(logp)
    loss = logp.new_zeros(())
    for outcome in (lambda part: part, other_token):
        alpha = outcome(case.alpha)
        inputs = LossInputs(
            logp=outcome(logp),
            rollout_logp=alpha,
            old_logp=outcome(case.pi_k),
            ref_logp=outcome(case.ref),
            completion=torch.arange(T),
            advantages=torch.zeros_like(alpha),
            group=torch.arange(T),
            staleness=case.staleness,
            entropy=case.entropy,
            finished=torch.ones(T, dtype=torch.bool),
        )
        loss = loss + recipe.loss(inputs, alpha.exp() / T)
    return loss


def other_token(logp: Tensor) -> Tensor:
    """The log-prob of all other tokens together."""
    return torch.log1p(-logp.exp())


def _name_knobs(knobs: Mapping[str, Knob]) -> str:
    return ", ".join(f"{knob} = {value!r}" for knob, value in knobs.items())


def advantage(
    peer: str,
    function: str,
    recipe: str,
    theirs: Callable[[Case], Tensor],
    *,
    note: str = "",
    differs: str = "",
    same: Same = "both",
    **overrides: Knob,
) -> Pairing:
    """A peer's advantages beside those of a recipe with these overrides."""
    ours_is = f"advantage of `{recipe}`"
    if overrides:
        ours_is += ", " + _name_knobs(overrides)
    return Pairing(
        peer=peer,
        function=function,
        ours_is=ours_is,
        theirs=lambda case, logp: theirs(case),
        ours=lambda case, logp: advantages(case, recipe, overrides),
        same=same,
        note=note,
        differs=differs,
    )


def kl(
    peer: str,
    function: str,
    name: str,
    theirs: Side,
    bound: float | None = None,
    *,
    note: str = "",
    differs: str = "",
    same: Same = "both",
) -> Pairing:
    """A peer's mean KL term beside ours. `name`: the estimator, after "rho " if it is weighted."""
    is_weighted = name.startswith("rho ")
    name = name.removeprefix("rho ")
    estimator = getattr(estimators, name)
    if bound is not None:
        estimator = partial(estimator, kl_bound=bound)

    def our_kl(case: Case, logp: Tensor) -> Tensor:
        # KL estimates do not read advantages.
        estimate = estimator(loss_inputs(case, logp, torch.zeros_like(case.rewards)))
        # The importance weight is a constant in the gradient, as with `kl_importance`.
        weight = (logp - case.alpha).exp().detach() if is_weighted else 1.0
        return (weight * estimate).mean()

    return Pairing(
        peer=peer,
        function=function,
        ours_is=f"`kl.{name}`, importance-weighted" if is_weighted else f"`kl.{name}`",
        theirs=theirs,
        ours=our_kl,
        same=same,
        note=note,
        differs=differs,
    )
