"""Checks of functions of your own: they run on small random inputs before a model loads."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lagrpo.core import inputs
from lagrpo.core.choices import CHOICES
from lagrpo.core.inputs import without_gradient
from lagrpo.core.objective import Recipe
from lagrpo.core.pieces import Piece, function_name
from lagrpo.core.probe import random_inputs, random_rewards
from lagrpo.core.references import describe_raised, did_you_mean


def check_own_functions(recipe: Recipe) -> None:
    """Raises ValueError for functions from outside lagrpo that fail on small random inputs."""
    own_functions = [f for f in recipe.functions if ":" in function_name(f)]
    if not own_functions:
        return
    names = ", ".join(map(function_name, own_functions))
    x = random_inputs()
    with _naming(names):
        x = with_statistics(recipe, x)
    for path, value in recipe.knobs.items():
        if isinstance(value, Piece) and value.function in own_functions:
            is_filter = any(value is keep for keep in recipe.filters)
            _check_own_piece(path, value, x, is_filter=is_filter)
    with _naming(names):
        # Also with all policies equal: a narrow mask may drop every token of other inputs.
        gradients_T = [_gradient(recipe, x), _gradient(recipe, _at_alpha(x))]
    if not all(bool(gradient_T.isfinite().all()) for gradient_T in gradients_T):
        raise ValueError(f"{names}: the gradient is not finite on small random inputs")
    if all(bool((gradient_T == 0).all()) for gradient_T in gradients_T):
        raise ValueError(f"{names}: no token has a gradient, so the policy would never learn")
    if recipe.surrogate.function in own_functions:
        _check_direction(recipe, x)


def _check_direction(recipe: Recipe, x: inputs.LossInputs) -> None:
    """Raises ValueError for a surrogate that ignores the advantage, or is to be minimized.

    With all policies equal every ratio is 1: there the gradient of a value to maximize has the sign
    of the advantage, over all tokens together.
    """
    name = recipe.surrogate.name
    at_alpha = _at_alpha(x)
    is_blind = all(
        torch.equal(_gradient(recipe, y), _gradient(recipe, replace(y, advantages=-y.advantages)))
        for y in (x, at_alpha)
    )
    if is_blind:
        raise ValueError(
            f"{name}: the gradient does not depend on the advantage, so rewards would not matter: "
            "multiply by x.advantage"
        )
    # `_gradient` is the loss's gradient, and the loss is minus the value.
    if bool((_gradient(recipe, at_alpha) * at_alpha.advantage).sum() > 0):
        raise ValueError(
            f"{name}: raises the probability of completions with a negative advantage. "
            "It returns a loss to minimize: return minus that, the value to maximize"
        )


@contextmanager
def _naming(names: str) -> Generator[None, None, None]:
    """Turns any error of a user's functions inside into a ValueError that names the functions.

    It has the line that raised, and for a wrong name the nearest one.
    """
    try:
        yield
    except Exception as error:
        reason = describe_raised(error) + _advice(error)
        raise ValueError(f"{names}: fails on small random inputs: {reason}") from error


def _advice(error: Exception) -> str:
    """The nearest name for one that LossInputs does not have; "" for other errors."""
    if isinstance(error, AttributeError) and isinstance(error.obj, inputs.LossInputs):
        return did_you_mean(f"x.{error.name}", [f"x.{name}" for name in dir(error.obj)])
    return ""


def _check_own_piece(path: str, own: Piece, x: inputs.LossInputs, *, is_filter: bool) -> None:
    """Raises ValueError unless a piece gives finite numbers of the shape that its knob needs."""
    rewards = random_rewards()
    knob = path.rpartition(".")[2]
    arguments: tuple[object, ...] = (x,)
    shape = x.logp.shape
    if knob == "advantage":
        arguments = (rewards,)
        shape = rewards.rewards.shape
    elif knob == "reduction":
        is_counted_C = torch.ones(len(rewards.group)).bool()
        arguments = (rewards.lengths, is_counted_C, 8)
        shape = rewards.rewards.shape
    elif knob in ("ratio", "level"):
        arguments = (x.logp - inputs.alpha(x), x.completion)
    elif knob not in CHOICES and not path.startswith("filters."):
        # A knob of a function of your own, whose arguments lagrpo does not know.
        return
    output = _compute(own, arguments)
    if not isinstance(output, Tensor):
        problem = f"{path} = {own.name!r} gives a {type(output).__name__}, not a tensor"
        if isinstance(output, tuple):
            problem += "; record metrics by x.log(name, value)"
        raise ValueError(problem)
    if output.shape != shape:
        shapes = f"{list(output.shape)}, not {list(shape)}"
        raise ValueError(f"{path} = {own.name!r} gives the shape {shapes}, on small random inputs")
    if not bool(output.isfinite().all()):
        raise ValueError(f"{path} = {own.name!r} is not finite on small random inputs")
    if is_filter and not bool(((output == 0) | (output == 1)).all()):
        raise ValueError(
            f"{path} = {own.name!r} gives other values than 0 and 1 (or False and True)"
        )


def _compute(own: Piece, arguments: tuple[object, ...]) -> object:
    """The output of a user's function, which may be anything."""
    with _naming(own.name):
        return own(*arguments)


def with_statistics(recipe: Recipe, x: inputs.LossInputs) -> inputs.LossInputs:
    """The same inputs, with the statistics of a step that consists of them."""
    return replace(x, step=recipe.collect(without_gradient(x)))


def _at_alpha(x: inputs.LossInputs) -> inputs.LossInputs:
    """The same inputs with all policies equal."""
    logp = x.logp.detach()
    return replace(x, rollout_logp=logp, old_logp=logp, ref_logp=logp)


def _gradient(recipe: Recipe, x: inputs.LossInputs) -> Tensor:
    """d loss / d log pi of each token [T]."""
    weight_C = torch.ones_like(x.advantages)
    return recipe.differentiate(with_statistics(recipe, x), weight_C).gradient_T
