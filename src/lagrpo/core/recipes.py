"""Recipes by name, with knobs replaced: rows of core/rows.py, and functions of your own.

A knob has a path, `surrogate.mask.epsilon_high`. A short path, `mask.epsilon_high` or
`epsilon_high`, stands for the only knob that ends so. A value is a number, the name of a function
in choices.py, or "package.module:function".

>>> resolve("dapo", {"epsilon_high": 0.3}).settings["surrogate.epsilon_high"]
0.3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import getdoc
from typing import TypeVar, cast

import torch

from lagrpo.core import filters, inputs, losses, weights
from lagrpo.core.choices import CHOICES, KNOB_NAMES, MAY_BE_NONE
from lagrpo.core.inputs import statistic_of
from lagrpo.core.kl import k1, k3_bias_corrected
from lagrpo.core.losses import clipped_exact, clipped_proportional, opmd_pairwise
from lagrpo.core.masks import ring
from lagrpo.core.objective import NUMBERS, PIECES, Recipe
from lagrpo.core.own_functions import check_own_functions, with_statistics
from lagrpo.core.pieces import Piece, PieceFunction, as_piece, function_name, minimum_of
from lagrpo.core.probe import RecordedInputs, random_inputs
from lagrpo.core.ratios import length_normalized, sequence, total
from lagrpo.core.references import did_you_mean, is_reference, load_reference
from lagrpo.core.rows import RECIPES

Entry = TypeVar("Entry")

COMPARES_COMPLETIONS: tuple[PieceFunction, ...] = (
    opmd_pairwise,
    losses.online_dpo,
    losses.online_ipo,
)
"""The surrogates that compare the completions of a group."""


def resolve(
    recipe: str | Recipe | PieceFunction, overrides: Mapping[str, object] | None = None
) -> Recipe:
    """A recipe with some knobs replaced.

    recipe     a name of the table; "package.module:name" or the object itself: a Recipe, or a
               surrogate, whose recipe has the defaults of `Recipe` otherwise
    overrides  values by paths of knobs. `epsilon` sets both ends of a clip range, unless
               `epsilon_high` is given too

    Raises ValueError for an unknown name (with the nearest one), a path that fits no knob or
    several, a number out of its domain, functions that contradict each other, and a function of
    your own that does not compute.
    """
    resolved = _find_recipe(recipe)
    overrides = dict(overrides or {})
    # Replacing a function replaces its knobs, so functions come first.
    for path in sorted(overrides, key=lambda path: _order(path, overrides[path])):
        resolved = _override(resolved, path, overrides)
    _check_domains(resolved)
    for problem in _contradictions(resolved):
        raise ValueError(problem)
    check_own_functions(resolved)
    return resolved


def _find_recipe(recipe: str | Recipe | PieceFunction) -> Recipe:
    """The recipe of that name, or of that function. Raises ValueError for other objects."""
    named: object = recipe
    if isinstance(recipe, str):
        if is_reference(recipe):
            named = load_reference(recipe)
        else:
            named = _look_up_recipe(recipe)
    if isinstance(named, Recipe):
        return named if named.name else replace(named, name=str(recipe))
    if not callable(named):
        raise ValueError(f"{recipe!r} is neither a Recipe nor a function of LossInputs")
    return from_surrogate(cast(PieceFunction, named))


def from_surrogate(function: PieceFunction) -> Recipe:
    """The recipe of a surrogate of your own, with the defaults of `Recipe` otherwise.

    Its formula is the first paragraph of the function's docstring.
    """
    # A partial has the docstring of its class.
    documented: object = getattr(function, "func", function)
    summary = (getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ")
    name = function_name(function)
    return Recipe(formula=summary.rstrip("."), source=name, surrogate=as_piece(function), name=name)


def _look_up_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError, with the nearest names, if there is none."""
    if name in RECIPES:
        return RECIPES[name]
    advice = did_you_mean(name, RECIPES, most=3) or ";"
    raise ValueError(f"unknown recipe {name!r}{advice} `lagrpo recipes` lists all")


