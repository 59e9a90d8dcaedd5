"""Functions of a user: named by module:function, or given as objects, wherever a recipe has a
function."""

from math import log

import own_functions
import pytest
import torch
from losses import at_ratios, gradient_of, inputs, random_inputs, with_statistics
from own_functions import above_the_mean, dppo, halved, narrow, probable, square_root
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.objective import Recipe
from lagrpo.core.recipes import inert_over_pi_k, resolve

# Where they may stand

PLACES = {
    "surrogate": ("grpo", dppo),
    "surrogate.mask": ("reinforce", narrow),
    "surrogate.weight": ("reinforce", halved),
    "advantage": ("grpo", above_the_mean),
    "token_advantage": ("reinforce", halved),
    "reduction": ("grpo", square_root),
    "filters": ("grpo", probable),
}


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("by", ["reference", "object"])
def test_own_function_takes_the_place_of_any_function(path, by):
    name, function = PLACES[path]
    reference = f"own_functions:{function.__name__}"
    value = reference if by == "reference" else function
    recipe = resolve(name, {path: [value] if path == "filters" else value})
    assert recipe.settings[path] == ([reference] if path == "filters" else reference)
    assert function in recipe.functions


def test_mask_weight_and_filter_of_a_user_act():
    """Ratios 1, 2 and 1; probabilities .5, .5 and .2."""
    x = inputs(
        tensor([0.5, 0.5, 0.2]).log().double().requires_grad_(),
        tensor([0.5, 0.25, 0.2]).log().double(),
        A=2.0,
    )
    for overrides, expected in (
        ({"mask": "own_functions:narrow"}, [2.0, 0.0, 2.0]),
        ({"mask": "own_functions:narrow", "width": 1.0}, [2.0, 2.0, 2.0]),
        ({"weight": "own_functions:halved"}, [1.0, 1.0, 1.0]),
        ({"token_advantage": "own_functions:halved"}, [2.5, 2.5, 2.5]),
        ({"filters": ["own_functions:probable"]}, [2.0, 2.0, 0.0]),
        ({"filters": ["own_functions:probable"], "least": 0.1}, [2.0, 2.0, 2.0]),
        ({"filters": ["own_functions:probable", "finished_only"], "least": 0.6}, [0.0, 0.0, 0.0]),
    ):
        y = inputs(x.logp, x.rollout_logp, A=2.0, finished=torch.ones(3, dtype=torch.bool))
        gradient_T = gradient_of(resolve("reinforce", overrides).value(y).sum(), y)
        assert_close(gradient_T, tensor(expected).double())


def test_advantage_and_reduction_of_a_user_act():
    recipe = resolve("grpo", {"advantage": above_the_mean, "scale": 3.0, "reduction": square_root})
    x = AdvantageInputs(tensor([1.0, 0.0, 0.0]), tensor([0, 0, 1]))
    assert_close(recipe.advantages(x, 8), tensor([1.5, 0.0, 0.0]))
    weight_C = recipe.weights(tensor([1, 4]), tensor([False, False]), 8)
    assert_close(weight_C, tensor([0.5, 0.25]).double())


def test_own_filter_may_collect_a_statistic_of_the_step():
    recipe = resolve(
        "reinforce", {"filters": "own_functions:near_the_most_probable", "share": 28.0}
    )
    assert recipe.needs_step_statistics
    x = inputs(tensor([-0.05, -1.3, -1.5]).requires_grad_())
    assert recipe.kept(with_statistics(recipe, x)).tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("package", ["", "pkg_of_user."])
