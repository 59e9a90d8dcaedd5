"""`lagrpo recipes NAME --code`: what is printed computes what the recipe computes."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from lagrpo.cli import main
from lagrpo.core import pieces
from lagrpo.core.advantages import zero_variance
from lagrpo.core.loss import Terms
from lagrpo.objective import code
from lagrpo.objective.compose import Recipe
from lagrpo.objective.recipes import PRESETS, resolve

MAX_LENGTH = 9
SIZES = (4, 1, 5, 3)  # completions of a group: one alone, one whose rewards are all equal


def inputs(seed: int) -> dict[str, Any]:
    """Four groups with ratios on both sides of every clip range."""
    rng = torch.Generator().manual_seed(seed)
    group = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    lengths = torch.randint(1, MAX_LENGTH + 1, (len(group),), generator=rng)
    completion = torch.arange(len(group)).repeat_interleave(lengths)
    alpha, *noise = torch.randn(4, len(completion), generator=rng, dtype=torch.float64)
    rewards = torch.randint(3, (len(group),), generator=rng).double() / 2
    rewards[group == 3] = 0.5
    return {
        "logp": (alpha - 1 + 0.4 * noise[0]).requires_grad_(),
        "logp_alpha": alpha - 1,
        "logp_k": alpha - 1 + 0.3 * noise[1],
        "logp_ref": alpha - 1 + 0.5 * noise[2],
        "completion": completion,
        "rewards": rewards,
        "group": group,
        "uniform": torch.rand(len(group), generator=rng, dtype=torch.float64),
        "max_length": MAX_LENGTH,
    }


def of_recipe(recipe: Recipe, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths, group = given["completion"].bincount(), given["group"]
    each = [group == g for g in group.unique()]
    advantage = [
        recipe.advantages(given["rewards"][own], lengths[own], MAX_LENGTH, given["uniform"][own]) for own in each
    ]
    flat = torch.cat([zero_variance(given["rewards"][own]).expand(int(own.sum())) for own in each])
    names = ("logp", "logp_alpha", "logp_k", "logp_ref", "completion")
    terms = Terms(*(given[name] for name in names), advantages=torch.cat(advantage), groups=group)
    weight = recipe.weights(lengths, flat, MAX_LENGTH).double()
    return recipe.loss(terms, weight)[0], recipe.cut(terms)


def check(recipe: Recipe) -> None:
    """Value, gradient and cut of the printed function are the recipe's, on several inputs."""
    scope: dict[str, Any] = {}
    source = code.write_code(recipe.name, recipe.formula, recipe.composition)
    exec(source, scope)
    function = scope[recipe.name]
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    for seed in range(5):
        given = inputs(seed)
        expected, cut = of_recipe(recipe, given)
        found, found_cut = function(**{name: given[name] for name in arguments})
        # weights of completions are float32 in the recipe
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=lambda text: f"{text}\n{source}")
        gradients = [torch.autograd.grad(loss, given["logp"])[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
        assert gradients[1].norm() > 1e-4
        assert torch.equal(found_cut, cut)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_code_of_a_recipe_computes_what_the_recipe_computes(name, capsys):
    check(resolve(name))
    main(["recipes", name, "--code"])
    recipe = resolve(name)
    assert capsys.readouterr().out.strip() == code.write_code(name, recipe.formula, recipe.composition).strip()


OTHERS: list[tuple[str, dict[str, Any]]] = [
    *(("grpo", {"kl": kl}) for kl in ("k2", "k3_clamped", "k3_linear", "k3_bias_corrected")),
    *(("grpo", {"kl_importance": True, "ratio": level}) for level in pieces.LEVELS),
    *(("grpo", {"advantage": name}) for name in pieces.ADVANTAGES),
    *(("clipped_proportional", {"ratio": level, "dual_clip": 1.5}) for level in pieces.LEVELS),
    *(("grpo_tis", {"correction": kind, "correction_level": level, "correction_floor": 0.3, "correction_cap": 1.7})
      for kind in ("truncated", "masked") for level in pieces.LEVELS),
    *(("cispo", {"weight": name, "epsilon_high": 0.2, "outer_high": 0.5, "mask": "ring"})
      for name in ("one", "ratio", "capped_ratio", "tapered_ratio", "exp_advantage")),
    *(("opmd", {"anchor": anchor}) for anchor in pieces.ANCHORS),
    *(("dapo", {"masked_count": count, "reduction": name, "overlong_buffer": 4})
      for count in (False, True) for name in pieces.REDUCTIONS),
    ("rec_two_side_is", {"denominator": "pi_k", "epsilon_high": 0.0}),
    ("grpo_tis", {"correction_cap": inf}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides"), OTHERS, ids=str)
def test_the_code_of_other_compositions(name, overrides):
    check(resolve(name, overrides))


def test_every_piece_has_its_code():
    none = {"none": ""}  # leaves its line out
    tables = {
        "advantage": code.ADVANTAGES, "surrogate": {**code.SURROGATES, **code.RANGES, "reinforce": ""},
        "ratio": code.LEVELS, "denominator": code.POLICIES, "mask": code.MASKS | none,
        "weight": code.WEIGHTS | {"one": ""}, "regularizer": code.REGULARIZERS | none, "anchor": code.POLICIES,
        "correction": code.CORRECTIONS | none, "correction_level": code.LEVELS, "kl": code.KLS,
        "reduction": code.REDUCTIONS,
    }  # fmt: skip
    for table, names in pieces.TABLES.items():
        assert set(names) <= set(tables[table]), table
    assert set(tables) == set(pieces.TABLES)
