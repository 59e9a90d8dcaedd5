"""What a row of the table is: a peer's function, and what of ours it is compared with.

`theirs` and `ours` get a case and the log-probs under pi [T], differentiable, and give a tensor; what is compared is
that tensor and its gradient. Both get the same advantages, unless advantages are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cases import MAX_LENGTH, Case, G
from torch import Tensor

from lagrpo.core import kl as estimators
from lagrpo.core.inputs import LossInputs
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
    """The loss of a recipe, whole: its own advantages and weights."""
    recipe = resolve(name, overrides)
    weight_C = recipe.weights(case.lengths, case.flat, MAX_LENGTH).double()
    advantage_C = advantages(case, name, **overrides)
    terms = LossInputs(
        logp, case.alpha, case.pi_k, case.ref, case.completion, advantage_C, case.group
    )
    return recipe.loss(terms, weight_C)[0]


def advantages(case: Case, name: str, **overrides: Any) -> Tensor:
    """The advantages of a recipe [C]; RED-Drop's draws are those of `red_uniform`."""
    recipe = resolve(name, overrides)
    uniform = torch.linspace(0, 0.9, G, dtype=torch.float64)
    lengths = torch.ones(G, dtype=torch.long)
    return torch.cat(
        [
            recipe.advantages(rewards, lengths, MAX_LENGTH, uniform)
            for rewards in case.rewards.view(-1, G)
        ]
    )


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
    said = ", ".join(f"{knob} = {value!r}" for knob, value in overrides.items())

    def their_side(case: Case, logp: Tensor) -> Tensor:
        more = {
            key: value(case) if callable(value) else value for key, value in (their or {}).items()
        }
        return theirs(case, logp, advantages(case, recipe, **overrides), *given, **more)

    text = f"`{recipe}`" + (f" with {said}" if said else "")
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
        zeros = torch.zeros_like(case.flat, dtype=logp.dtype)
        estimate = estimator(
            LossInputs(logp, case.alpha, case.pi_k, case.ref, case.completion, zeros, case.group)
        )
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