def test_knob_of_an_own_filter_is_reached_wherever_its_module_lies(package, tmp_path, monkeypatch):
    """Paths of knobs have dots, and so have names of modules."""
    (tmp_path / "pkg_of_user").mkdir()
    text = "def keep(x, *, least=0.3):\n    return x.logp.exp() >= least\n"
    (tmp_path / "pkg_of_user" / "filters_of_user.py").write_text(text, encoding="utf-8")
    (tmp_path / "filters_of_user.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    reference = f"{package}filters_of_user:keep"
    for path in ("least", f"filters.{reference}.least"):
        recipe = resolve("reinforce", {"filters": [reference], path: 0.1})
        assert recipe.settings[f"filters.{reference}.least"] == 0.1
        assert recipe.kept(inputs([log(0.2), log(0.05)])).tolist() == [1.0, 0.0]


# Recipes


def test_surrogate_alone_is_a_recipe_with_the_usual_rest():
    for loss in ("own_functions:dppo", dppo):
        recipe = resolve(loss, {"delta": 0.1})
        assert recipe.name == "own_functions:dppo"
        summary = "rho A of tokens whose probability has changed by at most delta"
        assert recipe.formula.rstrip(".") == summary
        settings = recipe.settings
        assert (settings["advantage"], settings["reduction"], settings["beta"]) == (
            "normalized",
            "token_mean",
            0.0,
        )
        assert settings["surrogate.delta"] == 0.1
        x = inputs([log(0.5)], [log(0.25)], A=3.0)
        assert recipe.value(x).tolist() == [0.0]
        assert_close(resolve(loss, {"delta": 0.3}).value(x), tensor([6.0]))


def test_recipe_object_is_resolved_like_a_row():
    for loss in ("own_functions:RECIPE", own_functions.RECIPE):
        recipe = resolve(loss, {"width": 0.2, "beta": 0.1, "kl": "k2"})
        assert isinstance(recipe, Recipe)
        assert recipe.settings["surrogate.mask.width"] == 0.2
        assert recipe.settings["kl"] == "k2"
        assert recipe.settings["filters"] == ["own_functions:probable"]
        assert recipe.name


def test_lambda_is_accepted_as_an_object():
    recipe = resolve(
        "grpo",
        {"surrogate": lambda x, *, power=2.0: x.advantage * x.logp.exp() ** power, "beta": 0.0},
    )
    assert recipe.settings["surrogate.power"] == 2.0
    assert_close(recipe.value(inputs([log(0.5)], A=3.0)), tensor([0.75]))


# What follows from them is found by computing


@pytest.mark.parametrize(
    ("recipe", "reads", "skips"),
    [
        (dppo, {"rollout_logp"}, True),
        (lambda x: x.logp * x.advantage, set(), True),
        (lambda x: x.logp * (x.advantage + 1), set(), False),
        (lambda x: (x.logp - x.ref_logp) * x.advantage, {"ref_logp"}, True),
        (lambda x: x.logp * x.advantage / (1 + x.staleness), {"staleness"}, True),
        (
            lambda x: x.logp * x.advantage * (x.group[x.completion] + 1),
            {"group"},
            False,  # a group is whole with all of its completions
        ),
        (
            lambda x: x.logp * x.advantage * x.entropy * x.finished[x.completion],
            {"entropy", "finished"},
            True,
        ),
    ],
    ids=["dppo", "nothing", "every completion", "pi_ref", "staleness", "groups", "entropy"],
)
def test_inputs_of_an_own_loss_are_found_by_computing_it(recipe, reads, skips):
    resolved = resolve(recipe)
    assert resolved.required_inputs == reads
    assert resolved.skips_zero_advantage == skips


def test_own_mask_over_pi_k_is_found_to_be_inert():
    recipe = resolve("reinforce", {"mask": "own_functions:since_pi_k"})
    assert inert_over_pi_k(recipe) == ["surrogate.mask"]
    assert inert_over_pi_k(resolve("reinforce", {"mask": "own_functions:narrow"})) == []


# What is rejected before a model loads


@pytest.mark.parametrize(
    ("name", "overrides", "problem"),
    [
        ("own_functions:nosuch", {}, "own_functions.py has no 'nosuch'"),
        ("own_functions:dpo", {}, "did you mean 'dppo'"),
        ("no_such_module:dppo", {}, "no module 'no_such_module' in the current directory"),
        ("own_functions:NUMBER", {}, "neither a Recipe nor a function"),
        ("own_functions:fails", {}, "own_functions:fails: fails on small random inputs: "),
        ("own_functions:fails_in_statistic", {}, "x.step has no .of another function"),
        ("own_functions:to_minimize", {}, "value to maximize"),
        ("own_functions:without_advantage", {}, "does not depend on the advantage"),
        ("own_functions:misspelled", {}, r"own_functions.py, line \d+.*x\.rollout_logp\b"),
        ("own_functions:not_collected", {}, "'y'.*collects"),
        ("own_functions:logs_sums", {}, r"metric 'mine/sums'.*\[2\]"),
        ("own_functions:logs_like_lagrpo", {}, "mine/reward"),
        ("own_functions:summed", {}, r"shape \[\], not \[17\]"),
        ("grpo", {"token_advantage": "own_functions:summed"}, r"summed.*token_advantages \[\]"),
        ("own_functions:without_gradient", {}, "no token has a gradient"),
        ("own_functions:infinite", {}, "is not finite"),
        ("own_functions:infinite_gradient", {}, "the gradient is not finite"),
        ("own_functions:knob_without_default", {}, "its knob 'width' needs a default"),
        (
            "own_functions:dppo",
            {"delat": 0.1},
            "delat is no knob of recipe .*; did you mean 'delta'",
        ),
        ("own_functions:dppo", {"delta": "x"}, "delta = 'x': write a number"),
        (
            "grpo",
            {"surrogate": "own_functions:NUMBER"},
            "write one of .*, or package.module:function",
        ),
        ("grpo", {"advantage": "own_functions:advantage_of_groups"}, r"shape \[2\], not \[6\]"),
        ("grpo", {"advantage": "own_functions:infinite_advantage"}, "is not finite"),
        ("grpo", {"reduction": "own_functions:scalar_reduction"}, r"shape \[\], not \[6\]"),
        ("reinforce", {"mask": "own_functions:fails"}, "own_functions:fails: fails on small"),
        ("reinforce", {"filters": ["own_functions:fails"]}, "own_functions:fails: fails on small"),
        ("reinforce", {"filters": ["own_functions:summed"]}, r"own_functions:summed.*shape \[\]"),
        ("reinforce", {"mask": "own_functions:summed"}, r"own_functions:summed.*shape \[\]"),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value and " " not in value else "",
)
def test_own_function_that_does_not_compute_is_rejected(name, overrides, problem):
    with pytest.raises(ValueError, match=problem):
        resolve(name, overrides)


def test_own_mask_that_drops_all_tokens_of_the_probe_is_accepted():
    """None of the random tokens has a ratio so near to 1, but tokens on policy have."""
    recipe = resolve("reinforce", {"mask": "own_functions:narrow", "width": 1e-6})
    x = at_ratios([1.0])
    assert gradient_of(recipe.value(x).sum(), x).tolist() == [1.0]


def test_rows_of_the_table_are_not_probed(monkeypatch):
    """Their functions are known to compute; only a function from outside is run before a model
    loads."""
    monkeypatch.setattr("lagrpo.core.own_functions.random_inputs", lambda: 1 / 0)
    resolve("grpo")
    with pytest.raises(ZeroDivisionError):
        resolve("own_functions:dppo")


def test_probe_and_a_real_batch_agree():
    """The derivative of an own loss, on inputs that are not the probe's."""
    _, x = random_inputs()
    derivative = resolve("own_functions:dppo").differentiate(x, torch.ones(7).double())
    rho = (x.logp - x.rollout_logp).exp().detach()
    change = (x.logp.exp() - x.rollout_logp.exp()).abs()
    assert_close(
        derivative.gradient_T, -torch.where(change <= 0.2, rho * x.advantage, 0.0).detach()
    )