def _look_up(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """The entry of that name. Raises ValueError, with the nearest name, if there is none."""
    if name in table:
        return table[name]
    advice = did_you_mean(name, table)
    raise ValueError(f"unknown {kind} {name!r}{advice} (all: {', '.join(table)})")


# Overrides


def _order(path: str, value: object) -> tuple[int, int]:
    """A key that sorts overrides: a function before its knobs, beta before the KL term's knobs."""
    name = _last_part(path)
    if name == "beta":
        # Without a KL term, the knobs of its estimator do not exist.
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


def _last_part(path: str) -> str:
    """The name of a knob, without the path to it."""
    return path.rpartition(".")[2]


def _override(recipe: Recipe, path: str, overrides: Mapping[str, object]) -> Recipe:
    """The recipe with the knob at one path of `overrides` replaced."""
    value = overrides[path]
    if path == "epsilon":
        low_path = _full_path(recipe, "epsilon_low", path)
        high_path = low_path.removesuffix("low") + "high"
        _check_given_once(recipe, low_path, path, overrides)
        recipe = recipe.with_knob(low_path, _read_number(path, value))
        # Whatever path names it: epsilon_high and surrogate.epsilon_high are the same knob.
        sets_high = any(high_path in _fitting(recipe, other) for other in overrides)
        return recipe if sets_high else recipe.with_knob(high_path, value)
    full_path = _full_path(recipe, path, path)
    _check_given_once(recipe, full_path, path, overrides)
    return recipe.with_knob(full_path, _read_value(full_path, value, recipe.knobs[full_path]))


def _check_given_once(
    recipe: Recipe, full_path: str, path: str, overrides: Mapping[str, object]
) -> None:
    """Raises ValueError if another path of `overrides` than this one is the same knob."""
    for other in overrides:
        if other != path and full_path in _fitting(recipe, other):
            raise ValueError(f"{path} and {other} are the same knob, {full_path}: give one of them")


def _full_path(recipe: Recipe, path: str, label: str) -> str:
    """The only knob whose path ends with `path`; `label` is the path that the user wrote.

    Raises ValueError if there is none, or more than one.
    """
    fitting = _fitting(recipe, path)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"{label} could be {' or '.join(fitting)}: write one of them")
    if recipe.beta == 0 and path.partition(".")[0] in ("kl", "kl_bound"):
        raise ValueError(
            f"{label} has no effect on recipe {recipe.name!r}: beta = 0, so it has no KL term"
        )
    knob_names = [_last_part(knob) for knob in recipe.knobs]
    all_names = {*NUMBERS, *CHOICES, *KNOB_NAMES, *knob_names}
    name = _last_part(path)
    problem = "has no effect on" if name in all_names else "is no knob of"
    advice = did_you_mean(name, dict.fromkeys(knob_names))
    raise ValueError(
        f"{label} {problem} recipe {recipe.name!r}{advice} (its knobs: {', '.join(recipe.knobs)})"
    )


def _fitting(recipe: Recipe, path: str) -> list[str]:
    """The knobs that a path can mean: the knob of exactly that path, else all that end so."""
    if path in recipe.knobs:
        return [path]
    return [knob for knob in recipe.knobs if knob.endswith(f".{path}")]


def _read_value(path: str, value: object, current: object) -> object:
    """The number of a knob, or the piece that a setting names.

    `current` is the knob's present value: it shows which type the new one must have.
    """
    if path == "filters":
        return _read_filters(path, value)
    names_function = (
        _last_part(path) in CHOICES or isinstance(current, Piece) or path.startswith("filters.")
    )
    if names_function and not isinstance(current, int | float):
        return _read_piece(path, value)
    if isinstance(current, str):
        return value
    if isinstance(current, bool):
        return _read_flag(path, value)
    if path == "overlong_buffer" and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{path} = {value!r}: write a whole number")
    return _read_number(path, value)


