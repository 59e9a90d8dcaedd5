"""Recipes by name, with knobs replaced: the table of core/rows.py, and recipes and functions of your own.

A knob has a path, `surrogate.mask.epsilon_high`. A short path, `mask.epsilon_high` or `epsilon_high`, stands for the
only knob that ends so. A value is a number, the name of a function in CHOICES, or "package.module:function".

>>> resolve("dapo", {"epsilon_high": 0.3}).settings["surrogate.epsilon_high"]
0.3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from inspect import getdoc
from typing import Any

import torch
from torch import Tensor

from lagrpo.core import advantages, corrections, filters, inputs, kl, losses, masks, weights
from lagrpo.core.kl import k1, k3_bias_corrected
from lagrpo.core.losses import clipped_exact, clipped_proportional, opmd_pairwise
from lagrpo.core.masks import ring
from lagrpo.core.objective import NUMBERS, PIECES, Recipe
from lagrpo.core.pieces import Piece, as_piece, function_name
from lagrpo.core.probe import RecordedInputs, random_inputs, random_rewards
from lagrpo.core.ratios import length_normalized, sequence, token
from lagrpo.core.reductions import constant_length, sequence_mean, sequence_sum, token_mean
from lagrpo.core.references import is_reference, load_reference
from lagrpo.core.rows import ROWS

RECIPES = ROWS

CHOICES: dict[str, tuple[Callable, ...]] = {
    "advantage": (
        advantages.normalized,
        advantages.normalized_unbiased,
        advantages.normalized_positive,
        advantages.centered,
        advantages.leave_one_out,
        advantages.maxrl,
        advantages.batch_scaled,
        advantages.batch_whitened,
        advantages.red_drop,
        advantages.log_mean_exp,
    ),
    "surrogate": (
        losses.clipped,
        losses.clipped_exact,
        losses.clipped_proportional,
        losses.clipped_by_staleness,
        losses.clipped_m2po_released,
        losses.unclipped,
        losses.reinforce,
        losses.opmd_kimi,
        losses.opmd_pairwise,
        losses.online_dpo,
        losses.online_ipo,
    ),
    "ratio": (token, sequence, length_normalized),
    "level": (token, sequence, length_normalized),
    "denominator": (inputs.alpha, inputs.pi_k),
    "anchor": (inputs.alpha, inputs.pi_k, inputs.pi_ref),
    "mask": (
        masks.one_side,
        masks.two_side,
        masks.ring,
        masks.tv,
        masks.binary_kl,
        masks.tv_two_side,
    ),
    "weight": (
        weights.importance,
        weights.capped_ratio,
        weights.capped_sequence,
        weights.tapered_ratio,
        weights.asymmetric_cap,
        weights.exp_advantage,
        weights.sapo,
        weights.vespo,
    ),
    "regularizer": (losses.asymre, losses.opmd),
    "filters": (
        filters.opsm,
        filters.seq_max_k3,
        filters.finished_only,
        filters.top_entropy,
        filters.m2po,
    ),
    "correction": (corrections.truncated, corrections.masked),
    "kl": (kl.k1, kl.k2, kl.k3, kl.k3_clamped, kl.k3_linear, kl.k3_bias_corrected),
    "reduction": (token_mean, sequence_mean, sequence_sum, constant_length),
}
"""The functions that a setting may name, for each knob that is a function."""

MAY_BE_NONE = ("mask", "weight", "regularizer", "correction")

MINIMUM = {
    "beta": 0.0,
    "epsilon_low": 0.0,
    "epsilon_high": 0.0,
    "dual_clip": 1.0,
    "outer_low": 0.0,
    "outer_high": 0.0,
    "delta": 0.0,
    "delta_low": 0.0,
    "delta_high": 0.0,
    "tau": 0.0,
    "share": 0.0,
    "eps_std": 0.0,
    "std_offset": 0.0,
    "kl_bound": 0.0,
    "strength": 0.0,
    "advantage.strength": 1e-9,
    "surrogate.strength": 1e-9,
    "weight_temperature": 1e-9,
    "overlong_buffer": 0.0,
    "correction.floor": 0.0,
    "correction.cap": 1.0,
}
"""The smallest value of a number, by the last part of its path or by all of it."""


def resolve(
    recipe: str | Recipe | Callable[..., Any], overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe with some knobs replaced.

    recipe     a name of the table; "package.module:name" or the object itself: a Recipe, or a surrogate, whose recipe
               has the defaults of `Recipe` otherwise
    overrides  values by paths of knobs. `epsilon` sets both ends of a clip range, unless `epsilon_high` is given too

    Raises ValueError for an unknown name (with the nearest one), a path that fits no knob or several, a number out of
    its domain, functions that contradict each other, and a function of your own that does not compute."""
    resolved = _find_recipe(recipe)
    given = dict(overrides or {})
    for path, value in sorted(given.items(), key=_order):
        resolved = _override(resolved, path, value, given)
    _check_domains(resolved)
    for problem in _contradictions(resolved):
        raise ValueError(problem)
    _check_own_functions(resolved)
    return resolved


