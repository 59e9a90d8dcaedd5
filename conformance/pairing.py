"""A row of the table: a peer's function, and the function of ours it is compared with.

`theirs` and `ours` get a case and the log-probs under pi [T], differentiable, and give a tensor; what is compared is
that tensor and its gradient. Both get the same advantages, unless advantages are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from cases import MAX_LENGTH, Case, G
from torch import Tensor

from lagrpo.core import kl as estimators
from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.inputs import LossInputs, without_gradient
from lagrpo.core.recipes import resolve

Side = Callable[[Case, Tensor], Any]

NO_BETA = {"beta": 0.0}
WIDE = {
    "epsilon_low": 0.1,
    "epsilon_high": 0.15,
}  # of GSPO, so that completions lie on both sides of the range


@dataclass(frozen=True)
class Pairing:
    """`same`: what is expected to agree: "both" value and gradient, "gradient", "value", or "neither". `note` says by
    which options they are brought together, `differs` where they differ and who follows the paper."""

    peer: str
    function: str
    ours_is: str
    theirs: Side
    ours: Side
    same: str = "both"
    note: str = ""
    differs: str = ""


def ours(case: Case, logp: Tensor, name: str, **overrides: Any) -> Tensor:
    """The loss of a recipe, whole: its own advantages, weights and statistics of the step."""
    recipe = resolve(name, overrides)
    weight_C = recipe.weights(case.lengths, case.flat, MAX_LENGTH).double()
    x = loss_inputs(case, logp, advantages(case, name, **overrides))
    x = replace(x, step=recipe.collect(without_gradient(x)))
    return recipe.loss(x, weight_C)


def loss_inputs(case: Case, logp: Tensor, advantages_C: Tensor) -> LossInputs:
    """All that a loss may read."""
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


def advantages(case: Case, name: str, uniform: Tensor | None = None, **overrides: Any) -> Tensor:
    """The advantages of a recipe [C]; `uniform` [C] are RED-Drop's random numbers."""
    recipe = resolve(name, overrides)
    if uniform is None:
        uniform = torch.linspace(0, 0.9, G, dtype=torch.float64).repeat(case.C // G)
    rewards = AdvantageInputs(case.rewards, case.group, case.lengths, uniform)
    return recipe.advantages(rewards, MAX_LENGTH)


def loss(
    peer: str,
    function: str,
    recipe: str,
    theirs: Callable[..., Tensor],
    *,
    note: str = "",
    differs: str = "",
    same: str = "both",
    given: tuple[Any, ...] = (),
    their: dict[str, Any] | None = None,
    **overrides: Any,
) -> Pairing:
    """A peer's loss on the advantages of our recipe, beside that recipe."""
    knobs = ", ".join(f"{knob} = {value!r}" for knob, value in overrides.items())

    def their_side(case: Case, logp: Tensor) -> Tensor:
        more = {
            key: value(case) if callable(value) else value for key, value in (their or {}).items()
        }
        return theirs(case, logp, advantages(case, recipe, **overrides), *given, **more)

    text = f"`{recipe}`" + (f" with {knobs}" if knobs else "")
    return Pairing(
        peer,
        function,
        text,
        their_side,
        partial(ours, name=recipe, **overrides),
        same,
        note,
        differs,
    )


def advantage(
    peer: str, function: str, recipe: str, theirs: Callable[[Case], Tensor], **more: Any
) -> Pairing:
    """A peer's advantages beside those of a recipe."""
    knobs = {
        knob: more.pop(knob)
        for knob in ("eps_std", "strength", "advantage", "std_offset")
        if knob in more
    }
    text = f"advantage of `{recipe}`" + "".join(
        f", {knob} = {value!r}" for knob, value in knobs.items()
    )
    return Pairing(
        peer,
        function,
        text,
        lambda case, logp: theirs(case),
        lambda case, logp: advantages(case, recipe, **knobs),
        **more,
    )


def kl(
    peer: str, function: str, name: str, theirs: Side, bound: float | None = None, **more: Any
) -> Pairing:
    """A peer's mean KL term beside ours; `name` is the estimator's, with "rho" where it is weighted."""
    estimator = getattr(estimators, name.removeprefix("rho "))
    if bound is not None:
        estimator = partial(estimator, kl_bound=bound)

    def own(case: Case, logp: Tensor) -> Tensor:
        estimate = estimator(loss_inputs(case, logp, torch.zeros_like(case.rewards)))
        weight = (logp - case.alpha).exp().detach() if name.startswith("rho ") else 1.0
        return (weight * estimate).mean()

    return Pairing(
        peer,
        function,
        f"`kl.{name.removeprefix('rho ')}`" + ", importance-weighted" * ("rho" in name),
        theirs,
        own,
        **more,
    )