def _read_filters(path: str, value: object) -> tuple[Piece | None, ...]:
    """The filters that a setting names. A single one stands for a list of one."""
    is_single = isinstance(value, str) or callable(value)
    entries = [value] if is_single else list(cast(Sequence[object], value))
    pieces = tuple(_read_piece(path, entry) for entry in entries)
    names = [keep.name for keep in pieces if keep is not None]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"filters: {name} stands there twice")
    return pieces


def _read_piece(path: str, value: object) -> Piece | None:
    """The piece that a setting names; None for "none", where a knob may be unset."""
    name = _last_part(path)
    table: dict[str, PieceFunction | None] = {f.__name__: f for f in CHOICES.get(name, ())}
    if name in MAY_BE_NONE:
        table = {"none": None, **table}
    function = value
    if isinstance(value, str):
        function = load_reference(value) if is_reference(value) else _look_up(path, value, table)
    if function is None and name in MAY_BE_NONE:
        return None
    if not callable(function):
        choices = f"one of {list(table)}" if table else "a function"
        raise ValueError(f"{path} = {value!r}: write {choices}, or package.module:function")
    return as_piece(cast(PieceFunction, function))


def _read_number(path: str, value: object) -> float:
    """The value, if it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} = {value!r}: write a number")
    return value


def _read_flag(path: str, value: object) -> bool:
    """The value, if it is a flag."""
    if not isinstance(value, bool):
        raise ValueError(f"{path} = {value!r}: write true or false")
    return value


# Checks


def _check_domains(recipe: Recipe) -> None:
    """Raises ValueError for a number below its minimum."""
    for path, value in recipe.knobs.items():
        if not isinstance(value, int | float):
            continue
        owner_path, _, name = path.rpartition(".")
        owner = recipe.knobs[owner_path] if owner_path else None
        minimum = minimum_of(owner.function if isinstance(owner, Piece) else Recipe, name)
        # `not >=` instead of `<`: it also rejects nan.
        if minimum is not None and not value >= minimum:
            raise ValueError(f"{path} must be at least {minimum:g}, but is {value}")


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """The reasons why these knobs do not go together."""
    dual_clip = _number(recipe, "surrogate.dual_clip")
    epsilon_high = _number(recipe, "surrogate.epsilon_high") or 0.0
    if dual_clip is not None and dual_clip < 1 + epsilon_high:
        yield f"dual_clip must be at least 1 + epsilon_high, but is {dual_clip}"
    for path, name in [
        ("correction.floor", "correction.floor"),
        ("filters.top_entropy.share", "share"),
        ("filters.clip_cov.share", "share"),
    ]:
        value = _number(recipe, path)
        if value is not None and value > 1:
            yield f"{name} must lie in [0, 1], but is {value}"
    mask = recipe.surrogate.knobs.get("mask")
    if isinstance(mask, Piece) and mask.function is ring and _overlaps(mask):
        yield "mask 'ring' needs its outer range outside the inner one: outer_* >= epsilon_*"
    if clips_around_pi_k(recipe) and _denominator(recipe.surrogate) is inputs.pi_k:
        yield (
            f"{recipe.surrogate.name} clips around pi_k/alpha, which is 1 with "
            "denominator = 'pi_k': use 'clipped'"
        )
    if recipe.correction is not None:
        yield from _contradictions_of_correction(recipe.surrogate)
    yield from _contradictions_of_filters(recipe)
    yield from _contradictions_of_kl(recipe)
    yield from _contradictions_of_token_advantage(recipe)
    if recipe.masked_count and not recipe.mask_zero_variance:
        yield "masked_count counts masked groups, but mask_zero_variance is off: no group is masked"


def _contradictions_of_correction(surrogate: Piece) -> Iterator[str]:
    """The reasons why a surrogate does not go together with a correction."""
    weight = surrogate.knobs.get("weight")
    with_ratio = [surrogate, weight] if isinstance(weight, Piece) else [surrogate]
    if any(_denominator(part) is inputs.alpha for part in with_ratio):
        yield (
            "correction weights by pi_k/alpha, which the ratio already contains: set "
            "denominator = 'pi_k', or drop it"
        )
    # Their denominator is alpha, and no knob.
    if surrogate.function in (losses.clipped_m2po_released, losses.clipped_bapo):
        yield (
            f"correction weights by pi_k/alpha, which the ratio of {surrogate.name} already "
            "contains: drop it"
        )
    if surrogate.function is opmd_pairwise:
        yield (
            "correction weights single completions, but opmd_pairwise compares the completions "
            "of a group: drop it"
        )


def _contradictions_of_filters(recipe: Recipe) -> Iterator[str]:
    """The reasons why filters would leave a gradient at tokens that they drop."""
    surrogate = recipe.surrogate
    compares_completions = surrogate.function in COMPARES_COMPLETIONS
    if recipe.filters and compares_completions:
        yield (
            f"filters drop completions or tokens, but {surrogate.name} compares the completions of "
            "a group: drop the filters"
        )
        return
    ratio = surrogate.knobs.get("ratio")
    is_whole = surrogate.function in (losses.opmd_kimi, losses.gmpo, losses.gepo) or (
        isinstance(ratio, Piece) and ratio.function in (sequence, length_normalized)
    )
    for keep in recipe.filters:
        if is_whole and keep.function in (filters.top_entropy, filters.clip_cov, filters.m2po):
            yield (
                f"{keep.name} drops single tokens, but {surrogate.name} gives all tokens of a "
                "completion one gradient: drop the filter, or set surrogate.ratio = 'token' if "
                "there is one"
            )


def _contradictions_of_kl(recipe: Recipe) -> Iterator[str]:
    """The reasons why the knobs of the KL term do not go together."""
    has_kl = recipe.beta > 0
    if recipe.kl_importance and has_kl and recipe.kl.function is k3_bias_corrected:
        yield (
            "kl_importance would weight k3_bias_corrected by the ratio a second time: use one of "
            "them"
        )
    if recipe.kl_importance and recipe.beta == 0:
        yield "kl_importance weights the KL term, but beta is 0, so there is no KL term"
    if has_kl and recipe.kl.function is k1:
        yield (
            "k1 is not a penalty: its expected gradient is 0 on fresh samples, and wrong on stale "
            "ones; use k2 or k3. As a reward of each token it is distillation: recipe opd"
        )


def _contradictions_of_token_advantage(recipe: Recipe) -> Iterator[str]:
    """The reasons why advantages of tokens do not go together with the rest of a recipe."""
    if recipe.token_advantage is None:
        if recipe.ignores_reward:
            yield (
                "advantage 'zero' leaves nothing to learn from: set token_advantage = "
                "'reverse_kl', or another advantage"
            )
        return
    surrogate = recipe.surrogate
    if surrogate.function in (losses.opmd_kimi, *COMPARES_COMPLETIONS):
        yield (
            f"token_advantage differs from token to token, but {surrogate.name} has one value "
            "per completion: take another surrogate"
        )
    if recipe.mask_zero_variance:
        yield (
            "token_advantage also teaches groups of equal rewards, which mask_zero_variance "
            "would leave out: set mask_zero_variance = false"
        )
    if recipe.overlong_buffer and recipe.ignores_reward:
        yield "overlong_buffer changes the reward, which advantage 'zero' does not read: drop it"


def _number(recipe: Recipe, path: str) -> float | None:
    """The value of a numeric knob; None if the recipe lacks it, or its value is not a number."""
    value = recipe.knobs.get(path)
    return value if isinstance(value, int | float) else None


def _overlaps(mask: Piece) -> bool:
    """True if the outer range of a ring begins inside its inner one."""
    for end in ("low", "high"):
        outer = mask.knobs[f"outer_{end}"]
        inner = mask.knobs[f"epsilon_{end}"]
        assert isinstance(outer, int | float)
        assert isinstance(inner, int | float)
        if outer < inner:
            return True
    return False


def _denominator(root: Piece) -> PieceFunction | None:
    """The policy below the ratio of a piece, if it has one."""
    denominator = root.knobs.get("denominator")
    return denominator.function if isinstance(denominator, Piece) else None


# Facts about a recipe, for messages


def inert_over_pi_k(recipe: Recipe) -> list[str]:
    """The paths of masks, weights, filters and clips that change no token while pi = pi_k.

    pi is pi_k at the only update on a batch. Such functions read the policy at the start of the
    batch, not the policy that sampled.
    """
    x = random_inputs()
    x = with_statistics(recipe, replace(x, old_logp=x.logp.detach()))
    inert: list[str] = []
    for path, value in recipe.knobs.items():
        is_factor = path.endswith((".mask", ".weight")) or path.startswith("filters.")
        if not isinstance(value, Piece) or not (is_factor or path == "surrogate"):
            continue
        if statistic_of(value.function) is not None:
            continue
        recorded = RecordedInputs.record(x)
        output_T = value(recorded)
        if "old_logp" not in recorded.fields_read or "rollout_logp" in recorded.fields_read:
            continue
        if path == "surrogate":
            # Where a clip does nothing, the gradient of rho A at rho = 1 is A. With the ratio of
            # the completion, each of its tokens has a share in the value of all.
            (gradient_T,) = torch.autograd.grad(output_T.sum(), x.logp)
            length_T = total(torch.ones_like(x.logp), x.completion).detach()
            is_inert = torch.allclose(gradient_T, x.advantage) or torch.allclose(
                gradient_T, length_T * x.advantage
            )
        else:
            is_inert = torch.allclose(output_T.to(x.logp.dtype), torch.ones_like(x.logp))
        if is_inert:
            inert.append(path)
    if "surrogate" in inert and len(inert) > 1:
        # The mask or weight in the surrogate is the part that does not act.
        inert.remove("surrogate")
    return inert


def clips_around_pi_k(recipe: Recipe) -> bool:
    """True if the surrogate clips pi to a range around pi_k.

    At the only update on a batch, pi is the center of the range.
    """
    return recipe.surrogate.function in (clipped_exact, clipped_proportional)


def bounds_whole_completions(recipe: Recipe) -> list[str]:
    """The paths of bounds on the ratio of a whole completion.

    The ratio of a long completion passes such a bound more easily.
    """
    always: tuple[PieceFunction, ...] = (
        weights.capped_sequence,
        weights.vespo,
        filters.seq_max_k3,
    )
    never: tuple[PieceFunction, ...] = (losses.unclipped, weights.importance, k3_bias_corrected)
    paths: list[str] = []
    for path, value in recipe.knobs.items():
        if not isinstance(value, Piece):
            continue
        has_sequence_ratio = any(
            isinstance(knob, Piece) and knob.function is sequence for knob in value.knobs.values()
        )
        if value.function in always or (has_sequence_ratio and value.function not in never):
            paths.append(path)
    return paths


def needs_of(recipe: Recipe) -> list[str]:
    """The inputs of a recipe beyond the trainer's own log-probs, as `lagrpo recipes` writes them.

    α, π_k, π_ref  the log-probs of these policies
    lag            the staleness of each token
    step           a second pass over the step
    """
    needs = {
        "α": recipe.needs_rollout_logp,
        "π_k": recipe.needs_old_logp,
        "π_ref": recipe.needs_pi_ref,
        "lag": recipe.needs_staleness,
        "step": recipe.needs_step_statistics,
    }
    return [name for name, is_needed in needs.items() if is_needed]