def _find_recipe(recipe: str | Recipe | Callable[..., Any]) -> Recipe:
    found: Any = recipe
    if isinstance(recipe, str):
        found = load_reference(recipe) if is_reference(recipe) else _look_up("recipe", recipe, ROWS)
    if isinstance(found, Recipe):
        return found if found.name else replace(found, name=str(recipe))
    if not callable(found):
        raise ValueError(f"{recipe!r} is neither a Recipe nor a function of LossInputs")
    return from_surrogate(found)


def from_surrogate(function: Callable) -> Recipe:
    """The recipe of a surrogate of your own: advantages normalized by group, a mean over the tokens of the batch, no
    KL term."""
    summary = (getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    name = function_name(function)
    return Recipe(summary.rstrip("."), name, surrogate=as_piece(function), name=name)


def _look_up(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name in table:
        return table[name]
    near = "".join(f"; did you mean {other!r}?" for other in get_close_matches(name, table, n=1))
    raise ValueError(f"unknown {kind} {name!r}{near} (all: {', '.join(table)})")


# Overrides


def _order(override: tuple[str, Any]) -> tuple[int, int]:
    """The place of an override: a function goes before the knobs that it has, beta before those of the KL term."""
    path, value = override
    name = path.rpartition(".")[2]
    if name == "beta":
        rank = 0
    elif name in PIECES or name == "filters":
        rank = 1
    elif name in ("mask", "weight", "regularizer"):
        rank = 2
    elif isinstance(value, str) or callable(value):
        rank = 3
    else:
        rank = 4
    return rank, path.count(".")


def _override(recipe: Recipe, path: str, value: Any, given: Mapping[str, Any]) -> Recipe:
    """The recipe with one knob replaced."""
    if path == "epsilon":
        low = _full_path(recipe, "epsilon_low", path)
        high = low.removesuffix("low") + "high"
        _check_given_once(recipe, low, path, given)
        recipe = recipe.with_knob(low, _read_number(path, value))
        if not any(high in _fitting(recipe, other) for other in given):
            recipe = recipe.with_knob(high, value)
        return recipe
    full = _full_path(recipe, path, path)
    _check_given_once(recipe, full, path, given)
    return recipe.with_knob(full, _read_value(full, value, recipe.knobs[full]))


def _check_given_once(recipe: Recipe, full: str, path: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError if another path than this one was given for the same knob."""
    for other in given:
        if other != path and full in _fitting(recipe, other):
            raise ValueError(f"{path} and {other} are the same knob, {full}: give one of them")


def _full_path(recipe: Recipe, path: str, label: str) -> str:
    """The only knob whose path ends so; `label` is what the user wrote."""
    fitting = _fitting(recipe, path)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"{label} could be {' or '.join(fitting)}: write one of them")
    name = path.rpartition(".")[2]
    known = dict.fromkeys([*NUMBERS, *CHOICES, *(m.rpartition(".")[2] for m in MINIMUM)])
    known |= dict.fromkeys(knob.rpartition(".")[2] for knob in recipe.knobs)
    own_names = list(dict.fromkeys(knob.rpartition(".")[2] for knob in recipe.knobs))
    near = "".join(f"; did you mean {own!r}?" for own in get_close_matches(name, own_names, n=1))
    problem = "has no effect on" if name in known else "is no knob of"
    if recipe.beta == 0 and path.partition(".")[0] in ("kl", "kl_bound"):
        raise ValueError(
            f"{label} has no effect on recipe {recipe.name!r}: beta = 0, so it has no KL term"
        )
    raise ValueError(
        f"{label} {problem} recipe {recipe.name!r}{near} (its knobs: {', '.join(recipe.knobs)})"
    )


def _fitting(recipe: Recipe, path: str) -> list[str]:
    """The knobs that a path can mean: the one of that path, else all that end so."""
    if path in recipe.knobs:
        return [path]
    return [knob for knob in recipe.knobs if knob.endswith(f".{path}")]


def _read_value(path: str, value: Any, current: Any) -> Any:
    """The number of a knob, or the piece that a setting names."""
    name = path.rpartition(".")[2]
    if path == "filters":
        named = [value] if isinstance(value, str) or callable(value) else list(value)
        pieces = tuple(_read_piece(path, keep) for keep in named)
        names = [keep.name for keep in pieces if keep is not None]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"filters: {name} stands there twice")
        return pieces
    is_function = name in CHOICES or isinstance(current, Piece) or path.startswith("filters.")
    if is_function and not isinstance(current, int | float):
        return _read_piece(path, value)
    if isinstance(current, str):
        return value
    is_count = path == "overlong_buffer"
    return _read_number(path, value, is_flag=isinstance(current, bool), is_count=is_count)


def _read_piece(path: str, value: Any) -> Piece | None:
    name = path.rpartition(".")[2]
    table: dict[str, Callable | None] = {f.__name__: f for f in CHOICES.get(name, ())}
    if name in MAY_BE_NONE:
        table = {"none": None, **table}
    if isinstance(value, str):
        function = load_reference(value) if is_reference(value) else _look_up(path, value, table)
    else:
        function = value
    if function is None and name in MAY_BE_NONE:
        return None
    if not callable(function):
        known = f"one of {list(table)}" if table else "a function"
        raise ValueError(f"{path} = {value!r}: write {known}, or package.module:function")
    return as_piece(function)  # pyright: ignore[reportArgumentType]


def _read_number(path: str, value: Any, is_flag: bool = False, is_count: bool = False) -> Any:
    if is_flag and isinstance(value, bool):
        return value
    if is_count and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{path} = {value!r}: write a whole number")
    if is_flag or isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} = {value!r}: write {'true or false' if is_flag else 'a number'}")
    return value


# Checks


def _check_domains(recipe: Recipe) -> None:
    for path, value in recipe.knobs.items():
        minimum = MINIMUM.get(path, MINIMUM.get(path.rpartition(".")[2]))
        if minimum is not None and isinstance(value, int | float) and not value >= minimum:
            raise ValueError(f"{path} must be at least {minimum:g}, but is {value}")


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """The reasons why these knobs do not go together."""
    knobs = recipe.knobs
    surrogate = recipe.surrogate
    if knobs.get("surrogate.dual_clip", 1e9) < 1 + knobs.get("surrogate.epsilon_high", 0.0):
        yield f"dual_clip must be at least 1 + epsilon_high, but is {knobs['surrogate.dual_clip']}"
    if knobs.get("correction.floor", 0.0) > 1:
        yield f"correction.floor must lie in [0, 1], but is {knobs['correction.floor']}"
    if knobs.get("filters.top_entropy.share", 0.0) > 1:
        yield f"share must lie in [0, 1], but is {knobs['filters.top_entropy.share']}"
    mask = surrogate.knobs.get("mask")
    if isinstance(mask, Piece) and mask.function is ring and _overlaps(mask):
        yield "mask 'ring' needs its outer range outside the inner one: outer_* >= epsilon_*"
    follows_pi_k = surrogate.function in (clipped_exact, clipped_proportional)
    if follows_pi_k and surrogate.knobs["denominator"].function is inputs.pi_k:
        yield (
            f"{surrogate.name} clips around pi_k/alpha, which is 1 with denominator = 'pi_k': "
            "use 'clipped'"
        )
    if recipe.correction is not None:
        weight = surrogate.knobs.get("weight")
        rated = [p for p in (surrogate, weight) if isinstance(p, Piece)]
        over_alpha = [p for p in rated if _denominator(p) is inputs.alpha]
        if over_alpha:
            yield (
                "correction weights by pi_k/alpha, which the ratio already contains: set "
                "denominator = 'pi_k', or drop it"
            )
        if surrogate.function is opmd_pairwise:
            yield (
                "correction weights single completions, but opmd_pairwise compares the "
                "completions of a group: drop it"
            )
    is_corrected_kl = recipe.kl.function is k3_bias_corrected
    if recipe.kl_importance and recipe.beta > 0 and is_corrected_kl:
        yield (
            "kl_importance would weight k3_bias_corrected by the ratio a second time: use one of "
            "them"
        )
    if recipe.kl_importance and recipe.beta == 0:
        yield "kl_importance weights the KL term, but beta is 0, so there is no KL term"
    if recipe.masked_count and not recipe.mask_zero_variance:
        yield "masked_count counts masked groups, but mask_zero_variance is off: no group is masked"
    if recipe.beta > 0 and recipe.kl.function is k1:
        yield (
            "k1 is not a penalty: its expected gradient is 0 on fresh samples, and wrong on stale "
            "ones; use k2 or k3"
        )


def _overlaps(mask: Piece) -> bool:
    """True if the outer range of a ring begins inside its inner one."""
    ends = ("low", "high")
    return any(mask.knobs[f"outer_{end}"] < mask.knobs[f"epsilon_{end}"] for end in ends)


def _denominator(root: Piece) -> Callable | None:
    denominator = root.knobs.get("denominator")
    return denominator.function if isinstance(denominator, Piece) else None


def _check_own_functions(recipe: Recipe) -> None:
    """Raise ValueError for functions from outside lagrpo that do not compute on small random inputs."""
    own = [f for f in recipe.functions if ":" in function_name(f)]
    if not own:
        return
    names = ", ".join(map(function_name, own))
    x = random_inputs()
    with _naming(names):
        x = replace(x, step=recipe.collect(inputs.without_gradient(x)))
    for path, value in recipe.knobs.items():
        if isinstance(value, Piece) and value.function in own:
            is_filter = any(value is keep for keep in recipe.filters)
            _check_own_piece(path, value, x, is_filter)
    with _naming(names):
        gradients_T = [_gradient(recipe, x), _gradient(recipe, _at_alpha(x))]
    if not all(bool(gradient_T.isfinite().all()) for gradient_T in gradients_T):
        raise ValueError(f"{names}: the gradient is not finite on small random inputs")
    if all(bool((gradient_T == 0).all()) for gradient_T in gradients_T):
        raise ValueError(f"{names}: no token has a gradient, so the policy would never learn")


@contextmanager
def _naming(names: str) -> Iterator[None]:
    """Inside, functions of your own are computed: an error names them."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{names}: fails on small random inputs: {error!r}") from error


def _check_own_piece(path: str, own: Piece, x: inputs.LossInputs, is_filter: bool) -> None:
    """Raise ValueError unless a piece gives finite numbers of the shape that its place asks for."""
    rewards = random_rewards()
    arguments: tuple[Any, ...] = (x,)
    like = x.logp
    place = path.rpartition(".")[2]
    if place == "advantage":
        arguments = (rewards,)
        like = rewards.rewards
    elif place == "reduction":
        arguments = (rewards.lengths, torch.ones(len(rewards.group)).bool(), 8)
        like = rewards.rewards
    elif place in ("ratio", "level"):
        arguments = (x.logp - inputs.alpha(x), x.completion)
    elif place not in CHOICES and not path.startswith("filters."):
        return  # a knob of a function of your own, whose arguments lagrpo does not know
    with _naming(own.name):
        output = own(*arguments)
    if not isinstance(output, Tensor):
        raise ValueError(f"{path} = {own.name!r} gives a {type(output).__name__}, not a tensor")
    if output.shape != like.shape:
        shapes = f"{list(output.shape)}, not {list(like.shape)}"
        raise ValueError(f"{path} = {own.name!r} gives the shape {shapes}, on small random inputs")
    if not bool(output.isfinite().all()):
        raise ValueError(f"{path} = {own.name!r} is not finite on small random inputs")
    if is_filter and not bool(((output == 0) | (output == 1)).all()):
        raise ValueError(
            f"{path} = {own.name!r} gives other values than 0 and 1 (or False and True)"
        )


def _at_alpha(x: inputs.LossInputs) -> inputs.LossInputs:
    """The same inputs with all policies equal: a narrow mask may drop every token of others."""
    logp = x.logp.detach()
    return replace(x, rollout_logp=logp, old_logp=logp, ref_logp=logp)


def _gradient(recipe: Recipe, x: inputs.LossInputs) -> Tensor:
    """d loss / d log pi of each token [T]."""
    x = replace(x, step=recipe.collect(inputs.without_gradient(x)))
    return recipe.differentiate(x, torch.ones_like(x.advantages)).gradient_T


def inert_over_pi_k(recipe: Recipe) -> list[str]:
    """The paths of masks, weights, filters and clips that do nothing while pi = pi_k, as at the only update on a batch:
    they read the policy at the start of the batch, not the one that sampled, and change no token."""
    x = random_inputs()
    x = replace(x, old_logp=x.logp.detach())
    x = replace(x, step=recipe.collect(inputs.without_gradient(x)))
    inert = []
    for path, value in recipe.knobs.items():
        is_factor = path.endswith((".mask", ".weight")) or path.startswith("filters.")
        if not isinstance(value, Piece) or not (is_factor or path == "surrogate"):
            continue
        if hasattr(value.function, "collect"):
            continue
        recorded = RecordedInputs.record(x)
        output_T = value(recorded)
        if "old_logp" not in recorded.fields_read or "rollout_logp" in recorded.fields_read:
            continue
        if path == "surrogate":
            (output_T,) = torch.autograd.grad(output_T.sum(), x.logp)
            changes = not torch.allclose(output_T, x.advantage)
        else:
            changes = not torch.allclose(output_T.to(x.logp.dtype), torch.ones_like(x.logp))
        if not changes:
            inert.append(path)
    if "surrogate" in inert and len(inert) > 1:
        inert.remove("surrogate")  # the mask or weight in it is what does not act
    return inert


def clips_around_pi_k(recipe: Recipe) -> bool:
    """True if the surrogate clips pi to a range around pi_k. At the only update on a batch pi is the center."""
    return recipe.surrogate.function in (clipped_exact, clipped_proportional)


def bounds_whole_completions(recipe: Recipe) -> list[str]:
    """The paths of bounds on the ratio of a whole completion, which long completions pass more easily."""
    bounded: Sequence[Callable] = (weights.capped_sequence, weights.vespo, filters.seq_max_k3)
    unbounded: Sequence[Callable] = (losses.unclipped, weights.importance, k3_bias_corrected)
    paths = []
    for path, value in recipe.knobs.items():
        if not isinstance(value, Piece):
            continue
        of_sequence = [
            k for k in value.knobs.values() if isinstance(k, Piece) and k.function is sequence
        ]
        if value.function in bounded or (of_sequence and value.function not in unbounded):
            paths.append(path)
    return paths


def needs_of(recipe: Recipe) -> list[str]:
    """What a recipe needs beyond the trainer's own log-probs, in the words of `lagrpo recipes`.

    α, π_k, π_ref: the log-probs of these policies; lag: the staleness of each token; step: a second pass over the step.
    """
    needs = {
        "α": recipe.needs_rollout_logp,
        "π_k": recipe.needs_old_logp,
        "π_ref": recipe.needs_pi_ref,
        "lag": recipe.needs_staleness,
        "step": recipe.needs_step_statistics,
    }
    return [name for name, is_needed in needs.items() if is_needed]
